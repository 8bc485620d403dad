"""The form of a bucket's parameters: how they appear while their unit is sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from ..dtypes import dtype_name
from ..layout import Layout, Part, Slot
from ..mesh import MeshAxes
from .changes import Untouched
from .full import Full, PlainFull
from .member import SUCCESSOR_KEY, Member, identity_of
from .messages import partly_on_meta, several_dtypes, tied_after_sharding


class Form(ABC):
    """How the parameters of a bucket appear while sharded. One object per bucket.

    A **local** is this rank's part of a member, in the shape of `member.part`, in any buffer laid out as the shard
    (the shard itself, a reduced gradient, optimizer state). The tensor that users see for it is **shown**.

    Args:
        layout: the bucket's plan.
        axes: the mesh.
        apart: whether shards are on a different device than the mesh (offloading).

    Attributes:
        plain: whether the shard is a plain 1-D tensor.
        keeps_originals: whether the original Parameter objects become the sharded parameters.
        follows: whether `follow` does anything.
        shows_locals: whether users see locals themselves, as plain parameters. Then the shard's own version counter
            does not count all changes, but `counters` and `reassigned` detect them; a parameter of which this rank has
            no elements gets no `.grad`; and one whose gradients were accumulated without sync gets a `.grad` of zeros,
            as there is no other way to notice that the user discarded those gradients.
    """

    plain = True
    keeps_originals = False
    follows = False
    shows_locals = False

    def __init__(self, layout: Layout, axes: MeshAxes, apart: bool = False) -> None:
        self.layout, self.axes, self.apart = layout, axes, apart

    @abstractmethod
    def take(self, slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
        """Copy this rank's `part` of the original's values into `local`."""

    @abstractmethod
    def make(self, member: Member, original: nn.Parameter) -> nn.Parameter:
        """Create a member's sharded parameter over `member.local`, which replaces `original`."""

    @abstractmethod
    def view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """The shown tensor (not a Parameter) of a local; shares memory."""

    @abstractmethod
    def local(self, member: Member, shown: torch.Tensor) -> torch.Tensor:
        """The local inside a shown tensor; shares memory."""

    @abstractmethod
    def whole(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """The whole value from every rank's local, over all kinds of parallelism. Collective."""

    @abstractmethod
    def cut(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, as a local; shares memory with `whole` where possible."""

    @abstractmethod
    def untouched(self, members: Sequence[Member], shard: torch.Tensor) -> Untouched:
        """A check that the sharded parameters, their storage and dtype are still those that this form created."""

    def counters(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        """Tensors whose version counters count in-place changes, besides the shard itself."""
        return ()

    def reassigned(self, members: Sequence[Member], shard: torch.Tensor) -> bool:
        """Whether sharded parameters have memory outside of `shard`. Called only if the form `shows_locals`."""
        return False

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        """Adopt the objects with which users replaced sharded parameters: all, or none.

        Returns:
            The current locals.

        Raises:
            ConfigError: a replacement that is not this parameter's shard (wrong shape, mesh, placement or type), or a
                different parameter of the bucket; or only some of the locals are on meta, or they have several dtypes.
        """
        rank, parameters = self.axes.global_rank, [member.sharded for member in members]
        for index, member in enumerate(members):
            for place in member.places:
                shown = place.shown()
                if shown is parameters[index] or shown is member.unsharded:
                    continue
                for other, parameter in zip(members, parameters, strict=True):
                    if other is not member and parameter is shown:
                        raise tied_after_sharding(member.name, rank, other.name)
                self._check_replacement(member, shown)
                parameters[index] = shown
        parts = [*map(self._adopted, members, parameters)]
        meta = [member.name for member, local in zip(members, parts, strict=True) if local.is_meta]
        if meta and len(meta) < len(parts):
            raise partly_on_meta(meta)
        dtypes = [dtype_name(local.dtype) for local in parts]
        if len(set(dtypes)) > 1:
            raise several_dtypes([*zip([member.name for member in members], dtypes, strict=True)], rank)
        for member, parameter in zip(members, parameters, strict=True):
            if parameter is not member.sharded:
                parameter.__dict__.update(identity_of(member.sharded))
                member.sharded = parameter
        return parts

    @abstractmethod
    def _check_replacement(self, member: Member, shown: Any) -> None:
        """Check that `shown` can replace a member's sharded parameter, and change nothing; see `adopt`."""

    def _adopted(self, member: Member, parameter: nn.Parameter) -> torch.Tensor:
        """The local in a sharded parameter or its replacement, whose memory users may have replaced; see `adopt`."""
        return self.local(member, parameter)

    def point(self, members: Sequence[Member], shard: Any) -> None:
        """Make the sharded parameters views of `shard`, which has the right values already."""
        for member in members:
            part = member.part
            local = shard.as_strided(part.shape, part.stride, shard.storage_offset() + part.offset)
            self._point(member, local)

    @abstractmethod
    def _point(self, member: Member, local: torch.Tensor) -> None:
        """Make a sharded parameter show `local`, a view of the shard."""

    def follow(self, members: Sequence[Member]) -> None:  # noqa: B027 - forms need not
        """Copy the `requires_grad` that users set on shown tensors to the members."""

    def succeed(self, old: Member, new: Member) -> None:
        """Let `new`, of this form, replace `old` of a different bucket: keep the object, or record its successor."""
        old.sharded.__dict__[SUCCESSOR_KEY] = new.sharded

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        """The bucket's full buffers."""
        return PlainFull(self.layout, members, device, dtype)

    def copied(self) -> Self:
        """A form for a copy of the bucket, without this form's state."""
        return type(self)(self.layout, self.axes, self.apart)
