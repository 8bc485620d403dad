"""Notes on PyTorch errors that sharding is likely to have caused: raised in a forward, or out of memory.

Such an error mentions shapes, dtypes or memory, but neither the parameter nor the remedy. Errors are inspected only
after they are raised, and only if their text is one that sharding is known to cause.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..errors import FullshardError
from ..forms import NAME_KEY, PART_KEY, WHOLE_KEY
from ..torch_private.local_tensor import plain_tensors, view_base
from .messages import Account, hint_of_dtypes, hint_of_freed, hint_of_parts, memory_in_words
from .out_of_memory import account, bytes_asked, is_out_of_memory

if TYPE_CHECKING:
    from .runner import Runner

_FREED = "data is not allocated yet"
_SHAPES = re.compile(r"size mismatch|must be a matrix|cannot be multiplied|must match the size|1-D")
_DTYPES = re.compile(r"same dtype|expected scalar type")
_SEEN = "_fullshard_seen"  # marks inspected errors: when outer units see one, inner units show other parameters


def add_hint(error: RuntimeError, runner: Runner) -> None:
    """Add a note if sharding is a likely cause of the error. Call for the innermost unit, before its state is reset."""
    if isinstance(error, FullshardError) or _SEEN in error.__dict__:
        return
    if is_out_of_memory(error):
        explain_failed_allocation(error, runner.root.units if runner.root is not None else [runner])
        return
    error.__dict__[_SEEN] = True
    text, hint = str(error), None
    if _FREED in text:
        hint = _of_freed(error)
    elif _SHAPES.search(text):
        hint = _of_parts(error)
    elif _DTYPES.search(text):
        hint = _of_dtypes(runner)
    if hint is not None:
        error.add_note(f"Fullshard: {hint}")


def explain_failed_allocation(error: BaseException, runners: Sequence[Runner]) -> None:
    """Explain an out-of-memory error by what holds memory, unless done already, before these units' state is reset."""
    if is_out_of_memory(error) and _SEEN not in error.__dict__:
        held = account(runners, asked=bytes_asked(str(error)))
        root = runners[0].root
        with_grad = root is None or root.pass_grad or root.backward is not None
        error.__dict__[_SEEN] = Explained(weakref.ref(runners[0]), held, with_grad)
        error.add_note(f"Fullshard: {memory_in_words(held)}")


class Explained(NamedTuple):
    """The explanation added to an out-of-memory error.

    Attributes:
        runner: of one of the units.
        account: what held memory when the allocation failed.
        with_grad: whether the pass builds a graph, or is a backward.
    """

    runner: weakref.ref[Runner]
    account: Account
    with_grad: bool


def explained(error: BaseException) -> Explained | None:
    """The explanation that `explain_failed_allocation` added to this error."""
    seen = error.__dict__.get(_SEEN)
    return seen if isinstance(seen, Explained) else None


def _of_freed(error: RuntimeError) -> str:
    names = [
        whole.__dict__[WHOLE_KEY]
        for tensor in _at_hand(error)
        if tensor.numel() and WHOLE_KEY in (whole := _whole_of(tensor)).__dict__ and not _has_memory(whole)
    ]
    which = f"parameter {names[0]!r}" if names else "a parameter"
    return hint_of_freed(which)


def _whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The base of `tensor` if it is a view (a transposed weight, or a chunk of one), else `tensor` itself."""
    base = view_base(tensor)
    return tensor if base is None else base


def _has_memory(tensor: torch.Tensor) -> bool:
    return any([plain.untyped_storage().nbytes() for plain in plain_tensors(tensor)])


def _of_parts(error: RuntimeError) -> str | None:
    for tensor in _at_hand(error):
        if PART_KEY in tensor.__dict__:
            return hint_of_parts(tensor.__dict__.get(NAME_KEY, "?"), tensor.numel())
    return None


def _of_dtypes(runner: Runner) -> str | None:
    units = runner.root.units if runner.root is not None else [runner]
    for user in units:
        policy = user.settings.policy
        if policy.param_dtype is not None and policy.output_dtype is None:
            return hint_of_dtypes(user.unit.name or "(root)", policy.param_dtype)
    return None


def _at_hand(error: RuntimeError) -> Iterator[torch.Tensor]:
    """The tensors in variables of the raising frame, or in attributes that its code names, one module deep."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return
    names = set(traceback.tb_frame.f_code.co_names)
    for value in list(traceback.tb_frame.f_locals.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                if not name or name.split(".")[0] in names:
                    shown = {**module.__dict__, **module._buffers, **module._parameters}
                    yield from [v for key, v in shown.items() if key in names and isinstance(v, torch.Tensor)]
