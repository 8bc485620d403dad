"""Whether values to load fit the model: their names, shapes and dtypes, in state dicts and in files.

Values of state dicts are copied as PyTorch copies them, whatever their dtype. Files are checked more strictly: a cast
that would round values needs `cast=True`, which is the default of `load_safetensors` alone (docs/decisions/0022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import as_bits
from ..errors import CheckpointError, class_and_value

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that may be cast to each other. 8-bit floats are not among them: they have their own scales."""


def check_shape(name: str, expected: Sequence[int], got: Sequence[int]) -> None:
    """Check that a value to load has the shape of the tensor `name`.

    Raises:
        CheckpointError: the shapes differ.
    """
    if tuple(got) != tuple(expected):
        raise _mismatch("shape", name, tuple(expected), tuple(got))


def check_value(name: str, value: Any, filled: torch.Tensor | None) -> None:
    """Check that a value to load is a tensor, or like one; without elements of its own it would load arbitrary memory.

    Args:
        filled: the memory of which the value's part is to fill some; None if torch copies the value itself.

    Raises:
        CheckpointError: it is not.
    """
    got = None
    if not hasattr(value, "__torch_function__"):
        got = class_and_value(value)
    elif filled is not None and not filled.is_meta and getattr(value, "is_meta", False):
        got = "a tensor on the meta device"
    elif filled is not None and getattr(value, "layout", torch.strided) is not torch.strided:
        got = f"a tensor of layout {value.layout}"
    if got is not None:
        raise CheckpointError(
            "A value to load cannot be copied into the model; nothing was loaded.",
            parameter=name,
            expected="a dense tensor with memory",
            got=got,
            remedy="pass tensors: torch.as_tensor(array), or value.to_dense(); a state on meta has no values",
            topic="checkpoint-does-not-fit",
        )


def check_cast(name: str, dtype: torch.dtype, saved: torch.dtype, cast: bool) -> None:
    """Check that saved values may be cast to a tensor's dtype.

    Args:
        name, dtype: the tensor to fill.
        saved: the dtype in the files.
        cast: whether floating-point values may be rounded, or overflow to infinity.

    Raises:
        CheckpointError: the dtypes differ and are not both floating-point, or the cast would round values.
    """
    floats = dtype in _FLOATS and saved in _FLOATS
    if dtype != saved and not floats:
        raise _mismatch("dtype", name, dtype, saved)
    if floats and not cast and torch.promote_types(dtype, saved) != dtype:
        raise rounding_error(name, dtype, saved)


def _mismatch(aspect: str, name: str, expected: object, got: object) -> CheckpointError:
    return CheckpointError(
        f"Values to load do not fit the model: a tensor has a different {aspect}; nothing was loaded.",
        parameter=name,
        expected=expected,
        got=got,
        remedy="load them into the model they were saved from, or fix the model's configuration",
        topic="checkpoint-does-not-fit",
    )


def rounding_error(name: str, dtype: torch.dtype, saved: torch.dtype) -> CheckpointError:
    """The error for values that the dtype of the tensor to fill cannot represent exactly."""
    return CheckpointError(
        f"Loading {saved} into {dtype} would round values; nothing was loaded.",
        parameter=name,
        expected=f"{dtype}, as in the model, or a floating-point dtype that converts to it exactly",
        got=saved,
        remedy="pass cast=True to allow rounding, or load into a model of the saved dtype",
        topic="checkpoint-does-not-fit",
    )


def check_names(files: str, missing: Sequence[str], unexpected: Sequence[str], remedy: str) -> None:
    """Check that the names in the files are those of the model.

    Args:
        files: the subject of the message and its verb, such as "A checkpoint does".
        missing: names that the files lack.
        unexpected: names that neither the model nor its optimizers have.

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


def _listed(names: Sequence[str], description: str) -> str:
    return f"{len(names)} {description}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor to fill has memory of its own for each element.

    Raises:
        CheckpointError: it is an expanded tensor.
    """
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise CheckpointError(
            "Elements of a tensor share memory, so values cannot be loaded into it; nothing was loaded.",
            parameter=name,
            got="an expanded tensor",
            remedy="give the tensor its own memory: tensor.clone()",
        )


def check_tied(name: str, first: tuple[str, torch.Tensor], other: tuple[str, torch.Tensor]) -> None:
    """Check that the files have the same values under two names of a tied parameter.

    Args:
        name: the parameter.
        first, other: its names in the files, and the values there.

    Raises:
        CheckpointError: the values differ.
    """
    if first[1].dtype != other[1].dtype or not torch.equal(as_bits(first[1]), as_bits(other[1])):
        raise CheckpointError(
            "A parameter is tied in the model, but the files hold different values for it; nothing was loaded.",
            parameter=name,
            expected=f"the same values under {first[0]} and {other[0]}",
            remedy="build the model without tying these (for example with tie_word_embeddings=False)",
            topic="tied-weights",
        )
