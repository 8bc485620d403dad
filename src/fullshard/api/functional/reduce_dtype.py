"""What `MixedPrecisionPolicy(reduce_dtype=None)` means: torch 2.15's rule, or the installed torch's after `adopt`."""

from __future__ import annotations

import logging

from ...policies import MixedPrecisionPolicy
from ...shard import Unit
from ...torch_private.releases import REDUCES_AS_COMPUTED

logger = logging.getLogger("fullshard")


class _Rule:
    """The process-wide rule, as `adopt` is process-wide.

    Attributes:
        as_computed: whether gradients are reduced in `param_dtype`.
        logged: whether the difference from the installed torch was logged.
    """

    as_computed = False
    logged = False


def follow_torch() -> None:
    """Give `reduce_dtype=None` the meaning that it has in the installed torch's `fully_shard`."""
    _Rule.as_computed = REDUCES_AS_COMPUTED


def reduces_as_computed() -> bool:
    """Whether `reduce_dtype=None` means `param_dtype`."""
    return _Rule.as_computed


def log_difference(unit: Unit, policy: MixedPrecisionPolicy) -> None:
    """Log once, on the first rank, that the installed torch would reduce a unit's gradients in a different dtype."""
    if _Rule.logged or not REDUCES_AS_COMPUTED or _Rule.as_computed or policy.reduce_dtype is not None:
        return
    for gradients in unit.gradients:
        bucket = gradients.bucket
        if bucket.storage_dtype.is_floating_point and gradients.reduce_dtype is not bucket.compute_dtype:
            _Rule.logged = True
            if unit.rank == 0:
                logger.warning(
                    "reduce_dtype=None reduces gradients in %s, the parameters' grad_dtype, as in torch 2.15; the "
                    "installed torch reduces them in %s, the param_dtype. MixedPrecisionPolicy(reduce_dtype=...) "
                    "sets the dtype.",
                    gradients.reduce_dtype,
                    bucket.compute_dtype,
                )
            return
