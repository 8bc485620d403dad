"""Fake tensors: shapes, dtypes and devices without memory, so that a model of any size runs on one small machine.

Public alternative: the meta device, where `scaled_dot_product_attention` takes the path that stores all scores, and
where programs that name a device fail. Test: tests/planner/test_profile.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """A context in which every new tensor is fake. What an operation raises is not also logged, with a traceback."""
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        _LOG.disabled = was_disabled


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one."""
    return type(tensor) is FakeTensor


def forget_value(leaf: object) -> None:
    """Drop the known value (`torch.tensor([3.0])`) of a fake tensor and of its views, so that only shapes remain.

    torch runs operations on known values for real, collectives included.
    """
    if type(leaf) is FakeTensor and leaf.constant is not None:
        leaf.fake_mode.fake_tensor_converter.invalidate_constant_aliases(leaf.constant)


class Remembered:
    """Runs operations on fake tensors, and faster where the same one ran before: a model repeats its layers.

    Results that torch took from its own cache of shapes are remembered, under a key at least as specific as torch's,
    and built as torch builds them.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of `func(*args, **kwargs)`."""
        settings = torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()
        try:
            key = func, settings, _key(args), _key(kwargs) if kwargs else None
            build = self._results.get(key)
        except _Unknown:
            return func(*args, **kwargs)
        if build is not None:
            return build(args)
        before = _looked_up()
        result = func(*args, **kwargs)
        if func is _UNSAFE_VIEW or _looked_up() == (before[0] + 1, *before[1:]):
            build = self._builder(func, args, result)
            if build is not None:
                self._results[key] = build
        return result

    def _builder(self, func: Any, args: Any, result: Any) -> Callable[[Any], Any] | None:
        """A function of the arguments that builds results like this one; None if it has values."""
        if isinstance(result, tuple):
            builders = [self._builder(func, args, each) for each in result]
            return None if None in builders else lambda args: tuple(build(args) for build in builders if build)
        if result is None:
            return lambda args: None
        if type(result) is not FakeTensor or result.is_conj() or result.is_neg():
            return None
        changed = next((i for i, arg in enumerate(args) if arg is result), None)
        if changed is not None:
            return lambda args: args[changed]
        mode, shape, stride, offset = self._mode, result.shape, result.stride(), result.storage_offset()
        dtype, device, requires_grad = result.dtype, result.fake_device, result.requires_grad
        is_view = func.is_view or func is _UNSAFE_VIEW
        base = next((i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)), None) if is_view else None

        def build(args: Any) -> torch.Tensor:
            with in_kernel_invocation_manager(mode):
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
                if base is not None:
                    meta.set_(args[base].untyped_storage(), offset, shape, stride)
            return FakeTensor(mode, meta, device)

        return build


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view whose schema does not declare it as one; torch's cache leaves such operations out."""


class _Unknown(Exception):
    """An argument that its shape and settings do not identify."""


_PLAIN = frozenset(
    [int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)


def _key(value: Any) -> Any:
    """All of an argument that an operation's result on fake tensors depends on."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _Unknown
        flags = value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference()
        place = value.storage_offset(), value.untyped_storage().nbytes(), value.fake_device
        return value.dtype, value.shape, value.stride(), place, flags
    if kind in _PLAIN:
        return kind, value
    if kind in (tuple, list, torch.Size):
        return kind, *map(_key, value)
    if kind is dict:
        return tuple((name, _key(item)) for name, item in value.items())
    raise _Unknown


def _looked_up() -> tuple[int, int, int]:
    """How often torch found an operation in its cache, did not find it, and bypassed the cache."""
    return FakeTensorMode.cache_hits, FakeTensorMode.cache_misses, sum(FakeTensorMode.cache_bypasses.values())
