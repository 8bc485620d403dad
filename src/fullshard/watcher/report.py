"""From what is known of all ranks: whether they are stuck, and a report in words. Pure; only the standard library.

A status is a dict, as a watcher sends it (`status.py` says with what). Ranks that say the same are told in one line,
so that a report on a thousand ranks fits a screen.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .board import COMPARE, GATHER, REDUCE, REGATHER, ROOT, VERBS, Record

Status = dict[str, Any]

_FIRST = 4  # times the limit is what a rank may take for its first step, whatever it does
_MOST_STACKS = 8
_MOVES = (GATHER, REGATHER, REDUCE)
_MOST_LINES = 14  # of a stack


def stuck(now: Sequence[Status], before: Sequence[Status], limit: float, hard: float) -> bool:
    """Whether nothing is to be hoped for, at least one rank having waited for `limit` seconds or one being gone.

    Args:
        now, before: the ranks' statuses, and those of a look before; empty if there was none.
        limit, hard: seconds. A wait longer than `hard` is never waited out.
    """
    longest = max([status["waited"] for status in now if status["waited"] is not None], default=0.0)
    if not longest:
        return False
    raised = any([status["raised"] is not None and status["waited"] is None for status in now])
    soon = (raised and longest > min(limit, 5.0)) or (longest > min(limit, 2.0) and _apart(now))
    if soon or longest > hard or any([_lost(status) for status in now]):
        return True
    if longest < limit:
        return False
    busy = [status for status in now if status["waited"] is None or status["idle"]]
    if not busy:  # all wait: for one thing, which may be slow, or for several, which never comes
        return len({_point(status) for status in now}) > 1 and list(map(_point, now)) == list(map(_point, before))
    earlier = {status["rank"]: status for status in before}
    if any([status["steps"] == 0 for status in busy]) and longest < _FIRST * limit:
        return False
    return bool(earlier) and not any([_moved(status, earlier.get(status["rank"])) for status in busy])


def sure(statuses: Sequence[Status]) -> bool:
    """Whether one look is enough: somebody is gone or has raised, or ranks wait for what cannot come."""
    raised = any([status["raised"] is not None and status["waited"] is None for status in statuses])
    return raised or any([_lost(status) for status in statuses]) or _apart(statuses)


def _apart(statuses: Sequence[Status]) -> bool:
    """Whether a rank compares its next step with others of which one waits for what that rank will not issue before."""
    waiting = [s for s in statuses if s["waited"] is not None and not s["idle"] and s["waits_for"] is not None]
    compares = [s["waits_for"]["turn"] for s in waiting if s["waits_for"]["verb"] == VERBS[COMPARE]]
    others = [s["waits_for"]["turn"] for s in waiting if s["waits_for"]["verb"] != VERBS[COMPARE]]
    return bool(compares and others) and max(others) >= min(compares)


def _point(status: Status) -> tuple[Any, ...]:
    """What a rank has come to."""
    last = status["last"] or {}
    return last.get("turn"), last.get("verb"), last.get("unit")


def _lost(status: Status) -> bool:
    return status["gone"] is not None or status["state"] in ("T", "unreachable")


def _moved(now: Status, before: Status | None) -> bool:
    """Whether a rank that does not wait has got anywhere since.

    One that says that it reads or writes files is believed. In its first step whatever a rank does counts (it may
    compile, or read); later it has to leave the line it was at, its children have to compute, or it has to read or
    write a quarter of a megabyte.
    """
    if before is None or now["count"] != before["count"] or now["state"] == "absent":
        return True
    if now.get("ticks") != before.get("ticks"):
        return True
    if now["steps"] == 0:
        return now["cpu"] - before["cpu"] > 0.02 or now["io"] != before["io"]
    children = now["children"] - before["children"] > 0.1
    return len({*now["samples"], *before["samples"]}) > 1 or children or now["io"] - before["io"] > 1 << 18


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


def conclusion(statuses: Sequence[Status]) -> str:
    """In one sentence, what went wrong."""
    for test, told in _CAUSES:
        found = [status for status in statuses if test(status)]
        if found:
            who = ranks_of([s["rank"] for s in found])
            return f"{who} {_agreeing(who, told(found[0]))}."
    departed = [s for s in statuses if s["last"] and s["last"]["verb"] == VERBS[COMPARE]]
    if departed and len(departed) < len(statuses):
        who = ranks_of([s["rank"] for s in departed])
        return f"{who} left the order that all ranks share: next {departed[0]['last']['unit']}."
    busy = [status for status in statuses if status["waited"] is None]
    if busy:
        who = ranks_of([s["rank"] for s in busy])
        return f"{who} did not come, and {_agreeing(who, _elsewhere(busy[0]))}."
    if len({_point(status) for status in statuses}) > 1:
        return "ranks wait for each other at different points."
    return "all ranks wait at the same point, and nothing arrives: the network, or what transports over it, is stuck."


def _elsewhere(status: Status) -> str:
    if status["state"] == "absent":
        return "has not built its model yet"
    if status["state"] == "R":
        return "computes elsewhere"
    return "is elsewhere, in code that is not the engine's"


def _raised(status: Status) -> str:
    return f"raised {headline(status['raised'])}{_where(status)}"


def headline(trace: str) -> str:
    """The line of a printed exception that has its type: its frames, before it, are indented. Of several, the last's.

    >>> headline("Traceback (most recent call last):\\n  File a\\nConfigError: no.\\n  remedy: do\\nMore.")
    'ConfigError: no.'
    """
    last = trace.strip().rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return next((line for line in last if not line.startswith(" ")), last[-1])


def _where(status: Status) -> str:
    last = status["last"]
    return f" (last: {_at(last)})" if last else " (before its first forward)"


def _at(record: dict[str, Any]) -> str:
    """What a rank issued, and in which step, if it belongs to one."""
    return f"{record['verb']} of {record['unit']}" + (f" (step {record['step']})" if record["root"] else "")


_OF_SEVERAL = {"is": "are", "has": "have", "waits": "wait", "computes": "compute"}


def _agreeing(who: str, what: str) -> str:
    """`what`, which begins with a verb, as it is said of `who`: of one rank or of several."""
    verb, space, rest = what.partition(" ")
    return (_OF_SEVERAL.get(verb, verb) if who.startswith("ranks ") else verb) + space + rest


_CAUSES: list[tuple[Callable[[Status], bool], Callable[[Status], str]]] = [
    (lambda s: s["raised"] is not None and (s["gone"] is not None or s["waited"] is None), _raised),
    (lambda s: s["gone"] is not None, lambda s: f"is gone: {s['gone']}{_where(s)}"),
    (lambda s: s["state"] == "T", lambda s: f"is stopped (SIGSTOP){_where(s)}"),
    (lambda s: s["state"] == "unreachable", lambda s: "cannot be reached: its machine is down, or the network is cut"),
]


def line_of(status: Status) -> str:
    """What one rank does, in a line."""
    last = status["last"]
    at = _at(last) if last else "nothing yet"
    if status["gone"] is not None:
        quoted = f"; raised {headline(status['raised'])}" if status["raised"] else ""
        return f"is gone: {status['gone']}{quoted}; last: {at}"
    if status["state"] == "unreachable":
        return f"cannot be reached; last: {at}"
    if status["state"] == "T":
        return f"is stopped ({signal.SIGSTOP.name}); last: {at}"
    if status["waited"] is not None:
        what = status["waits_for"]
        return f"waits for {_at(what)}" if what else "waits for other ranks"
    if status["raised"] is not None:
        return f"raised {headline(status['raised'])}; last: {at}"
    return f"{_elsewhere(status)}; last: {at}"


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
    waited = max([status["waited"] for status in statuses if status["waited"] is not None], default=0.0)
    lines = [f"Ranks are stuck: {conclusion(statuses)}"]
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
        "number": record.number,
        "root": record.unit // ROOT,
        "verb": VERBS[record.verb],
        "unit": name,
        "bytes": sizes[index] if record.verb in _MOVES and index < len(sizes) else 0,
        "turn": record.turn,
        "step": record.step,
    }
