"""The diagnosis of a run that hung or died, in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...watcher.judge import UNKNOWN, Status, grouped, ranks_of, verdict
from ...watcher.messages import at, cut_short, first_difference, lines_of, quotes, sentence
from . import messages
from .evidence import Evidence, WatcherReport, read
from .recorder import Mismatch, mismatches, without_dump

_APART = 600.0  # seconds, at most, between two reports of one incident
_ENDS = ("raised", "gone", "stopped")  # kinds of verdict that explain more than a cut of the network
_ALONE = (*_ENDS, "data", "unreachable")  # kinds of verdict for which the stacks of other ranks do not matter
_MOST_STACKS = 4
_MOST_GROUPS = 4  # process groups with a section

Sections = dict[str, Sequence[str]]
"""Heading -> lines. Sections without lines are not shown."""


@dataclass(frozen=True)
class Diagnosis:
    """What happened, and why; `str` gives the full text.

    Attributes:
        summary: one sentence.
        kind: the kind of a `Verdict`, "cut" if the network was cut, "recorder" if there are only dumps of the flight
            recorder, or "nothing" if nothing is wrong.
        ranks: the ranks to blame; empty if there are none, or none can be identified.
        sections: reasons, times, what each rank did, stacks, next steps, files.
    """

    summary: str
    kind: str
    ranks: tuple[int, ...]
    sections: Sections

    def __str__(self) -> str:
        texts = ["\n  ".join([title, *lines]) for title, lines in self.sections.items() if lines]
        return "\n\n".join([self.summary, *texts])


def doctor(path: str | os.PathLike[str]) -> Diagnosis:
    """Diagnose a run from its watchers' reports and the flight recorder's dumps.

    Pickles are read with a reader for containers, strings and numbers, which refuses everything else.

    Args:
        path: a file or a folder.

    Raises:
        ConfigError: there is no such path, or it has no report or dump.
    """
    evidence = read(Path(path))
    differing = mismatches(evidence.dumps)
    if not evidence.reports:
        return _by_recorder(evidence, differing)
    incident = _newest_incident(evidence.reports)
    statuses, halves = incident.statuses, incident.halves
    cause = verdict(statuses)
    summary, kind, ranks = sentence(cause), cause.kind, cause.ranks
    reasons, steps = messages.reasons(cause), messages.next_steps(cause)
    if halves and kind not in _ENDS:
        summary, kind, ranks = messages.cut(statuses, halves), "cut", ()
        reasons, steps = messages.reasons_for_cut(halves), messages.CUT
    blamed = [status for status in statuses if status["rank"] in ranks]
    difference = first_difference(statuses)
    sections: Sections = {
        "Why": _bulleted(reasons),
        "When (UTC)": _times(incident, blamed),
        "What each rank did": lines_of(statuses, *(["was not reported by any rank"] if halves else [])),
        "First difference in the order of units": [difference] if difference else [],
        **quotes(blamed[:1], [status for status in blamed if status["stack"]] or (() if kind in _ALONE else statuses)),
        **_recorder_sections(evidence, differing),
        "What to do next": _numbered(steps),
        "Files": _sources(evidence, incident),
    }
    return Diagnosis(summary, kind, ranks, sections)


# One incident has several reports if the network was cut, or if ranks ended one by one.


@dataclass(frozen=True)
class Incident:
    """All reports of one incident, merged.

    Attributes:
        statuses: the most informative status of each rank, in rank order.
        halves: the parts of a network that was cut: ranks that reached each other but not the others, which were alive;
            empty if it was not cut.
        reports: the merged reports, oldest first.
    """

    statuses: tuple[Status, ...]
    halves: tuple[tuple[int, ...], ...]
    reports: tuple[WatcherReport, ...]


def _newest_incident(reports: Sequence[WatcherReport]) -> Incident:
    """Merge the reports that are about the same processes as the newest one, and near it in time."""
    newest_first = sorted(reports, key=lambda report: report.time, reverse=True)
    merged = [newest_first[0]]
    for report in newest_first[1:]:
        if merged[-1].time - report.time <= _APART and all([_same_run(report, other) for other in merged]):
            merged.append(report)
    merged.reverse()
    best: dict[int, Status] = {}
    for report in merged:  # the first status is the closest to the cause: ranks that end later do so because of it
        for status in report.ranks:
            earlier = best.get(status["rank"])
            if earlier is None or (earlier["state"] in UNKNOWN and status["state"] not in UNKNOWN):
                best[status["rank"]] = status
    statuses = tuple(best[rank] for rank in sorted(best))
    return Incident(statuses, _halves(merged, best), tuple(merged))


def _same_run(report: WatcherReport, other: WatcherReport) -> bool:
    if len(report.ranks) != len(other.ranks):
        return False
    processes = {status["rank"]: (status["host"], status["pid"]) for status in report.ranks if status["pid"]}
    return all(
        [processes.get(s["rank"], (s["host"], s["pid"])) == (s["host"], s["pid"]) for s in other.ranks if s["pid"]]
    )


def _halves(reports: Sequence[WatcherReport], best: dict[int, Status]) -> tuple[tuple[int, ...], ...]:
    """The ranks that each report reached, if some report did not reach a rank that was alive in another."""
    reached = {tuple(s["rank"] for s in report.ranks if s["state"] not in UNKNOWN) for report in reports}
    unreachable = {s["rank"] for report in reports for s in report.ranks if s["state"] == "unreachable"}
    alive = [rank for rank in unreachable if best[rank]["state"] not in UNKNOWN and best[rank]["gone"] is None]
    return tuple(sorted(reached)) if alive and len(reached) > 1 else ()


# In words.


def _by_recorder(evidence: Evidence, differing: Sequence[Mismatch]) -> Diagnosis:
    """The diagnosis from dumps of the flight recorder alone."""
    absent = without_dump(evidence.dumps)
    missing = [messages.NO_DUMP.format(who=ranks_of(absent))] if absent else []
    sources: Sections = {"Files": _sources(evidence, None)}
    if not differing:
        kind = "recorder" if absent else "nothing"
        return Diagnosis(messages.NOTHING_IS_WRONG, kind, tuple(absent), {"But": missing, **sources})
    first = differing[0]
    ranks = first.to_blame or (tuple(absent) if first.agrees else ())
    summary, steps = messages.by_recorder(first.name, first.number, sorted(first.missing), first.agrees)
    reason = f"all ranks number a group's collectives in the same way, and all before {first.number} matched"
    sections: Sections = {
        "Why": _bulleted([reason]),
        "When (UTC)": [f"{_moment(first.time)}  it was first issued"] if first.time else [],
        **_recorder_sections(evidence, differing),
        "What to do next": _numbered([*missing, *steps]),
        **sources,
    }
    return Diagnosis(summary, "recorder", ranks, sections)


def _bulleted(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _numbered(lines: Sequence[str]) -> list[str]:
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"


def _times(incident: Incident, blamed: Sequence[Status]) -> list[str]:
    events = [(s["last"]["time"], f"rank {s['rank']} issued its last event: {at(s)}") for s in blamed if s["last"]]
    waiting = [s for s in incident.statuses if s["waited"] is not None]
    if waiting:
        longest = max(waiting, key=lambda status: status["waited"])
        first = " first" if len(waiting) > 1 else ""
        events.append((longest["time"] - longest["waited"], f"rank {longest['rank']} started to wait{first}"))
    for report in incident.reports:
        events.append((report.time, f"a watcher reported that the ranks were stuck ({report.source})"))
    return [f"{_moment(time)}  {event}" for time, event in sorted(events)[-12:]]


def _recorder_sections(evidence: Evidence, differing: Sequence[Mismatch]) -> Sections:
    sections: Sections = {}
    for mismatch in differing[:_MOST_GROUPS]:
        issued = [*mismatch.issued.items()]
        issued += [(rank, f"nothing yet; last: {call}") for rank, call in mismatch.missing.items()]
        lines = [f"{who}: {call}" for who, call in grouped(issued)]
        blamed = mismatch.to_blame or tuple(mismatch.stacks)
        stacks = grouped([(rank, "\n".join(mismatch.stacks.get(rank, ()))) for rank in blamed])
        for who, stack in stacks[:_MOST_STACKS]:
            lines += [f"issued by {who} from:", *[f"  {line}" for line in cut_short(stack)]] if stack else []
        title = f"PyTorch's flight recorder: group {mismatch.name}, collective {mismatch.number}"
        sections[title + (", which no rank got past" if mismatch.agrees else "")] = lines
    absent = without_dump(evidence.dumps)
    if evidence.reports and absent:
        sections["No dump of the flight recorder"] = [messages.NO_DUMP.format(who=ranks_of(absent))]
    return sections


def _sources(evidence: Evidence, incident: Incident | None) -> list[str]:
    lines = [f"{report.source}: a watcher's report" for report in (incident.reports if incident else ())]
    if incident and (older := len(evidence.reports) - len(incident.reports)):
        lines.append(f"left out: {older} older report(s) of other incidents; pass a report's path to read it")
    if evidence.dumps:
        lines.append(f"dumps of the flight recorder of {ranks_of([dump.rank for dump in evidence.dumps])}")
    return [*lines, *[f"left out: {text}" for text in evidence.left_out]]
