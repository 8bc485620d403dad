"""Reduction of gradients that were kept unsharded, when no further backward is to come: a pipeline's last act."""

from __future__ import annotations

from ..errors import PhaseError
from ..shard import has_gradient
from ..watcher import BACKWARD
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
            raise PhaseError(
                "This gradient reduction was dropped before it was waited for.",
                got="reset_iter_state(), or an exception in the reduction",
                remedy="run the forwards and backwards of this step again",
                code="P343",
            )
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
        raise PhaseError(
            "finalize_backward() cannot leave gradients that differ between replicas.",
            expected="set_requires_all_reduce(True)",
            got=f"False on {', '.join(repr(name or '(root)') for name in partly[:3])}",
            code="P344",
        )
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
        raise PhaseError(
            "reset_iter_state() was called while the model runs.",
            remedy="let its forward or backward end, by an exception for instance, and call it then",
            code="P416",
        )
    unfinalized, root.unfinalized = root.unfinalized, False
    root.recover()
    if not unfinalized:
        return
    units = [one.unit for one in root.units]
    if root.adds:
        raise PhaseError(
            "reset_iter_state() cannot take back gradients that were added to older ones.",
            parameter=", ".join(member.name for unit in units for member in unit.members if has_gradient(member)),
            expected="no .grad before the first backward of an iteration (zero_grad() after each step)",
            got="gradients of this iteration in one .grad with those of iterations before",
            remedy="zero_grad(), and repeat all iterations since the last step",
            code="P417",
        )
    for unit in units:
        for gradients in unit.gradients:
            for member in gradients.bucket.members:
                member.sharded.grad = None
            gradients.delivery.let_go({id(member.sharded) for member in gradients.bucket.members})


def _start(root: Root) -> None:
    if root.pass_top is not None or root.in_backward:
        raise PhaseError(
            "Kept gradients cannot be reduced while the model runs.",
            remedy="let its forward and backward end first",
            code="P042",
        )
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
