"""What a process is doing, from its Python stacks and the operating system: its call, its progress, how it ended.

A stack shows which function of Fullshard's or PyTorch's was called, and from which line of the program. Linux's `/proc`
shows whether a process runs and which resources it has used; a neighbour that does not answer is asked for its stack by
a signal. Without `/proc` (macOS) nothing here fails: unknown values are empty or 0.
"""

from __future__ import annotations

import faulthandler
import glob
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""The signal by which neighbours ask for Python stacks; programs do not use it."""
DUMPS_ARE_SAFE = sys.hexversion < 0x030D0000
"""Whether `faulthandler` may read a stack at any time. It crashes CPython 3.13 in functions that Dynamo compiles."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

_OURS = f"{Path(__file__).parent.parent}/"
_MODULE_CALLS = f"{_OURS}api/"  # its `__call__` and `forward` run a sharded model
_TORCH = re.compile(r"/(site|dist)-packages/torch/")
_STANDARD = f"{os.path.dirname(os.__file__)}/"
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_COLLECTIVES = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")
_DISPATCH = re.compile(r"/torch/(_ops|_compile|_library/\w+)\.py$")  # between a function and its operator
_METHODS = (f"{_OURS}forms/", f"{_OURS}api/")  # define most of our functions that are called as methods
_DECORATORS = ("wrapper", "_fn", "inner", "inner_func", "decorate_context", "decorate_fwd")
_PREFIXES = {
    _COLLECTIVES[0]: "torch.distributed.",
    **{f"distributed/checkpoint/state_dict_{part}.py": "torch.distributed.checkpoint." for part in ("saver", "loader")},
}
"""Path of a file of PyTorch's -> the prefix under which programs call its functions."""
FORWARD, BACKWARD = "ran the model's forward", "ran a backward"
OF_STEPS = (FORWARD, BACKWARD, "called no_sync")
"""Calls of every training step: a rank in a different call is more likely to be at fault."""


class Frame(NamedTuple):
    """One line of a stack."""

    path: str
    line: str
    function: str

    @property
    def is_ours(self) -> bool:
        return self.path.startswith(_OURS)

    @property
    def is_torchs(self) -> bool:
        return _TORCH.search(self.path) is not None

    @property
    def is_users(self) -> bool:
        """Whether it belongs to the program, or to a library other than Fullshard, PyTorch and Python's own."""
        standard = self.path.startswith(("<", _STANDARD)) and "-packages/" not in self.path
        return not (self.is_ours or self.is_torchs or standard)

    @property
    def calls_a_module(self) -> bool:
        if self.is_ours:
            return self.path.startswith(_MODULE_CALLS) and self.function in ("__call__", "forward")
        return self.function in ("_wrapped_call_impl", "_call_impl")

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line} in {self.function}'


class CurrentCall(NamedTuple):
    """The call that the program is in.

    Attributes:
        did: a predicate that follows a rank's name: "called fullshard.save", "ran the model's forward".
        at: file and line of the program: "train.py:79".
        waits: whether the innermost frame is in a collective of PyTorch's, where the host waits for other ranks.
        in_pass: whether a sharded model's forward, or a backward, is running.
    """

    did: str
    at: str
    waits: bool
    in_pass: bool

    def __str__(self) -> str:
        return f"{self.did} ({self.at})"


def frames_of(dump: str) -> list[Frame]:
    """The frames in `faulthandler`'s output of one thread, innermost first."""
    return [Frame(*match.groups()) for line in dump.splitlines() if (match := _FRAME.match(line)) is not None]


def frames_at(thread: int) -> list[Frame]:
    """A thread's current frames, innermost first; the main thread's if the thread has ended. Empty if unreadable.

    In CPython 3.11 frames of other threads (`sys._current_frames`) crash or deadlock (python/cpython#99110, #106883),
    so `faulthandler` reads them there; see `DUMPS_ARE_SAFE` why not in newer ones.
    """
    if sys.hexversion < 0x030C0000:
        return _frames_dumped(thread)
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # frames vanish while they are read
        return []
    stacks = sys._current_frames()
    frame = stacks.pop(thread, None) or stacks.get(threading.main_thread().ident or 0)
    del stacks  # a frame that is referenced keeps its function's variables alive
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append(Frame(code.co_filename, str(frame.f_lineno or "???"), code.co_name))
        frame = frame.f_back
    return frames


_MOST_FRAMES = 100  # as many as `faulthandler` shows


