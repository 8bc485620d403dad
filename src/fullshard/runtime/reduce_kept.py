"""Reduction of gradients that were kept unsharded, when no further backward is to come: a pipeline's last act."""

from __future__ import annotations

from ..errors import PhaseError
from ..watcher import BACKWARD
from .phases import Happening, Phase
from .root import Root


def reduce_kept(root: Root) -> None:
    """Reduce what backwards without gradient sync set aside, of units that sync now, and free them. Collective.

    Raises:
        PhaseError: within a forward or backward.
    """
    if root.pass_top is not None or root.in_backward:
        raise PhaseError(
            "Kept gradients cannot be reduced while the model runs.",
            remedy="let its forward and backward end first",
            code="P042",
        )
    root.recover_if_broken()
    try:
        root.reducer.begin(root.top.settings.reduce)
        root.position.begin(BACKWARD, True)
        root.reducer.end()
    except BaseException:
        root.recover()
        raise
    root.position.end()
    for one in root.units:
        if one.phase is Phase.IDLE and one.settings.reshard_after_backward:
            one.happens(Happening.RESHARD)
