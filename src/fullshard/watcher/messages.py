"""The watchers' messages to users: the report on stuck ranks, and the wording of errors and warnings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ..errors import DivergenceError, message
from .judge import (
    Status,
    Verdict,
    first_issued,
    grouped,
    has_raised,
    in_own_collective,
    line_of_error,
    ranks_of,
    stands,
    verdict,
)

_MOST_STACKS = 8
_MOST_LINES = 20  # lines of a stack
_OF_SEVERAL = {"is": "are", "has": "have", "waits": "wait", "computes": "compute"}


# The report.


def report(statuses: Sequence[Status]) -> str:
    """The report on stuck ranks: the verdict, a line for each group of ranks in the same state, errors and stacks."""
    statuses = sorted(statuses, key=lambda status: status["rank"])
    waits = [status[wait] for status in statuses for wait in ("waited", "own") if status.get(wait) is not None]
    lines = [f"Ranks are stuck: {sentence(verdict(statuses))}", *(f"  {line}" for line in lines_of(statuses))]
    lines.append(f"  longest wait: {max(waits, default=0.0):.1f} s")
    if difference := first_difference(statuses):
        lines.append(f"  First difference: {difference}")
    for title, quoted in quotes(statuses, statuses).items():
        lines += [f"{title}:", *(f"    {line.strip()}" for line in quoted)]
    return "\n".join(lines)


def quotes(raising: Sequence[Status], standing: Sequence[Status]) -> dict[str, list[str]]:
    """Heading -> lines: the first error of the `raising` ranks, and the stacks of the `standing` ranks."""
    raised = [status for status in raising if has_raised(status)][:1]
    stacks = grouped([(status["rank"], status["stack"]) for status in standing if status["stack"]])[:_MOST_STACKS]
    return {
        **{f"What rank {status['rank']} raised": cut_short(status["raised"]) for status in raised},
        **{f"Python stack of {who}, innermost first": cut_short(stack) for who, stack in stacks},
    }


def cut_short(text: str) -> list[str]:
    """The beginning and end of a long text: innermost frames come first in stacks, and last in tracebacks."""
    lines = [line.rstrip() for line in text.strip().splitlines() if set(line.strip()) - set("^~")]
    half = _MOST_LINES // 2
    more = len(lines) - 2 * half
    return [*lines[:half], f"... {more} more lines", *lines[-half:]] if more > 0 else lines


def sentence(cause: Verdict) -> str:
    """A verdict in words: the first sentence of a report, also of the report by `fullshard doctor`."""
    if cause.kind == "transport":
        return "all ranks wait at the same point, and nothing arrives: the network or its transport is stuck."
    who, waiting = ranks_of([status["rank"] for status in cause.named]), _while(cause.others)
    if cause.kind == "apart":
        odd = f"{who} issued something different from the others; " if cause.named else ""
        return f"{odd}ranks wait for each other at different points."
    first = cause.named[0]
    if cause.kind == "unreachable":
        hosts = ", ".join(sorted({status["host"] for status in cause.named if status["host"]})) or "its machine"
        whose = f"{who}'s watcher" if len(cause.named) == 1 else f"the watchers of {who}"
        return (
            f"no answer from {whose} ({hosts}): its process is stopped, has ended or holds the interpreter lock, its "
            f"machine is down or overloaded, or the network is cut{waiting}."
        )
    if cause.kind == "calls" and all(status["gone"] for status in cause.others):
        gone = ranks_of([status["rank"] for status in cause.others])
        return f"{who} {_called(first)} after the end of {gone} ({after(cause.others[0])})."
    action = _DID[cause.kind](first)
    if cause.kind == "absent" and any(status.get("broken") for status in cause.others):
        action = "ended or raised before it sharded a model"
    return f"{_agreeing(who, action)}{waiting}."


def first_difference(statuses: Sequence[Status]) -> str:
    """The first event at which ranks differ; empty if they do not, as far back as their records go."""
    turn, issued = first_issued(statuses)
    behind_first = sorted(issued.items(), key=lambda item: item[1] != "nothing")
    groups = [f"{who}: {event}{' yet' * (event == 'nothing')}" for who, event in grouped(behind_first)]
    return f"event {turn}: {'; '.join(groups)}" if issued else ""


def _while(statuses: Sequence[Status]) -> str:
    """The calls in which these ranks wait, as a "while" clause; empty if no call was reported."""
    waiting = [(status["rank"], _called(status)) for status in statuses if status.get("call") and stands(status)]
    calls = [f"{who} {call}" for who, call in grouped(waiting)[:3]]
    return f" while {', and '.join(calls)}" if calls else ""


def _called(status: Status) -> str:
    caught = f" after catching {status['caught']}" if status.get("caught") else ""
    return f"{status['call']['did']} ({status['call']['at']}){caught}"


def _calling(status: Status, joint: str = "; ") -> str:
    return f"{joint}{_called(status)}" if status.get("call") else ""


def _elsewhere(status: Status) -> str:
    if status["state"] == "absent":
        return "has not built its model yet"
    if in_own_collective(status):
        return "is elsewhere, in a collective that is not the engine's"
    return "computes elsewhere" if status["state"] == "R" else "is elsewhere, in code that is not the engine's"


def after(status: Status) -> str:
    """A rank's position, by the last event it issued."""
    if status["last"] is None:
        return "before its first forward" if status.get("unheard") is None else "its position is unknown"
    return f"after {at(status)}"


