"""From what is known of all ranks: whether they are stuck, and a report in words. Pure; only the standard library.

A status is a dict, as a watcher sends it (`Watcher.status` in `process.py` says with what). Ranks that say the same are
told in one line, so that a report on a thousand ranks fits a screen.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .calls import OF_STEPS
from .log import COMPARE, GATHER, REDUCE, REGATHER, ROOT, VERBS, Record

Status = dict[str, Any]

_UNKNOWN = ("unreachable", "absent")
_FIRST = 4  # times the limit is what a rank may take for its first step, whatever it does
_MOST_STACKS = 8
_MOVES = (GATHER, REGATHER, REDUCE)
_MOST_LINES = 14  # of a stack
BY_ITSELF = "by itself"
"""In how a rank ended, if its program came to its end."""
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
    broken = any([status.get("broken") for status in now]) and any([status["state"] in _UNKNOWN for status in now])
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
        raised = any([status["raised"] is not None and status["waited"] is None for status in now])
        soon = (raised and longest > min(limit, 5.0)) or (longest > min(limit, 2.0) and _apart(now))
        if soon or by_host > hard or any([_lost(status) for status in now]):
            return True
    silent = max([status["silent"] for status in now if status.get("silent") is not None], default=0.0)
    return silent > 1.0 and any([_failed(status) for status in now])


def sure(statuses: Sequence[Status]) -> bool:
    """Whether one look is enough: somebody is gone or has raised, or ranks wait for what cannot come."""
    raised = any([status["raised"] is not None and status["waited"] is None for status in statuses])
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


def first_difference(statuses: Sequence[Status]) -> str | None:
    """Where two ranks issued different things first, as far as their records go back."""
    issued: dict[int, dict[int, tuple[str, str]]] = {}  # by number: what each rank issued
    for status in statuses:
        for record in of_last_root(status):
            issued.setdefault(record["turn"], {})[status["rank"]] = (record["verb"], record["unit"])
    for number in sorted(issued):
        by_rank = issued[number]
        if len(set(by_rank.values())) > 1:
            told = grouped([(rank, f"{verb} of {unit}") for rank, (verb, unit) in by_rank.items()])
            return f"event {number}: " + "; ".join(f"{who}: {what}" for who, what in told)
    ends = {s["rank"]: found[-1]["turn"] for s in statuses if (found := of_last_root(s))}
    if len(set(ends.values())) > 1:
        last = min(ends.values())
        behind = [rank for rank, count in ends.items() if count == last]
        ahead = issued.get(last + 1, {})
        told = grouped([(rank, f"{verb} of {unit}") for rank, (verb, unit) in ahead.items()])
        return f"event {last + 1}: {ranks_of(behind)}: nothing yet; " + "; ".join(f"{a}: {b}" for a, b in told)
    return None


def of_last_root(status: Status) -> list[dict[str, Any]]:
    """The records of the root that the rank ran last: its turns are numbered alike on all ranks."""
    found = [record for record in status["records"] if record["turn"]]
    return [record for record in found if record["root"] == found[-1]["root"]]


@dataclass(frozen=True)
class Verdict:
    """What went wrong: the first sentence of a report, and of `fullshard doctor`'s.

    Attributes:
        kind: "raised", "gone", "stopped", "unreachable", "data", "absent", "calls", "departed", "elsewhere", "apart" or
            "transport".
        ranks: to blame; empty if nobody is, or nobody can be told.
        what: the sentence.
    """

    kind: str
    ranks: tuple[int, ...]
    what: str


def verdict(statuses: Sequence[Status]) -> Verdict:
    """The first cause that holds: what follows from a failure must not be taken for it."""
    for find in (_raised, _killed, _stopped, _unreachable, _ended, _absent, _calls, _departed, _elsewhere, _apart_at):
        if (found := find(statuses)) is not None:
            return found
    what = "all ranks wait at the same point, and nothing arrives: the network, or what transports over it, is stuck."
    return Verdict("transport", (), what)


def _verdict(kind: str, found: Sequence[Status], what: str, statuses: Sequence[Status]) -> Verdict:
    """`what`, which begins with a verb in the singular, said of these ranks; and what the others had called."""
    ranks = tuple(sorted(status["rank"] for status in found))
    others = [status for status in statuses if status["rank"] not in ranks]
    return Verdict(kind, ranks, f"{ranks_of(ranks)} {_agreeing(ranks_of(ranks), what)}{_while(others)}.")


def _while(others: Sequence[Status]) -> str:
    """The calls in which these ranks wait, as a sentence goes on; empty if none is known."""
    waiting = [(s["rank"], _called(s)) for s in others if s.get("call") and _stands(s)]
    told = [f"{who} {what}" for who, what in grouped(waiting)[:3]]
    return f" while {', and '.join(told)}" if told else ""


def _stands(status: Status) -> bool:
    """Whether the rank waits for others, in a collective of ours or of the program's own."""
    return status["waited"] is not None or status.get("own") is not None


