"""What a process does, as its Python stacks and the operating system tell: what it called, whether it gets on, its end.

A stack says which function of ours or PyTorch's was called, and from which line of the program. Linux's `/proc` says
whether a process runs and what it has used; a neighbour that does not answer is asked for its stack by a signal. Where
there is no `/proc` (macOS) nothing here fails: what is not known is empty or 0.
"""

from __future__ import annotations

import glob
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""By which neighbours ask for Python stacks; one that programs do not use."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

_OURS = f"{Path(__file__).parent.parent}/"
_MODULE_CALLS = f"{_OURS}api/"  # whose `__call__` and `forward` run a sharded model
_TORCH = re.compile(r"/(site|dist)-packages/torch/")
_STANDARD = f"{os.path.dirname(os.__file__)}/"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_COLLECTIVES = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")
_DISPATCH = re.compile(r"/torch/(_ops|_compile|_library/\w+)\.py$")  # between a function and its operator
_METHODS = (f"{_OURS}forms/", f"{_OURS}api/")  # where functions of ours that are called by a bare name are, mostly
_DECORATORS = ("wrapper", "_fn", "inner", "inner_func", "decorate_context", "decorate_fwd")
_PREFIXES = {
    _COLLECTIVES[0]: "torch.distributed.",
    **{f"distributed/checkpoint/state_dict_{part}.py": "torch.distributed.checkpoint." for part in ("saver", "loader")},
}
"""Where functions of PyTorch's are that programs call by more than their name."""
FORWARD, BACKWARD = "ran the model's forward", "ran a backward"
OF_STEPS = (FORWARD, BACKWARD, "called no_sync")
"""What all ranks do in every step: a rank that does something else is more likely the one that is wrong."""


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
        """Whether it belongs to the program, or to a library that is neither ours, PyTorch's nor Python's own."""
        standard = self.path.startswith(("<", _STANDARD)) and "-packages/" not in self.path
        return not (self.is_ours or self.is_torchs or standard)

    @property
    def calls_a_module(self) -> bool:
        if self.is_ours:
            return self.path.startswith(_MODULE_CALLS) and self.function in ("__call__", "forward")
        return self.function in ("_wrapped_call_impl", "_call_impl")

    def __str__(self) -> str:
        return f'File "{self.path}", line {self.line} in {self.function}'


class Call(NamedTuple):
    """What the program has called.

    Attributes:
        did: as a sentence goes on after a rank's name: "called fullshard.save", "ran the model's forward".
        at: file and line of the program: "train.py:79".
        waits: whether its innermost frame is one of PyTorch's collectives: the host waits for other ranks there.
        in_pass: whether a sharded model's forward, or a backward, is running.
    """

    did: str
    at: str
    waits: bool
    in_pass: bool

    def __str__(self) -> str:
        return f"{self.did} ({self.at})"


def frames_of(dump: str) -> list[Frame]:
    """The main thread's frames, innermost first, of what `faulthandler` wrote: that thread gets the signal."""
    frames: list[Frame] = []
    for line in dump.splitlines():
        if line.startswith("Current thread"):
            frames = []
        elif line.startswith("Thread "):
            if frames:
                break
        elif (match := _FRAME.match(line)) is not None:
            frames.append(Frame(*match.groups()))
    return frames


def frames_at(thread: int) -> list[Frame]:
    """A thread's frames now, innermost first; the main thread's if it has ended."""
    stacks = sys._current_frames()
    frame = stacks.get(thread) or stacks.get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return frames


def frames_of_trace(trace: TracebackType | None) -> list[Frame]:
    """An exception's frames, innermost first."""
    frames = [Frame(f.f_code.co_filename, str(line), f.f_code.co_name) for f, line in traceback.walk_tb(trace)]
    return frames[::-1]


def readable(frames: Sequence[Frame]) -> str:
    """The program's frames, a line each, below the innermost one: what called ours and PyTorch's tells the place."""
    return "\n".join([str(each) for index, each in enumerate(frames) if not index or each.is_users])


def call_of(frames: Sequence[Frame]) -> Call | None:
    """What the program has called; None if no frame is the program's.

    The line is the innermost of the program's. Where it is part of the model (a forward that calls a block), it is the
    line that called the whole model.
    """
    at = _users(frames, 0)
    if at is None:
        return None
    inner = next((each for each in frames if not (each.is_torchs and _DISPATCH.search(each.path))), None)
    waits = inner is not None and inner.is_torchs and inner.path.endswith(_COLLECTIVES)
    modules = [index for index, each in enumerate(frames) if each.is_ours and each.calls_a_module]
    in_pass = bool(modules) or any([_is_backward(each) for each in frames])
    if at and modules and frames[at - 1].calls_a_module:
        at = _users(frames, modules[-1])
        if at is None:
            return None
    user = frames[at]
    called = [each for each in frames[:at] if each.is_ours or each.is_torchs]
    return Call(_did(called[::-1], user), f"{os.path.basename(user.path)}:{user.line}", waits, in_pass)


def _users(frames: Sequence[Frame], start: int) -> int | None:
    return next((index for index, each in enumerate(frames) if index >= start and each.is_users), None)


def _is_backward(frame: Frame) -> bool:
    return frame.is_torchs and (frame.function in ("backward", "_engine_run_backward"))


