"""Reducing a unit's gradients: all its buckets together, over the shard axis, then over the replicate axis."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm import Comm
from ..events import stream
from ..torch_private.profiler import begin_range, no_range, recording
from .gradients import Gradients, GradState
from .scaling import MEAN, Rules, Scaling, Total
from .unit import Unit


def has_gradients(unit: Unit) -> bool:
    """Whether gradients wait to be reduced: autograd's, or collected ones."""
    return any([g.state is GradState.PENDING or g.waiting() for g in unit.gradients])


def collect(unit: Unit, everything: bool) -> None:
    """Move autograd's gradients into the reduction buffers (no communication).

    Args:
        everything: buckets that train and got no gradient take part with zeros, as other ranks may have some: all
            trainable buckets of a unit are reduced once one is.
    """
    ledger = unit.ledger
    for gradients in unit.gradients:
        takes_part = everything and gradients.state is GradState.NONE and gradients.bucket.trains
        if takes_part or gradients.waiting():
            ledger.reducing += gradients.collect()
    if ledger.gathered + ledger.staging + ledger.reducing > ledger.peak:
        ledger.note()
    if stream.listeners:
        unit.emit("collect", sum(g.live_bytes for g in unit.gradients))


def _scaling(gradients: Gradients, comm: Comm, rules: Rules, total: Total | None) -> Scaling:
    """How a bucket's sum over ranks becomes the gradient."""
    if getattr(comm, "scales_itself", False):
        return MEAN
    world, dtype = gradients.bucket.axes.world, gradients.reduce_dtype
    if rules.reduction == "mean":
        return Scaling.choose(world, dtype, rules.divide_factor, rules.force_sum)
    return Scaling.summed(world, dtype, total)


class Reduction:
    """One reduction of a unit's gradients, from issue to delivery.

    Args:
        unit: whose pending gradients are reduced.
        comm: collectives.
        rules: how.
        total: what sums are divided by; None: nothing.
    """

    __slots__ = ("_replicating", "_scratch_bytes", "comm", "unit")

    def __init__(self, unit: Unit, comm: Comm, rules: Rules, total: Total | None = None) -> None:
        self.unit, self.comm = unit, comm
        self._scratch_bytes, self._replicating = 0, False
        end = begin_range("reduce", unit.name) if recording() else no_range
        scratch = 0
        try:
            for gradients in unit.gradients:
                if gradients.state is GradState.PENDING:
                    scratch += gradients.issue_reduce(
                        comm, _scaling(gradients, comm, rules, total), rules.check_nonfinite
                    )
        finally:
            end()
        if scratch:
            self._scratch_bytes = scratch
            unit.ledger.reducing += scratch
            unit.ledger.note()
        if stream.listeners:
            unit.emit("reduce", sum([g.buffer_bytes for g in unit.gradients if g.state is GradState.REDUCING]))

    def replicate(self, all_reduce: bool) -> None:
        """The shard axis is to be done: give the buffers back, and start reducing over the replicate axis.

        Args:
            all_reduce: False keeps the slice reduced over the shard axis only, to be added to the next one.
        """
        self._replicating = True
        unit = self.unit
        for gradients in unit.gradients:
            if gradients.state is not GradState.REDUCING:
                continue
            end = begin_range("wait for reduce", unit.name) if recording() else no_range
            try:
                unit.ledger.reducing -= gradients.finish_shard_axis()
            finally:
                end()
            if gradients.bucket.axes.replicate is None:
                continue
            if not all_reduce:
                gradients.keep_partial()
                continue
            end = begin_range("all_reduce", unit.name) if recording() else no_range
            try:
                nbytes = gradients.replicate(self.comm)
            finally:
                end()
            if stream.listeners:
                unit.emit("all_reduce", nbytes)

    def finish(
        self, all_reduce: bool, hook: Callable[[torch.Tensor], None] | None, fill_unused: bool
    ) -> list[torch.Tensor]:
        """Wait, and deliver into `.grad`.

        Args:
            all_reduce: see `replicate`.
            hook: called with each reduced slice [shard_numel] before it is delivered.
            fill_unused: give parameters that no rank used a gradient of zeros.

        Returns:
            What got a gradient; see `Delivery.deliver`.
        """
        if not self._replicating:
            self.replicate(all_reduce)
        given: list[torch.Tensor] = []
        unit = self.unit
        for gradients in unit.gradients:
            if gradients.state is not GradState.REDUCING:
                continue
            if gradients.replicating is not None:
                end = begin_range("wait for all_reduce", unit.name) if recording() else no_range
                try:
                    gradients.finish_replicate()
                finally:
                    end()
            if hook is not None and gradients.slice is not None:
                hook(gradients.slice)
            given += gradients.deliver(fill_unused)
        if self._scratch_bytes:
            self.drop()
        if stream.listeners:
            unit.emit("reduced", sum(g.buffer_bytes for g in unit.gradients))
        return given

    def drop(self) -> None:
        """The scratch memory is gone: the reduction is delivered, or given up."""
        self.unit.ledger.reducing -= self._scratch_bytes
        self._scratch_bytes = 0
