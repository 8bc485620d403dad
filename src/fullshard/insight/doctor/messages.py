"""What `fullshard doctor` says: why a verdict is believed, what to do next, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import ConfigError
from ...watcher.judge import BY_ITSELF, Status, Verdict, first_hand, first_issued, line_of_error, of_last_root, ranks_of
from ...watcher.messages import after, at

# Why a verdict is believed.


def because(verdict: Verdict) -> list[str]:
    """Why the verdict is believed, a line each."""
    return _BECAUSE[verdict.kind](verdict)


def _who(statuses: Sequence[Status]) -> str:
    return ranks_of([status["rank"] for status in statuses])


def _waiters(verdict: Verdict) -> list[str]:
    """What those who wait have issued, and those named have not."""
    behind = min([max([record["turn"] for record in of_last_root(status)], default=0) for status in verdict.named])
    ahead = [status for status in verdict.others if status["waits_for"] and status["waits_for"]["turn"] > behind]
    if not ahead:
        return []
    point = at(ahead[0], "waits_for")
    here = [status for status in ahead if at(status, "waits_for") == point]
    return [f"{_who(here)} waited for {point}, to which {'it' if len(verdict.named) == 1 else 'they'} never came"]


def _raised(verdict: Verdict) -> list[str]:
    return [
        f"its watcher read the exception that it raised {after(verdict.named[0])}",
        *_waiters(verdict),
        *(
            f"rank {s['rank']} raised another error, which may follow from it: {line_of_error(s)}"
            for s in first_hand(verdict.others)
        ),
    ]


def _gone(verdict: Verdict) -> list[str]:
    how, steps = verdict.named[0]["gone"], verdict.named[0]["steps"]
    by_itself = BY_ITSELF in how
    rest = [s for s in verdict.others if s["gone"] is not None and (BY_ITSELF in s["gone"]) == by_itself]
    return [
        f"how it ended, as it said or its machine did: {how}",
        *_waiters(verdict),
        *([f"it raised nothing: its program came to its end after {steps} steps"] if by_itself else []),
        *(
            f"rank {s['rank']} is gone, too ({s['gone']}), which may follow from it"
            for s in rest
            if "DivergenceError" not in line_of_error(s)
        ),
    ]


def _calls(verdict: Verdict) -> list[str]:
    gone = [status for status in verdict.others if status["gone"] is not None]
    rest = f"{_who(gone)} came to the end of the program" if gone else "no rank is anywhere else"
    return [f"each of these calls waits for the other ranks to make it, too, and {rest}"]


def _apart(verdict: Verdict) -> list[str]:
    if not verdict.named:
        rest = "the ranks are evenly split, so that nobody can be blamed: see the first difference"
    else:
        issued = first_issued([*verdict.named, *verdict.others])[1].get(
            verdict.others[0]["rank"], at(verdict.others[0])
        )
        rest = f"{_who(verdict.others)} issued {issued}; {_who(verdict.named)} did not"
    return ["all ranks wait, at points at which they do not meet", rest]


_BECAUSE: dict[str, Callable[[Verdict], list[str]]] = {
    "raised": _raised,
    "gone": _gone,
    "data": _gone,
    "stopped": lambda verdict: [
        "the system says that the process is stopped (state T): it lives, and does not run",
        *_waiters(verdict),
    ],
    "unreachable": lambda verdict: [
        "its watcher, a thread of its process, did not answer within the time allowed",
        "no other rank is on its machine that could say whether it is gone, stopped, or holds the interpreter",
    ],
    "absent": lambda verdict: ["it never said anything"],
    "calls": _calls,
    "departed": lambda verdict: [
        "in the first steps the order was the same on all ranks; only there another unit came than it says",
        f"{_who(verdict.others)} still follow that order",
    ],
    "elsewhere": lambda verdict: [*_waiters(verdict), *_standing(verdict.named[0])[0]],
    "apart": _apart,
    "transport": lambda verdict: [f"{_who(verdict.others)} issued the same, and none of them got past it"],
}


def _standing(status: Status) -> tuple[list[str], tuple[str, ...]]:
    """What is known of a rank that is elsewhere, a line each; and what to do next."""
    asleep = f"the system says that it sleeps (state {status['state']}), and its stack did not change"
    line, steps = _STATES.get(status["state"], (asleep, _SLEEPS))
    innermost = status["stack"].strip().partition("\n")[0]
    for parts, doing, better in _FRAMES:
        if any(part in innermost for part in parts):
            return [line, f"it {doing}: innermost in its stack is {innermost}"], better
    return [line], steps


def cut(statuses: Sequence[Status], halves: Sequence[Sequence[int]]) -> str:
    """The sentence for a network that was cut between these groups of ranks."""
    hosts = {status["rank"]: status["host"] for status in statuses}
    named = [f"{ranks_of(half)} ({', '.join(sorted({hosts[rank] for rank in half}))})" for half in halves]
    return f"the network is cut between {' and '.join(named)}."


def because_cut(halves: Sequence[Sequence[int]]) -> list[str]:
    """Why that is believed."""
    return [f"{ranks_of(half)} reached each other and none of the others, which lived" for half in halves]


NOTHING_IS_WRONG = "nothing is wrong: all that the flight recorder holds was issued alike on all ranks, and ended."


def by_recorder(group: str, number: int, ranks: Sequence[int], agrees: bool) -> tuple[str, tuple[str, ...]]:
    """What the flight recorder alone tells, in a sentence; and what to do next.

    Args:
        number: of the group's first collective that does not match.
        ranks: those that did not issue it.
        agrees: whether all ranks issued it alike.
    """
    which = f"collective {number} of group {group}"
    if ranks:
        return f"{ranks_of(ranks)} did not issue {which}, for which others wait.", _NOT_ISSUED
    if agrees:
        return f"{which} was issued alike by all ranks that tell, and did not end.", _TRANSPORT[:1]
    return f"ranks disagree on {which}.", _DEPARTED[:1]


# What to do next.


def next_steps(verdict: Verdict) -> tuple[str, ...]:
    """What to do, in this order."""
    first = verdict.named[0] if verdict.named else verdict.others[0]
    if verdict.kind == "raised":
        return _of_error(line_of_error(first))
    if verdict.kind in ("gone", "data"):
        return _of_end(first["gone"])
    steps = _standing(first)[1] if verdict.kind == "elsewhere" else _NEXT_STEPS[verdict.kind]
    return tuple(text.format(pid=first["pid"], host=first["host"]) for text in steps)


_MEMORY = (
    "Was the host out of memory? `dmesg -T | grep -iE 'out of memory|killed process'` on that machine, and "
    "`oom_kill` in the container's /sys/fs/cgroup/memory.events (a container that was killed so ends with exit code "
    "137).",
    "If so: fewer or lighter data loader workers, less pinned or offloaded memory, fewer ranks per machine, a "
    "larger limit.",
    "If not: did a scheduler kill the job at its time or memory limit, or somebody by hand? See its log.",
)
_SIGNALS: dict[str, tuple[str, ...]] = {
    "SIGKILL": _MEMORY,
    "SIGABRT": (
        "Native code gave up (a failed assertion, 'terminate called ...', NCCL's own watchdog): the reason is in "
        "the last lines that this rank wrote to stderr.",
        "If that is NCCL's timeout, another rank is the cause: read what the dumps of PyTorch's flight recorder say "
        "(TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1), or set fullshard.watch(limit=...) below that "
        "timeout.",
    ),
    "SIGSEGV": (
        "Native code crashed, most often an extension or a driver: run again with PYTHONFAULTHANDLER=1 for the "
        "Python stack, and with `ulimit -c unlimited` for a core file.",
    ),
    "SIGBUS": (
        "Shared memory or a mapped file was cut short: is /dev/shm full (`df -h /dev/shm`)? Data loader workers use "
        "it: give the container more (`--shm-size`), or take fewer workers.",
    ),
    "SIGTERM": (
        "Somebody asked it to end: a scheduler (preemption, time limit), a launcher after another rank had failed, "
        "or a person. See the launcher's log for what came first.",
    ),
}  # fmt: skip
_RAISED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"OutOfMemoryError|out of memory",
        (
            "The device was out of memory: a smaller batch, activation checkpointing, or smaller units. "
            "`fullshard.memory_use(model)` says how much the model itself takes.",
            "Only one rank ran out? Its batch was larger (longer sequences), or something else uses its device "
            "(nvidia-smi).",
        ),
    ),
    (
        r"DataLoader worker",
        (
            "A data loader worker died: out of host memory (dmesg), or of shared memory (`df -h /dev/shm`, "
            "`--shm-size`).",
            "Run with num_workers=0 once to see an error of the data set itself.",
        ),
    ),
    (
        r"CUDA error|device-side assert|CUBLAS|CUDNN",
        (
            "The device found the error later than the call that caused it: run again with CUDA_LAUNCH_BLOCKING=1.",
            "`dmesg -T | grep Xid` tells whether the device itself failed.",
        ),
    ),
    (r"No space left|Disk quota", ("Make room on the disk it writes to, or write elsewhere.",)),
    (r"StopIteration", ("Its data ended before that of the others: see that all ranks get equally many batches.",)),
)


def _of_error(line: str) -> tuple[str, ...]:
    """After an exception, by the line that has its type."""
    for pattern, told in _RAISED:
        if re.search(pattern, line):
            return told
    return (
        "Repair what raised it; its traceback is above. The other ranks did nothing wrong: they waited for this one.",
        "If the program goes on after such errors on purpose (a bad batch, say), all ranks have to skip it together.",
    )


def _of_end(gone: str) -> tuple[str, ...]:
    """After the end of a process, by what its watcher saw of it."""
    for name, told in _SIGNALS.items():
        if name in gone:
            return told
    if BY_ITSELF in gone:
        return _DATA_EXHAUSTED
    if "os._exit" in gone:
        return (
            "It was killed, or ended itself by os._exit: how could not be seen. Look at the launcher's log for its "
            "exit code.",
            *_MEMORY,
        )
    return (
        "It ended itself: sys.exit, os._exit, or an error handler of the program's own. The last lines that it "
        "printed, and the program's calls of exit, say why.",
        "A program that ends on one rank has to end on all: agree first (an all-reduce of a flag), then leave.",
    )


_DATA_EXHAUSTED = (
    "Its loop ended a step before that of the others, most likely as its data did: it had fewer batches.",
    "Give all ranks equally many: DistributedSampler (drop_last=True), a number of steps that is fixed beforehand, "
    "or for streams an all-reduce each step of whether every rank still has a batch.",
)
_STOPPED = (
    "Somebody or something stopped it: a debugger, Ctrl-Z, a cgroup freezer, a scheduler that suspends jobs.",
    "`kill -CONT {pid}` on {host} lets it go on; `grep TracerPid /proc/{pid}/status` tells whether a debugger holds "
    "it.",
)
_UNREACHABLE = (
    "Is that machine up (ping, its console, the scheduler's node state)? Did it lose its network, or was it taken "
    "away (a preempted instance)?",
    "Start again without it, or with a spare. If the machine is well, look at the process there: `py-spy dump "
    "--native` says whether native code holds the interpreter, `ps -o stat` whether it is stopped.",
)
CUT = (
    "All of these ranks live: what failed is between them. Look at the link, switch or routes between their machines "
    "(dmesg: link down; ibstat; ethtool -S; the fabric manager's log).",
    "NCCL_DEBUG=INFO shows which interfaces are used; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose them.",
)
_DEPARTED = (
    "All ranks have to run the same units in the same order. Look for what decides by the rank's own data or state: "
    "an `if` on the batch, an empty batch skipped, an expert without tokens, an evaluation or a log on one rank only.",
    'check="every" on fully_shard names the first call that differs, where it is made.',
)
_NOT_ISSUED = (
    "Look where that rank was: the program's line above is of what it issued last. It ended or hangs after it, or "
    "took another branch: all ranks have to make the same calls in the same order.",
)
_CALLS = (
    "Every rank has to make both calls, in the same order, or none. Look for `if rank == 0:` around the call that is "
    "named first: fullshard.save, load, clip_grad_norm_, state_dict, full_tensor() and all_reduce need all ranks.",
    "If each rank decides by its own data (an empty batch, an evaluation on one rank), let them agree first.",
)
_OWN_COLLECTIVE = (
    "It waits in a collective of the program's own, which the other ranks did not call: make it on all ranks or on "
    "none. Look for `if rank == 0:` around a barrier, a reduced loss, a checkpoint or an evaluation.",
)
_DATA = (
    "It waits for data: is its storage slow or gone, has a worker died or locked up? DataLoader(timeout=...) turns "
    "that into an error.",
)
_COMPILING = (
    "It compiles, while others are done: let all ranks see the same shapes, compile before training, share the "
    "compiler's cache, or raise fullshard.watch(limit=...).",
)
_CHECKPOINTING = ("It writes or reads files: if that is expected to take so long, raise fullshard.watch(limit=...).",)
_DEVICE_OR_DISK = (
    "It sleeps in the kernel and cannot be interrupted: a disk, network file system or driver does not answer. "
    "`cat /proc/{pid}/stack` (as root) and `dmesg -T` on {host} say which.",
)
_COMPUTES = (
    "It computes: an endless loop, or work that only this rank does. If that is right and only slow, raise "
    "fullshard.watch(limit=...).",
)
_SLEEPS = (
    "It sleeps at the line above: a lock, a sleep, a socket, or native code that holds the interpreter (the GIL) "
    "and never gives it back. While it lives, `py-spy dump --native --pid {pid}` or `gdb -p {pid}` on {host} show "
    "where.",
    "If it is right and only slow, raise fullshard.watch(limit=...).",
)
_ABSENT = (
    "It has not called its model yet: does it build it more slowly, wait in a collective of its own, or has it failed "
    "before? Look at what it printed.",
)
_TRANSPORT = (
    "All ranks issued the same, so the program is right: look at what carries it. NCCL_DEBUG=INFO, `dmesg -T | grep "
    "-iE 'xid|link'`, and whether the same job runs on other machines.",
    "Dumps of PyTorch's flight recorder tell how far each group got: TORCH_FR_BUFFER_SIZE=2000 "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1; give their folder to `fullshard doctor`.",
)
NO_DUMP = "There is no dump of {who}: did it end before it could write one? Look at what it printed, and at dmesg."

_NEXT_STEPS = {
    "stopped": _STOPPED,
    "unreachable": _UNREACHABLE,
    "absent": _ABSENT,
    "calls": _CALLS,
    "departed": _DEPARTED,
    "apart": _DEPARTED,
    "transport": _TRANSPORT,
}
"""By a verdict's kind, where that is all that counts."""
_STATES = {
    "D": ("the system says that it sleeps and cannot be interrupted (state D)", _DEVICE_OR_DISK),
    "R": ("the system says that it runs (state R), and its stack did not change between two looks", _COMPUTES),
}
_FRAMES = (
    (
        ("/torch/distributed/checkpoint", "/torch/serialization"),
        "reads or writes a checkpoint",
        _CHECKPOINTING,
    ),
    (("/torch/distributed/",), "is in a collective that is not the engine's", _OWN_COLLECTIVE),
    (("/torch/_inductor", "/torch/_dynamo", "/triton/"), "compiles", _COMPILING),
    (("/torch/utils/data/",), "waits for data", _DATA),
)
"""What a rank does whose innermost frame is in such a file."""


# evidence.py


def no_such_path(path: Path) -> ConfigError:
    """The error for a path at which there is nothing."""
    return ConfigError(f"there is no file or folder {path}")


def unreadable(path: Path, left_out: str) -> ConfigError:
    """The error for a file that cannot be read; `left_out` says why, after its name."""
    return ConfigError(f"{path} cannot be read: {left_out.partition(': ')[2]}")


def no_evidence(path: Path, left_out: Sequence[str]) -> ConfigError:
    """The error for a folder in which nothing is of use; `left_out` says why, a line for each file that looked so."""
    why = f" ({len(left_out)} could not be read; {left_out[0]})" if left_out else ""
    return ConfigError(
        f"there is neither a watcher's report (stuck-*.json) nor a flight recorder's dump (nccl_trace_rank_*) "
        f"in {path}{why}"
    )
