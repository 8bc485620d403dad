"""Losses and logs made from sharded parameters themselves: as in one process, or refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from models import TORCH

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of squares": lambda p, q: p.pow(2).sum(),
    "mean of squares": lambda p, q: (p - q).square().mean(),
    "mean of absolute values": lambda p, q: p.abs().mean(),
    "norm": lambda p, q: p.norm(),
    "norm of a difference": lambda p, q: torch.linalg.norm(p - q),
    "norm of all dims": lambda p, q: torch.linalg.vector_norm(p, 2, (0, 1)),
    "norm 1": lambda p, q: p.norm(1),
    "norm 3": lambda p, q: p.norm(3),
    "largest absolute value": lambda p, q: p.norm(math.inf),
    "smallest absolute value": lambda p, q: torch.linalg.vector_norm(p, -math.inf),
    "amax": lambda p, q: p.abs().amax(),
    "amin": lambda p, q: torch.amin(p),
    "amin by its name": lambda p, q: torch.amin(input=p, dim=None),
    "amax, dims kept": lambda p, q: p.amax(dim=(-1, 0), keepdim=True).sum(),
    "norm by infinity, dims kept": lambda p, q: torch.linalg.vector_norm(p, math.inf, keepdim=True).sum(),
    "norm by infinity of all dims": lambda p, q: p.norm(math.inf, (0, 1)),
    "amax of all dims": lambda p, q: p.amax((0, 1)),
    "amax of equal elements": lambda p, q: (p > 0).to(p.dtype).mul(p.detach()).clamp(max=0.0).add(p * 0).amax(),
    "max": lambda p, q: p.abs().max(),
    "min": lambda p, q: p.min(),
    "distance of max and min": lambda p, q: p.max() - p.min(),
    "var": lambda p, q: p.var(),
    "std": lambda p, q: (p - q).std(),
    "var of all": lambda p, q: p.var(correction=0),
    "sum of norms": lambda p, q: p.norm() + (2 * p).norm() ** 2,
}
BY_ROWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mse_loss": F.mse_loss,
    "MSELoss, the other way round": lambda p, q: nn.MSELoss()(q, p),
    "mse_loss, reduction": lambda p, q: F.mse_loss(p, q, None, None, "mean"),
    "sum of mse_loss": lambda p, q: F.mse_loss(p, q, reduction="sum"),
    "smooth_l1_loss": lambda p, q: F.smooth_l1_loss(p, q, beta=0.1),
    "huber_loss": lambda p, q: F.huber_loss(p, q, "mean", 0.1),
    "soft_margin_loss": lambda p, q: F.soft_margin_loss(p, q.sign()),
    "l1_loss": F.l1_loss,
    "mse_loss, size_average": lambda p, q: F.mse_loss(p, q, size_average=True, reduction="sum"),
    "mse_loss, reduce": lambda p, q: F.mse_loss(p, q, reduce=True, size_average=False),
    "dist": torch.dist,
    "dist by infinity": lambda p, q: torch.dist(p, q, math.inf),
    "norms of columns": lambda p, q: p.norm(dim=0).sum(),
    "norms of columns, cubed": lambda p, q: torch.linalg.vector_norm(p, 3, dim=0).pow(3).sum(),
    "norms of rows": lambda p, q: torch.norm(p, dim=1).sum(),
    "columns of norm 1": lambda p, q: (p / p.norm(dim=0, keepdim=True)).pow(3).sum(),
}
if TORCH >= (2, 13):  # before, DTensor has no rule for these, and says so
    BY_ROWS |= {
        "binary_cross_entropy_with_logits": lambda p, q: F.binary_cross_entropy_with_logits(p, q.sigmoid()),
        "binary_cross_entropy": lambda p, q: F.binary_cross_entropy(p.sigmoid(), q.sigmoid(), weight=q.square()),
    }
PARTS_ON_ALL_RANKS: dict[str, Callable[[Tensor, Tensor], Any]] = {  # else DTensor raises where there is none
    "largest of columns": lambda p, q: p.amax(0).sum(),
}
LOGS: dict[str, Callable[[Tensor], Any]] = {
    "finite": lambda p: torch.isfinite(p).all(),
    "any NaN": lambda p: p.isnan().any(),
    "zeros": lambda p: torch.count_nonzero(p > 0),
    "counted": lambda p: (p > 0).sum(),
    "largest": lambda p: p.max(),
    "smallest": torch.amin,
    "a dtype": lambda p: p.sum(dtype=torch.float64),
}
FLAT_LOGS: dict[str, Callable[[Tensor], Any]] = {
    "largest integer": lambda p: (p * 10).long().max(),
    "smallest integer": lambda p: (p * 10).to(torch.int16).min(),
    "any of nothing": lambda p: (p * 0).any(),
    "all of bytes": lambda p: (p != 0).to(torch.uint8).all(),
}
READ: dict[str, Callable[[Tensor], Any]] = {  # by Python, from a parameter and from its gradient
    "norm": lambda p: p.norm().item(),
    "norm 1": lambda p: p.norm(1).item(),
    "largest": lambda p: p.abs().max().item(),
    "largest, in bf16": lambda p: p.bfloat16().abs().amax().item(),
    "as a float": lambda p: float(p.pow(2).sum()),
    "as an int": lambda p: int((p > 0).sum()),
    "a condition": lambda p: 1 if (p > 0.4).any() else 0,
    "all": lambda p: bool((p > -0.4).all()),
    "any NaN": lambda p: torch.isnan(p).any().item(),
    "is nonzero": lambda p: torch.is_nonzero((p > 0).sum()),
    "rounded": lambda p: round(p.norm().item(), 4),
    "formatted": lambda p: f"{p.norm():.3f}",
    "in a list": lambda p: p.sum().tolist(),
    "in NumPy": lambda p: p.norm().numpy().item(),
    "square root": lambda p: math.sqrt(p.pow(2).sum()),
    "mean of squares": lambda p: p.square().mean().sqrt().item(),
    "a fraction": lambda p: ((p.abs() < 0.3).sum() / p.numel()).item(),
    "a ratio": lambda p: (p.norm() / (p.norm() + 1)).item(),
    "a sum of norms": lambda p: sum([p.norm() ** 2, (2 * p).norm() ** 2]).sqrt().item(),  # type: ignore[attr-defined]
    "the larger one": lambda p: max(p.norm(), (2 * p).norm()).item(),
    "stacked": lambda p: torch.stack([p.norm(), (2 * p).norm()]).mean().item(),
    "clamped": lambda p: p.clamp(min=0).sum().item(),
    "chosen": lambda p: torch.where(p > 0, p, 0 * p).sum().item(),
    "on the host": lambda p: p.cpu().norm().cpu().item(),
    "of a copy": lambda p: p.clone().norm().item(),
    "a change": lambda p: (p - p.clone() * 2).norm().item(),
    "in double": lambda p: p.double().sum().item(),
    "added in place": lambda p: torch.zeros(()).add_(p.norm()).item(),
    "added to a norm in place": lambda p: p.detach().norm().add_(p.abs().sum()).mul_(2).item(),
    "in an element": lambda p: torch.zeros(3).index_put_((torch.tensor([1]),), p.norm().view(1)).sum().item(),
    "total norm": lambda p: torch.nn.utils.get_total_norm([p, 2 * p]).item(),
    "sum of stacked norms": lambda p: torch.stack([p.norm(), (2 * p).norm()]).sum().item(),
    "sum of joined norms": lambda p: torch.cat([p.norm().view(1), (2 * p).norm().view(1)]).sum().item(),
    "sum of stacked extremes": lambda p: torch.stack([p.max(), p.min()]).sum().item(),
    "of a deep copy": lambda p: copy.deepcopy(p).norm().item(),
}
READ_OF_ROWS: dict[str, Callable[[Tensor], Any]] = {  # refused of flat shards
    "close": lambda p: torch.allclose(p, p + 1e-9) and not p.allclose(p * (p > 0)),
    "equal": lambda p: torch.equal(p, p * 1),
    "an element": lambda p: p[0, 0].item(),
    "a row": lambda p: p[-1].sum().item(),
    "largest of rows": lambda p: p.max(dim=1)[0].sum().item(),
    "largest norm of rows": lambda p: p.norm(dim=1).max().item(),
    "sum of columns": lambda p: p.sum(0).norm().item(),
    "both extremes": lambda p: torch.aminmax(p, dim=1)[0].sum().item(),
    "dot product": lambda p: (p @ p.T).trace().item(),
    "entropy": lambda p: -(p.softmax(1) * p.log_softmax(1)).sum().item(),
    "columns with any": lambda p: (p > 0.2).any(0).sum().item(),
    "rows with any": lambda p: torch.any(p > 0.2, dim=1, keepdim=True).float().mean().item(),
    "any, as a number": lambda p: (p > -9).any().float().item(),
    "where the largest is": lambda p: whole(p.argmax()).item(),
    "where the smallest of columns are": lambda p: p.argmin(dim=0).sum().item(),
    "largest of columns": lambda p: p.amax(dim=0, keepdim=True).sum().item(),
    "smallest of rows": lambda p: torch.amin(p, 1).sum().item(),
}
READ_OF_SEVERAL_ROWS: dict[str, Callable[[Tensor], Any]] = {  # DTensor refuses these of one row
    "centred in place": lambda p: p.clone().sub_(p.mean(0, keepdim=True)).pow(3).sum().item(),
    "scaled in place": lambda p: p.clone().div_(p.norm(dim=0, keepdim=True)).pow(3).sum().item(),
}


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def differences(layout: str, rows: int) -> dict[str, Any]:
    """What differs from one process: value and gradient of each penalty, and each logged value."""
    found: dict[str, Any] = {}
    of_rows = {**BY_ROWS, **(PARTS_ON_ALL_RANKS if rows > 1 else {})}
    for name, penalty in {**ELEMENTWISE, **(of_rows if layout == "rows" else {})}.items():
        torch.manual_seed(0)
        plain = nn.Linear(3, rows, bias=False)
        model = nn.Linear(3, rows, bias=False)
        model.load_state_dict(plain.state_dict())
        fullshard.fully_shard(model, layout=layout)
        ours, theirs = (penalty(p, p.detach() * 0.5) for p in (model.weight, plain.weight))
        inputs = torch.ones(2, 3)
        (model(inputs).square().mean() + whole(ours)).backward()
        (plain(inputs).square().mean() + theirs).backward()
        gradients = whole(model.weight.grad), plain.weight.grad
        if not all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in ((whole(ours), theirs), gradients)):
            found[name] = (float(whole(ours)), float(theirs), *gradients)
    for name, log in {**LOGS, **(FLAT_LOGS if layout == "flat" else {})}.items():
        ours, theirs = whole(log(model.weight.detach())), log(plain.weight.detach())
        if ours.dtype != theirs.dtype or not torch.allclose(ours.double(), theirs.double()):
            found[name] = (ours, theirs)
    return found


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_penalties_are_those_of_one_process(run_ranks, layout, rows):
    found = run_ranks(differences, layout, rows)
    assert found == [{}, {}]


def alike(ours: Any, theirs: Any) -> bool:
    return bool(ours == theirs or (type(ours) is float and math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)))


def differently_read(layout: str, rows: int) -> dict[str, Any]:
    """The values read by Python that differ from one process: of a parameter, without a graph, and of its gradient."""
    torch.manual_seed(0)
    plain = nn.Linear(3, rows, bias=False)
    model = fullshard.fully_shard(copy.deepcopy(plain), layout=layout)
    for module in (plain, model):
        module(torch.linspace(-1, 1, 6).view(2, 3)).square().sum().backward()
    found: dict[str, Any] = {}
    of_rows = {**READ_OF_ROWS, **(READ_OF_SEVERAL_ROWS if rows > 1 else {})}
    for name, read in {**READ, **(of_rows if layout == "rows" else {})}.items():
        pairs = [(w.detach(), w.data, w.grad) for w in (model.weight, plain.weight)]
        for ours, theirs in zip(*[[read(tensor) for tensor in tensors] for tensors in pairs], strict=True):
            if type(ours) is not type(theirs) or not alike(ours, theirs):
                found[name] = (ours, theirs)
        with torch.no_grad():
            assert alike(read(model.weight), read(plain.weight)), name
    return found


@pytest.mark.parametrize("rows", [1, 5])  # with one row, a rank has none
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_values_read_by_python_are_those_of_one_process(run_ranks, layout, rows):
    assert run_ranks(differently_read, layout, rows) == [{}, {}]


def into_tensor() -> str:
    weight = fullshard.fully_shard(nn.Linear(3, 4, bias=False)).weight
    with pytest.raises(fullshard.PhaseError) as error:
        torch.tensor([weight.norm()])
    return str(error.value)


def test_a_constructor_of_tensors_cannot_read_parts(run_ranks):
    message = run_ranks(into_tensor)[1]
    assert "torch.tensor() cannot read a value" in message and "parameter: weight" in message
    assert "torch.stack(values)" in message


def with_nan(layout: str, at: int) -> list[bool]:
    model = nn.Linear(3, 4, bias=False)
    with torch.no_grad():
        model.weight[at] = math.nan
    weight = fullshard.fully_shard(model, layout=layout).weight
    values = [weight.max(), weight.amin(), weight.norm(math.inf), weight.detach().max(), weight.norm(math.inf, (0, 1))]
    return [bool(whole(value).isnan()) for value in values]


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_extremes_are_nan_where_any_element_is(run_ranks, layout, at):
    assert run_ranks(with_nan, layout, at) == [[True] * 5] * 2


def with_infinity(layout: str, rows: int) -> list[Any]:
    """Values and gradients of extremes that are infinite, beside those of one process."""
    plain = nn.Linear(3, rows, bias=False)
    with torch.no_grad():
        plain.weight.fill_(-math.inf)
        plain.weight[0, 0] = math.inf
    model = fullshard.fully_shard(copy.deepcopy(plain), layout=layout)
    found = []
    for penalty in (torch.max, torch.amax, torch.min, torch.amin, lambda p: p.norm(math.inf)):
        plain.zero_grad(), model.zero_grad()
        ours, theirs = penalty(model.weight), penalty(plain.weight)
        whole(ours).backward(), theirs.backward()
        found.append(torch.equal(whole(ours), theirs) and torch.equal(whole(model.weight.grad), plain.weight.grad))
    with torch.inference_mode():
        found.append(torch.equal(whole(model.weight.max()), plain.weight.max()))
    return found


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_infinite_extremes(run_ranks, layout, rows):
    assert run_ranks(with_infinity, layout, rows) == [[True] * 6] * 2


def refused() -> list[str]:
    model = fullshard.fully_shard(nn.Linear(3, 4, bias=False), layout="flat")
    raised = []
    for penalty in (lambda p: p.norm(dim=0), lambda p: p.var(0), lambda p: p.amax(1), lambda p: F.mse_loss(p, p)):
        with pytest.raises(fullshard.PhaseError) as error:
            penalty(model.weight)
        raised.append(str(error.value))
    return raised


def test_reductions_along_a_dim_of_a_flat_shard_are_refused_by_name(run_ranks):
    *along, loss = run_ranks(refused)[0]
    assert all("a reduction along some dims only" in text for text in along)
    assert all("weight" in text for text in (*along, loss))
