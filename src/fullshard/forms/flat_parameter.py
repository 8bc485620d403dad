"""`FlatParameter`: all parameters of a wrapper instance in a single 1-D tensor, of which each rank has a slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..layout import Layout, Slot
from .member import PART_KEY

ATTRIBUTE = "_flat_param"
"""The name under which an instance's wrapped module registers it; programs and checkpoints rely on it."""


@dataclass(frozen=True)
class FlatParamShardMetadata:
    """A rank's part of a `FlatParameter`, with an entry for each parameter of which the rank has elements.

    Attributes:
        param_names: names relative to the wrapped module.
        param_shapes: shapes of the whole parameters.
        param_strides: strides of the whole parameters.
        param_contiguities: whether each is contiguous in the usual (row-major) sense.
        param_numels: elements of each whole parameter.
        param_offsets: (first, last) element on this rank, both inclusive, in the flattened parameter.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class _Meta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_Meta):
    """A 1-D `nn.Parameter` over a unit's whole shard: what optimizers see with `use_orig_params=False`.

    As in PyTorch, the constructor returns a plain `nn.Parameter` (for which optimizers have fast paths) with the
    attributes below; `isinstance` recognizes it.

    Args:
        local: [shard_numel], a view of the unit's shard.
        layout: the unit's plan, flat.
        rank: this process's index on the shard axis.
        requires_grad: of all its parameters.

    Attributes:
        _unpadded_unsharded_size, _padded_unsharded_size, _sharded_size: `torch.Size`s without and with the padding
            at the end, and of this rank's slice. Each parameter begins at a multiple of 16 bytes.
        _num_params: number of parameters.
        _fqns, _shapes, _strides, _contiguities, _numels: of each parameter, in order.
        _numels_with_padding: of each parameter, including the padding that follows it.
        _offsets: first element of each parameter in the whole flat parameter.
        _shard_numel_padded: padding elements at the end of this rank's slice.
        _local_shard: this tensor.
        _fsdp_flattened: True; Lightning checks for it.
    """

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout, rank: int, requires_grad: bool = True) -> FlatParameter:
        self: Any = nn.Parameter(local, requires_grad=requires_grad)
        self._is_flat_param = self._fsdp_flattened = True
        describe_layout(self, layout, rank)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` uses the arguments."""


def describe_layout(parameter: Any, layout: Layout, rank: int) -> None:
    """Write the public metadata of `FlatParameter` onto `parameter`."""
    slots = sorted(layout.slots, key=lambda slot: slot.offset)
    ends = [*(slot.offset for slot in slots[1:]), max((s.offset + s.numel for s in slots), default=0)]
    parameter.__dict__[PART_KEY] = "a FlatParameter"
    parameter._num_params = len(slots)
    parameter._fqns = tuple(slot.name for slot in slots)
    parameter._shapes = tuple(torch.Size(slot.shape) for slot in slots)
    parameter._strides = tuple(slot.stride for slot in slots)
    parameter._contiguities = tuple(is_contiguous(slot) for slot in slots)
    parameter._numels = tuple(slot.numel for slot in slots)
    parameter._offsets = tuple(slot.offset for slot in slots)
    parameter._numels_with_padding = tuple(end - slot.offset for slot, end in zip(slots, ends, strict=True))
    parameter._unpadded_unsharded_size = torch.Size([ends[-1] if slots else 0])
    parameter._padded_unsharded_size = torch.Size([layout.gathered_numel])
    parameter._sharded_size = torch.Size([layout.shard_numel])
    numel = max(0, min(layout.shard_numel, parameter._unpadded_unsharded_size[0] - rank * layout.shard_numel))
    parameter._shard_numel_padded = layout.shard_numel - numel
    parameter._local_shard = parameter.data


def is_contiguous(slot: Slot) -> bool:
    """Whether a parameter lies in memory in the order of its dims."""
    return tuple(slot.spec.order) == tuple(range(len(slot.shape)))


def shard_metadata(layout: Layout, rank: int) -> FlatParamShardMetadata:
    """The metadata of `rank`'s part of a flat layout."""
    entries: Sequence[tuple[Slot, int, int]] = [
        (slot, part.start, part.start + part.numel - 1)
        for slot in sorted(layout.slots, key=lambda slot: slot.offset)
        if (part := layout.part(slot, rank)).numel
    ]
    return FlatParamShardMetadata(
        tuple(slot.name for slot, _, _ in entries),
        tuple(torch.Size(slot.shape) for slot, _, _ in entries),
        tuple(slot.stride for slot, _, _ in entries),
        tuple(is_contiguous(slot) for slot, _, _ in entries),
        tuple(slot.numel for slot, _, _ in entries),
        tuple((first, last) for _, first, last in entries),
    )
