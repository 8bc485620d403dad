"""What watchers say to users: the report on ranks that are stuck, and the wording of errors and warnings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ..errors import ConfigError, DivergenceError, message
from .judge import (
    Status,
    Verdict,
    first_issued,
    grouped,
    has_raised,
    line_of_error,
    ranks_of,
    stands,
    verdict,
)

_MOST_STACKS = 8
_MOST_LINES = 20  # of a stack
_OF_SEVERAL = {"is": "are", "has": "have", "waits": "wait", "computes": "compute"}


# The report.


def report(statuses: Sequence[Status]) -> str:
    """All that is known of ranks that are stuck: the verdict, a line for ranks that say the same, errors and stacks."""
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
    """By heading: what the first of these ranks that raised an error raised, and the Python stacks of others."""
    raised = [status for status in raising if has_raised(status)][:1]
    stacks = grouped([(status["rank"], status["stack"]) for status in standing if status["stack"]])[:_MOST_STACKS]
    return {
        **{f"What rank {status['rank']} raised": cut_short(status["raised"]) for status in raised},
        **{f"Python stack of {who}, innermost first": cut_short(stack) for who, stack in stacks},
    }


def cut_short(text: str) -> list[str]:
    """Of a long text the beginning and the end: innermost frames come first in stacks, and last in tracebacks."""
    lines = [line.rstrip() for line in text.strip().splitlines() if set(line.strip()) - set("^~")]
    half = _MOST_LINES // 2
    more = len(lines) - 2 * half
    return [*lines[:half], f"... {more} more lines", *lines[-half:]] if more > 0 else lines


def sentence(found: Verdict) -> str:
    """A verdict in words: the first sentence of a report, and of `fullshard doctor`'s."""
    if found.kind == "transport":
        return (
            "all ranks wait at the same point, and nothing arrives: the network, or what transports over it, is stuck."
        )
    who, waiting = ranks_of([status["rank"] for status in found.named]), _while(found.others)
    if found.kind == "apart":
        odd = f"{who} issued something different from the others; " if found.named else ""
        return f"{odd}ranks wait for each other at different points."
    first = found.named[0]
    if found.kind == "unreachable":
        hosts = ", ".join(sorted({status["host"] for status in found.named if status["host"]})) or "its machine"
        whose = f"{who}'s watcher" if len(found.named) == 1 else f"the watchers of {who}"
        return (
            f"no answer from {whose} ({hosts}): its process is stopped, has ended or holds the interpreter, its "
            f"machine is down or overloaded, or the network is cut{waiting}."
        )
    if found.kind == "calls" and all(status["gone"] for status in found.others):
        gone = ranks_of([status["rank"] for status in found.others])
        return f"{who} {_called(first)} after the end of {gone} ({after(found.others[0])})."
    what = _DID[found.kind](first)
    if found.kind == "absent" and any(status.get("broken") for status in found.others):
        what = "has made no unit, and ended or raised before"
    return f"{_agreeing(who, what)}{waiting}."


def first_difference(statuses: Sequence[Status]) -> str:
    """Where ranks issued different things first; empty if they did not, as far as their records go back."""
    turn, issued = first_issued(statuses)
    behind_first = sorted(issued.items(), key=lambda item: item[1] != "nothing")
    groups = [f"{who}: {what}{' yet' * (what == 'nothing')}" for who, what in grouped(behind_first)]
    return f"event {turn}: {'; '.join(groups)}" if issued else ""


def _while(others: Sequence[Status]) -> str:
    """The calls in which these ranks wait, as a sentence goes on; empty if none is known."""
    waiting = [(status["rank"], _called(status)) for status in others if status.get("call") and stands(status)]
    calls = [f"{who} {what}" for who, what in grouped(waiting)[:3]]
    return f" while {', and '.join(calls)}" if calls else ""


def _called(status: Status) -> str:
    caught = f" after catching {status['caught']}" if status.get("caught") else ""
    return f"{status['call']['did']} ({status['call']['at']}){caught}"


def _calling(status: Status, joint: str = "; ") -> str:
    return f"{joint}{_called(status)}" if status.get("call") else ""


def _elsewhere(status: Status) -> str:
    if status["state"] == "absent":
        return "has not built its model yet"
    if status.get("own") is not None:
        return "is elsewhere, in a collective that is not the engine's"
    return "computes elsewhere" if status["state"] == "R" else "is elsewhere, in code that is not the engine's"


def after(status: Status) -> str:
    """Where a rank was, by what it issued last."""
    if status["last"] is None:
        return "before its first forward" if status.get("unheard") is None else "where it was is not known"
    return f"after {at(status)}"


def at(status: Status, which: str = "last") -> str:
    """What a rank issued last, or waits for, and in which step, if it belongs to one."""
    record = status[which]
    if record is None:
        return "nothing yet" if status.get("unheard") is None else "not known"
    return f"{record['verb']} of {record['unit']}" + (f" (step {record['step']})" if record["root"] else "")