def _did(called: Sequence[Frame], user: Frame) -> str:
    """In words.

    Args:
        called: frames of ours and PyTorch's, outermost first.
        user: which called them.
    """
    if not called:
        return f"was in {user.function}"
    if called[0].calls_a_module:
        return FORWARD
    if _is_backward(called[0]):
        return BACKWARD
    public = [each for each in called if each.function not in _DECORATORS and not each.function.startswith("_")]
    if called[0].function.startswith("__torch_") or not public:
        return "used a sharded tensor" if called[0].is_torchs else f"was in {user.function}"
    first = public[0]
    of = next((prefix for path, prefix in _PREFIXES.items() if first.path.endswith(path)), "")
    of = "fullshard." if first.is_ours else of
    return f"called {'' if first.path.startswith(_METHODS) else of}{first.function}"


# What the operating system tells (proc(5)).


def state(pid: int) -> str:
    """Of a process or thread, a letter of proc(5): R runs, S and D sleep, T is stopped, Z has ended; "?" unknown."""
    return (_stat(pid) or "?")[0]


def started(pid: int) -> int:
    """When the process was started, in ticks since the machine was: no other has its number and this."""
    return int("".join(_stat(pid)[19:20]) or 0)


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that the process and the children it waited for have used."""
    return sum(map(int, _stat(pid)[11:15])) / _TICKS


def moved_bytes_of_others() -> int:
    """Bytes that this process has read and written, but for the thread that asks."""
    mine = _read(f"/proc/self/task/{threading.get_native_id()}/io")
    return _moved(_read("/proc/self/io")) - _moved(mine) - len(mine)  # what reading `mine` read


def machine() -> str:
    """What processes have in common that see each other: a machine's boot, and a name space of process numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{_read('/proc/sys/kernel/random/boot_id').strip()} {space}"


def activity(task: int, states: Sequence[str], samples: Sequence[Sequence[Frame]]) -> dict[str, Any]:
    """What shows whether a process gets on, as a part of its status.

    Args:
        task: its thread that was looked at.
        states: of that thread, a letter of `state` for each look.
        samples: its stack, at each look.
    """
    frames = samples[-1] if samples else ()
    call = call_of(frames)
    return {
        "state": state(task),
        "wakes": int(_field(task, "voluntary_ctxt_switches:") or 0),  # to wait for a lock, a peer, a disk, a time
        "runs": set(states) == {"R"},
        "stack": readable(frames),
        "samples": ["\n".join(map(str, each)) for each in samples],
        "call": call._asdict() if call is not None else None,
    }


def children_seconds(pid: int) -> float:
    """Seconds of CPU that its children use now (compilers, loaders)."""
    children = " ".join(map(_read, glob.glob(f"/proc/{pid}/task/*/children")))
    return sum(cpu_seconds(int(child)) for child in children.split())


# What a neighbour sees of a rank that does not answer.


def lives(last: dict[str, Any]) -> bool:
    """Whether the process that said this last is alive."""
    return _ending(last["pid"]) is None and started(last["pid"]) == last["start"]


def look_at(last: dict[str, Any]) -> dict[str, Any]:
    """What the system tells of a process of this machine.

    Args:
        last: what it said last.
    """
    pid, known = last["pid"], {"time": time.time(), "gone": None}
    if not lives(last):
        how = _ending(pid) or "killed, or ended by os._exit"
        return {**known, "state": "gone", "gone": "os._exit(0)" if how == "exit code 0" else how}
    states, samples = [], []
    for _ in range(2):
        states.append(state(pid))
        samples.append(_stack_of(last))
    used = {"cpu": cpu_seconds(pid), "children": children_seconds(pid), "io": _moved(_read(f"/proc/{pid}/io"))}
    return {**known, **used, **activity(pid, states, samples)}


def _stack_of(last: dict[str, Any]) -> list[Frame]:
    """A neighbour's Python stack: `faulthandler` writes it when a signal arrives, whoever holds the interpreter."""
    pid, path = last["pid"], f"/proc/{last['pid']}/fd/{last['stacks']}"
    if state(pid) == "T" or not int(_field(pid, "SigCgt:") or "0", 16) >> (SIGNAL - 1) & 1:
        return []  # it would end a process that is past its own end, or runs another program now
    try:
        with open(path, "rb") as stacks:
            before = os.fstat(stacks.fileno()).st_size
            os.kill(pid, SIGNAL)
            size, deadline = before, time.monotonic() + 0.5
            while time.monotonic() < deadline:
                time.sleep(0.02)
                grown = os.fstat(stacks.fileno()).st_size
                if grown == size and grown > before:
                    break
                size = grown
            return frames_of(os.pread(stacks.fileno(), 1 << 16, before).decode(errors="replace"))
    except OSError:
        return []


def _ending(pid: int) -> str | None:
    """How a process that nobody has waited for yet ended; None if it lives or cannot be asked any more."""
    fields = _stat(pid)
    if not fields or fields[0] not in "ZX" or len(fields) < 50:
        return None
    code, number = int(fields[49]), int(fields[49]) & 0x7F
    if not number:
        return f"exit code {code >> 8}"
    known = number in set(signal.Signals)
    return f"killed by signal {number} ({signal.Signals(number).name if known else 'a real-time signal'})"


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the third on; empty if there is none."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _field(pid: int, name: str) -> str:
    """The first word that `/proc/PID/status` has under this name; empty if there is none."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return next((line.split()[1] for line in lines if line.startswith(name)), "")


def _moved(text: str) -> int:
    """Bytes that a process or thread has read and written, whatever by."""
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("rchar", "wchar")))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
