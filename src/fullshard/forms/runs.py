"""Runs: parameters lie back to back and are cut anywhere; each appears as a `FlatShard`, a run of its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..layout import Part, Slot
from ..torch_private.local_tensor import local_part
from .flat_shard import FlatShard, Run
from .member import NAME_KEY, Member
from .rows import RowsForm


class RunsForm(RowsForm):
    """See the module's docstring, and `Form`."""

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