def first_hand(statuses: Sequence[Status]) -> list[Status]:
    """Ranks that raised an error of their own; a DivergenceError says that another rank failed."""
    raised = [s for s in statuses if line_of_error(s) and (s["gone"] is not None or s["waited"] is None)]
    return [status for status in raised if "DivergenceError" not in line_of_error(status)]


def line_of_error(status: Status) -> str:
    """The line of what it raised that has its type; empty if it raised nothing."""
    return headline(status["raised"]) if status["raised"] else ""


def _raised(statuses: Sequence[Status]) -> Verdict | None:
    found = first_hand(statuses)
    same = [status for status in found if line_of_error(status) == line_of_error(found[0])]
    what = f"raised {line_of_error(same[0])} ({_after(same[0])})" if same else ""
    return _verdict("raised", same, what, statuses) if same else None


def ended(statuses: Sequence[Status], by_itself: bool) -> list[Status]:
    """Ranks that ended alike, of those that ended so; not those that ended because another one had failed.

    Args:
        by_itself: whether the program came to its end.
    """
    found = [s for s in statuses if s["gone"] is not None and (BY_ITSELF in s["gone"]) == by_itself]
    found = [status for status in found if "DivergenceError" not in line_of_error(status)] or found
    chosen = [s for s in found if "signal" in s["gone"] and "SIGTERM" not in s["gone"]] or found
    return [status for status in chosen if status["gone"] == chosen[0]["gone"]]


def _killed(statuses: Sequence[Status]) -> Verdict | None:
    found = ended(statuses, by_itself=False)
    if not found:
        return None
    return _verdict("gone", found, f"is gone: {found[0]['gone']} ({_after(found[0])})", statuses)


def _stopped(statuses: Sequence[Status]) -> Verdict | None:
    found = [status for status in statuses if status["state"] == "T"]
    if not found:
        return None
    return _verdict("stopped", found, f"is stopped by a signal (SIGSTOP; {_after(found[0])})", statuses)


def _unreachable(statuses: Sequence[Status]) -> Verdict | None:
    found = [status for status in statuses if status["state"] == "unreachable"]
    if not found:
        return None
    ranks = tuple(sorted(status["rank"] for status in found))
    hosts = ", ".join(sorted({status["host"] for status in found if status["host"]})) or "its machine"
    whose = f"rank {ranks[0]}'s watcher" if len(ranks) == 1 else f"the watchers of {ranks_of(ranks)}"
    return Verdict(
        "unreachable",
        ranks,
        f"no answer from {whose} ({hosts}): its process is stopped, has ended or holds the interpreter, its machine is "
        f"down or overloaded, or the network is cut"
        f"{_while([status for status in statuses if status not in found])}.",
    )


def _ended(statuses: Sequence[Status]) -> Verdict | None:
    found = ended(statuses, by_itself=True)
    if not found:
        return None
    others = [status for status in statuses if status not in found]
    alone = [s for s in others if s.get("call") and _stands(s) and s["call"]["did"] not in OF_STEPS]
    if alone and alone == others and len(alone) <= len(found):
        ranks, gone = [tuple(status["rank"] for status in side) for side in (alone, found)]
        what = f"{ranks_of(ranks)} {_called(alone[0])} after the end of {ranks_of(gone)} ({_after(found[0])})."
        return Verdict("calls", ranks, what)
    what = f"is gone without an error: out of data? ({_after(found[0])})"
    return _verdict("data", found, what, statuses)


