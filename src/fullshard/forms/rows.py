"""Rows: every parameter is split along a dim as by `torch.chunk`, and appears as a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..layout import Layout, Part, Slot
from ..mesh import MeshAxes
from ..torch_private.local_tensor import around_local, keep_mesh, local_of, local_part, same_memory, set_local
from .changes import Untouched
from .full import Full, PlainFull
from .member import NAME_KEY, SUCCESSOR_KEY, Member, attributes_of, hooks_onto, identity_of
from .messages import replaced_by_another, tied_after_sharding
from .row_shard import DATA_DIMS_KEY, as_row_shard, full_of


class RowsForm:
    """See the module's docstring, and `Form`.

    Args:
        layout: of kind rows.
        axes: the mesh.
        apart: whether shards are on a different device than the mesh (offloading).
    """

    plain = True
    keeps_originals = False
    counts = False
    follows = False
    gives_empty = True
    shows_kept = False

    def __init__(self, layout: Layout, axes: MeshAxes, apart: bool = False) -> None:
        self.layout, self.axes, self.apart = layout, axes, apart

    def take(self, slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
        local.copy_(local_part(original).narrow(slot.spec.dim, part.start, part.shape[slot.spec.dim]))

    def make(self, member: Member, original: nn.Parameter) -> nn.Parameter:
        shown = self._plain_view(member, member.local)
        parameter = nn.Parameter(shown, requires_grad=original.requires_grad)
        keep_mesh(parameter, shown)
        parameter.__dict__.update(attributes_of(original, alike=member.local))
        self._dress(member, parameter)
        hooks_onto(parameter, original)
        # This view itself: it shares the shard's version counter, which counts writes through `to_local()`.
        set_local(parameter, member.local)
        return parameter

    def _dress(self, member: Member, parameter: nn.Parameter) -> None:
        """Set the class and attributes that users' operations may have removed from a sharded parameter."""
        as_row_shard(parameter)
        parameter.__dict__[NAME_KEY] = member.name
        parameter.__dict__[DATA_DIMS_KEY] = self.axes.mesh.ndim

    def view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        return as_row_shard(self._plain_view(member, local))

    def _plain_view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """A local as a DTensor of torch's own class (subclasses: as they show it)."""
        if self.apart and local.device != self.axes.device and not local.is_meta:
            # `from_local` would move it to the mesh's device.
            stand_in = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=self.axes.device)
            rows = self._rows(member, stand_in)
            set_local(rows, local)
            return around_local(rows)
        return self._rows(member, local)

    def _rows(self, member: Member, local: torch.Tensor) -> DTensor:
        if member.split is not None:
            return member.split.sharded(local)
        slot = member.slot
        placement = Shard(slot.spec.dim)
        placements = (placement,) if self.axes.replicate is None else (Replicate(), placement)
        # With shape and stride, because chunks may be uneven; without a check, so without communication.
        return DTensor.from_local(
            local, self.axes.mesh, placements, run_check=False, shape=torch.Size(slot.shape), stride=slot.stride
        )

    def local(self, member: Member, shown: torch.Tensor) -> torch.Tensor:
        return local_of(shown)

    def whole(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta:
            return torch.empty(member.shape, dtype=local.dtype, device="meta")
        if self.apart:  # collectives need the mesh's device
            local = local.to(self.axes.device)
        shown: Any = self.view(member, local.detach())
        return full_of(shown)

    def cut(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        shown: Any = member.sharded
        # src_data_rank=None: every rank has the whole tensor and takes its own part, without communication.
        cut: Any = distribute_tensor(whole.detach(), shown.device_mesh, shown.placements, src_data_rank=None)
        return local_of(cut)

    def untouched(self, members: Sequence[Member], shard: torch.Tensor) -> Untouched:
        inside = [(partial(local_of, member.sharded), member.local) for member in members]
        return Untouched([*inside, *[(place.reader, member.sharded) for member in members for place in member.places]])

    def counters(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        return ()

    def reassigned(self, members: Sequence[Member], shard: torch.Tensor) -> bool:
        return False  # assignments to `.data` are recorded (`assign_data`)

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        for member in members:
            for place in member.places:
                shown = place.shown()
                if shown is not member.sharded and shown is not member.unsharded:
                    refuse_tie(member, shown, members, self.axes.global_rank)
                    self._check(member, shown)
                    shown.__dict__.update(identity_of(member.sharded))
                    member.sharded = shown
        return [local_of(member.sharded) for member in members]

    def _check(self, member: Member, shown: Any) -> None:
        expected: Any = member.sharded
        if isinstance(shown, nn.Parameter) and isinstance(shown, DTensor) and shown.shape == expected.shape:
            if shown.device_mesh == expected.device_mesh and shown.placements == expected.placements:
                return
        raise replaced_by_another(member.name, self.axes.global_rank, member.sharded, shown)

    def point(self, members: Sequence[Member], shard: torch.Tensor) -> None:
        for member in members:
            part = member.part
            local = shard.as_strided(part.shape, part.stride, shard.storage_offset() + part.offset)
            if not same_memory(local_of(member.sharded), local) or shard.is_meta:
                set_local(member.sharded, local)
            self._dress(member, member.sharded)
            member.local = local_of(member.sharded)

    def follow(self, members: Sequence[Member]) -> None:
        """Do nothing: users see the members' sharded parameters themselves."""

    def succeed(self, old: Member, new: Member) -> None:
        old.sharded.__dict__[SUCCESSOR_KEY] = new.sharded

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        return PlainFull(self.layout, members, device, dtype)

    def copied(self) -> RowsForm:
        return type(self)(self.layout, self.axes, self.apart)


def refuse_tie(member: Member, shown: Any, members: Sequence[Member], rank: int) -> None:
    """Raise if `shown`, in the place of `member`, is a different parameter of the same bucket.

    Raises:
        ConfigError: names both.
    """
    other = next((other for other in members if other is not member and shown is other.sharded), None)
    if other is not None:
        raise tied_after_sharding(member.name, rank, other.name)
