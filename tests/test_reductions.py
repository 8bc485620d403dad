"""`reduction="sum"` and `"tokens"`: exact against one process on the concatenated, unequal batches; what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import set_token_count
from test_meshes import Experts
from training import full_gradients
from ways import (
    WIDTH,
    alone,
    differences,
    error_of,
    gradient_problems,
    layers,
    named_error,
    shard,
    value_problems,
    without_sync,
)

STEPS, MICRO = 2, 2


def samples(step: int, micro: int, rank: int) -> int:
    """Unequal between ranks, micro-batches and steps; 0 of them in one place."""
    return (3 * step + 5 * micro + 2 * rank + 1) % 7 if (step, micro, rank) != (0, 1, 1) else 0


def inputs(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(samples(step, micro, rank), WIDTH, generator=generator, dtype=torch.float64)


def summed(model: nn.Module, x: Tensor) -> Tensor:
    """A sum over the samples."""
    return model(x).square().sum()


def one_process(plain: nn.Module, step: int, reduction: str) -> Tensor:
    """The gradients of all ranks' batches of the step, concatenated; the loss."""
    ranks = range(dist.get_world_size())
    x = torch.cat([inputs(step, micro, rank) for micro in range(MICRO) for rank in ranks])
    loss = summed(plain, x) / (len(x) if reduction == "tokens" else 1)
    loss.backward()
    return loss


def this_rank(model: Any, step: int, sync: str, reduction: str) -> None:
    """The gradients of this rank's batches: each reduced, the last only, or over the replicate axis at last only."""
    if reduction == "tokens":
        set_token_count(model, [samples(step, micro, dist.get_rank()) for micro in range(MICRO)])
    for micro in range(MICRO):
        x = inputs(step, micro, dist.get_rank())
        if sync == "last" and micro < MICRO - 1:
            with without_sync(model):
                summed(model, x).backward()
            continue
        if sync == "shard axis":
            model.set_requires_all_reduce(micro == MICRO - 1)
        summed(model, x).backward()


def clip(model: Any, max_norm: float) -> Tensor:
    """By the front-end's own function; the norm before."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(max_norm)
    return fullshard.clip_grad_norm_(model.parameters(), max_norm)


def trained(way: str, reduction: str, sync: str, **settings: Any) -> list[str]:
    """Gradients, their norm and what an optimizer makes of them when clipped, over steps of unequal batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shard(layers(), way, reduction=reduction, **settings)
    plain = layers()
    where = f"{way}, {reduction}, {sync}, {settings}"
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3, weight_decay=0.1) for m in (model, plain))
    problems: list[str] = []
    for step in range(STEPS):
        mine.zero_grad(), theirs.zero_grad()
        this_rank(model, step, sync, reduction)
        one_process(plain, step, reduction)
        problems += gradient_problems(f"{where}, step {step}", model, plain)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        assert norm > 0.2
        problems += differences(f"{where}, step {step}", {"norm": clip(model, 0.2)}, {"norm": norm}, 1e-12)
        mine.step(), theirs.step()
    return problems + value_problems(where, model, plain, 1e-10)


def test_sums_and_tokens_are_exact_against_one_process(run_ranks) -> None:
    for problems in run_ranks(on_two_ranks):
        assert not problems, problems


def on_two_ranks() -> list[str]:
    problems: list[str] = []
    for way in ("rows", "wrapper"):  # sums, the other ways and one batch a step: tests/property
        for sync in ("each", "last"):
            problems += trained(way, "tokens", sync)
    problems += trained("originals", "tokens", "each", sharding_strategy=fullshard.ShardingStrategy.NO_SHARD)
    more = (
        in_sixteen_bits,
        near_the_largest_number,
        counts_on_the_device,
        nothing_to_count,
        one_collective,
        recomputed,
        penalised,
    )
    return problems + [problem for check in more for problem in check()]


def test_on_hybrid_meshes_expert_meshes_and_context_parallel_ranks(run_ranks) -> None:
    for problems in run_ranks(on_four_ranks, world=4):
        assert not problems, problems