def _absent(statuses: Sequence[Status]) -> Verdict | None:
    found = [status for status in statuses if status["state"] == "absent"]
    what = "did not come to a first forward: it has not built its model yet"
    if any([status.get("broken") for status in statuses]):
        what = "has made no unit, and ended or raised before"
    return _verdict("absent", found, what, statuses) if found else None


def _calls(statuses: Sequence[Status]) -> Verdict | None:
    """Ranks made different calls, each of which waits for the others: those that fewer made come first."""
    if not all([s.get("call") and _stands(s) for s in statuses]):
        return None
    sides: dict[tuple[Any, ...], list[Status]] = {}
    for status in statuses:
        sides.setdefault(_place(status), []).append(status)
    if len(sides) < 2:
        return None

    def order(side: list[Status]) -> tuple[int, bool, bool, int]:
        of_steps = side[0]["call"]["did"] in OF_STEPS
        return len(side), of_steps, not any(map(_compares, side)), side[0]["rank"]

    first, *others = sorted(sides.values(), key=order)
    clear = order(first)[:3] < order(others[0])[:3]
    ranks = tuple(status["rank"] for status in first)
    beside = [status for side in others for status in side]
    return Verdict("calls", ranks if clear else (), f"{ranks_of(ranks)} {_called(first[0])}{_while(beside)}.")


def _called(status: Status) -> str:
    caught = f" after catching {status['caught']}" if status.get("caught") else ""
    return f"{status['call']['did']} ({status['call']['at']}){caught}"


def _compares(status: Status) -> bool:
    return bool(status["last"]) and status["last"]["verb"] == VERBS[COMPARE]


def departed(statuses: Sequence[Status]) -> list[Status]:
    """Ranks that compare their next step with the others, which do not, though they wait, too, as far as is known."""
    found = [status for status in statuses if _compares(status)]
    elsewhere = [status for status in statuses if status["waited"] is None and not status["idle"]]
    return found if len(found) < len(statuses) and not elsewhere else []


def _departed(statuses: Sequence[Status]) -> Verdict | None:
    found = departed(statuses)
    if not found:
        return None
    last = found[0]["last"]
    at = f"at {last['unit']}, step {last['step']}"
    call = f"; {_called(found[0])}" if found[0].get("call") else ""
    return _verdict("departed", found, f"left the order that all ranks share ({at}{call})", statuses)


def _elsewhere(statuses: Sequence[Status]) -> Verdict | None:
    found = [status for status in statuses if status["waited"] is None]
    if not found:
        return None
    call = f"; it {_called(found[0])}" if found[0].get("call") else ""
    what = f"did not come, and {_is_elsewhere(found[0])} ({_after(found[0])}{call})"
    return _verdict("elsewhere", found, what, statuses)


def _apart_at(statuses: Sequence[Status]) -> Verdict | None:
    if len({_point(status) for status in statuses}) < 2:
        return None
    issued = first_issued(statuses)
    most = max(issued.values(), key=list(issued.values()).count)
    odd = tuple(sorted(rank for rank, what in issued.items() if what != most))
    if 2 * len(odd) >= len(issued):
        return Verdict("apart", (), "ranks wait for each other at different points.")
    what = f"{ranks_of(odd)} issued something else than the others; ranks wait for each other at different points."
    return Verdict("apart", odd, what)


def first_issued(statuses: Sequence[Status]) -> dict[int, str]:
    """What each rank issued where they differ first: nothing, perhaps."""
    by_rank = {s["rank"]: {r["turn"]: f"{r['verb']} of {r['unit']}" for r in of_last_root(s)} for s in statuses}
    begun = max([min(turns) for turns in by_rank.values() if turns], default=0)
    for turn in sorted({turn for turns in by_rank.values() for turn in turns}):
        issued = {rank: turns.get(turn, "nothing") for rank, turns in by_rank.items()}
        if turn >= begun and len(set(issued.values())) > 1:
            return issued
    return {status["rank"]: str(_point(status)) for status in statuses}


def _is_elsewhere(status: Status) -> str:
    if status["state"] == "absent":
        return "has not built its model yet"
    if status.get("own") is not None:
        return "is elsewhere, in a collective that is not the engine's"
    if status["state"] == "R":
        return "computes elsewhere"
    return "is elsewhere, in code that is not the engine's"


