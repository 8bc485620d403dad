"""What is known of all ranks, judged: whether they are stuck, and who is to blame. Pure; only the standard library.

A status is a dict, as a watcher sends it (`Watcher.status` in `roll_call.py` says with what). Wording: `messages.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .log import COMPARE, VERBS
from .process import OF_STEPS

Status = dict[str, Any]

UNKNOWN = ("unreachable", "absent")
"""States of a rank whose watcher did not answer, or was not there."""
BY_ITSELF = "by itself"
"""In how a rank ended, if its program came to its end."""
_FIRST = 4  # times the limit is what a rank may take for its first step, whatever it does
_WAKES = 2.0  # times in a second: more often than a loop wakes that asks once a second whether something has come


def unheard(rank: int, last: Status | None, seconds: float = 0.0) -> Status:
    """What is known of a rank that does not answer: not where it is, which it alone can tell.

    Args:
        last: what it said last; None: it has said nothing yet, as it has made no unit.
        seconds: for which it has not answered.
    """
    known: Status = dict.fromkeys(("gone", "raised", "caught", "waited", "waits_for", "last", "call", "own", "silent"))
    known |= {"rank": rank, "host": "", "state": "absent" if last is None else "unreachable", "idle": False, "pid": 0}
    known |= {"count": 0, "steps": 0, "ticks": 0, "cpu": 0.0, "children": 0.0, "io": 0, "records": [], "stack": ""}
    known |= {"samples": [], "runs": False, "wakes": 0, "broken": False, "time": time.time(), "unheard": seconds}
    kept = ("host", "pid", "machine", "start")
    return known | {name: last[name] for name in kept if last is not None and name in last}


def stuck(now: Sequence[Status], before: Sequence[Status], limit: float, hard: float) -> bool:
    """Whether nothing is to be hoped for, at least one rank having waited for `limit` seconds or one being gone.

    No answer proves nothing: it counts only once it has lasted for the limit, as the wait has; or when a connection
    broke, and the job is over anyway.

    Args:
        now, before: the ranks' statuses, and those of a look before; empty if there was none.
        limit, hard: seconds. A wait of the host longer than `hard` is never waited out.
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
    if not busy:  # all wait: for one thing, which may be slow, or for several, which never comes
        return len({_point(status) for status in now}) > 1 and list(map(_point, now)) == list(map(_point, before))
    if not earlier or any([_moved(status, earlier.get(status["rank"]), limit) for status in busy]):
        return False
    if all([_waits(status) or status.get("own") is not None for status in now]):
        return len({_place(status) for status in now}) > 1
    beginning = any([status["steps"] == 0 for status in busy])
    # Where others wait for a rank that is elsewhere in collectives of the program's own only, it is not our business.
    return longest >= (_FIRST * limit if beginning else limit)


def _fails(now: Sequence[Status], longest: float, limit: float, hard: float) -> bool:
    """Whether the ranks need not be compared any further: one is gone, stopped or raises, or a wait was too long."""
    if longest:
        by_host = max([status["waited"] for status in now if _waits(status)], default=0.0)
        raised = any(map(has_raised, now))
        soon = (raised and longest > min(limit, 5.0)) or (longest > min(limit, 2.0) and _apart(now))
        if soon or by_host > hard or any([_lost(status) for status in now]):
            return True
    silent = max([status["silent"] for status in now if status.get("silent") is not None], default=0.0)
    return silent > 1.0 and any([_failed(status) for status in now])


def sure(statuses: Sequence[Status]) -> bool:
    """Whether one look is enough: somebody is gone or has raised, or ranks wait for what cannot come."""
    raised = any(map(has_raised, statuses))
    never = any([s.get("broken") for s in statuses]) and any([s["state"] == "absent" for s in statuses])
    return raised or never or any([_lost(status) for status in statuses]) or _apart(statuses)


