"""Runs: parameters lie back to back and are cut anywhere; each appears as a `FlatShard`, a run of its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..layout import Part, Slot
from .flat_shard import FlatShard
from .member import NAME_KEY, Member
from .messages import replaced_by_another
from .rows import RowsForm
from .run import Run, take_run


class RunsForm(RowsForm):
    """See the module's docstring, and `Form`."""

    def take(self, slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
        take_run(slot, part, original, local)

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

    def _check(self, member: Member, shown: Any) -> None:
        expected: Any = member.sharded
        if isinstance(shown, FlatShard) and isinstance(shown, nn.Parameter) and shown.shape == expected.shape:
            if shown._run.same_as(expected._run):
                return
        raise replaced_by_another(member.name, self.axes.global_rank, member.sharded, shown)
