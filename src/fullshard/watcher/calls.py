"""What a rank has called, read from its Python stacks: the function of ours or PyTorch's, and the user's line."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

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
