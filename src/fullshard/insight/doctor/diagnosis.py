"""The explanation of a run that hung or died, in words."""

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

_APART = 600.0  # seconds between reports that tell of one incident, at most
_ENDS = ("raised", "gone", "stopped")  # of one rank, which others would have reported; before a cut of the network
_ALONE = (*_ENDS, "data", "unreachable")  # where the stacks of the others say nothing
_MOST_STACKS = 4
_MOST_GROUPS = 4  # process groups of which something is told

Sections = dict[str, Sequence[str]]
"""By heading what is under it, a line each; those without a line are not shown."""


@dataclass(frozen=True)
class Diagnosis:
    """What happened; `str` of it is the whole explanation.

    Attributes:
        what: one sentence.
        kind: as that of a `Verdict`; "cut" if the network was; "recorder" where only the flight recorder tells,
            "nothing" if nothing is wrong.
        ranks: those to blame; empty if nobody is, or nobody can be told.
        sections: why it is believed, when, what ranks did, stacks, what to do.
    """

    what: str
    kind: str
    ranks: tuple[int, ...]
    sections: Sections

    def __str__(self) -> str:
        texts = ["\n  ".join([title, *lines]) for title, lines in self.sections.items() if lines]
        return "\n\n".join([self.what, *texts])


def doctor(path: str | os.PathLike[str]) -> Diagnosis:
    """Explain what the watchers' reports and the flight recorder's dumps at `path`, a file or a folder, tell.

    Pickles are loaded by a reader that knows containers, strings and numbers, and refuses whatever names a class.

    Raises:
        ConfigError: there is no such path, or nothing of use at it.
    """
    evidence = read(Path(path))
    differ = mismatches(evidence.dumps)
    if not evidence.reports:
        return _by_recorder(evidence, differ)
    incident = merged(evidence.reports)
    statuses, halves = incident.statuses, incident.halves
    judged = verdict(statuses)
    what, kind, ranks = sentence(judged), judged.kind, judged.ranks
    because, steps = messages.because(judged), messages.next_steps(judged)
    if halves and kind not in _ENDS:
        what, kind, ranks = messages.cut(statuses, halves), "cut", ()
        because, steps = messages.because_cut(halves), messages.CUT
    blamed = [status for status in statuses if status["rank"] in ranks]
    difference = first_difference(statuses)
    sections: Sections = {
        "Why this is believed": _marked(because),
        "When (UTC)": _times(incident, blamed),
        "What each rank did": lines_of(statuses, *(["was not reported by any rank"] if halves else [])),
        "First difference in the order of units": [difference] if difference else [],
        **quotes(blamed[:1], [status for status in blamed if status["stack"]] or (() if kind in _ALONE else statuses)),
        **_recorder_sections(evidence, differ),
        "What to do next": _numbered(steps),
        "Read": _sources(evidence, incident),
    }
    return Diagnosis(what, kind, ranks, sections)


# Reports of one run put together: several are written when the network was cut, or when ranks end one by one.


@dataclass(frozen=True)
class Incident:
    """What all reports of one incident know.

    Attributes:
        statuses: the best that is known of each rank, in their order.
        halves: groups of ranks that reached each other and not the others, though these lived; empty if there are none.
        reports: those that were put together, oldest first.
        older: how many reports tell of other incidents, before.
    """

    statuses: tuple[Status, ...]
    halves: tuple[tuple[int, ...], ...]
    reports: tuple[WatcherReport, ...]
    older: int


def merged(reports: Sequence[WatcherReport]) -> Incident:
    """The newest incident. Reports belong to one if they are of the same processes and near in time."""
    newest_first = sorted(reports, key=lambda report: report.time, reverse=True)
    taken = [newest_first[0]]
    for report in newest_first[1:]:
        if taken[-1].time - report.time <= _APART and all([_one_run(report, other) for other in taken]):
            taken.append(report)
    taken.reverse()
    best: dict[int, Status] = {}
    for report in taken:  # what was known first is nearest to the cause: later ranks are gone because of it
        for status in report.ranks:
            known = best.get(status["rank"])
            if known is None or (known["state"] in UNKNOWN and status["state"] not in UNKNOWN):
                best[status["rank"]] = status
    statuses = tuple(best[rank] for rank in sorted(best))
    return Incident(statuses, _halves(taken, best), tuple(taken), len(reports) - len(taken))


