"""Why the verdict on a run is believed, and what to do about it, from what watchers knew of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...watcher.report import (
    BY_ITSELF,
    Status,
    departed,
    first_hand,
    first_issued,
    line_of_error,
    of_last_root,
    ranks_of,
    verdict,
)
from . import remedies
from .merge import Incident

_ENDS = ("raised", "gone", "stopped")  # of one rank, which others would have reported; before a cut of the network


@dataclass(frozen=True)
class Cause:
    """What went wrong.

    Attributes:
        kind: as that of a `Verdict`, or "cut".
        ranks: to blame; empty if nobody is, or nobody can be told.
        what: one sentence: the verdict's, which the ranks raised, if one report tells of the incident.
        because: why it is believed, a line each.
        remedies: what to do next, in this order.
    """

    kind: str
    ranks: tuple[int, ...]
    what: str
    because: tuple[str, ...]
    remedies: tuple[str, ...]


def cause_of(incident: Incident) -> Cause:
    """The watchers' verdict on all that is known, or that the network was cut, with reasons and remedies."""
    found = verdict(incident.statuses)
    if incident.halves and found.kind not in _ENDS:
        return _cut(incident)
    blamed = [status for status in incident.statuses if status["rank"] in found.ranks]
    because, remedy = _EXPLAINED[found.kind](incident, blamed)
    return Cause(found.kind, found.ranks, found.what, tuple(because), tuple(remedy))


def place(status: Status) -> str:
    """What a rank issued last."""
    last = status["last"]
    if last is None and status.get("unheard") is not None:
        return "a place that is not known"
    return f"{last['verb']} of {last['unit']}, step {last['step']}" if last else "before its first forward"


Explained = tuple[list[str], tuple[str, ...]]
"""Why it is believed, and what to do."""


def _who(found: Sequence[Status]) -> tuple[int, ...]:
    return tuple(status["rank"] for status in found)


def _turn(status: Status) -> int:
    """How far it got in the order of its last root."""
    return max([record["turn"] for record in of_last_root(status)], default=0)


def _waiters(incident: Incident, blamed: Sequence[Status]) -> list[str]:
    """What those who wait have issued, and the blamed have not."""
    behind = min([_turn(status) for status in blamed])
    ahead = [s for s in incident.statuses if s["waits_for"] and s not in blamed and s["waits_for"]["turn"] > behind]
    if not ahead:
        return []
    what = ahead[0]["waits_for"]
    here = [s for s in ahead if (s["waits_for"]["verb"], s["waits_for"]["unit"]) == (what["verb"], what["unit"])]
    others = "it" if len(blamed) == 1 else "they"
    return [
        f"{ranks_of(_who(here))} waited for {what['verb']} of {what['unit']} (step {what['step']}), to which {others} "
        f"never came"
    ]


def _raised(incident: Incident, same: Sequence[Status]) -> Explained:
    because = [f"its watcher read the exception that it raised after {place(same[0])}", *_waiters(incident, same)]
    others = [status for status in first_hand(incident.statuses) if status not in same]
    because += [f"rank {s['rank']} raised another error, which may follow from it: {line_of_error(s)}" for s in others]
    return because, remedies.of_error(line_of_error(same[0]))


def _gone(incident: Incident, same: Sequence[Status]) -> Explained:
    how = same[0]["gone"]
    because = [f"how it ended, as it said or its machine did: {how}", *_waiters(incident, same)]
    if BY_ITSELF in how:
        because.append(f"it raised nothing: its program came to its end after {same[0]['steps']} steps")
    others = [s for s in incident.statuses if s["gone"] is not None and s not in same]
    others = [s for s in others if (BY_ITSELF in s["gone"]) == (BY_ITSELF in how) and "DivergenceError" not in
              line_of_error(s)]  # fmt: skip
    because += [f"rank {s['rank']} is gone, too ({s['gone']}), which may follow from it" for s in others]
    return because, remedies.of_end(how)


def _stopped(incident: Incident, found: Sequence[Status]) -> Explained:
    stopped = "the system says that the process is stopped (state T): it lives, and does not run"
    return [stopped, *_waiters(incident, found)], _filled(remedies.STOPPED, found[0])


