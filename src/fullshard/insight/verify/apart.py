"""How far apart two tensors are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...dtypes import as_real


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
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), shape)) if shape else ()


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Root mean square of all finite elements of these; 0 if there are none."""
    total, count = 0.0, 0
    for tensor in tensors:
        plain = exact(tensor).nan_to_num(0.0, 0.0, 0.0)
        total, count = total + float(plain.square().sum()), count + plain.numel()
    return math.sqrt(total / count) if count else 0.0