def headline(trace: str) -> str:
    """The line of a printed exception that has its type: its frames, before it, are indented. Of several, the last's.

    >>> headline("Traceback (most recent call last):\\n  File a\\nConfigError: no.\\n  remedy: do\\nMore.")
    'ConfigError: no.'
    """
    last = trace.strip().rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return next((line for line in last if not line.startswith(" ")), last[-1])


def _after(status: Status) -> str:
    last = status["last"]
    if last is None and status.get("unheard") is not None:
        return "where it was is not known"
    return f"after {_at(last)}" if last else "before its first forward"


def _at(record: dict[str, Any]) -> str:
    """What a rank issued, and in which step, if it belongs to one."""
    return f"{record['verb']} of {record['unit']}" + (f" (step {record['step']})" if record["root"] else "")


_OF_SEVERAL = {"is": "are", "has": "have", "waits": "wait", "computes": "compute"}


def _agreeing(who: str, what: str) -> str:
    """`what`, which begins with a verb, as it is said of `who`: of one rank or of several."""
    verb, space, rest = what.partition(" ")
    return (_OF_SEVERAL.get(verb, verb) if who.startswith("ranks ") else verb) + space + rest


def line_of(status: Status) -> str:
    """What one rank does, in a line."""
    last = status["last"]
    at = _at(last) if last else "nothing yet" if status.get("unheard") is None else "not known"
    if status["gone"] is not None:
        quoted = f"; raised {headline(status['raised'])}" if status["raised"] else ""
        return f"is gone: {status['gone']}{quoted}; last: {at}"
    if status["state"] == "unreachable":
        return f"gives no answer: its watcher cannot be reached; last: {at}"
    if status["state"] == "T":
        return f"is stopped ({signal.SIGSTOP.name}); last: {at}"
    if status["waited"] is not None:
        what = status["waits_for"]
        return (f"waits for {_at(what)}" if what else "waits for other ranks") + _calling(status)
    if status["raised"] is not None:
        return f"raised {headline(status['raised'])}; last: {at}"
    return f"{_is_elsewhere(status)}; last: {at}{_calling(status)}"


def _calling(status: Status) -> str:
    return f"; {_called(status)}" if status.get("call") else ""


def grouped(told: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Ranks that say the same, together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in told:
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


def words(statuses: Sequence[Status]) -> str:
    """The whole report."""
    statuses = sorted(statuses, key=lambda status: status["rank"])
    waits = [status["waited"] for status in statuses if status["waited"] is not None]
    waited = max([*waits, *[status["own"] for status in statuses if status.get("own") is not None]], default=0.0)
    lines = [f"Ranks are stuck: {verdict(statuses).what}"]
    told = grouped([(status["rank"], line_of(status)) for status in statuses])
    width = max(len(who) for who, _ in told)
    lines += [f"  {who:<{width}}  {_agreeing(who, what)}" for who, what in told]
    lines.append(f"  longest wait: {waited:.1f} s")
    difference = first_difference(statuses)
    if difference:
        lines.append(f"  First difference: {difference}")
    for status in statuses:
        if status["raised"] is not None and (status["gone"] is not None or status["waited"] is None):
            lines += [f"What rank {status['rank']} raised:", *_indented(status["raised"])]
            break
    stacks = grouped([(status["rank"], status["stack"]) for status in statuses if status["stack"]])
    for who, stack in stacks[:_MOST_STACKS]:
        lines += [f"Python stack of {who}, innermost first:", *_indented(stack)]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    lines = text.strip().splitlines()
    more = [f"... {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return [f"    {line.strip()}" for line in [*lines[:_MOST_LINES], *more]]


def told(record: Record, names: dict[int, list[str]], nbytes: dict[int, list[int]]) -> dict[str, Any]:
    """A record with names in place of numbers, and the bytes that its unit gathers or reduces (0 where it does not)."""
    known = names.get(record.unit // ROOT, [])
    index, sizes = record.unit % ROOT, nbytes.get(record.unit // ROOT, [])
    name = (known[index] or "(root)") if index < len(known) else f"unit {index}"
    return {
        "number": record.word,
        "root": record.unit // ROOT,
        "verb": VERBS[record.verb],
        "unit": name,
        "bytes": sizes[index] if record.verb in _MOVES and index < len(sizes) else 0,
        "turn": record.turn,
        "step": record.step,
    }
