"""Gradients that are not finite: named with parameter, unit and rank, the same on all ranks, whatever the front-end."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import NonfiniteGradient, nonfinite_gradients, set_check_nonfinite
from fullshard.torch_private.local_tensor import inside
from test_meshes import Experts
from test_reductions import Weights
from ways import (
    SOME_WAYS,
    WIDTH,
    batch,
    but_last,
    differences,
    error_of,
    loss_of,
    mine,
    named_error,
    shard,
    value_problems,
    whole_parameters,
    without_sync,
)

NAN, INF = float("nan"), float("inf")


class Gate(torch.autograd.Function):
    """The identity, of whose gradient the last element becomes a number of one's choice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad[-1, -1] = ctx.value
        return grad, None


class Layer(nn.Linear):
    """Puts `poison` into the gradient of its weight, where it is set."""

    poison: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.poison is None else Gate.apply(self.weight, self.poison), self.bias)


def poisonable() -> nn.Sequential:
    """Two units of two layers, and a last layer that the root holds."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(Layer(WIDTH, WIDTH), nn.Tanh(), Layer(WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks, Layer(WIDTH, 2)).double()


def made(way: str, **settings: Any) -> tuple[Any, list[Layer]]:
    """The model sharded, and its layers."""
    model = poisonable()
    found = [module for module in model.modules() if isinstance(module, Layer)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shard(model, way, but_last, **settings), found


def run(model: Any, layers: list[Layer], seed: int, poison: dict[tuple[int, int], float] | None = None) -> None:
    """A backward, with poison by (rank, layer)."""
    for index, layer in enumerate(layers):
        layer.poison = (poison or {}).get((dist.get_rank(), index))
    loss_of(model, mine(seed)).backward()


def expect(problems: list[str], where: str, model: Any, *want: NonfiniteGradient) -> None:
    got = nonfinite_gradients(model)
    if got != list(want):
        problems.append(f"{where}: {list(map(str, got))} where {list(map(str, want))} is wanted")


def test_parameter_unit_and_rank_are_named_and_all_ranks_skip(run_ranks) -> None:
    for problems in run_ranks(on_two_ranks):
        assert not problems, problems


def on_two_ranks() -> list[str]:
    problems: list[str] = []
    for way in SOME_WAYS:
        named(way, problems)
        skipped(way, problems)
    overflow(problems), scaled(problems), apart(problems)
    return problems


def named(way: str, problems: list[str]) -> None:
    model, layers = made(way)
    second = "0.2.weight", "0"
    run(model, layers, 0)
    expect(problems, f"{way}, nothing", model)
    run(model, layers, 0, {(0, 1): NAN})
    expect(problems, f"{way}, not asked for", model, NonfiniteGradient(*second, "nan", None))
    model.zero_grad()
    set_check_nonfinite(model, True)
    run(model, layers, 0, {(0, 1): NAN})
    expect(problems, f"{way}, nan", model, NonfiniteGradient(*second, "nan", (0,)))
    expect(problems, f"{way}, asked again", model, NonfiniteGradient(*second, "nan", (0,)))
    model.zero_grad()
    run(model, layers, 1, {(1, 4): -INF, (0, 0): NAN, (0, 3): INF, (1, 3): -INF, (1, 0): INF})
    found = [NonfiniteGradient("0.0.weight", "0", "nan", (0, 1)), NonfiniteGradient("1.2.weight", "1", "inf", (0, 1))]
    last = NonfiniteGradient("2.weight", "(root)", "inf", (1,))
    expect(problems, f"{way}, several", model, *sorted([*found, last], key=lambda one: one.unit != "(root)"))
    for sync in (True, False):
        model.zero_grad()
        if sync:
            run(model, layers, 2, {(1, 1): INF})
        else:
            with without_sync(model):
                run(model, layers, 2, {(1, 1): INF})
        run(model, layers, 3)
        run(model, layers, 3, {(0, 4): NAN})
        found = [NonfiniteGradient("2.weight", "(root)", "nan", (0,)), NonfiniteGradient(*second, "inf", (1,))]
        expect(problems, f"{way}, accumulated, sync {sync}", model, *found)
    for value in (NAN, None, INF):  # zeroed in place, and asked each time
        model.zero_grad(set_to_none=False)
        run(model, layers, 4, {} if value is None else {(int(value == INF), 1): value})
        want = [] if value is None else [NonfiniteGradient(*second, str(value), (int(value == INF),))]
        if value != NAN or value is None:
            expect(problems, f"{way}, zeroed in place, {value}", model, *want)
    set_check_nonfinite(model, False)
    model.zero_grad()
    run(model, layers, 0, {(1, 1): INF})
    expect(problems, f"{way}, no more asked for", model, NonfiniteGradient(*second, "inf", None))


def skipped(way: str, problems: list[str]) -> None:
    """A step that one rank spoils is no step on any; training goes on as if it had not been."""
    model, layers = made(way)
    plain = poisonable()
    set_check_nonfinite(model, True)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (model, plain))
    steps = 0
    for step in range(4):
        before = whole_parameters(model)
        ours.zero_grad()
        run(model, layers, step, {(1, 2): NAN} if step == 1 else None)
        if nonfinite_gradients(model):
            problems += differences(f"{way}: skipped", whole_parameters(model), before, 0.0)
            continue
        steps += 1
        ours.step()
        theirs.zero_grad()
        loss_of(plain, batch(step)).backward()
        theirs.step()
    problems += [] if steps == 3 else [f"{way}: {steps} of 3 steps"]
    problems += value_problems(way, model, plain, 1e-10)


def overflow(problems: list[str]) -> None:
    """What no rank contributed, and how findings are said."""
    policy = fullshard.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fullshard.fully_shard(Weights(), mp_policy=policy, reduction="sum")
    set_check_nonfinite(model, True)
    model(4e4).backward()
    expect(problems, "overflow", model, NonfiniteGradient("weight", "(root)", "inf", ()))
    said = [str(NonfiniteGradient("w", "block", "nan", ranks)) for ranks in (None, (), (3,), (0, 3))]
    assert all("w (unit block): nan" in text for text in said)
    assert "set_check_nonfinite" in said[0] and "overflowed" in said[1]
    assert said[2].endswith("nan from rank 3") and said[3].endswith("nan from ranks 0, 3")
    wrong = error_of(lambda: nonfinite_gradients(nn.Linear(1, 1)))
    problems += named_error(wrong, "no units", kinds=fullshard.ConfigError)
    problems += named_error(error_of(lambda: set_check_nonfinite(nn.Linear(1, 1), True)), "no units")


def scaled(problems: list[str]) -> None:
    """Before the scaler has unscaled, and after; it skips the step by itself."""
    model, layers = made("rows")
    set_check_nonfinite(model, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fullshard.ShardedGradScaler("cpu", init_scale=2.0**10)
    layers[0].poison = INF if dist.get_rank() == 1 else None
    before = whole_parameters(model)
    scaler.scale(loss_of(model, mine(0))).backward()
    want = NonfiniteGradient("0.0.weight", "0", "inf", (1,))
    expect(problems, "scaled", model, want)
    scaler.unscale_(optimizer)
    kind = "inf" if torch.isinf(before["0.0.weight"].new_tensor(INF) * 2.0**-10) else "nan"
    expect(problems, "unscaled", model, NonfiniteGradient("0.0.weight", "0", kind, (1,)))
    scaler.step(optimizer)
    problems += differences("scaler", whole_parameters(model), before, 0.0)


def apart(problems: list[str]) -> None:
    """A parameter that no unit holds: its gradient is each rank's own."""
    model = poisonable()
    layer: Any = model[2]
    fullshard.fully_shard(model, ignored_params=set(layer.parameters()))
    layer.poison = NAN if dist.get_rank() == 1 else None
    loss_of(model, mine(0)).backward()
    want = NonfiniteGradient("2.weight", None, "nan", (1,))
    expect(problems, "ignored", model, want)
    assert "in no unit" in str(want)


