"""`FlatParameter`: all parameters of a wrapper instance in a single 1-D tensor, of which each rank has a slice.

It is registered on the wrapped module, and is the only tensor that an optimizer updates; modules inside have stand-ins
with the shapes of their parameters. This is the wrapper's form with use_orig_params=False.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from ..layout import Layout, Slot
from ..torch_private.local_tensor import same_memory
from .changes import OWNER_KEY, Untouched
from .local import LocalForm, memory_of
from .member import PART_KEY, Member
from .messages import replaced_by_another
from .placeholders import stand_in_for

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


class FlatParameterForm(LocalForm):
    """See the module's docstring, and `Form`.

    Attributes:
        flat: the `FlatParameter`, a view of the shard; None until it is registered.
    """

    keeps_originals = False
    follows = True
    flat: Any = None
    _holder: weakref.ref[nn.Module] | None = None

    @property
    def holder(self) -> nn.Module | None:
        """The module that the flat parameter is registered on."""
        return self._holder() if self._holder is not None else None

    def register(self, members: Sequence[Member], shard: torch.Tensor, holder: nn.Module) -> nn.Parameter:
        """Register the flat parameter on `holder`, the wrapped module, and stand-ins on the modules."""
        existing = holder._parameters.get(ATTRIBUTE)
        self._holder = weakref.ref(holder)
        if existing is not None and existing.numel() == shard.numel() and not existing.__dict__.get(OWNER_KEY):
            existing.data = shard
            describe_layout(existing, self.layout, self.axes.shard.rank)
            self.flat = existing
        else:
            requires_grad = any(member.sharded.requires_grad for member in members)
            self.flat = FlatParameter(shard, self.layout, self.axes.shard.rank, requires_grad)
        self.flat.__dict__[OWNER_KEY] = members[0].sharded.__dict__.get(OWNER_KEY)
        holder._parameters[ATTRIBUTE] = self.flat
        for member in members:
            member.stand_in = stand_in_for(member, shard.dtype, shard.device)
            moved = [place if place.outside else place.moved_outside() for place in member.places]
            member.places = [place for place in moved if place is not None]
            for place in member.places:
                place.show(member.stand_in)
        flat: nn.Parameter = self.flat
        return flat

    def unregister(self) -> None:
        """Take the flat parameter off its module."""
        if (holder := self.holder) is not None:
            holder._parameters.pop(ATTRIBUTE, None)

    def register_again(self) -> None:
        """Register the flat parameter again after `unregister`."""
        if (holder := self.holder) is not None:
            holder._parameters[ATTRIBUTE] = self.flat

    def move_to(self, holder: nn.Module) -> None:
        """Register the flat parameter on a different module (a copy)."""
        self._holder = weakref.ref(holder)
        self.register_again()

    def point(self, members: Sequence[Member], shard: torch.Tensor) -> None:
        super().point(members, shard)
        flat = self.flat
        if flat is None:
            return
        if not same_memory(flat, shard) or shard.is_meta or flat.dtype != shard.dtype:
            flat.data = shard
        flat._local_shard = flat.data
        for member in members:
            stand_in = stand_in_for(member, shard.dtype, shard.device)
            for place in member.places:
                if place.shown() is member.stand_in:
                    place.show(stand_in)
            member.stand_in = stand_in

    def untouched(self, members: Sequence[Member], shard: torch.Tensor) -> Untouched:
        objects = [(place.reader, member.stand_in) for member in members for place in member.places]
        if (holder := self.holder) is not None:
            objects.append((partial(holder._parameters.get, ATTRIBUTE), self.flat))
        return Untouched(objects, memory_of(self.flat, shard))

    def counters(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        return [self.flat]

    def reassigned(self, members: Sequence[Member], shard: torch.Tensor) -> bool:
        return self.flat.data_ptr() != shard.data_ptr()

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        for member in members:
            if any(place.shown() is not member.stand_in for place in member.places):  # the user replaced a stand-in
                raise self._not_fitting(member, member.places[0].registered())
        holder = self.holder
        flat = holder._parameters.get(ATTRIBUTE) if holder is not None else self.flat
        if not isinstance(flat, nn.Parameter) or flat.numel() != self.layout.shard_numel or flat.dim() != 1:
            names = ", ".join(member.name for member in members)
            expected = f"a Parameter of shape {(self.layout.shard_numel,)}"
            raise replaced_by_another(names, self.axes.global_rank, expected, flat)
        if flat is not self.flat:
            flat.__dict__.update(self.flat.__dict__)
            self.flat = flat
        whole = flat.detach()
        step = whole.stride(0) if whole.numel() else 1
        return [
            whole.as_strided(
                m.part.shape, tuple(s * step for s in m.part.stride), whole.storage_offset() + m.part.offset * step
            )
            for m in members
        ]

    def follow(self, members: Sequence[Member]) -> None:
        requires_grad = self.flat.requires_grad
        for member in members:
            if member.sharded.requires_grad != requires_grad:
                member.sharded.requires_grad_(requires_grad)

    def copied(self) -> Self:
        copy = super().copied()
        copy.flat = self.flat  # until the copy registers its own
        return copy
