"""How far two computations of one training step may differ by rounding alone.

Sharding changes the order of sums, not what is summed. A sum of n products in precision u has a relative error of at
most gamma_n = n u / (1 - n u) (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002,
section 3.1); where rounding errors are independent and of mean zero it exceeds about lambda sqrt(n) u only with a
probability that falls as exp(-lambda^2 / 2) (N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error
Analysis, SIAM J. Sci. Comput. 41(5), 2019). A network chains `depth` such sums, whose errors add up in the same way:

    tolerance = LAMBDA * (sqrt(depth) * u + sqrt(depth * length) * u_sum)

    u       unit roundoff of the coarsest dtype in which values are stored, computed with, sent or reduced
    u_sum   of the dtype in which products are summed: float32 for 16-bit dtypes, otherwise that dtype
    depth   consecutive roundings: three for every module that has parameters, forward and backward
    length  terms of the longest sum: the largest dim of any parameter, or the number of ranks and micro-batches
    LAMBDA  4

A tensor differs if the root mean square of its differences on a rank exceeds the tolerance times the root mean square
of what is expected, plus that of all gradients of the step: gradients that are zero but for rounding (of a bias before
a norm) are as large as the rounding of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from ...dtypes import LARGEST_OF_8_BITS, as_real
from .findings import Finding
from .session import Raised, Session

LAMBDA = 4.0
UPDATE = 16.0  # operations of one optimizer step on one element, at most


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 for dtypes without fractions."""
    if dtype.is_complex or dtype.is_floating_point:
        return torch.finfo(dtype).eps / 2
    return 0.0


def gradient_tolerance(dtypes: Iterable[torch.dtype], packed: Iterable[torch.dtype], depth: int, length: int) -> float:
    """The formula above, for losses and gradients.

    Args:
        dtypes: those in which values are stored, computed with or reduced.
        packed: 8-bit dtypes in which they are sent, with a scale for each block.
        depth: number of modules that have parameters.
        length: terms of the longest sum.
    """
    coarsest = max([d for d in dtypes if unit_roundoff(d)], key=unit_roundoff, default=torch.float32)
    summed_in = torch.float32 if coarsest.is_floating_point and coarsest.itemsize < 4 else coarsest
    chained = 3 * max(depth, 1)
    # Of int8 relative to the block's largest magnitude, which is about four times its root mean square.
    sent = [unit_roundoff(dtype) or 4 * 0.5 / LARGEST_OF_8_BITS[dtype] for dtype in packed]
    rounding = math.sqrt(chained) * max([unit_roundoff(coarsest), *sent])
    return LAMBDA * (rounding + math.sqrt(chained * max(length, 1)) * unit_roundoff(summed_in))


def update_tolerance(dtype: torch.dtype) -> float:
    """For a parameter after a step from equal values with equal gradients: `UPDATE` roundings of one element."""
    return LAMBDA * math.sqrt(UPDATE) * unit_roundoff(dtype)


def difference(template: Finding, got: torch.Tensor, expected: torch.Tensor, allowed: float) -> Finding | None:
    """Compare two tensors: `template` with the first element that differs; None if they are equal to rounding.

    NaN and infinities must be the same ones in the same places.

    Args:
        template: completed by `element` (its index in `expected`), `expected`, `got`, and how much all elements differ.
        got, expected: of the same shape.
        allowed: root mean square of the difference.
    """
    a, b = exact(got), exact(expected)
    if not a.numel() or torch.equal(a, b):
        return None
    gap = (a - b).abs()
    nonfinite = ~(a.isfinite() & b.isfinite())
    if bool(nonfinite.any()):
        same = nonfinite & ((a == b) | (a.isnan() & b.isnan()))
        gap = torch.where(same, 0.0, gap.nan_to_num(nan=math.inf, posinf=math.inf))
    size = float(gap.square().mean().sqrt())
    if size <= allowed:
        return None
    far = (gap > max(allowed, float(gap.max()) / 2)).nonzero()
    at = int(far[0] if len(far) else gap.argmax()) // (1 + got.is_complex())
    return replace(
        template,
        what=f"{template.what.removesuffix('.')} (root mean square difference {size:.2e}, allowed {allowed:.1e}).",
        element=index_of(at, expected.shape),
        expected=_text_of(expected, at),
        got=_text_of(got, at),
    )


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """[numel] in double precision (on the host if the device lacks it); complex numbers as their parts, [2 * numel]."""
    real = as_real(tensor.detach())
    return (real.cpu() if real.device.type == "mps" else real).to(torch.float64).reshape(-1)


def _text_of(tensor: torch.Tensor, at: int) -> str:
    value = tensor.detach().reshape(-1)[at].item()
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def index_of(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a tensor's element number `at`, in row-major order."""
    return tuple(int(i) for i in np.unravel_index(at, shape))


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Root mean square of all elements of these tensors, of which nonfinite ones count as 0; 0 if there are none."""
    total, count = 0.0, 0
    for tensor in tensors:
        finite = exact(tensor).nan_to_num(0.0, 0.0, 0.0)
        total, count = total + float(finite.square().sum()), count + finite.numel()
    return math.sqrt(total / count) if count else 0.0


def merged(session: Session, findings: list[Finding], order: Iterable[str] = ()) -> list[Finding]:
    """The findings of all ranks, one for each kind and parameter, in the order of parameters. Collective."""
    groups: dict[tuple[str, str | None], list[Finding]] = {}
    for of_rank in session.gather(findings):
        for finding in of_rank:
            groups.setdefault((finding.kind, finding.parameter), []).append(finding)
    positions = {name: i for i, name in enumerate(order)}
    result = [
        replace(group[0], ranks=tuple(sorted({rank for finding in group for rank in finding.ranks})))
        for group in groups.values()
    ]
    return sorted(result, key=lambda finding: positions.get(finding.parameter or "", -1))


def error_findings(errors: dict[int, Raised], step: int | None, what: str) -> list[Finding]:
    """One finding for each different error, of errors by rank."""
    ranks_of: dict[Raised, list[int]] = {}
    for rank, error in errors.items():
        ranks_of.setdefault(error, []).append(rank)
    return [
        Finding(
            "error",
            f"{what} {error.name}.",
            step,
            error.parameter,
            ranks=tuple(ranks),
            expected="no error",
            got=error.text.strip().partition("\n")[0] or error.name,
            cause=error.remedy or (None if error.where is None else f"raised at {error.where}"),
        )
        for error, ranks in ranks_of.items()
    ]