def _one_run(one: WatcherReport, other: WatcherReport) -> bool:
    if len(one.ranks) != len(other.ranks):
        return False
    processes = {status["rank"]: (status["host"], status["pid"]) for status in one.ranks if status["pid"]}
    return all(
        [processes.get(s["rank"], (s["host"], s["pid"])) == (s["host"], s["pid"]) for s in other.ranks if s["pid"]]
    )


def _halves(reports: Sequence[WatcherReport], best: dict[int, Status]) -> tuple[tuple[int, ...], ...]:
    """Who reached whom, if somebody could not be reached by some and lived for others."""
    heard = {tuple(s["rank"] for s in report.ranks if s["state"] not in UNKNOWN) for report in reports}
    lost = {s["rank"] for report in reports for s in report.ranks if s["state"] == "unreachable"}
    alive = [rank for rank in lost if best[rank]["state"] not in UNKNOWN and best[rank]["gone"] is None]
    return tuple(sorted(heard)) if alive and len(heard) > 1 else ()


# In words.


def _by_recorder(evidence: Evidence, differ: Sequence[Mismatch]) -> Diagnosis:
    absent = without_dump(evidence.dumps)
    missing = [messages.NO_DUMP.format(who=ranks_of(absent))] if absent else []
    sources: Sections = {"Read": _sources(evidence, None)}
    if not differ:
        kind = "recorder" if absent else "nothing"
        return Diagnosis(messages.NOTHING_IS_WRONG, kind, tuple(absent), {"But": missing, **sources})
    first = differ[0]
    ranks = first.to_blame or (tuple(absent) if first.agrees else ())
    what, steps = messages.by_recorder(first.name, first.number, sorted(first.missing), first.agrees)
    because = f"collectives of a group are numbered alike on all ranks; all before {first.number} matched"
    sections: Sections = {
        "Why this is believed": _marked([because]),
        "When (UTC)": [f"{_moment(first.time)}  it was issued first"] if first.time else [],
        **_recorder_sections(evidence, differ),
        "What to do next": _numbered([*missing, *steps]),
        **sources,
    }
    return Diagnosis(what, "recorder", ranks, sections)


def _marked(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _numbered(lines: Sequence[str]) -> list[str]:
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"


def _times(incident: Incident, blamed: Sequence[Status]) -> list[str]:
    found = [(s["last"]["time"], f"rank {s['rank']} issued its last: {at(s)}") for s in blamed if s["last"]]
    waiting = [s for s in incident.statuses if s["waited"] is not None]
    if waiting:
        longest = max(waiting, key=lambda status: status["waited"])
        first = ", first of all" if len(waiting) > 1 else ""
        found.append((longest["time"] - longest["waited"], f"rank {longest['rank']} began to wait{first}"))
    for report in incident.reports:
        found.append((report.time, f"the ranks were found to be stuck ({report.source})"))
    return [f"{_moment(when)}  {what}" for when, what in sorted(found)[-12:]]


def _recorder_sections(evidence: Evidence, differ: Sequence[Mismatch]) -> Sections:
    sections: Sections = {}
    for mismatch in differ[:_MOST_GROUPS]:
        issued = [*mismatch.issued.items()]
        issued += [(rank, f"nothing yet; last: {what}") for rank, what in mismatch.missing.items()]
        lines = [f"{who}: {what}" for who, what in grouped(issued)]
        blamed = mismatch.to_blame or tuple(mismatch.stacks)
        stacks = grouped([(rank, "\n".join(mismatch.stacks.get(rank, ()))) for rank in blamed])
        for who, stack in stacks[:_MOST_STACKS]:
            lines += [f"issued by {who} from:", *[f"  {line}" for line in cut_short(stack)]] if stack else []
        title = f"PyTorch's flight recorder: group {mismatch.name}, collective {mismatch.number}"
        sections[title + (", which none got past" if mismatch.agrees else "")] = lines
    absent = without_dump(evidence.dumps)
    if evidence.reports and absent:
        sections["No dump of the flight recorder"] = [messages.NO_DUMP.format(who=ranks_of(absent))]
    return sections


def _sources(evidence: Evidence, incident: Incident | None) -> list[str]:
    lines = [f"{report.source}: a watcher's report" for report in (incident.reports if incident else ())]
    if incident and incident.older:
        lines.append(f"not taken: {incident.older} older report(s), of other incidents; name a file to read that one")
    if evidence.dumps:
        lines.append(f"the flight recorder's dumps of {ranks_of([dump.rank for dump in evidence.dumps])}")
    return [*lines, *[f"left out: {text}" for text in evidence.left_out]]
