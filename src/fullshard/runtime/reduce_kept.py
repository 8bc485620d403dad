"""Reduces gradients that were kept unsharded, when no further backward will follow: the last step of a pipeline."""

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
        root: the root whose gradients are reduced; None: nothing is in flight.
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
    """Start to reduce kept gradients, as `reduce_kept`, and free the units; the handle's `wait` ends it. Collective.

    Raises:
        PhaseError: called within a forward or backward, or before the last handle was waited for; or hybrid sharding
            is set not to reduce between replicas.
    """
    partly = [r.unit.name for r in root.units if r.settings.reduce.sync and not r.settings.reduce.all_reduce]
    if any(r.unit.name in partly and b.axes.replicate is not None for r in root.units for b in r.unit.buckets):
        raise replicas_would_differ(partly)
    _start(root)
    root.finalizing = handle = GradientReductionHandle(root)
    return handle


def reduce_kept(root: Root) -> None:
    """Reduce the gradients set aside by backwards without sync, for units that sync now, and free these. Collective.

    Raises:
        PhaseError: called within a forward or backward.
    """
    _start(root)
    _finish(root)


def reset_iteration(root: Root) -> None:
    """Drop the gradients of all backwards since the last finalization, and reset all units to the beginning of a step.

    Raises:
        PhaseError: called within a forward or backward; or these gradients were added to older ones.
    """
    if root.pass_top is not None or root.in_backward:
        raise reset_while_it_runs()
    unfinalized, root.unfinalized = root.unfinalized, False
    root.recover()
    if not unfinalized:
        return
    units = [runner.unit for runner in root.units]
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
    for runner in root.units:
        if runner.phase is Phase.IDLE and runner.settings.reshard_after_backward:
            runner.happens(Happening.RESHARD)


def _finish(root: Root) -> None:
    try:
        root.reducer.finish()
    except BaseException:
        root.recover()
        raise
    root.position.end()
    root.finalizing, root.unfinalized, root.reducer.in_flight.finalizing = None, False, None