def _waits(status: Status) -> bool:
    """Whether the rank's host waits for a collective of ours."""
    return status["waited"] is not None and not status["idle"]


def _apart(statuses: Sequence[Status]) -> bool:
    """Whether a rank compares its next step with others of which one waits for what that rank will not issue before."""
    waiting = [s for s in statuses if _waits(s) and s["waits_for"] is not None]
    compares = [s["waits_for"]["turn"] for s in waiting if s["waits_for"]["verb"] == VERBS[COMPARE]]
    others = [s["waits_for"]["turn"] for s in waiting if s["waits_for"]["verb"] != VERBS[COMPARE]]
    return bool(compares and others) and max(others) >= min(compares)


def _point(status: Status) -> tuple[Any, ...]:
    """What a rank has come to."""
    last = status["last"] or {}
    return last.get("turn"), last.get("verb"), last.get("unit")


def _compares(status: Status) -> bool:
    return bool(status["last"]) and status["last"]["verb"] == VERBS[COMPARE]


def _place(status: Status) -> tuple[Any, ...]:
    """Where in the program a rank is."""
    call = status.get("call")
    return (call["did"], call["at"]) if call else _point(status)


def _lost(status: Status) -> bool:
    return status["gone"] is not None or status["state"] == "T"


def _failed(status: Status) -> bool:
    """Whether the rank ended in another way than programs that are done."""
    return status["gone"] is not None and (status["raised"] is not None or BY_ITSELF not in status["gone"])


def _moved(now: Status, before: Status | None, limit: float) -> bool:
    """Whether a rank that does not wait for a collective of ours has got anywhere since.

    One that says that it reads or writes files is believed. In its first step whatever a rank does counts (it may
    compile, or read). Later it has to leave the line it was at, compute there (unless the host may spin there for a
    device), wake up often (as one does that sends or receives), read or write a quarter of a megabyte, or its children
    have to compute. In a collective computing is none: its threads do a little for ever.
    """
    if before is None or now["state"] == "absent":
        return True
    if "unreachable" in (now["state"], before["state"]):
        return now["state"] != before["state"] or now.get("unheard", limit) < limit
    if now["count"] != before["count"] or now.get("ticks") != before.get("ticks"):
        return True
    seconds = now["time"] - before["time"]
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
    """What went wrong, on which a report and `fullshard doctor` agree.

    Attributes:
        kind: "raised", "gone", "stopped", "unreachable", "data", "absent", "calls", "departed", "elsewhere", "apart" or
            "transport".
        named: ranks that did what went wrong, in their order; empty if nobody did, or nobody can be told.
        others: the other ranks.
        is_clear: whether those named are to blame, rather than others.
    """

    kind: str
    named: Sequence[Status]
    others: Sequence[Status]
    is_clear: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those to blame."""
        return tuple(status["rank"] for status in self.named if self.is_clear)


def verdict(statuses: Sequence[Status]) -> Verdict:
    """The first cause that holds: what follows from a failure must not be taken for it."""
    raised = first_hand(statuses)
    done = _ended(statuses, by_itself=True)
    found: dict[str, Sequence[Status]] = {
        "raised": [status for status in raised if line_of_error(status) == line_of_error(raised[0])],
        "gone": _ended(statuses, by_itself=False),
        "stopped": [status for status in statuses if status["state"] == "T"],
        "unreachable": [status for status in statuses if status["state"] == "unreachable"],
        "calls": _called_after(statuses, done),
        "data": done,
        "absent": [status for status in statuses if status["state"] == "absent"],
    }
    for kind, named in found.items():
        if named:
            return _verdict(kind, named, statuses)
    if all([status.get("call") and stands(status) for status in statuses]) and len(set(map(_place, statuses))) > 1:
        return _different_calls(statuses)
    compare = [status for status in statuses if _compares(status)]
    elsewhere = [status for status in statuses if status["waited"] is None]
    # Those that compare have left the order that all share, if the others wait, too, as far as is known.
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
    """Whether the rank waits for others, in a collective of ours or of the program's own."""
    return status["waited"] is not None or status.get("own") is not None


