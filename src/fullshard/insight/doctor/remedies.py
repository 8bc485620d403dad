"""What to do next, for each way in which a run ends. Pure: texts in, texts out."""

from __future__ import annotations

import re

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


def of_error(line: str) -> tuple[str, ...]:
    """After an exception, by the line that has its type."""
    for pattern, told in _RAISED:
        if re.search(pattern, line):
            return told
    return (
        "Repair what raised it; its traceback is above. The other ranks did nothing wrong: they waited for this one.",
        "If the program goes on after such errors on purpose (a bad batch, say), all ranks have to skip it together.",
    )


def of_end(gone: str) -> tuple[str, ...]:
    """After the end of a process, by what its watcher saw of it."""
    for name, told in _SIGNALS.items():
        if name in gone:
            return told
    if "by itself" in gone:
        return DATA_EXHAUSTED
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


DATA_EXHAUSTED = (
    "Its loop ended a step before that of the others, most likely as its data did: it had fewer batches.",
    "Give all ranks equally many: DistributedSampler (drop_last=True), a number of steps that is fixed beforehand, "
    "or for streams an all-reduce each step of whether every rank still has a batch.",
)
STOPPED = (
    "Somebody or something stopped it: a debugger, Ctrl-Z, a cgroup freezer, a scheduler that suspends jobs.",
    "`kill -CONT {pid}` on {host} lets it go on; `grep TracerPid /proc/{pid}/status` tells whether a debugger holds "
    "it.",
)
UNREACHABLE = (
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
DEPARTED = (
    "All ranks have to run the same units in the same order. Look for what decides by the rank's own data or state: "
    "an `if` on the batch, an empty batch skipped, an expert without tokens, an evaluation or a log on one rank only.",
    'check="every" on fully_shard names the first call that differs, where it is made.',
)
NOT_ISSUED = (
    "Look where that rank was: the program's line above is of what it issued last. It ended or hangs after it, or "
    "took another branch: all ranks have to make the same calls in the same order.",
)
CALLS = (
    "Every rank has to make both calls, in the same order, or none. Look for `if rank == 0:` around the call that is "
    "named first: fullshard.save, load, clip_grad_norm_, state_dict, full_tensor() and all_reduce need all ranks.",
    "If each rank decides by its own data (an empty batch, an evaluation on one rank), let them agree first.",
)
OWN_COLLECTIVE = (
    "It waits in a collective of the program's own, which the other ranks did not call: make it on all ranks or on "
    "none. Look for `if rank == 0:` around a barrier, a reduced loss, a checkpoint or an evaluation.",
)
DATA = (
    "It waits for data: is its storage slow or gone, has a worker died or locked up? DataLoader(timeout=...) turns "
    "that into an error.",
)
COMPILING = (
    "It compiles, while others are done: let all ranks see the same shapes, compile before training, share the "
    "compiler's cache, or raise fullshard.watch(limit=...).",
)
CHECKPOINTING = ("It writes or reads files: if that is expected to take so long, raise fullshard.watch(limit=...).",)
DEVICE_OR_DISK = (
    "It sleeps in the kernel and cannot be interrupted: a disk, network file system or driver does not answer. "
    "`cat /proc/{pid}/stack` (as root) and `dmesg -T` on {host} say which.",
)
COMPUTES = (
    "It computes: an endless loop, or work that only this rank does. If that is right and only slow, raise "
    "fullshard.watch(limit=...).",
)
SLEEPS = (
    "It sleeps at the line above: a lock, a sleep, a socket, or native code that holds the interpreter (the GIL) "
    "and never gives it back. While it lives, `py-spy dump --native --pid {pid}` or `gdb -p {pid}` on {host} show "
    "where.",
    "If it is right and only slow, raise fullshard.watch(limit=...).",
)
ABSENT = (
    "It has not called its model yet: does it build it more slowly, wait in a collective of its own, or has it failed "
    "before? Look at what it printed.",
)
TRANSPORT = (
    "All ranks issued the same, so the program is right: look at what carries it. NCCL_DEBUG=INFO, `dmesg -T | grep "
    "-iE 'xid|link'`, and whether the same job runs on other machines.",
    "Dumps of PyTorch's flight recorder tell how far each group got: TORCH_FR_BUFFER_SIZE=2000 "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1; give their folder to `fullshard doctor`.",
)
NO_DUMP = "There is no dump of {who}: did it end before it could write one? Look at what it printed, and at dmesg."
