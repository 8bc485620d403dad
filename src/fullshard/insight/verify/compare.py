"""The parts that ranks hold against whole values that the first rank has, how far apart the two may be, and what
ranks found, put together.

How far two computations of one training step may differ by rounding alone.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...checkpoint.names import Named
from ...dtypes import as_real
from .model_parts import ModelParts
from .report import Finding
from .session import Raised, Session

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


@dataclass(frozen=True)
class Difference:
    """How one part differs: the first element that does (its number in the part), and how much all do."""

    at: int
    expected: str
    got: str
    size: float
    allowed: float

    def __str__(self) -> str:
        return f"root mean square difference {self.size:.2e}, allowed {self.allowed:.1e}"


def difference(got: torch.Tensor, want: torch.Tensor, allowed: float) -> Difference | None:
    """None if `got` is `want` to rounding; NaN and infinities must be the same ones.

    Args:
        got, want: of one shape.
        allowed: root mean square of the difference.
    """
    a, b = exact(got), exact(want)
    if not a.numel() or torch.equal(a, b):
        return None
    gap = (a - b).abs()
    odd = ~(a.isfinite() & b.isfinite())
    if bool(odd.any()):
        same = odd & ((a == b) | (a.isnan() & b.isnan()))
        gap = torch.where(same, 0.0, gap.nan_to_num(nan=math.inf, posinf=math.inf))
    size = float(gap.square().mean().sqrt())
    if size <= allowed:
        return None
    far = (gap > max(allowed, float(gap.max()) / 2)).nonzero()
    at = int(far[0] if len(far) else gap.argmax()) // (1 + got.is_complex())
    return Difference(at, _shown(want, at), _shown(got, at), size, allowed)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """[numel] in double precision (on devices that know none, on the host); of complex numbers their parts."""
    plain = as_real(tensor.detach())
    return (plain.cpu() if plain.device.type == "mps" else plain).to(torch.float64).reshape(-1)


def _shown(tensor: torch.Tensor, at: int) -> str:
    value = tensor.detach().reshape(-1)[at].item()
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def index_of(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Where the element of a number is in a tensor of a shape."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), shape)) if shape else ()


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Root mean square of all finite elements of these; 0 if there are none."""
    total, count = 0.0, 0
    for tensor in tensors:
        plain = exact(tensor).nan_to_num(0.0, 0.0, 0.0)
        total, count = total + float(plain.square().sum()), count + plain.numel()
    return math.sqrt(total / count) if count else 0.0


Allowed = Callable[[Named, torch.Tensor], float]
"""From this rank's part of what is expected, [numel] in double, to the root mean square difference allowed."""
Cause = Callable[[Named, torch.Tensor, torch.Tensor], str | None]
"""Of a difference, from this rank's parts of what there is and of what is expected, likewise."""


def compare(
    session: Session,
    parts: ModelParts,
    template: Finding,
    wanted: Mapping[str, torch.Tensor | None] | None,
    got: Callable[[Named], torch.Tensor | None],
    allowed: Allowed,
    cause: Cause = lambda row, mine, want: None,
) -> tuple[list[Finding], int]:
    """One set of tensors, such as all gradients of a step: sent by the first rank, cut and compared by every rank.

    At most one whole tensor at a time is held besides what ranks have. Collective.

    Args:
        session: the ranks.
        parts: this rank's model; alike on all.
        template: what to say of a parameter that differs, a sentence without its end.
        wanted: whole values by name, on the first rank; None of a parameter that is to have none.
        got: this rank's part of the same.
        allowed, cause: see there.

    Returns:
        The findings of all ranks, and the number of tensors compared.
    """
    found, compared, rank = list[Finding](), 0, session.rank

    def add(row: Named, expected: str, got: str, gap: Difference | None = None) -> None:
        one = replace(template, parameter=row.name, rank=rank, ranks=(rank,), expected=expected, got=got)
        found.append(replace(one, what=f"{one.what}{'' if gap is None else f' ({gap})'}."))

    sizes = {} if wanted is None else {n: None if t is None else (tuple(t.shape), t.dtype) for n, t in wanted.items()}
    for name, size in session.told(sizes).items():
        row = parts.rows[name]
        if not parts.comparable(row):
            continue
        mine = got(row)
        compared += 1
        if size is None:
            # A `FlatParameter` has one gradient for all in it: zeros stand for none.
            of_all = row.bucket is not None and row.bucket.flat_parameter is not None
            if mine is not None and not (of_all and not bool(mine.any())):
                add(row, "None", f"a tensor, root mean square {rms([mine]):.2e}")
            continue
        want = parts.cut(row, session.sent(None if wanted is None else wanted[name], *size))
        if not want.numel():
            continue  # this rank has nothing of it, and may show None for that
        if mine is None:
            add(row, "a value", "None")
            continue
        want = want.to(mine.device)
        gap = difference(mine, want, allowed(row, exact(want)))
        if gap is not None:
            add(row, gap.expected, gap.got, gap)
            element = index_of(int(parts.numbers(row, session.device)[gap.at]), row.shape)
            found[-1] = replace(found[-1], element=element, cause=cause(row, exact(mine), exact(want)))
    return merged(session, found, parts.rows), compared


def merged(session: Session, mine: list[Finding], order: Iterable[str] = ()) -> list[Finding]:
    """The findings of all ranks, one for each kind and parameter, in the order of parameters. Collective."""
    together: dict[tuple[str, str | None], list[Finding]] = {}
    for findings in session.all(mine):
        for finding in findings:
            together.setdefault((finding.kind, finding.parameter), []).append(finding)
    place = {name: i for i, name in enumerate(order)}
    found = []
    for same in together.values():
        ranks = tuple(sorted({rank for one in same for rank in one.ranks}))
        found.append(replace(same[0], ranks=ranks))
    return sorted(found, key=lambda one: place.get(one.parameter or "", -1))


def error_findings(failed: dict[int, Raised], step: int | None, what: str) -> list[Finding]:
    """One finding for each text of an error."""
    ranks_of: dict[Raised, list[int]] = {}
    for rank, error in failed.items():
        ranks_of.setdefault(error, []).append(rank)
    found = []
    for error, ranks in ranks_of.items():
        first = error.text.strip().partition("\n")[0] or error.name
        cause = error.remedy or (None if error.where is None else f"raised at {error.where}")
        at = (error.parameter, None, ranks[0], tuple(ranks), "no error", first, cause)
        found.append(Finding("error", f"{what} {error.name}.", step, *at))
    return found