def at(status: Status, which: str = "last") -> str:
    """The event that a rank issued last or waits for (`which`), with its step unless it belongs to none."""
    record = status[which]
    if record is None:
        return "nothing yet" if status.get("unheard") is None else "unknown"
    return f"{record['verb']} of {record['unit']}" + (f" (step {record['step']})" if record["root"] else "")


def _agreeing(who: str, predicate: str) -> str:
    """Join `who` and `predicate`, whose first word is a singular verb, in grammatical agreement."""
    verb, space, rest = predicate.partition(" ")
    return f"{who} {_OF_SEVERAL.get(verb, verb) if who.startswith('ranks ') else verb}{space}{rest}"


_DID: dict[str, Callable[[Status], str]] = {
    "raised": lambda s: f"raised {line_of_error(s)} ({after(s)})",
    "gone": lambda s: f"is gone: {s['gone']} ({after(s)})",
    "stopped": lambda s: f"is stopped by a signal (SIGSTOP; {after(s)})",
    "data": lambda s: f"is gone: the program ended by itself, without an error ({after(s)})",
    "absent": lambda s: "did not reach a first forward: it has not built its model yet",
    "calls": _called,
    "departed": lambda s: (
        f"left the order that all ranks share (at {s['last']['unit']}, step {s['last']['step']}{_calling(s)})"
    ),
    "elsewhere": lambda s: f"did not arrive, and {_elsewhere(s)} ({after(s)}{_calling(s, '; it ')})",
}
"""Kind of a verdict -> what a rank named in it did; begins with a singular verb."""


def lines_of(statuses: Sequence[Status], beyond: str = "does not answer: its watcher cannot be reached") -> list[str]:
    """What ranks are doing, with a line for each group of ranks in the same state.

    Args:
        beyond: the line for ranks that cannot be reached.
    """
    groups = grouped([(status["rank"], line_of(status, beyond)) for status in statuses])
    width = max(len(who) for who, _ in groups)
    return [_agreeing(f"{who:<{width}} ", line) for who, line in groups]


def line_of(status: Status, beyond: str = "does not answer: its watcher cannot be reached") -> str:
    """What a rank is doing, in a line."""
    last, call = f"; last: {at(status)}", _calling(status)
    raised = f"raised {line_of_error(status)}" if status["raised"] else ""
    if status["gone"] is not None:
        return f"is gone: {status['gone']}{'; ' * bool(raised)}{raised}{last}"
    if status["state"] == "unreachable":
        return beyond + last
    if status["state"] == "T":
        return f"is stopped ({signal.SIGSTOP.name}){last}"
    if status["waited"] is not None:
        return f"waits for {at(status, 'waits_for') if status['waits_for'] else 'other ranks'}{call}"
    return f"{raised or _elsewhere(status)}{last}{'' if raised else call}"


# rank.py


def store_is_silent(waited: float, keeper: str) -> DivergenceError:
    """The error for a rank that waits while the store does not answer.

    Args:
        waited: seconds.
        keeper: what the rank that may keep the store is doing; empty if unknown.
    """
    return _unexplained(
        f"this rank has waited for {waited:.0f} s, and the store of the process group (at rank 0, or at the "
        "launcher) does not answer.",
        keeper,
    )


def connection_broke(error: BaseException) -> DivergenceError:
    """The error for a failed collective that no watcher explained."""
    return _unexplained(f"a connection to another rank broke ({error}).", "")


def _unexplained(symptom: str, cause: str) -> DivergenceError:
    return DivergenceError(
        symptom,
        got=cause or "no watcher reported a cause",
        remedy="read the output of the other ranks",
        topic="rank-gone",
    )


def stuck_ranks(report: str) -> DivergenceError:
    """The error that every rank raises with the watchers' report."""
    return DivergenceError(
        report,
        remedy="let every rank make the same calls in the same order; with unequal numbers of batches, train in "
        "fullshard.join(model, loader); end all ranks when one fails; fullshard.watch(limit=...) sets the time allowed",
        topic="rank-gone",
    )


def reported_earlier(report: str) -> str:
    """The note on a backend's own error that ends a rank after the watchers' report."""
    return f"fullshard reported earlier: {report}"


# roll_call.py


def waits_long(statuses: Sequence[Status], hard: float) -> str:
    """Printed once in a wait that may be for a rank that sleeps (`judge.may_sleep`)."""
    longest = max(status["waited"] or 0.0 for status in statuses)
    lines = "".join(f"  {line}\n" for line in lines_of(statuses))
    return (
        f"fullshard: ranks have waited for {longest:.0f} s for a rank that neither computes nor moves on:\n{lines}"
        f"  After {hard:.0f} s they raise an error; fullshard.watch(limit=...) sets a shorter time.\n"
    )


def not_written(folder: object, error: OSError) -> str:
    """Printed if a report cannot be written."""
    return f"fullshard: the report could not be written to {folder}: {error}\n"


def store_unreachable(rank: int, error: object, pause: float) -> str:
    """Printed once by a watcher that cannot reach the store."""
    return (
        f"fullshard: rank {rank}'s watcher could not reach the process group's store ({error}); it retries every "
        f"{pause:.0f} s\n"
    )


def ended_by_watcher(rank: int, grace: float, report: str) -> str:
    """Printed by a watcher that ends a rank."""
    return (
        f"fullshard: rank {rank} has not raised this within {grace:.0f} s (it is in code that is not the engine's), "
        f"and is terminated:\n{report}\n"
    )


def no_watcher(error: BaseException) -> str:
    """The warning for a watcher that cannot be started."""
    return message(f"no watcher could be started ({error}): hangs will not be explained")
