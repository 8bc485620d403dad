"""Names, shapes and dtypes of a checkpoint's tensors, as checkpoints of all formats give them.

model.layers.0.weight                             a parameter or buffer
optimizer.state.layers.0.weight.exp_avg           optimizer state of a parameter
values["optimizer"]["param_groups"], ...          everything that is not a tensor
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError

MODEL = "model."
"""The prefix of parameters and buffers."""
OPTIMIZER = "optimizer.state."
"""The prefix of optimizer state; the parameter's name, a dot, and the key follow."""

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
"""The keys under which programs save a model and its optimizer, in one nested state dict."""


def state_path(name: str, parameters: Container[str]) -> tuple[str, str] | None:
    """Split the name of optimizer state into parameter and key, by the longest parameter name that matches; or None."""
    rest = name.removeprefix(OPTIMIZER)
    parameter = rest
    while parameter := parameter.rpartition(".")[0]:
        if parameter in parameters:
            return parameter, rest.removeprefix(f"{parameter}.")
    return None


COUNTS = 2**62
"""Counts in a checkpoint, such as steps and bytes, are below it."""
_MOST_DIMS = 64  # torch's limit
MOST_NAME = 2000
"""The most characters in a tensor's name: names are split at their dots, which is slow for a million of them."""


def checked_name(name: object) -> str:
    """A tensor's name.

    Raises:
        ValueError: it is not text, or too long.
    """
    if not isinstance(name, str):
        raise ValueError(f"a name that is a {type(name).__name__}")
    if len(name) > MOST_NAME:
        raise ValueError(f"a name of {len(name)} characters")
    return name


def refuse_long(names: Iterable[str], prefix: str = "") -> None:
    """Refuse names of tensors to save that `checked_name` refuses when they are loaded.

    Args:
        prefix: under which they may be saved.

    Raises:
        CheckpointError: a name is too long.
    """
    longest = max(names, key=len, default="")
    if len(prefix) + len(longest) > MOST_NAME:
        raise CheckpointError(
            "The name of a tensor is too long to be loaded; nothing was written.",
            parameter=f"{longest[:100]}...",
            expected=f"at most {MOST_NAME} characters, with all keys on the way to the tensor",
            got=len(prefix) + len(longest),
            remedy="save it under shorter keys",
        )


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of a tensor.

    Args:
        name: of the tensor, for error messages.

    Raises:
        ValueError: it is not a valid shape.
    """
    extents = tuple(shape) if isinstance(shape, Sequence) else None
    are_counts = extents is not None and all(type(extent) is int and extent >= 0 for extent in extents)
    are_few = extents is not None and are_counts and len(extents) <= _MOST_DIMS
    if extents is None or not are_few or math.prod(max(extent, 1) for extent in extents) >= COUNTS:
        # Not `str`: the text of nested tuples can take all memory.
        raise ValueError(f"{name[:100]!r} has shape {reprlib.repr(shape)}")
    return extents


@dataclass(frozen=True)
class TensorEntry:
    """A checkpoint's description of a tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}"

    def checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor to write, unchanged.

        Raises:
            CheckpointError: its shape or dtype is different.
        """
        got = TensorEntry(tuple(tensor.shape), tensor.dtype)
        if got != self:
            raise CheckpointError("A tensor does not match its entry.", parameter=name, expected=self, got=got)
        return tensor
