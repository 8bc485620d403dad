"""Who is to blame and why that is believed, from what watchers knew of all ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...watcher.board import COMPARE, VERBS
from ...watcher.report import Status, headline, of_last_root, ranks_of
from . import remedies
from .merge import Incident


@dataclass(frozen=True)
class Cause:
    """What went wrong.

    Attributes:
        kind: "raised", "gone", "stopped", "cut", "unreachable", "data", "departed", "elsewhere", "absent", "apart" or
            "transport".
        ranks: to blame; empty if nobody is, or nobody can be told.
        what: one sentence.
        because: why it is believed, a line each.
        remedies: what to do next, in this order.
    """

    kind: str
    ranks: tuple[int, ...]
    what: str
    because: tuple[str, ...]
    remedies: tuple[str, ...]


def cause_of(incident: Incident) -> Cause:
    """The first of these that holds: an exception, an end, a stop, a network that was cut, an order that was left."""
    killed, ended = partial(_gone, by_itself=False), partial(_gone, by_itself=True)
    for find in (_raised, killed, _stopped, _cut, _unreachable, ended, _departed, _elsewhere, _apart):
        if (cause := find(incident)) is not None:
            return cause
    everybody = tuple(status["rank"] for status in incident.statuses)
    return Cause(
        "transport",
        (),
        "all ranks wait at the same point, and nothing arrives.",
        (f"{ranks_of(everybody)} issued the same, and none of them got past it",),
        remedies.TRANSPORT,
    )


def place(status: Status) -> str:
    """What a rank issued last."""
    last = status["last"]
    return f"{last['verb']} of {last['unit']}, step {last['step']}" if last else "before its first forward"


def line_of_error(status: Status) -> str:
    """The line of what it raised that has its type; empty if it raised nothing."""
    return headline(status["raised"]) if status["raised"] else ""


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


def _raised(incident: Incident) -> Cause | None:
    raised = [s for s in incident.statuses if line_of_error(s) and (s["gone"] is not None or s["waited"] is None)]
    first_hand = [status for status in raised if "DivergenceError" not in line_of_error(status)]
    if not first_hand:
        return None
    same = [status for status in first_hand if line_of_error(status) == line_of_error(first_hand[0])]
    error = line_of_error(same[0])
    because = [f"its watcher read the exception that it raised after {place(same[0])}", *_waiters(incident, same)]
    others = [status for status in first_hand if status not in same]
    because += [f"rank {s['rank']} raised another error, which may follow from it: {line_of_error(s)}" for s in others]
    return Cause(
        "raised",
        _who(same),
        f"{ranks_of(_who(same))} raised {error} (after {place(same[0])}).",
        tuple(because),
        remedies.of_error(error),
    )


def _gone(incident: Incident, by_itself: bool) -> Cause | None:
    found = [s for s in incident.statuses if s["gone"] is not None and ("by itself" in s["gone"]) == by_itself]
    consequences = [status for status in found if "DivergenceError" in line_of_error(status)]
    found = [status for status in found if status not in consequences] or found
    if not found:
        return None
    signals = [status for status in found if "signal" in status["gone"] and "SIGTERM" not in status["gone"]]
    chosen = signals or found
    same = [status for status in chosen if status["gone"] == chosen[0]["gone"]]
    how, who = same[0]["gone"], ranks_of(_who(same))
    because = [f"its watcher, which outlived it, saw how it ended: {how}", *_waiters(incident, same)]
    if "by itself" in how:
        because.append(f"it raised nothing: its program came to its end after {same[0]['steps']} steps")
    others = [status for status in found if status not in same]
    because += [f"rank {s['rank']} is gone, too ({s['gone']}), which may follow from it" for s in others]
    verb = "are" if len(same) > 1 else "is"
    if by_itself:
        what = f"{who} ended by itself while others went on: out of data? (after {place(same[0])})"
        return Cause("data", _who(same), what, tuple(because), remedies.of_end(how))
    what = f"{who} {verb} gone: {how} (after {place(same[0])})."
    return Cause("gone", _who(same), what, tuple(because), remedies.of_end(how))


def _stopped(incident: Incident) -> Cause | None:
    found = [status for status in incident.statuses if status["state"] == "T"]
    if not found:
        return None
    return Cause(
        "stopped",
        _who(found),
        f"{ranks_of(_who(found))} {'are' if len(found) > 1 else 'is'} stopped by a signal (after {place(found[0])}).",
        (
            "the system says that the process is stopped (state T): it lives, and does not run",
            *_waiters(incident, found),
        ),
        _filled(remedies.STOPPED, found[0]),
    )


def _cut(incident: Incident) -> Cause | None:
    if not incident.halves:
        return None
    hosts = {status["rank"]: status["host"] for status in incident.statuses}
    named = [f"{ranks_of(half)} ({', '.join(sorted({hosts[rank] for rank in half}))})" for half in incident.halves]
    return Cause(
        "cut",
        (),
        f"the network is cut between {' and '.join(named)}.",
        tuple(f"{ranks_of(half)} reached each other and none of the others, which lived" for half in incident.halves),
        remedies.CUT,
    )


def _unreachable(incident: Incident) -> Cause | None:
    found = [status for status in incident.statuses if status["state"] == "unreachable"]
    if not found:
        return None
    hosts = ", ".join(sorted({status["host"] for status in found if status["host"]})) or "its machine"
    return Cause(
        "unreachable",
        _who(found),
        f"{ranks_of(_who(found))} cannot be reached ({hosts}): the machine is down, or the network is cut.",
        (
            "neither the rank nor its watcher, a process of its own that outlives it, answered",
            "a rank that only hangs, or died alone, would have been told of by its watcher",
        ),
        remedies.UNREACHABLE,
    )


def _departed(incident: Incident) -> Cause | None:
    found = [s for s in incident.statuses if s["last"] and s["last"]["verb"] == VERBS[COMPARE]]
    if not found or len(found) == len(incident.statuses):
        return None
    last, others = found[0]["last"], [status for status in incident.statuses if status not in found]
    return Cause(
        "departed",
        _who(found),
        f"{ranks_of(_who(found))} left the order of units that ranks share (at {last['unit']}, step {last['step']}).",
        (
            "in the first steps the order was the same on all ranks; only there another unit came than it says",
            f"{ranks_of(_who(others))} still follow that order",
        ),
        remedies.DEPARTED,
    )


_FRAMES: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("/torch/distributed/checkpoint", "/torch/serialization"), "reads or writes a checkpoint", remedies.CHECKPOINTING),
    (("/torch/distributed/",), "is in a collective that is not the engine's", remedies.OWN_COLLECTIVE),
    (("/torch/_inductor", "/torch/_dynamo", "/triton/"), "compiles", remedies.COMPILING),
    (("/torch/utils/data/",), "waits for data", remedies.DATA),
)


def _elsewhere(incident: Incident) -> Cause | None:
    busy = [status for status in incident.statuses if status["waited"] is None and status["gone"] is None]
    if not busy:
        return None
    absent = [status for status in busy if status["state"] == "absent"]
    if absent:
        what = f"{ranks_of(_who(absent))} did not come to a first forward."
        return Cause("absent", _who(absent), what, ("no watcher of it was ever there to ask",), remedies.ABSENT)
    first = busy[0]
    stack = first["stack"].splitlines()
    doing = "is in code that is not the engine's"
    remedy: tuple[str, ...] = remedies.SLEEPS
    because = [*_waiters(incident, busy)]
    if first["state"] == "D":
        remedy = remedies.DEVICE_OR_DISK
        because.append("the system says that it sleeps and cannot be interrupted (state D)")
    elif first["state"] == "R":
        doing, remedy = "computes in code that is not the engine's", remedies.COMPUTES
        because.append("the system says that it runs (state R), and its stack did not change between two looks")
    else:
        because.append(f"the system says that it sleeps (state {first['state']}), and its stack did not change")
    for parts, told, better in _FRAMES:
        if stack and any([part in stack[0] for part in parts]):
            doing, remedy = told, better
            because.append(f"innermost in its stack: {stack[0].strip()}")
            break
    what = f"{ranks_of(_who(busy))} did not come: it {doing} (after {place(first)})."
    return Cause("elsewhere", _who(busy), what, tuple(because), _filled(remedy, first))


def _apart(incident: Incident) -> Cause | None:
    at = {s["rank"]: _point(s) for s in incident.statuses}
    if len(set(at.values())) < 2:
        return None
    issued = _first_issued(incident.statuses)
    counts = Counter(issued.values())
    most, times = counts.most_common(1)[0]
    because = ["all ranks wait, at points at which they do not meet"]
    odd: tuple[int, ...] = ()
    if 2 * times > len(issued):
        odd = tuple(sorted(rank for rank, what in issued.items() if what != most))
        because.append(f"{ranks_of(sorted(set(issued) - set(odd)))} issued {most}; {ranks_of(odd)} did not")
        what = f"{ranks_of(odd)} issued something else than the others; ranks wait for each other at different points."
    else:
        what = "ranks wait for each other at different points."
        because.append("as many issued the one as the other, so that nobody can be blamed: see the first difference")
    return Cause("apart", odd, what, tuple(because), remedies.DEPARTED)


def _point(status: Status) -> tuple[object, ...]:
    last = status["last"] or {}
    return last.get("turn"), last.get("verb"), last.get("unit")


def _first_issued(statuses: Sequence[Status]) -> dict[int, str]:
    """What each rank issued where they differ first: nothing, perhaps."""
    by_rank = {s["rank"]: {r["turn"]: f"{r['verb']} of {r['unit']}" for r in of_last_root(s)} for s in statuses}
    numbers = sorted({turn for turns in by_rank.values() for turn in turns})
    begun = max([min(turns) for turns in by_rank.values() if turns], default=0)
    told: Callable[[int, int], str] = lambda rank, number: by_rank[rank].get(number, "nothing")  # noqa: E731
    for number in numbers:
        here = {rank: told(rank, number) for rank in by_rank}
        if number >= begun and len(set(here.values())) > 1:
            return here
    return {status["rank"]: str(_point(status)) for status in statuses}


def _filled(texts: tuple[str, ...], status: Status) -> tuple[str, ...]:
    return tuple(text.format(pid=status["pid"], host=status["host"]) for text in texts)
