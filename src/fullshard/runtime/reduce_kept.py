"""Reduction of gradients that were kept unsharded, when no further backward is to come: a pipeline's last act."""

from __future__ import annotations

from ..shard import has_gradient
from ..watcher import BACKWARD
from .messages import (
    added_to_older_gradients,
    reduced_while_it_runs,
    reduction_was_dropped,
    replicas_would_differ,
    reset_while_it_runs,
)
from .phases import Happening, Phase
from .root import Root


class GradientReductionHandle:
    """Reductions in flight, returned by `FSDPModule.finalize_backward(async_op=True)`.

    Args:
        root: whose gradients are reduced; None: nothing is in flight.
    """

    def __init__(self, root: Root | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until `.grad` is complete. Collective; may be called more than once.

        Raises:
            PhaseError: `reset_iter_state()` dropped the gradients.
        """
        root = self._root
        if root is None:
            return
        if root.finalizing is not self:
            raise reduction_was_dropped()
        _finish(root)
        self._root = None


def finalize(root: Root) -> GradientReductionHandle:
    """Start what `reduce_kept` does, and free the units; the handle's `wait` does the rest. Collective.

    Raises:
        PhaseError: within a forward or backward, before the last handle was waited for, or where hybrid sharding does
            not reduce between replicas.
    """
    partly = [one.unit.name for one in root.units if one.settings.reduce.sync and not one.settings.reduce.all_reduce]
    if any(one.unit.name in partly and b.axes.replicate is not None for one in root.units for b in one.unit.buckets):
        raise replicas_would_differ(partly)
    _start(root)
    root.finalizing = handle = GradientReductionHandle(root)
    return handle


def reduce_kept(root: Root) -> None:
    """Reduce what backwards without gradient sync set aside, of units that sync now, and free them. Collective.

    Raises:
        PhaseError: within a forward or backward.
    """
    _start(root)
    _finish(root)


def reset_iteration(root: Root) -> None:
    """Drop what the backwards since the last finalization gave, and bring all units back to where a step begins.

    Raises:
        PhaseError: within a forward or backward; or gradients were there before, to which those were added.
    """
    if root.pass_top is not None or root.in_backward:
        raise reset_while_it_runs()
    unfinalized, root.unfinalized = root.unfinalized, False
    root.recover()
    if not unfinalized:
        return
    units = [one.unit for one in root.units]
    if root.adds:
        raise added_to_older_gradients([m.name for unit in units for m in unit.members if has_gradient(m)])
    for unit in units:
        for gradients in unit.gradients:
            for member in gradients.bucket.members:
                member.sharded.grad = None
            gradients.delivery.let_go({id(member.sharded) for member in gradients.bucket.members})


def _start(root: Root) -> None:
    if root.pass_top is not None or root.in_backward:
        raise reduced_while_it_runs()
    root.recover_if_broken()
    root.refuse_while_finalizing()
    try:
        root.reducer.begin(root.top.settings.reduce)
        root.position.begin(BACKWARD, True)
        root.reducer.in_flight.finalizing = root.reducer
        root.reducer.reduce_rest()
    except BaseException:
        root.recover()
        raise
    for one in root.units:
        if one.phase is Phase.IDLE and one.settings.reshard_after_backward:
            one.happens(Happening.RESHARD)


def _finish(root: Root) -> None:
    try:
        root.reducer.finish()
    except BaseException:
        root.recover()
        raise
    root.position.end()
    root.finalizing, root.unfinalized, root.reducer.in_flight.finalizing = None, False, None
