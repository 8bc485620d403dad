"""How far two computations of one training step may differ by rounding alone.

Sharding changes the order of sums, not what is summed. A sum of n products in precision u has a relative error of at
most gamma_n = n u / (1 - n u) (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002,
section 3.1); where rounding errors are independent and of mean zero it exceeds about lambda sqrt(n) u only with a
probability that falls as exp(-lambda^2 / 2) (N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41(5), 2019). A network chains `depth` such sums, whose errors add up in the same way:

    tolerance = LAMBDA * (sqrt(depth) * u + sqrt(depth * length) * u_sum)

    u       unit roundoff of the coarsest dtype in which values are stored, computed with or reduced
    u_sum   of the dtype in which products are summed: float32 for 16-bit dtypes, otherwise that dtype
    depth   roundings one after another: three for every module that has parameters, forward and backward
    length  terms of the longest sum: the largest dim of any parameter, or the number of ranks and micro-batches
    LAMBDA  4

A tensor differs if the root mean square of its differences on a rank exceeds the tolerance times the root mean square
of what is expected, plus that of all gradients of the step: gradients that are zero but for rounding (of a bias before
a norm) are as large as the rounding of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

LAMBDA = 4.0
UPDATE = 16.0  # operations of one optimizer's step on one element, at most


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 of dtypes without fractions."""
    if dtype.is_complex or dtype.is_floating_point:
        return torch.finfo(dtype).eps / 2
    return 0.0


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which matrix products of `dtype` are summed."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return dtype


def gradient_tolerance(dtypes: Iterable[torch.dtype], depth: int, length: int) -> float:
    """The formula above, of losses and gradients.

    Args:
        dtypes: those in which values are stored, computed with or reduced.
        depth: number of modules that have parameters.
        length: terms of the longest sum.
    """
    coarsest = max([d for d in dtypes if unit_roundoff(d)], key=unit_roundoff, default=torch.float32)
    chained = 3 * max(depth, 1)
    rounding = math.sqrt(chained) * unit_roundoff(coarsest)
    return LAMBDA * (rounding + math.sqrt(chained * max(length, 1)) * unit_roundoff(summed_in(coarsest)))


def update_tolerance(dtype: torch.dtype) -> float:
    """Of a parameter after a step from equal values with equal gradients: `UPDATE` roundings of one element."""
    return LAMBDA * math.sqrt(UPDATE) * unit_roundoff(dtype)
