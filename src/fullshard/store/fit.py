"""Which values in files can take the place of which tensors: one rule for checkpoints and for safetensors files."""

from __future__ import annotations

import torch

from ..checkpoint.values import rounding_error
from ..errors import CheckpointError
from .source import MODEL, Entry
from .write import bytes_of

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What may be cast into each other: 8-bit floats have scales of their own."""


def check_fit(name: str, shape: tuple[int, ...], dtype: torch.dtype, entry: Entry, cast: bool) -> None:
    """Refuse values of another shape, or of a dtype that does not become the tensor's.

    Args:
        name, shape, dtype: the tensor to fill.
        entry: what the files have.
        cast: whether floating-point values may be rounded, or become infinite.

    Raises:
        CheckpointError: they do not fit.
    """
    floats = dtype in _FLOATS and entry.dtype in _FLOATS
    for what, expected, got in (("shape", shape, entry.shape), ("dtype", dtype, entry.dtype)):
        if expected != got and not (what == "dtype" and floats):
            raise CheckpointError(
                f"A checkpoint does not fit the model: a tensor has another {what}; nothing was loaded.",
                parameter=name,
                expected=expected,
                got=got,
                remedy="load it into the model it was saved from, or fix the model's configuration",
                code="K146",
            )
    if floats and not cast and not _holds(dtype, entry.dtype):
        raise rounding_error(name, dtype, entry.dtype)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of `other` is one of `dtype`."""
    ours, theirs = torch.finfo(dtype), torch.finfo(other)
    return ours.eps <= theirs.eps and ours.max >= theirs.max


def check_tied(name: str, first: tuple[str, torch.Tensor], other: tuple[str, torch.Tensor]) -> None:
    """Refuse several values of a parameter that is one in the model.

    Args:
        name: of the parameter.
        first, other: its names in the files, and what is kept there.

    Raises:
        CheckpointError: the values differ.
    """
    if first[1].dtype != other[1].dtype or bytes_of(first[1]) != bytes_of(other[1]):
        raise CheckpointError(
            "A parameter is tied in the model, and files hold several values of it; nothing was loaded.",
            parameter=name,
            expected=f"the same values under {first[0].removeprefix(MODEL)} and {other[0].removeprefix(MODEL)}",
            remedy="make the model without tying these (tie_word_embeddings=False, say)",
            code="K115",
        )
