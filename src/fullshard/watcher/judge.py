"""Judges the statuses of all ranks: whether they are stuck, and which rank is to blame. Pure; only standard library.

A status is a dict, as a watcher sends it (`Watcher.status` in `roll_call.py` lists the keys). Wording: `messages.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .issued import COMPARE, VERBS
from .process import OF_STEPS

Status = dict[str, Any]

FORMAT = 1
"""The number of the format of reports in files, which begin with it."""

UNKNOWN = ("unreachable", "absent")
"""States of a rank whose watcher did not answer, or never started."""
BY_ITSELF = "by itself"
"""Part of the text on how a rank ended, if its program ran to its end."""
_FIRST = 4  # limits: the time that a rank may take for its first step, whatever it does
_WAKES = 2.0  # per second: more than a loop that polls once a second


def unheard(rank: int, last: Status | None, seconds: float = 0.0) -> Status:
    """The status of a rank that does not answer, without its position, which only the rank itself can report.

    Args:
        last: its last status; None: it has never sent a status, as it has not sharded a model yet.
        seconds: how long it has not answered.
    """
    status: Status = dict.fromkeys(("gone", "raised", "caught", "waited", "waits_for", "last", "call", "own", "silent"))
    status |= {"rank": rank, "host": "", "state": "absent" if last is None else "unreachable", "idle": False, "pid": 0}
    status |= {"count": 0, "steps": 0, "ticks": 0, "cpu": 0.0, "children": 0.0, "io": 0, "records": [], "stack": ""}
    status |= {"samples": [], "runs": False, "wakes": 0, "broken": False, "unheard": seconds}
    status |= {"time": time.time(), "clock": time.monotonic()}
    constant = ("host", "pid", "machine", "start")
    return status | {name: last[name] for name in constant if last is not None and name in last}


def stuck(now: Sequence[Status], before: Sequence[Status], limit: float, hard: float) -> bool:
    """Whether the ranks are stuck for good. Requires that a rank has waited for `limit` seconds, or is gone.

    Silence proves nothing: it counts only once it has lasted for the limit, as the wait has; or if a connection broke,
    in which case the job is over anyway.

    Args:
        now, before: the ranks' statuses, and those of the previous look; empty if there was none.
        limit, hard: seconds. A wait of the host for more than `hard` always counts as stuck.
    """
    longest = max([status["waited"] for status in now if status["waited"] is not None], default=0.0)
    own = max([status["own"] for status in now if status.get("own") is not None], default=0.0)
    broken = any([status.get("broken") for status in now]) and any([status["state"] in UNKNOWN for status in now])
    if broken or _fails(now, longest, limit, hard):
        return True
    if max(longest, own) < limit:
        return False
    earlier = {status["rank"]: status for status in before}
    busy = [status for status in now if not _waits(status)]
    if not busy:  # all wait: a single event may just be slow; different events never happen
        return len({_point(status) for status in now}) > 1 and list(map(_point, now)) == list(map(_point, before))
    if not earlier or any([_moved(status, earlier.get(status["rank"]), limit) for status in busy]):
        return False
    if all([_waits(status) or status.get("own") is not None for status in now]):
        return len({_place(status) for status in now}) > 1
    beginning = any([status["steps"] == 0 for status in busy])
    # Waits in the program's own collectives alone, for a rank that is elsewhere, are the program's concern.
    return longest >= (_FIRST * limit if beginning else limit)


def may_sleep(now: Sequence[Status], hard: float) -> bool:
    """Whether ranks found stuck may only wait for one that sleeps in its own code, or waits there for another program.

    Args:
        now: the ranks' statuses.
        hard: seconds; a wait that is longer counts as stuck in any case.
    """
    waits = [status["waited"] or 0.0 for status in now]
    return (
        not all(map(stands, now))
        and not sure(now)
        and max(waits) <= hard
        and not any(s["state"] in UNKNOWN for s in now)
    )


def _fails(now: Sequence[Status], longest: float, limit: float, hard: float) -> bool:
    """Whether no further comparison is needed: a rank is gone, stopped or has raised, or a wait was too long."""
    if longest:
        by_host = max([status["waited"] for status in now if _waits(status)], default=0.0)
        raised = any(map(has_raised, now))
        soon = (raised and longest > min(limit, 5.0)) or (longest > min(limit, 2.0) and _apart(now))
        if soon or by_host > hard or any([_lost(status) for status in now]):
            return True
    silent = max([status["silent"] for status in now if status.get("silent") is not None], default=0.0)
    return silent > 1.0 and any([_failed(status) for status in now])


def sure(statuses: Sequence[Status]) -> bool:
    """Whether one look is enough: a rank is gone or has raised, or ranks wait for events that cannot happen."""
    raised = any(map(has_raised, statuses))
    never = any([s.get("broken") for s in statuses]) and any([s["state"] == "absent" for s in statuses])
    return raised or never or any([_lost(status) for status in statuses]) or _apart(statuses)


def _waits(status: Status) -> bool:
    """Whether the rank's host waits for a collective of Fullshard's."""
    return status["waited"] is not None and not status["idle"]


def _apart(statuses: Sequence[Status]) -> bool:
    """Whether a rank waits in a comparison while another waits for an event that the former issues only afterwards."""
    waiting = [s for s in statuses if _waits(s) and s["waits_for"] is not None]
    comparing = [s["waits_for"]["turn"] for s in waiting if s["waits_for"]["verb"] == VERBS[COMPARE]]
    running = [s["waits_for"]["turn"] for s in waiting if s["waits_for"]["verb"] != VERBS[COMPARE]]
    return bool(comparing and running) and max(running) >= min(comparing)


def _point(status: Status) -> tuple[Any, ...]:
    """The last event of a rank."""
    last = status["last"] or {}
    return last.get("turn"), last.get("verb"), last.get("unit")


def _compares(status: Status) -> bool:
    return bool(status["last"]) and status["last"]["verb"] == VERBS[COMPARE]


def _place(status: Status) -> tuple[Any, ...]:
    """A rank's position in the program."""
    call = status.get("call")
    return (call["did"], call["at"]) if call else _point(status)