def _frames_dumped(thread: int) -> list[Frame]:
    """See `frames_at`: by `faulthandler`, which reads all stacks in one call and makes no frame objects."""
    try:
        with _memory() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("ascii", errors="replace")
    except OSError:
        return []
    _, *parts = _THREAD.split(text)
    stacks = {int(number, 16): dump for number, dump in zip(parts[::2], parts[1::2], strict=True)}
    return frames_of(stacks.get(thread) or stacks.get(threading.main_thread().ident or 0, ""))


def _memory() -> Any:
    """A file in memory, where the system has such."""
    return open(os.memfd_create("stacks"), "wb") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def frames_of_trace(trace: TracebackType | None) -> list[Frame]:
    """An exception's frames, innermost first."""
    frames = [Frame(f.f_code.co_filename, str(line), f.f_code.co_name) for f, line in traceback.walk_tb(trace)]
    return frames[::-1]


def users_level() -> int:
    """The `stacklevel` with which the caller's `warnings.warn` names the program's line; 1 if there is none."""
    stack = traceback.walk_stack(sys._getframe(1))
    frames = [Frame(f.f_code.co_filename, str(line), f.f_code.co_name) for f, line in stack]
    at = _users(frames, 0)
    return 1 if at is None else at + 1


def readable(frames: Sequence[Frame]) -> str:
    """The innermost frame and the program's frames, a line each: the callers of library frames show the place."""
    return "\n".join([str(frame) for index, frame in enumerate(frames) if not index or frame.is_users])


def call_of(frames: Sequence[Frame]) -> CurrentCall | None:
    """The call that the program is in; None if no frame is the program's.

    Its line is that of the program's innermost frame; inside the model (a forward that calls a block), the line that
    called the whole model.
    """
    at = _users(frames, 0)
    if at is None:
        return None
    inner = next((frame for frame in frames if not (frame.is_torchs and _DISPATCH.search(frame.path))), None)
    waits = inner is not None and inner.is_torchs and inner.path.endswith(_COLLECTIVES)
    modules = [index for index, frame in enumerate(frames) if frame.is_ours and frame.calls_a_module]
    in_pass = bool(modules) or any([_is_backward(frame) for frame in frames])
    if at and modules and frames[at - 1].calls_a_module:
        at = _users(frames, modules[-1])
        if at is None:
            return None
    user = frames[at]
    called = [frame for frame in frames[:at] if frame.is_ours or frame.is_torchs]
    return CurrentCall(_did(called[::-1], user), f"{os.path.basename(user.path)}:{user.line}", waits, in_pass)


def _users(frames: Sequence[Frame], start: int) -> int | None:
    """The index of the innermost frame of the program from `start` on."""
    return next((index for index, frame in enumerate(frames) if index >= start and frame.is_users), None)


def _is_backward(frame: Frame) -> bool:
    return frame.is_torchs and (frame.function in ("backward", "_engine_run_backward"))


def _did(called: Sequence[Frame], user: Frame) -> str:
    """The predicate for a call.

    Args:
        called: frames of Fullshard and PyTorch, outermost first.
        user: the program's frame that called them.
    """
    if not called:
        return f"was in {user.function}"
    if called[0].calls_a_module:
        return FORWARD
    if _is_backward(called[0]):
        return BACKWARD
    public = [frame for frame in called if frame.function not in _DECORATORS and not frame.function.startswith("_")]
    if called[0].function.startswith("__torch_") or not public:
        return "used a sharded tensor" if called[0].is_torchs else f"was in {user.function}"
    first = public[0]
    prefix = next((prefix for path, prefix in _PREFIXES.items() if first.path.endswith(path)), "")
    prefix = "fullshard." if first.is_ours else prefix
    return f"called {'' if first.path.startswith(_METHODS) else prefix}{first.function}"


# Facts from the operating system (proc(5)).


def state(pid: int) -> str:
    """The state of a process or thread, by proc(5): R runs, S and D sleep, T is stopped, Z has ended; "?": unknown."""
    return (_stat(pid) or "?")[0]


def started(pid: int) -> int:
    """The start time of a process, in ticks since the machine's; with the pid it identifies a process."""
    return int("".join(_stat(pid)[19:20]) or 0)


def cpu_seconds(pid: int) -> float:
    """CPU seconds that the process and the children it has waited for have used."""
    return sum(map(int, _stat(pid)[11:15])) / _TICKS


