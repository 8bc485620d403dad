"""What may take the place of what: names, shapes and dtypes of values to load, for state dicts and for files.

State dicts are copied in as PyTorch copies them, whatever the dtype; files are not: what would lose digits is refused
unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dtypes import as_bits
from ..errors import CheckpointError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What may be cast into each other: 8-bit floats have scales of their own."""


def check_shape(name: str, expected: Sequence[int], got: Sequence[int] | None) -> None:
    """Refuse a value of another shape than that of the tensor `name`, which is `expected`.

    Raises:
        CheckpointError: it is.
    """
    if got is None or tuple(got) != tuple(expected):
        raise CheckpointError(
            "Values to load do not fit the model: a tensor has a different shape; nothing was loaded.",
            parameter=name,
            expected=tuple(expected),
            got=None if got is None else tuple(got),
            remedy="load them into the model they were saved from, or fix the model's configuration",
            topic="checkpoint-does-not-fit",
        )


def check_cast(name: str, dtype: torch.dtype, saved: torch.dtype, cast: bool) -> None:
    """Refuse a dtype that does not become the tensor's.

    Args:
        name, dtype: the tensor to fill.
        saved: what the files have.
        cast: whether floating-point values may be rounded, or become infinite.

    Raises:
        CheckpointError: it does not.
    """
    floats = dtype in _FLOATS and saved in _FLOATS
    if dtype != saved and not floats:
        raise CheckpointError(
            "Values to load do not fit the model: a tensor has a different dtype; nothing was loaded.",
            parameter=name,
            expected=dtype,
            got=saved,
            remedy="load them into the model they were saved from, or fix the model's configuration",
            topic="checkpoint-does-not-fit",
        )
    if floats and not cast and not _holds(dtype, saved):
        raise rounding_error(name, dtype, saved)


def rounding_error(name: str, dtype: torch.dtype, saved: torch.dtype) -> CheckpointError:
    """What to raise for values whose digits the tensor to fill cannot hold."""
    return CheckpointError(
        f"Loading {saved} into {dtype} would round values; nothing was loaded.",
        parameter=name,
        expected=f"{dtype}, as the model has it, or floating-point numbers of fewer digits",
        got=saved,
        remedy="pass cast=True if rounding is wanted, or load into a model of the saved dtype",
        topic="checkpoint-does-not-fit",
    )


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of `other` is one of `dtype`."""
    ours, theirs = torch.finfo(dtype), torch.finfo(other)
    return ours.eps <= theirs.eps and ours.max >= theirs.max


def check_names(files: str, missing: Sequence[str], unexpected: Sequence[str], remedy: str) -> None:
    """Refuse files whose names are not the model's.

    Args:
        files: what they are.
        missing: names that they lack.
        unexpected: names that the model lacks, or its optimizers.

    Raises:
        CheckpointError: there are any.
    """
    if missing or unexpected:
        raise CheckpointError(
            f"{files} not fit the model: names differ; nothing was loaded.",
            parameter=(*missing, *unexpected)[0],
            expected=_listed(missing, "that the files lack") if missing else None,
            got=_listed(unexpected, "that the model and its optimizers lack") if unexpected else None,
            remedy=f"{remedy}; or pass strict=False to leave these as they are",
            topic="checkpoint-does-not-fit",
        )


def _listed(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def check_tied(name: str, first: tuple[str, torch.Tensor], other: tuple[str, torch.Tensor]) -> None:
    """Refuse several values of a parameter that is one in the model.

    Args:
        name: of the parameter.
        first, other: its names in the files, and what is kept there.

    Raises:
        CheckpointError: the values differ.
    """
    if first[1].dtype != other[1].dtype or not torch.equal(as_bits(first[1]), as_bits(other[1])):
        raise CheckpointError(
            "A parameter is tied in the model, and files hold several values of it; nothing was loaded.",
            parameter=name,
            expected=f"the same values under {first[0]} and {other[0]}",
            remedy="make the model without tying these (tie_word_embeddings=False, say)",
            topic="tied-weights",
        )