def _lost(status: Status) -> bool:
    return status["gone"] is not None or status["state"] == "T"


def _failed(status: Status) -> bool:
    """Whether the rank ended in any way but by running to its end."""
    return status["gone"] is not None and (status["raised"] is not None or BY_ITSELF not in status["gone"])


def _moved(now: Status, before: Status | None, limit: float) -> bool:
    """Whether a rank that does not wait for a collective of Fullshard's has made progress since.

    A rank that declares that it reads or writes files is believed. In its first step any activity counts (it may
    compile, or read). Later it has to leave the line it was at, compute there (unless the host may be spinning for a
    device), wake up often (as it does when it sends or receives), read or write a quarter of a megabyte, or have
    children that compute. Computing inside a collective does not count: its threads never stop using a little CPU.
    """
    if before is None or now["state"] == "absent":
        return True
    if "unreachable" in (now["state"], before["state"]):
        return now["state"] != before["state"] or now.get("unheard", limit) < limit
    if now["count"] != before["count"] or now.get("ticks") != before.get("ticks"):
        return True
    seconds = now["clock"] - before["clock"]
    stands = now.get("own") is not None
    if now["steps"] == 0 and not stands:
        return now["cpu"] - before["cpu"] > 0.02 + 0.01 * seconds or now["io"] != before["io"]
    computes = now.get("runs") and before.get("runs") and not now["idle"] and not stands
    woke = now.get("wakes", 0) - before.get("wakes", 0) > _WAKES * max(seconds, 1.0)
    children = now["children"] - before["children"] > 0.1
    changed = len({*now["samples"], *before["samples"]}) > 1
    return bool(changed or computes or woke or children or now["io"] - before["io"] > 1 << 18)


# Who is to blame.


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang, shared by reports and `fullshard doctor`.

    Attributes:
        kind: "raised", "gone", "stopped", "unreachable", "data", "absent", "calls", "departed", "elsewhere", "apart" or
            "transport".
        named: the statuses of the ranks at fault, in rank order; empty if there are none, or none can be identified.
        others: the statuses of the other ranks.
        is_clear: whether the named ranks are certainly to blame.
    """

    kind: str
    named: Sequence[Status]
    others: Sequence[Status]
    is_clear: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks to blame."""
        return tuple(status["rank"] for status in self.named if self.is_clear)


def verdict(statuses: Sequence[Status]) -> Verdict:
    """The first cause that applies, in an order that puts causes before their consequences."""
    raised = first_hand(statuses)
    done = _ended(statuses, by_itself=True)
    causes: dict[str, Sequence[Status]] = {
        "raised": [status for status in raised if line_of_error(status) == line_of_error(raised[0])],
        "gone": _ended(statuses, by_itself=False),
        "stopped": [status for status in statuses if status["state"] == "T"],
        "unreachable": [status for status in statuses if status["state"] == "unreachable"],
        "calls": _called_after(statuses, done),
        "data": done,
        "absent": [status for status in statuses if status["state"] == "absent"],
    }
    for kind, named in causes.items():
        if named:
            return _verdict(kind, named, statuses)
    if all([status.get("call") and stands(status) for status in statuses]) and len(set(map(_place, statuses))) > 1:
        return _different_calls(statuses)
    compare = [status for status in statuses if _compares(status)]
    elsewhere = [status for status in statuses if status["waited"] is None]
    # Ranks that compare have left the shared order, provided that the others wait too, or their devices may.
    if compare and len(compare) < len(statuses) and all([status["idle"] for status in elsewhere]):
        return _verdict("departed", compare, statuses)
    if elsewhere:
        return _verdict("elsewhere", elsewhere, statuses)
    if len(set(map(_point, statuses))) < 2:
        return Verdict("transport", (), statuses)
    issued = first_issued(statuses)[1] or {status["rank"]: str(_point(status)) for status in statuses}
    most = max(issued.values(), key=list(issued.values()).count)
    odd = [status for status in statuses if issued.get(status["rank"], "nothing") != most]
    return _verdict("apart", odd if 2 * len(odd) < len(issued) else (), statuses)