def moved_bytes_of_others() -> int:
    """Bytes that this process has read and written, except for the calling thread."""
    own_thread = _read(f"/proc/self/task/{threading.get_native_id()}/io")
    return _moved(_read("/proc/self/io")) - _moved(own_thread) - len(own_thread)  # reading `own_thread` counts too


def machine() -> str:
    """An identifier shared by processes that see each other: the machine's boot id and the namespace of pids."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{_read('/proc/sys/kernel/random/boot_id').strip()} {space}"


def activity(task: int, states: Sequence[str], samples: Sequence[Sequence[Frame]]) -> dict[str, Any]:
    """The part of a status that shows whether a process makes progress.

    Args:
        task: the thread that was sampled.
        states: its `state` at each sample.
        samples: its stack at each sample.
    """
    frames = samples[-1] if samples else ()
    call = call_of(frames)
    return {
        "state": state(task),
        "wakes": int(_field(task, "voluntary_ctxt_switches:") or 0),  # waits for locks, peers, disks or timers
        "runs": set(states) == {"R"},
        "stack": readable(frames),
        "samples": ["\n".join(map(str, sample)) for sample in samples],
        "call": call._asdict() if call is not None else None,
    }


def children_seconds(pid: int) -> float:
    """CPU seconds that the live children of a process have used (compilers, loaders)."""
    children = " ".join(map(_read, glob.glob(f"/proc/{pid}/task/*/children")))
    return sum(cpu_seconds(int(child)) for child in children.split())


# A neighbour's view of a rank that does not answer.


def lives(last: dict[str, Any]) -> bool:
    """Whether the process that sent this status is alive."""
    return _ending(last["pid"]) is None and started(last["pid"]) == last["start"]


def look_at(last: dict[str, Any]) -> dict[str, Any]:
    """The status of a process on this machine, as the operating system sees it.

    Args:
        last: the last status that it sent.
    """
    pid, status = last["pid"], {"time": time.time(), "clock": time.monotonic(), "gone": None}
    if not lives(last):
        ending = _ending(pid) or "killed, or ended by os._exit"
        return {**status, "state": "gone", "gone": "os._exit(0)" if ending == "exit code 0" else ending}
    states, samples = [], []
    for _ in range(2):
        states.append(state(pid))
        samples.append(_stack_of(last))
    used = {"cpu": cpu_seconds(pid), "children": children_seconds(pid), "io": _moved(_read(f"/proc/{pid}/io"))}
    return {**status, **used, **activity(pid, states, samples)}


def _stack_of(last: dict[str, Any]) -> list[Frame]:
    """A neighbour's Python stack: `faulthandler` writes it on a signal, even if a thread holds the interpreter lock.

    Empty if that is not safe (`DUMPS_ARE_SAFE`): the neighbour then does not handle the signal.
    """
    pid, path = last["pid"], f"/proc/{last['pid']}/fd/{last['stacks']}"
    if state(pid) == "T" or not int(_field(pid, "SigCgt:") or "0", 16) >> (SIGNAL - 1) & 1:
        return []  # the signal would kill a process that is shutting down, or runs a different program now
    try:
        with open(path, "rb") as stacks:
            start = os.fstat(stacks.fileno()).st_size
            os.kill(pid, SIGNAL)
            size, deadline = start, time.monotonic() + 0.5
            while time.monotonic() < deadline:
                time.sleep(0.02)
                new_size = os.fstat(stacks.fileno()).st_size
                if new_size == size and new_size > start:
                    break
                size = new_size
            return frames_of(os.pread(stacks.fileno(), 1 << 16, start).decode(errors="replace"))
    except OSError:
        return []


def _ending(pid: int) -> str | None:
    """How a process that has not been waited for yet ended; None if it is alive or its status is lost."""
    fields = _stat(pid)
    if not fields or fields[0] not in "ZX" or len(fields) < 50:
        return None
    code, number = int(fields[49]), int(fields[49]) & 0x7F
    if not number:
        return f"exit code {code >> 8}"
    is_named = number in set(signal.Signals)
    return f"killed by signal {number} ({signal.Signals(number).name if is_named else 'a real-time signal'})"


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the third on; empty if the file does not exist."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _field(pid: int, name: str) -> str:
    """The first word of a field of `/proc/PID/status`; empty if it does not exist."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return next((line.split()[1] for line in lines if line.startswith(name)), "")


def _moved(text: str) -> int:
    """Bytes read and written, by any means, in the text of `/proc/.../io`."""
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("rchar", "wchar")))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