def on_four_ranks() -> list[str]:
    problems: list[str] = []
    problems += trained("originals", "sum", "last", hybrid=True)
    problems += trained("flat", "tokens", "shard axis", hybrid=True)
    problems += trained("wrapper", "tokens", "each", hybrid=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    both = fullshard.DataParallelMeshDims(shard=("dp", "cp"))
    problems += trained("rows", "tokens", "last", mesh=mesh, dp_mesh_dims=both)
    return problems + experts()


def experts() -> list[str]:
    """Each pair of ranks has an expert: its gradient is the pair's sum, divided by the count of all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    rank, expert = dist.get_rank(), mesh.get_local_rank("ep")
    model = Experts(expert).double()
    own = {id(p) for p in model.expert.parameters()}
    fullshard.fully_shard(
        model,
        reduction="tokens",
        shard_placement_fn=lambda p: fullshard.ShardPlacementResult(mesh=mesh["edp"]) if id(p) in own else None,
    )
    batches = [torch.randn(1 + 2 * r, 4, generator=torch.Generator().manual_seed(r)).double() for r in range(4)]
    set_token_count(model, len(batches[rank]))
    summed(model, batches[rank]).backward()
    wholes = [Experts(e).double() for e in range(2)]
    for other, x in enumerate(batches):
        (summed(wholes[other // 2], x) / sum(map(len, batches))).backward()
    want = {f"expert.{name}": p.grad for name, p in wholes[expert].expert.named_parameters()}
    for name, p in wholes[0].shared.named_parameters():
        want[f"shared.{name}"] = p.grad + wholes[1].shared.get_parameter(name).grad
    got = full_gradients(model)
    lines = fullshard.describe(model)
    assert "4 ranks: sharded 4 ways; gradients: sum over 4, divided by the count of tokens of 4" in lines
    assert "2 ranks: sharded 2 ways; gradients: sum over 2, divided by the count of tokens of 4" in lines
    return differences("experts", got, {name: want[name] for name in got})


class Weights(nn.Module):
    """A loss whose gradient is a number of one's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, factor: float) -> Tensor:
        return (self.weight * factor).sum()


def in_sixteen_bits() -> list[str]:
    """A divisor that 8 or 11 bits do not hold, and a sum and a count beyond float16's largest number."""
    problems = []
    cases = [
        (torch.bfloat16, (256.0, 512.0), (257, 514), 255 / 256),
        (torch.float16, (3e4, 6e4), (3 * 10**4, 10**4), 2.25),
    ]
    for dtype, factors, counts, want in cases:
        policy = fullshard.MixedPrecisionPolicy(reduce_dtype=dtype)
        model = fullshard.fully_shard(Weights(), mp_policy=policy, reduction="tokens")
        set_token_count(model, counts[dist.get_rank()])
        model(factors[dist.get_rank()]).backward()
        got = model.weight.grad.full_tensor()
        if not torch.allclose(got, torch.full_like(got, want), rtol=0 if dtype == torch.bfloat16 else 1e-3):
            problems.append(f"{dtype}: {got} where {want} is wanted")
    return problems


def near_the_largest_number() -> list[str]:
    """The mean in float16 of gradients whose sum it cannot hold."""
    model = fullshard.fully_shard(Weights(), mp_policy=fullshard.MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model(6e4).backward()
    got = model.weight.grad.full_tensor()
    return [] if torch.equal(got, torch.full_like(got, torch.tensor(6e4).half().item())) else [f"{got}"]


def counts_on_the_device() -> list[str]:
    """Counts in a tensor, and tensors in a list, one root in a module that is no unit; a longer name for the same."""
    problems, rank = [], dist.get_rank()
    for given in (
        torch.tensor([3, 4 + rank]),
        [torch.tensor(3), torch.tensor([4 + rank])],
        [3, torch.tensor(4 + rank)],
    ):
        model = nn.Sequential(fullshard.fully_shard(Weights(), reduction="tokens"))
        set_token_count(model, given)
        for _ in range(2):
            model(30.0).backward()
        problems += differences("tensors", {"w": model[0].weight.grad.full_tensor()}, {"w": torch.full((8,), 8.0)})
    return problems


def nothing_to_count() -> list[str]:
    """A total of 0: nothing is divided."""
    model = fullshard.fully_shard(Weights(), reduction="tokens")
    set_token_count(model, 0)
    model(0.0).backward()
    return differences("no tokens", {"w": model.weight.grad.full_tensor()}, {"w": torch.zeros(8)})


def one_collective() -> list[str]:
    """One more all-reduce a step, of three integers, whatever the number of units."""
    recording = fullshard.RecordingComm(fullshard.TorchComm())
    model: Any = shard(layers(), "rows", comm=recording, reduction="tokens")
    this_rank(model, 0, "each", "tokens")
    recording.calls.clear()
    set_token_count(model, [1, 1])
    told = [(call.verb, call.nbytes) for call in recording.calls]
    divisor = model._runner().settings.reduce.tokens.total(torch.bfloat16)
    assert (divisor.shape, divisor.dtype) == ((1,), torch.float32)  # of no dims, a GPU would round it
    return [] if told == [("all_reduce", 24)] else [f"set_token_count ran {told}"]


class Recomputing(nn.Sequential):
    """A backward within the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def penalised() -> list[str]:
    """A gradient penalty goes through the units twice: the backward within the loss has a count of 0."""
    model, plain = shard(layers(), "rows", reduction="tokens"), layers()
    set_token_count(model, [0, 3])
    for one, ranks in ((model, [dist.get_rank()]), (plain, range(dist.get_world_size()))):
        x = torch.cat([torch.full((3, WIDTH), 0.1 + rank, dtype=torch.float64) for rank in ranks]).requires_grad_()
        loss = summed(one, x) / (1 if one is model else len(x))
        slopes = torch.autograd.grad(loss, x, create_graph=True)[0] * (1 if one is model else len(x))
        penalty = slopes.square().sum() / (1 if one is model else len(x))
        (loss + penalty).backward()
    return gradient_problems("gradient penalty", model, plain)


def recomputed() -> list[str]:
    """Reentrant checkpointing is one backward to the user."""
    model = Recomputing(*layers())
    for layer in model:
        fullshard.fully_shard(layer, reduction="tokens")
    fullshard.fully_shard(model, reduction="tokens")
    plain = layers()
    for _ in range(2):
        set_token_count(model, 2)
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        summed(model, x).backward()
        (summed(plain, x.detach()) / 2).backward()
    return gradient_problems("checkpointed", model, plain) if dist.get_world_size() == 2 else ["made for two ranks"]


# What is refused.


@pytest.mark.cpu("different numbers of micro-batches are compared on a CPU alone: the host of a device would wait")
def test_what_cannot_be_counted_is_refused_and_the_next_step_is_right(run_ranks) -> None:
    for problems in run_ranks(refused):
        assert not problems, problems


def refused() -> list[str]:
    problems: list[str] = []
    for way in ("rows", "wrapper"):
        refused_in(way, problems)
    return problems + arguments_refused()


def refused_in(way: str, problems: list[str]) -> None:
    model = shard(layers(), way, reduction="tokens")
    x, expect = inputs(0, 0, dist.get_rank()), checker(problems, way)

    def backward() -> None:
        summed(model, x).backward()

    expect(backward, fullshard.PhaseError, "no count", "set_token_count(model, count)")
    set_token_count(model, 3)
    broken = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
    broken.register_hook(lambda grad: grad.nothing)
    try:
        summed(model, broken).backward()
        problems.append(f"{way}: a hook without an error")
    except AttributeError:  # of the hook's own making; that backward is not counted
        model.zero_grad()
    backward()
    expect(backward, AssertionError, "one more than the 1 of the last count")
    for wrong in (-1, 1.5, True, [], "3", torch.ones(2, 2), torch.tensor(0.5), None):
        expect(partial(set_token_count, model, wrong), ValueError, "set_token_count")
    below = next(m for m in model.modules() if m is not model and isinstance(m, (FSDP, fullshard.FSDPModule)))
    expect(lambda: set_token_count(below, 3), fullshard.PhaseError, "for the root")
    model.zero_grad()
    set_token_count(model, [3, 3])
    with without_sync(model):
        backward()
    expect(lambda: set_token_count(model, 3), fullshard.PhaseError, "middle of a step", "zero_grad()")
    backward()
    model.zero_grad()
    set_token_count(model, [3] * (1 + dist.get_rank()))
    expect(backward, fullshard.DivergenceError, "different numbers of micro-batches")
    model.zero_grad()
    plain = layers()
    this_rank(model, 0, "each", "tokens"), one_process(plain, 0, "tokens")
    problems += gradient_problems(f"{way}: after what was refused", model, plain)


def checker(problems: list[str], where: str) -> Callable[..., None]:
    """A function that notes where an action does not raise an error of that kind with these fragments."""

    def expect(action: Callable[[], object], kinds: Any, *fragments: str) -> None:
        problems.extend(named_error(error_of(action), *fragments, kinds=kinds, where=where))

    return expect


def arguments_refused() -> list[str]:
    problems: list[str] = []
    expect = checker(problems, "arguments")
    expect(lambda: shard(layers(), "originals", alone, reduction="average"), ValueError, "'average'")
    for reduction in ("sum", "tokens"):
        model: Any = shard(layers(), "rows", reduction=reduction)
        expect(lambda model=model: model.set_reduce_scatter_divide_factor(2.0), ValueError, "divide factor")
        expect(lambda model=model: model.set_force_sum_reduction_for_comms(True), ValueError, "force_sum")
        model.set_force_sum_reduction_for_comms(False)
        wrapped = shard(layers(), "wrapper", reduction=reduction)
        hook: Sequence[Any] = (None, lambda state, grad, out: None)
        expect(lambda wrapped=wrapped, hook=hook: wrapped.register_comm_hook(*hook), ValueError, "communication hook")
    differs = shard(layers(), "rows", alone, reduction="sum" if dist.get_rank() else "mean")
    expect(lambda: differs(torch.ones(1, WIDTH).double()), fullshard.DivergenceError, "reduction sum")
    return problems
