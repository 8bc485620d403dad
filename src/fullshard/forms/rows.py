"""The forms of `fully_shard`: each parameter appears as a sharded tensor.

- **rows**: it is split along a dim as by `torch.chunk`, and appears as a DTensor;
- **runs**: parameters lie back to back and are cut anywhere; each appears as a `FlatShard`, a run of its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..layout import Part, Slot
from ..torch_private.local_tensor import around_local, keep_mesh, local_of, local_part, same_memory, set_local
from .changes import Untouched
from .flat_shard import FlatShard, Run
from .form import Form
from .member import NAME_KEY, Member, attributes_of, hooks_onto
from .messages import kind_and_shape, replaced_by_another
from .row_shard import DATA_DIMS_KEY, as_row_shard, full_of


class RowsForm(Form):
    """See the module's docstring, and `Form`. The layout is of kind rows."""

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

    def _check_replacement(self, member: Member, shown: Any) -> None:
        if not self._alike(member.sharded, shown):
            raise replaced_by_another(member.name, self.axes.global_rank, kind_and_shape(member.sharded), shown)

    def _alike(self, sharded: Any, shown: Any) -> bool:
        """Whether `shown` is a Parameter that is split like a sharded one."""
        if not isinstance(shown, nn.Parameter) or not isinstance(shown, DTensor) or shown.shape != sharded.shape:
            return False
        return shown.device_mesh == sharded.device_mesh and shown.placements == sharded.placements

    def _point(self, member: Member, local: torch.Tensor) -> None:
        if not same_memory(local_of(member.sharded), local) or local.is_meta:
            set_local(member.sharded, local)
        self._dress(member, member.sharded)
        member.local = local_of(member.sharded)


class RunsForm(RowsForm):
    """See the module's docstring, and `Form`. The layout is flat."""

    def take(self, slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
        local.copy_(Run.of(self.layout, slot, self.axes).cut(local_part(original)))

    def _dress(self, member: Member, parameter: nn.Parameter) -> None:
        parameter.__dict__[NAME_KEY] = member.name

    def run_of(self, member: Member) -> Run:
        """The elements of a member on each rank."""
        return Run.of(self.layout, member.slot, self.axes)

    def _plain_view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        return FlatShard(local, self.run_of(member))

    def whole(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta:
            return torch.empty(member.shape, dtype=local.dtype, device="meta")
        return FlatShard(local.detach(), self.run_of(member)).full_tensor()

    def cut(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        return self.run_of(member).cut(whole.detach())

    def _alike(self, sharded: Any, shown: Any) -> bool:
        if not isinstance(shown, FlatShard) or not isinstance(shown, nn.Parameter) or shown.shape != sharded.shape:
            return False
        return shown._run.same_as(sharded._run)
