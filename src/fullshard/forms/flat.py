"""A `FlatParameter` over the whole shard, registered on the wrapped module; modules inside have stand-ins with shapes.

The wrapper's form with use_orig_params=False. The flat parameter is the only tensor that an optimizer updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from ..torch_private.local_tensor import same_memory
from .changes import OWNER_KEY, Untouched
from .flat_parameter import ATTRIBUTE, FlatParameter, describe_layout
from .local import LocalForm, memory_of
from .member import Member
from .messages import not_its_flat_shard
from .placeholders import stand_in_for


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
            raise not_its_flat_shard(names, self.axes.global_rank, self.layout.shard_numel, flat)
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