def has_raised(status: Status) -> bool:
    """Whether an error has ended what the rank did."""
    return bool(status["raised"]) and (status["gone"] is not None or status["waited"] is None)


def first_hand(statuses: Sequence[Status]) -> list[Status]:
    """Ranks that raised an error of their own; a DivergenceError says that another rank failed."""
    return [s for s in statuses if has_raised(s) and "DivergenceError" not in line_of_error(s)]


def line_of_error(status: Status) -> str:
    """The line of what it raised that has its type; empty if it raised nothing. Of several errors, the last one's.

    >>> line_of_error({"raised": "Traceback (most recent call last):\\n  File a\\nConfigError: no.\\n  remedy: do"})
    'ConfigError: no.'
    """
    lines = (status["raised"] or "").strip().rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return next((line for line in lines if not line.startswith(" ")), lines[-1] if lines else "")  # frames: indented


def _ended(statuses: Sequence[Status], by_itself: bool) -> list[Status]:
    """Ranks that ended alike, of those that ended so; not those that ended because another one had failed.

    Args:
        by_itself: whether the program came to its end.
    """
    ended = [s for s in statuses if s["gone"] is not None and (BY_ITSELF in s["gone"]) == by_itself]
    ended = [status for status in ended if "DivergenceError" not in line_of_error(status)] or ended
    chosen = [s for s in ended if "signal" in s["gone"] and "SIGTERM" not in s["gone"]] or ended
    return [status for status in chosen if status["gone"] == chosen[0]["gone"]]


def _called_after(statuses: Sequence[Status], done: Sequence[Status]) -> list[Status]:
    """Ranks that made a call which is not of every step, after most others had come to their program's end."""
    others = [status for status in statuses if status not in done]
    alone = [s for s in others if s.get("call") and stands(s) and s["call"]["did"] not in OF_STEPS]
    return alone if alone == others and len(alone) <= len(done) else []


def _different_calls(statuses: Sequence[Status]) -> Verdict:
    """Ranks made different calls, each of which waits for the others: those that fewer made come first."""
    sides: dict[tuple[Any, ...], list[Status]] = {}
    for status in statuses:
        sides.setdefault(_place(status), []).append(status)

    def order(side: list[Status]) -> tuple[int, bool, bool]:
        compares = any(map(_compares, side))
        return len(side), side[0]["call"]["did"] in OF_STEPS, not compares

    first, second = sorted(sides.values(), key=lambda side: (order(side), side[0]["rank"]))[:2]
    return _verdict("calls", first, statuses, order(first) < order(second))


def first_issued(statuses: Sequence[Status]) -> tuple[int, dict[int, str]]:
    """Where ranks that have records differ first, as far as all of these go back; 0 and nothing if they do not differ.

    Returns:
        The number of what they issued there, and that of each: "nothing" of one that has not come so far.
    """
    records = {status["rank"]: of_last_root(status) for status in statuses}
    by_rank = {rank: {r["turn"]: f"{r['verb']} of {r['unit']}" for r in own} for rank, own in records.items() if own}
    begun = max(map(min, by_rank.values()), default=0)
    for turn in sorted({turn for turns in by_rank.values() for turn in turns if turn >= begun}):
        issued = {rank: turns.get(turn, "nothing") for rank, turns in by_rank.items()}
        if len(set(issued.values())) > 1:
            return turn, issued
    return 0, {}


def of_last_root(status: Status) -> list[dict[str, Any]]:
    """The records of the root that the rank ran last: its turns are numbered alike on all ranks."""
    records = [record for record in status["records"] if record["turn"]]
    return [record for record in records if record["root"] == records[-1]["root"]]


def grouped(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Ranks that say the same, together."""
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