def test_on_hybrid_and_expert_meshes(run_ranks) -> None:
    for problems in run_ranks(on_four_ranks, world=4):
        assert not problems, problems


def on_four_ranks() -> list[str]:
    problems: list[str] = []
    for way in ("rows", "wrapper"):
        model, layers = made(way, hybrid=True)
        set_check_nonfinite(model, True)
        run(model, layers, 0, {(3, 1): NAN, (0, 4): INF})
        found = [
            NonfiniteGradient("2.weight", "(root)", "inf", (0,)),
            NonfiniteGradient("0.2.weight", "0", "nan", (3,)),
        ]
        expect(problems, f"hybrid, {way}", model, *found)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    experts = Experts(mesh.get_local_rank("ep"))
    own = {id(p) for p in experts.expert.parameters()}
    fullshard.fully_shard(
        experts, shard_placement_fn=lambda p: fullshard.ShardPlacementResult(mesh=mesh["edp"]) if id(p) in own else None
    )
    set_check_nonfinite(experts, True)
    factor = torch.tensor(NAN if dist.get_rank() == 2 else 1.0)
    experts(torch.ones(2, 4)).sum().mul(factor).backward()
    names = [name for name, _ in experts.named_parameters()]
    order = sorted(names, key=lambda name: name.startswith("expert"))
    expect(problems, "experts", experts, *[NonfiniteGradient(name, "(root)", "nan", (2,)) for name in order])
    return problems


def norms_by_infinity(way: str) -> list[float]:
    """Total norms where only the last rank's slice has a NaN, by our function or method, and by torch's."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False)
    sharded: Any = fullshard.FullyShardedDataParallel(model, use_orig_params=True) if way == "wrapper" else model
    if way != "wrapper":
        fullshard.fully_shard(model, layout=way)
    totals = []
    for clip in (fullshard.clip_grad_norm_, nn.utils.clip_grad_norm_)[: 1 if way == "wrapper" else 2]:
        sharded.zero_grad()
        sharded(torch.ones(2, 3)).sum().backward()
        if dist.get_rank() == 1:
            for parameter in sharded.parameters():
                inside(parameter.grad).view(-1)[-1:] = NAN
        if way == "wrapper":
            totals.append(float(sharded.clip_grad_norm_(1.0, INF)))
        else:
            total: Any = clip(sharded.parameters(), 1.0, INF)
            totals.append(float(total.full_tensor() if hasattr(total, "full_tensor") else total))
    return totals


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@pytest.mark.gloo("its MAX leaves NaN out")
def test_a_norm_by_infinity_is_nan_where_any_rank_has_one(run_ranks, way):
    for totals in run_ranks(norms_by_infinity, way):
        assert totals and all(map(math.isnan, totals))