def _verdict(kind: str, named: Sequence[Status], statuses: Sequence[Status], is_clear: bool = True) -> Verdict:
    ordered = sorted(named, key=lambda status: status["rank"])
    return Verdict(kind, ordered, [status for status in statuses if status not in ordered], is_clear)


def stands(status: Status) -> bool:
    """Whether the rank waits for others, in a collective of Fullshard's or of the program's own."""
    return status["waited"] is not None or status.get("own") is not None


def in_own_collective(status: Status) -> bool:
    """Whether the rank is in a collective of the program's own."""
    return status.get("own") is not None or bool(status.get("call") and status["call"]["waits"])


def has_raised(status: Status) -> bool:
    """Whether an error has ended the rank's program, or its last pass."""
    return bool(status["raised"]) and (status["gone"] is not None or status["waited"] is None)


def first_hand(statuses: Sequence[Status]) -> list[Status]:
    """Ranks that raised an error of their own; a DivergenceError only reports the failure of another rank."""
    return [s for s in statuses if has_raised(s) and "DivergenceError" not in line_of_error(s)]


def line_of_error(status: Status) -> str:
    """The line of a rank's traceback with the type of the (last, if chained) error; empty without an error.

    >>> line_of_error({"raised": "Traceback (most recent call last):\\n  File a\\nConfigError: no.\\n  remedy: do"})
    'ConfigError: no.'
    """
    lines = (status["raised"] or "").strip().rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return next((line for line in lines if not line.startswith(" ")), lines[-1] if lines else "")  # frames: indented


def _ended(statuses: Sequence[Status], by_itself: bool) -> list[Status]:
    """Ranks that ended first-hand and in the same way; without those that ended because another rank had failed.

    Args:
        statuses: of all ranks.
        by_itself: True: ranks whose program ran to its end; False: all others that ended.
    """
    ended = [s for s in statuses if s["gone"] is not None and (BY_ITSELF in s["gone"]) == by_itself]
    ended = [status for status in ended if "DivergenceError" not in line_of_error(status)] or ended
    chosen = [s for s in ended if "signal" in s["gone"] and "SIGTERM" not in s["gone"]] or ended
    return [status for status in chosen if status["gone"] == chosen[0]["gone"]]


def _called_after(statuses: Sequence[Status], done: Sequence[Status]) -> list[Status]:
    """Ranks in a call outside the training step, if at least as many others have finished their program."""
    remaining = [status for status in statuses if status not in done]
    calling = [s for s in remaining if s.get("call") and stands(s) and s["call"]["did"] not in OF_STEPS]
    return calling if calling == remaining and len(calling) <= len(done) else []


def _different_calls(statuses: Sequence[Status]) -> Verdict:
    """The verdict on ranks that made different calls, each of which waits for the others; blames the smallest group."""
    sides: dict[tuple[Any, ...], list[Status]] = {}
    for status in statuses:
        sides.setdefault(_place(status), []).append(status)

    def order(side: list[Status]) -> tuple[int, bool, bool]:
        compares = any(map(_compares, side))
        return len(side), side[0]["call"]["did"] in OF_STEPS, not compares

    first, second = sorted(sides.values(), key=lambda side: (order(side), side[0]["rank"]))[:2]
    return _verdict("calls", first, statuses, order(first) < order(second))


def first_issued(statuses: Sequence[Status]) -> tuple[int, dict[int, str]]:
    """The first event at which ranks with records differ, as far back as all their records go.

    Returns:
        The event's turn, and rank -> event: "nothing" for a rank that has not got there. (0, {}) if none differ.
    """
    records = {status["rank"]: of_last_root(status) for status in statuses}
    by_rank = {rank: {r["turn"]: f"{r['verb']} of {r['unit']}" for r in log} for rank, log in records.items() if log}
    begun = max(map(min, by_rank.values()), default=0)
    for turn in sorted({turn for turns in by_rank.values() for turn in turns if turn >= begun}):
        issued = {rank: turns.get(turn, "nothing") for rank, turns in by_rank.items()}
        if len(set(issued.values())) > 1:
            return turn, issued
    return 0, {}


def of_last_root(status: Status) -> list[dict[str, Any]]:
    """The records of the root that the rank ran last: its turns have the same numbers on all ranks."""
    records = [record for record in status["records"] if record["turn"]]
    return [record for record in records if record["root"] == records[-1]["root"]]


def grouped(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Group ranks with equal texts: (ranks in words, text)."""
    by_text: dict[str, list[int]] = {}
    for rank, text in texts:
        by_text.setdefault(text, []).append(rank)
    return [(ranks_of(ranks), text) for text, ranks in by_text.items()]


def ranks_of(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`.

    >>> ranks_of([5, 0, 1, 2])
    'ranks 0-2, 5'
    """
    ordered, runs = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
