"""The explanation of a run that hung or died, in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...watcher.report import Status, first_difference, grouped, line_of, line_of_error, ranks_of
from . import remedies
from .causes import Cause, cause_of, place
from .evidence import Evidence
from .merge import Incident, merged
from .read import read
from .recorder import Mismatch, mismatches, without_dump

_MOST_STACKS = 4
_MOST_LINES = 20  # of a stack
_MOST_GROUPS = 4  # process groups of which something is told


@dataclass(frozen=True)
class Section:
    """A heading and what is under it, a line each."""

    title: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *[f"  {line}" for line in self.lines]])


@dataclass(frozen=True)
class Diagnosis:
    """What happened; `str` of it is the whole explanation.

    Attributes:
        what: one sentence.
        kind: see `Cause`; "recorder" where only the flight recorder tells, "nothing" if nothing is wrong.
        ranks: those to blame; empty if nobody is, or nobody can be told.
        sections: why it is believed, when, what ranks did, stacks, what to do.
    """

    what: str
    kind: str
    ranks: tuple[int, ...]
    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join([self.what, *[str(section) for section in self.sections if section.lines]])


def doctor(path: str | os.PathLike[str]) -> Diagnosis:
    """Explain what the watchers' reports and the flight recorder's dumps at `path`, a file or a folder, tell.

    Pickles are loaded by a reader that knows containers, strings and numbers, and refuses whatever names a class.

    Raises:
        ConfigError: there is no such path, or nothing of use at it.
    """
    evidence = read(Path(path))
    found = mismatches(evidence.dumps)
    if not evidence.reports:
        return _by_recorder(evidence, found)
    incident = merged(evidence.reports)
    cause = cause_of(incident)
    by_rank = {status["rank"]: status for status in incident.statuses}
    blamed = [by_rank[rank] for rank in cause.ranks]
    told = grouped([(status["rank"], _line_of(status, incident)) for status in incident.statuses])
    width = max(len(who) for who, _ in told)
    difference = first_difference(incident.statuses)
    sections = [
        Section("Why this is believed", _marked(cause.because)),
        Section("When (UTC)", tuple(_times(incident, blamed))),
        Section("What each rank did", tuple(f"{who:<{width}}  {what}" for who, what in told)),
        Section("First difference in the order of units", (difference,) if difference else ()),
        *_raised(blamed),
        *_stacks(incident, cause),
        *_recorder_sections(evidence, found),
        Section("What to do next", _numbered(cause.remedies)),
        Section("Read", tuple(_sources(evidence, incident))),
    ]
    return Diagnosis(cause.what, cause.kind, cause.ranks, tuple(sections))


def _by_recorder(evidence: Evidence, found: Sequence[Mismatch]) -> Diagnosis:
    read_ = Section("Read", tuple(_sources(evidence, None)))
    absent = without_dump(evidence.dumps)
    if not found:
        what = "nothing is wrong: all that the flight recorder holds was issued alike on all ranks, and ended."
        note = Section("But", (remedies.NO_DUMP.format(who=ranks_of(absent)),) if absent else ())
        return Diagnosis(what, "recorder" if absent else "nothing", tuple(absent), (note, read_))
    first = found[0]
    advice: tuple[str, ...]
    ranks = first.to_blame or (tuple(absent) if first.agrees else ())
    if first.missing:
        what = (
            f"{ranks_of(ranks)} did not issue collective {first.number} of group {first.name}, for which others wait."
        )
        advice = remedies.NOT_ISSUED
    elif first.agrees:
        what = (
            f"collective {first.number} of group {first.name} was issued alike by all ranks that tell, and did not end."
        )
        advice = remedies.TRANSPORT[:1]
    else:
        what = f"ranks disagree on collective {first.number} of group {first.name}."
        advice = remedies.DEPARTED[:1]
    if absent:
        advice = (remedies.NO_DUMP.format(who=ranks_of(absent)), *advice)
    because = (f"collectives of a group are numbered alike on all ranks; all before {first.number} matched",)
    sections = [
        Section("Why this is believed", _marked(because)),
        Section("When (UTC)", (f"{_moment(first.time)}  it was issued first",) if first.time else ()),
        *_recorder_sections(evidence, found),
        Section("What to do next", _numbered(advice)),
        read_,
    ]
    return Diagnosis(what, "recorder", ranks, tuple(sections))


def _line_of(status: Status, incident: Incident) -> str:
    if incident.halves and status["state"] == "unreachable":
        return f"told of by nobody; last: {place(status)}"
    return line_of(status)


def _marked(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"- {line}" for line in lines)


def _numbered(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"


def _times(incident: Incident, blamed: Sequence[Status]) -> list[str]:
    found = [(s["last"]["time"], f"rank {s['rank']} issued its last: {place(s)}") for s in blamed if s["last"]]
    waiting = [s for s in incident.statuses if s["waited"] is not None]
    if waiting:
        longest = max(waiting, key=lambda status: status["waited"])
        first = ", first of all" if len(waiting) > 1 else ""
        found.append((longest["time"] - longest["waited"], f"rank {longest['rank']} began to wait{first}"))
    for report in incident.reports:
        found.append((report.time, f"the ranks were found to be stuck ({report.source})"))
    return [f"{_moment(when)}  {what}" for when, what in sorted(found)[-12:]]


def _raised(blamed: Sequence[Status]) -> list[Section]:
    return [
        Section(f"What rank {status['rank']} raised", _cut_short(status["raised"]))
        for status in blamed[:1]
        if line_of_error(status)
    ]


def _stacks(incident: Incident, cause: Cause) -> list[Section]:
    """Python stacks of those to blame; of all, if that is nobody, or these left none."""
    blamed = [s for s in incident.statuses if s["rank"] in cause.ranks and s["stack"]]
    if not blamed and cause.kind in ("raised", "gone", "data", "stopped", "unreachable"):
        return []
    told = grouped([(s["rank"], s["stack"]) for s in blamed or incident.statuses if s["stack"]])
    return [Section(f"Python stack of {who}, innermost first", _cut_short(stack)) for who, stack in told[:_MOST_STACKS]]


def _cut_short(text: str) -> tuple[str, ...]:
    """Of a long text the beginning and the end: innermost frames come first in stacks, and last in tracebacks."""
    lines = [line.rstrip() for line in text.strip().splitlines() if set(line.strip()) - set("^~")]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines", *lines[-half:]]
    return tuple(lines)


def _recorder_sections(evidence: Evidence, found: Sequence[Mismatch]) -> list[Section]:
    sections = []
    for mismatch in found[:_MOST_GROUPS]:
        told = [(rank, what) for rank, what in mismatch.issued.items()]
        told += [(rank, f"nothing yet; last: {what}") for rank, what in mismatch.missing.items()]
        lines = [f"{who}: {what}" for who, what in grouped(told)]
        blamed = mismatch.to_blame or tuple(mismatch.stacks)
        stacks = grouped([(rank, "\n".join(mismatch.stacks.get(rank, ()))) for rank in blamed])
        for who, stack in stacks[:_MOST_STACKS]:
            lines += [f"issued by {who} from:", *[f"  {line}" for line in _cut_short(stack)]] if stack else []
        title = f"PyTorch's flight recorder: group {mismatch.name}, collective {mismatch.number}"
        sections.append(Section(title + (", which none got past" if mismatch.agrees else ""), tuple(lines)))
    absent = without_dump(evidence.dumps)
    if evidence.reports and absent:
        sections.append(Section("No dump of the flight recorder", (remedies.NO_DUMP.format(who=ranks_of(absent)),)))
    return sections


def _sources(evidence: Evidence, incident: Incident | None) -> list[str]:
    lines = [f"{report.source}: a watcher's report" for report in (incident.reports if incident else ())]
    if incident and incident.older:
        lines.append(f"not taken: {incident.older} older report(s), of other incidents; name a file to read that one")
    if evidence.dumps:
        lines.append(f"the flight recorder's dumps of {ranks_of([dump.rank for dump in evidence.dumps])}")
    return [*lines, *[f"left out: {text}" for text in evidence.left_out]]