def _agreeing(who: str, what: str) -> str:
    """`who` does `what`, which begins with a verb in the singular."""
    verb, space, rest = what.partition(" ")
    return f"{who} {_OF_SEVERAL.get(verb, verb) if who.startswith('ranks ') else verb}{space}{rest}"


_DID: dict[str, Callable[[Status], str]] = {
    "raised": lambda s: f"raised {line_of_error(s)} ({after(s)})",
    "gone": lambda s: f"is gone: {s['gone']} ({after(s)})",
    "stopped": lambda s: f"is stopped by a signal (SIGSTOP; {after(s)})",
    "data": lambda s: f"is gone without an error: out of data? ({after(s)})",
    "absent": lambda s: "did not come to a first forward: it has not built its model yet",
    "calls": _called,
    "departed": lambda s: (
        f"left the order that all ranks share (at {s['last']['unit']}, step {s['last']['step']}{_calling(s)})"
    ),
    "elsewhere": lambda s: f"did not come, and {_elsewhere(s)} ({after(s)}{_calling(s, '; it ')})",
}
"""By a verdict's kind: what a rank did that is named in it; begins with a verb in the singular."""


def lines_of(statuses: Sequence[Status], beyond: str = "gives no answer: its watcher cannot be reached") -> list[str]:
    """What each rank does, in a line for all that do the same.

    Args:
        beyond: said of ranks that cannot be reached.
    """
    groups = grouped([(status["rank"], line_of(status, beyond)) for status in statuses])
    width = max(len(who) for who, _ in groups)
    return [_agreeing(f"{who:<{width}} ", what) for who, what in groups]


def line_of(status: Status, beyond: str = "gives no answer: its watcher cannot be reached") -> str:
    """What one rank does, in a line."""
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
        keeper: what the rank does that may keep the store; empty if that is not known.
    """
    return _unexplained(
        f"this rank has waited for {waited:.0f} s, and the store of the process group (at rank 0, or at the "
        "launcher) does not answer.",
        keeper,
    )


def connection_broke(error: BaseException) -> DivergenceError:
    """The error for a collective that failed, and of which the watchers said nothing."""
    return _unexplained(f"a connection to another rank broke ({error}).", "")


def _unexplained(what: str, why: str) -> DivergenceError:
    return DivergenceError(
        what,
        got=why or "no watcher reported a cause",
        remedy="look at what the other ranks printed",
        topic="rank-gone",
    )


def stuck_ranks(report: str) -> DivergenceError:
    """The error that every rank raises with the watchers' report."""
    return DivergenceError(
        report,
        remedy="let every rank make the same calls in the same order; with unequal numbers of batches, train in "
        "fullshard.join(model, loader); end all ranks when one fails; the time allowed is set by "
        "fullshard.watch(limit=...)",
        topic="rank-gone",
    )


def not_a_time(name: str, value: object) -> ConfigError:
    """The error for `limit` or `grace` that is not a time."""
    return ConfigError(f"watch() takes {name} in seconds.", expected="a positive number", got=repr(value))


def not_a_bool(enabled: object) -> ConfigError:
    """The error for `enabled` that is not a bool."""
    return ConfigError("watch(enabled=) must be True or False.", got=repr(enabled))


def not_a_path(folder: object) -> ConfigError:
    """The error for `folder` that is not a path."""
    return ConfigError("watch() takes the path of a folder, which is made when needed.", got=repr(folder))


def is_a_file(path: str) -> ConfigError:
    """The error for `folder` that is a file."""
    return ConfigError("watch() takes the path of a folder, which is made when needed.", got=f"the file {path}")


def found_before(report: str) -> str:
    """Printed below a backend's own error that ends a rank after the watchers' report."""
    return f"fullshard had found before: {report}"


# roll_call.py


def not_written(folder: object, error: OSError) -> str:
    """Printed where a report cannot be written."""
    return f"fullshard: the report could not be written to {folder}: {error}\n"


def store_unreachable(rank: int, error: object, pause: float) -> str:
    """Printed by a watcher that cannot reach the store, once."""
    return (
        f"fullshard: rank {rank}'s watcher could not reach the process group's store ({error}); it tries again every "
        f"{pause:.0f} s\n"
    )


def ended_by_watcher(rank: int, grace: float, report: str) -> str:
    """Printed by a watcher that ends a rank."""
    return (
        f"fullshard: rank {rank} has not raised this within {grace:.0f} s (it is in code that is not the engine's), "
        f"and is ended:\n{report}\n"
    )


def no_watcher(error: BaseException) -> str:
    """The warning for a watcher that cannot be started."""
    return message(f"no watcher could be started ({error}): hangs will not be explained")
