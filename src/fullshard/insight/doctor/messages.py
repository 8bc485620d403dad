"""The texts of `fullshard doctor`: the reasons for a verdict, and next steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ...watcher.judge import (
    BY_ITSELF,
    Status,
    Verdict,
    first_hand,
    first_issued,
    in_own_collective,
    line_of_error,
    of_last_root,
    ranks_of,
)
from ...watcher.messages import after, at

# The reasons for a verdict.


def reasons(verdict: Verdict) -> list[str]:
    """The reasons for the verdict, one per line."""
    return _REASONS[verdict.kind](verdict)


def _who(statuses: Sequence[Status]) -> str:
    return ranks_of([status["rank"] for status in statuses])


def _waiters(verdict: Verdict) -> list[str]:
    """The event that other ranks wait for, and the named ranks did not reach."""
    behind = min([max([record["turn"] for record in of_last_root(status)], default=0) for status in verdict.named])
    ahead = [status for status in verdict.others if status["waits_for"] and status["waits_for"]["turn"] > behind]
    if not ahead:
        return []
    point = at(ahead[0], "waits_for")
    waiting = [status for status in ahead if at(status, "waits_for") == point]
    return [f"{_who(waiting)} waited for {point}, which {'it' if len(verdict.named) == 1 else 'they'} never reached"]


def _raised(verdict: Verdict) -> list[str]:
    return [
        f"its watcher saw the exception that it raised {after(verdict.named[0])}",
        *_waiters(verdict),
        *(
            f"rank {s['rank']} raised a different error, which may be a consequence: {line_of_error(s)}"
            for s in first_hand(verdict.others)
        ),
    ]


def _gone(verdict: Verdict) -> list[str]:
    how, steps = verdict.named[0]["gone"], verdict.named[0]["steps"]
    by_itself = BY_ITSELF in how
    others = [s for s in verdict.others if s["gone"] is not None and (BY_ITSELF in s["gone"]) == by_itself]
    return [
        f"how it ended, as reported by itself or its machine: {how}",
        *_waiters(verdict),
        *(
            [f"it raised nothing: its program came to its end, or called sys.exit, after {steps} steps"]
            if by_itself
            else []
        ),
        *(
            f"rank {s['rank']} is gone too ({s['gone']}), which may be a consequence"
            for s in others
            if "DivergenceError" not in line_of_error(s)
        ),
    ]


def _calls(verdict: Verdict) -> list[str]:
    gone = [status for status in verdict.others if status["gone"] is not None]
    rest = f"{_who(gone)} ran to the end of the program" if gone else "no rank is anywhere else"
    return [f"each of these calls waits until the other ranks make it too, and {rest}"]


def _apart(verdict: Verdict) -> list[str]:
    if not verdict.named:
        rest = "the ranks are evenly split, so no rank can be blamed: see the first difference"
    else:
        issued = first_issued([*verdict.named, *verdict.others])[1].get(
            verdict.others[0]["rank"], at(verdict.others[0])
        )
        rest = f"{_who(verdict.others)} issued {issued}; {_who(verdict.named)} did not"
    return ["all ranks wait, but for different events", rest]


_REASONS: dict[str, Callable[[Verdict], list[str]]] = {
    "raised": _raised,
    "gone": _gone,
    "data": _gone,
    "stopped": lambda verdict: [
        "the operating system reports its process as stopped (state T): it exists, but does not run",
        *_waiters(verdict),
    ],
    "unreachable": lambda verdict: [
        "its watcher, a thread of its process, did not answer within the limit",
        "its machine has no other rank that could report whether it is gone, stopped, or holds the interpreter lock",
    ],
    "absent": lambda verdict: ["it has never reported a status"],
    "calls": _calls,
    "departed": lambda verdict: [
        "in the first steps all ranks ran the units in the same order; only there did a different unit run",
        f"{_who(verdict.others)} still follow that order",
    ],
    "elsewhere": lambda verdict: [*_waiters(verdict), *_standing(verdict.named[0])[0]],
    "apart": _apart,
    "transport": lambda verdict: [f"{_who(verdict.others)} issued the same event, and none of them got past it"],
}


def _standing(status: Status) -> tuple[list[str], tuple[str, ...]]:
    """What a rank that is elsewhere does, one fact per line; and the next steps."""
    asleep = f"the operating system reports it as sleeping (state {status['state']}), and its stack did not change"
    line, steps = _STATES.get(status["state"], (asleep, _SLEEPS))
    innermost = status["stack"].strip().partition("\n")[0]
    if in_own_collective(status):
        return [
            line,
            f"it is in a collective that is not the engine's: its innermost frame is {innermost}",
        ], _PROGRAM_COLLECTIVE
    for folders, action, specific_steps in _FRAMES:
        if any(folder in innermost for folder in folders):
            return [line, f"it {action}: its innermost frame is {innermost}"], specific_steps
    return [line], steps


def cut(statuses: Sequence[Status], halves: Sequence[Sequence[int]]) -> str:
    """The summary for a network that was cut between these groups of ranks."""
    hosts = {status["rank"]: status["host"] for status in statuses}
    named = [f"{ranks_of(half)} ({', '.join(sorted({hosts[rank] for rank in half}))})" for half in halves]
    return f"the network is cut between {' and '.join(named)}."


def reasons_for_cut(halves: Sequence[Sequence[int]]) -> list[str]:
    """The reasons for `cut`."""
    return [f"{ranks_of(half)} reached each other and none of the others, which were alive" for half in halves]


NOTHING_IS_WRONG = (
    "nothing is wrong: all ranks issued the same collectives in the flight recorder, and all of them ended."
)


def by_recorder(group: str, number: int, ranks: Sequence[int], agrees: bool) -> tuple[str, tuple[str, ...]]:
    """The summary and the next steps from the flight recorder alone.

    Args:
        number: the number of the group's first collective that does not match.
        ranks: the ranks that did not issue it.
        agrees: whether all ranks issued the same call.
    """
    collective = f"collective {number} of group {group}"
    if ranks:
        return f"{ranks_of(ranks)} did not issue {collective}, which other ranks wait for.", _NOT_ISSUED
    if agrees:
        return f"all ranks with a dump issued {collective}, and it did not end.", _TRANSPORT[:1]
    return f"ranks disagree on {collective}.", _DEPARTED[:1]


# Next steps.


def next_steps(verdict: Verdict) -> tuple[str, ...]:
    """What the user should do, in this order."""
    first = verdict.named[0] if verdict.named else verdict.others[0]
    if verdict.kind == "raised":
        return _after_error(line_of_error(first))
    if verdict.kind in ("gone", "data"):
        return _after_end(first["gone"])
    steps = _standing(first)[1] if verdict.kind == "elsewhere" else _NEXT_STEPS[verdict.kind]
    return tuple(text.format(pid=first["pid"], host=first["host"]) for text in steps)


_MEMORY = (
    "Was the host out of memory? `dmesg -T | grep -iE 'out of memory|killed process'` on that machine, and "
    "`oom_kill` in the container's /sys/fs/cgroup/memory.events (a container killed this way ends with exit code "
    "137).",
    "If so: fewer or lighter data loader workers, less pinned or offloaded memory, fewer ranks per machine, a "
    "larger limit.",
    "If not: did a scheduler kill the job at its time or memory limit, or did a user kill it? See its log.",
)
_SIGNALS: dict[str, tuple[str, ...]] = {
    "SIGKILL": _MEMORY,
    "SIGABRT": (
        "Native code aborted (a failed assertion, 'terminate called ...', NCCL's watchdog): the last lines that this "
        "rank wrote to stderr say why.",
        "If the reason is NCCL's timeout, a different rank is the cause: read dumps of PyTorch's flight recorder "
        "(TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1), or set fullshard.watch(limit=...) below that "
        "timeout.",
    ),
    "SIGSEGV": (
        "Native code crashed, usually in an extension or a driver: run again with PYTHONFAULTHANDLER=1 for the "
        "Python stack, and with `ulimit -c unlimited` for a core file.",
    ),
    "SIGBUS": (
        "Shared memory or a mapped file was truncated: is /dev/shm full (`df -h /dev/shm`)? Data loader workers use "
        "it: give the container more (`--shm-size`), or use fewer workers.",
    ),
    "SIGTERM": (
        "It was asked to end: by a scheduler (preemption, time limit), by a launcher after another rank failed, or by "
        "a user. The launcher's log says what came first.",
    ),
}  # fmt: skip
_RAISED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"OutOfMemoryError|out of memory",
        (
            "The device was out of memory: use a smaller batch, activation checkpointing, or smaller units. "
            "`fullshard.memory_use(model)` reports how much the model itself takes.",
            "If only one rank ran out, its batch was larger (longer sequences), or another process uses its device "
            "(nvidia-smi).",
        ),
    ),
    (
        r"DataLoader worker",
        (
            "A data loader worker died: out of host memory (dmesg), or of shared memory (`df -h /dev/shm`, "
            "`--shm-size`).",
            "Run once with num_workers=0 to see errors of the dataset itself.",
        ),
    ),
    (
        r"CUDA error|device-side assert|CUBLAS|CUDNN",
        (
            "The device reports errors later than the call that caused them: run again with CUDA_LAUNCH_BLOCKING=1.",
            "`dmesg -T | grep Xid` shows whether the device itself failed.",
        ),
    ),
    (r"No space left|Disk quota", ("Free space on the disk that it writes to, or write to a different one.",)),
    (r"StopIteration", ("Its data ended before that of the other ranks: give all ranks the same number of batches.",)),
)


def _after_error(line: str) -> tuple[str, ...]:
    """The next steps after an exception; `line` has its type."""
    for pattern, steps in _RAISED:
        if re.search(pattern, line):
            return steps
    return (
        "Fix the error; its traceback is above. The other ranks did nothing wrong: they waited for this one.",
        "If the program skips such errors on purpose (a bad batch, say), all ranks have to skip together.",
    )


def _after_end(gone: str) -> tuple[str, ...]:
    """The next steps after the end of a process; `gone` says how it ended."""
    for signal, steps in _SIGNALS.items():
        if signal in gone:
            return steps
    if BY_ITSELF in gone:
        return _DATA_EXHAUSTED
    if "os._exit" in gone:
        return (
            "It was killed, or called os._exit: no rank could see which. The launcher's log has its exit code.",
            *_MEMORY,
        )
    return (
        "The program exited: sys.exit, os._exit, or an error handler of the program. Its last output, and its calls to "
        "exit, say why.",
        "If a program exits on one rank, it has to exit on all: agree first (all-reduce a flag), then exit.",
    )


_DATA_EXHAUSTED = (
    "Its loop ended a step before that of the other ranks, most likely because it had fewer batches.",
    "Give all ranks the same number: use DistributedSampler (drop_last=True) or a fixed number of steps; for streams, "
    "all-reduce in each step whether every rank still has a batch.",
)
_STOPPED = (
    "It was stopped: by a debugger, Ctrl-Z, a cgroup freezer, or a scheduler that suspends jobs.",
    "`kill -CONT {pid}` on {host} resumes it; `grep TracerPid /proc/{pid}/status` shows whether a debugger holds it.",
)
_UNREACHABLE = (
    "Is that machine up (ping, its console, the scheduler's node state)? Did it lose its network, or was it preempted?",
    "Restart without it, or with a spare. If the machine is up, look at its process: `py-spy dump --native` shows "
    "whether native code holds the interpreter lock, `ps -o stat` whether it is stopped.",
)
CUT = (
    "All of these ranks are alive; the network between them failed. Check the link, switch or routes of their machines "
    "(dmesg: link down; ibstat; ethtool -S; the fabric manager's log).",
    "NCCL_DEBUG=INFO shows which interfaces are used; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select them.",
)
_DEPARTED = (
    "All ranks have to run the same units in the same order. Look for decisions that depend on a rank's data or state: "
    "an `if` on the batch, an empty batch skipped, an expert without tokens, an evaluation or a log on one rank only.",
    'check="every" on fully_shard reports the first call that differs, at the line that makes it.',
)
_NOT_ISSUED = (
    "Look at where that rank was: the frame above is the program's line that issued its last collective. After it, the "
    "rank ended, hangs, or took a different branch: all ranks have to make the same calls in the same order.",
)
_CALLS = (
    "Every rank has to make both calls, in the same order, or neither. Look for `if rank == 0:` around the first of "
    "them: fullshard.save, load, clip_grad_norm_, state_dict, full_tensor() and all_reduce need all ranks.",
    "If each rank decides from its own data (an empty batch, an evaluation on one rank), let them agree first.",
)
_PROGRAM_COLLECTIVE = (
    "It waits in one of the program's collectives, which the other ranks did not call: call it on all ranks or on "
    "none. Look for `if rank == 0:` around a barrier, a reduced loss, a checkpoint or an evaluation.",
)
_DATA = (
    "It waits for data: is its storage slow or gone, has a worker died or hung? DataLoader(timeout=...) turns that "
    "into an error.",
)
_COMPILING = (
    "It compiles while other ranks have finished: give all ranks the same shapes, compile before training, share the "
    "compiler's cache, or raise fullshard.watch(limit=...).",
)
_CHECKPOINTING = ("It reads or writes files: if that is expected to take this long, raise fullshard.watch(limit=...).",)
_DEVICE_OR_DISK = (
    "It sleeps in the kernel and cannot be interrupted: a disk, network file system or driver does not answer. "
    "`cat /proc/{pid}/stack` (as root) and `dmesg -T` on {host} show which.",
)
_COMPUTES = (
    "It computes: an endless loop, or work that only this rank does. If the work is correct but slow, raise "
    "fullshard.watch(limit=...).",
)
_SLEEPS = (
    "It sleeps at the line above: in a lock, a sleep, a socket, or native code that never releases the interpreter "
    "lock (GIL). While it is alive, `py-spy dump --native --pid {pid}` or `gdb -p {pid}` on {host} shows where.",
    "If it is correct but slow, raise fullshard.watch(limit=...).",
)
_ABSENT = (
    "It has not called its model yet: is it slower to build it, does it wait in a collective of the program, or did it "
    "fail before? Look at its output.",
)
_TRANSPORT = (
    "All ranks issued the same calls, so the program is correct: check the network. Use NCCL_DEBUG=INFO, `dmesg -T | "
    "grep -iE 'xid|link'`, and run the same job on other machines.",
    "Dumps of PyTorch's flight recorder show how far each group got: set TORCH_FR_BUFFER_SIZE=2000 "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and pass their folder to `fullshard doctor`.",
)
NO_DUMP = "There is no dump of {who}: did it end before it could write one? Look at its output, and at dmesg."

_NEXT_STEPS = {
    "stopped": _STOPPED,
    "unreachable": _UNREACHABLE,
    "absent": _ABSENT,
    "calls": _CALLS,
    "departed": _DEPARTED,
    "apart": _DEPARTED,
    "transport": _TRANSPORT,
}
"""Kind of a verdict -> next steps, for kinds that need no further distinction."""
_STATES = {
    "D": ("the operating system reports it in an uninterruptible sleep (state D)", _DEVICE_OR_DISK),
    "R": (
        "the operating system reports it as running (state R), and its stack did not change between two samples",
        _COMPUTES,
    ),
}
_FRAMES = (
    (
        ("/torch/distributed/checkpoint", "/torch/serialization"),
        "reads or writes a checkpoint",
        _CHECKPOINTING,
    ),
    (("/torch/_inductor", "/torch/_dynamo", "/triton/"), "compiles", _COMPILING),
    (("/torch/utils/data/",), "waits for data", _DATA),
)
"""Part of the innermost frame's path -> what the rank does, and next steps."""