def _cut(incident: Incident) -> Cause:
    hosts = {status["rank"]: status["host"] for status in incident.statuses}
    named = [f"{ranks_of(half)} ({', '.join(sorted({hosts[rank] for rank in half}))})" for half in incident.halves]
    return Cause(
        "cut",
        (),
        f"the network is cut between {' and '.join(named)}.",
        tuple(f"{ranks_of(half)} reached each other and none of the others, which lived" for half in incident.halves),
        remedies.CUT,
    )


def _unreachable(incident: Incident, found: Sequence[Status]) -> Explained:
    because = [
        "its watcher, a thread of its process, did not answer within the time allowed",
        "no other rank is on its machine that could say whether it is gone, stopped, or holds the interpreter",
    ]
    return because, remedies.UNREACHABLE


def _absent(incident: Incident, found: Sequence[Status]) -> Explained:
    return ["it never said anything"], remedies.ABSENT


def _calls(incident: Incident, found: Sequence[Status]) -> Explained:
    gone = [status for status in incident.statuses if status["gone"] is not None]
    rest = f"{ranks_of(_who(gone))} came to the end of the program" if gone else "no rank is anywhere else"
    return [f"each of these calls waits for the other ranks to make it, too, and {rest}"], remedies.CALLS


def _departed(incident: Incident, found: Sequence[Status]) -> Explained:
    others = [status for status in incident.statuses if status not in departed(incident.statuses)]
    because = [
        "in the first steps the order was the same on all ranks; only there another unit came than it says",
        f"{ranks_of(_who(others))} still follow that order",
    ]
    return because, remedies.DEPARTED


def _transport(incident: Incident, found: Sequence[Status]) -> Explained:
    everybody = _who(incident.statuses)
    return [f"{ranks_of(everybody)} issued the same, and none of them got past it"], remedies.TRANSPORT


_FRAMES: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("/torch/distributed/checkpoint", "/torch/serialization"), "reads or writes a checkpoint", remedies.CHECKPOINTING),
    (("/torch/distributed/",), "is in a collective that is not the engine's", remedies.OWN_COLLECTIVE),
    (("/torch/_inductor", "/torch/_dynamo", "/triton/"), "compiles", remedies.COMPILING),
    (("/torch/utils/data/",), "waits for data", remedies.DATA),
)


def _elsewhere(incident: Incident, busy: Sequence[Status]) -> Explained:
    first = busy[0]
    stack = first["stack"].splitlines()
    remedy: tuple[str, ...] = remedies.SLEEPS
    because = [*_waiters(incident, busy)]
    if first["state"] == "D":
        remedy = remedies.DEVICE_OR_DISK
        because.append("the system says that it sleeps and cannot be interrupted (state D)")
    elif first["state"] == "R":
        remedy = remedies.COMPUTES
        because.append("the system says that it runs (state R), and its stack did not change between two looks")
    else:
        because.append(f"the system says that it sleeps (state {first['state']}), and its stack did not change")
    for parts, doing, better in _FRAMES:
        if stack and any([part in stack[0] for part in parts]):
            remedy = better
            because.append(f"it {doing}: innermost in its stack is {stack[0].strip()}")
            break
    return because, _filled(remedy, first)


def _apart(incident: Incident, odd: Sequence[Status]) -> Explained:
    because = ["all ranks wait, at points at which they do not meet"]
    issued = first_issued(incident.statuses)
    others = [status for status in incident.statuses if status not in odd]
    if odd:
        most = issued[others[0]["rank"]]
        because.append(f"{ranks_of(_who(others))} issued {most}; {ranks_of(_who(odd))} did not")
    else:
        because.append("as many issued the one as the other, so that nobody can be blamed: see the first difference")
    return because, remedies.DEPARTED


_EXPLAINED = {
    "raised": _raised,
    "gone": _gone,
    "data": _gone,
    "stopped": _stopped,
    "unreachable": _unreachable,
    "absent": _absent,
    "calls": _calls,
    "departed": _departed,
    "elsewhere": _elsewhere,
    "apart": _apart,
    "transport": _transport,
}


def _filled(texts: tuple[str, ...], status: Status) -> tuple[str, ...]:
    return tuple(text.format(pid=status["pid"], host=status["host"]) for text in texts)
