"""`fullshard.plan`, `solve` and `fullshard plan`: answers, and what is refused."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan import MODELS, WAYS, memory_row, rows_of, split
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import models
from fullshard import ConfigError, MixedPrecisionPolicy, Rates, Strategy, plan, solve
from fullshard.cli.main import main
from fullshard.insight.planner import Plans, schedule, strategies
from fullshard.insight.planner.schedule import Axes
from fullshard.wrap import CustomPolicy
from quantised import GatheredInt8, StoredInt8, quantise

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "model.py")


def tokens(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def gpt() -> nn.Module:
    return models.GPT(3)


HOW = {"ranks": 8, "batch": 4, "sequence": 12, "step": tokens}


@pytest.mark.parametrize(("name", "way"), [row for row in rows_of(WAYS) if row[0] == "GPT" or row[1] == "rows"])
def test_the_peak_is_what_the_allocator_reports(name, way, in_a_process):
    """Within 3% of the third step's, AdamW included; parameters, gradients and optimizer state to the byte.

    Each model, and each way for one of them; `make plan-table` has each way for each model, on two worlds.
    """
    row = in_a_process(memory_row, name, way, 8)
    assert row["exact"]
    assert row["planned"] == pytest.approx(row["measured"], rel=0.03)


@pytest.mark.parametrize("packed", [None, torch.int8])
def test_bytes_sent_are_those_of_the_engine(fake_world, packed):
    """As a recording communicator counts them: whole buffers, of which each rank sends all but its own slice."""
    fake_world(8)
    policy = MixedPrecisionPolicy(gather_dtype=packed, scatter_dtype=packed)
    best = plan(gpt, **HOW, strategy=Strategy(micro_batch=4), mp_policy=policy).best
    model = models.GPT(3)
    recorded = fullshard.RecordingComm(fullshard.TorchComm())
    for unit in [*model.blocks, model]:
        fullshard.fully_shard(unit, comm=recorded, mp_policy=policy)
    for _ in range(2):
        recorded.calls.clear()
        tokens(model, 4, 12).backward()
        model.zero_grad()
    for verb, recorded_as in (("gather", "gather"), ("reduce", "exchange" if packed else "reduce")):
        calls = [call for call in recorded.calls if call.verb == recorded_as]
        assert best.sent[verb] == sum(call.nbytes * 7 // 8 for call in calls)
        assert best.collectives[verb] == len(calls)


@pytest.mark.parametrize("packed", [None, torch.int8])
def test_bytes_sent_between_replicas_are_those_of_the_engine(fake_world, packed):
    """By a recording communicator, as above; an all-reduce sends twice, packed as an exchange and a gather."""
    fake_world(8)
    policy = MixedPrecisionPolicy(all_reduce_dtype=packed)
    best = plan(gpt, **HOW, strategy=Strategy(micro_batch=4, replicate=2), mp_policy=policy).best
    model, mesh = models.GPT(3), init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    recorded = fullshard.RecordingComm(fullshard.TorchComm())
    for unit in [*model.blocks, model]:
        fullshard.fully_shard(unit, comm=recorded, mp_policy=policy, mesh=mesh)
    for _ in range(2):
        recorded.calls.clear()
        tokens(model, 4, 12).backward()
        model.zero_grad()
    verbs = ("exchange", "gather") if packed else ("all_reduce",)
    dtype = torch.uint8 if packed else torch.float32
    calls = [call for call in recorded.calls if call.world == 2 and call.verb in verbs and call.dtype == dtype]
    assert best.sent["all_reduce"] == sum(call.nbytes // 2 for call in calls) * (1 if packed else 2)
    assert best.collectives["all_reduce"] == len(calls)
    if packed:
        exact = plan(gpt, **HOW, strategy=Strategy(micro_batch=4, replicate=2)).best
        assert best.sent["all_reduce"] < 0.27 * exact.sent["all_reduce"]
        assert best.peak >= exact.peak
        assert {verb: best.sent[verb] for verb in ("gather", "reduce")} == {
            verb: exact.sent[verb] for verb in ("gather", "reduce")
        }


def test_a_unit_without_parameters_sends_nothing():
    """The root, whose parameters are all in blocks."""
    blocks = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])  # noqa: E731
    units = plan(blocks, ranks=4, step=lambda m, b, s: m(torch.ones(b, 8)).sum(), strategy=Strategy()).best.units
    assert {unit.name: bool(unit.sent) for unit in units} == {"": False, "0": True, "1": True, "2": True}


def test_a_search_ranks_what_fits_by_time():
    plans = plan(gpt, **HOW, device="cpu", device_memory=10**9)
    assert plans.fits and all(p.fits for p in plans.ranked)
    seconds = [p.seconds for p in plans.ranked]
    assert seconds == sorted(seconds)
    assert set(strategies(8, None, 4)) <= {p.strategy for p in plans.ranked}
    least = min(p.reserved for p in plans.ranked)
    tight = plan(gpt, **HOW, device="cpu", device_memory=least)
    assert tight.fits and tight.best.reserved <= least
    none = plan(gpt, **HOW, device_memory=1000)
    assert not none.fits and any(p.strategy.offload for p in none.ranked)
    peaks = [p.peak for p in none.ranked]
    assert peaks == sorted(peaks)


def test_a_search_keeps_the_refinements_that_help():
    """Prefetch 0 where it makes a strategy fit; gradients accumulated whole where that saves time."""
    slow = Rates(flops=1e12, bandwidth=1e6, between=1e6, latency=1e-6)
    plans = plan(gpt, **HOW, device="cpu", rates=slow)
    blocks = [p for p in plans.ranked if p.strategy.units == "auto"]
    plain, whole = ([p for p in blocks if p.strategy.accumulate == how] for how in ("reduced", "whole"))
    assert whole and all(p.micro_batches > 1 for p in whole)
    for refined in whole:
        base = next(p for p in plain if p.strategy == replace(refined.strategy, accumulate="reduced", prefetch=1))
        assert refined.seconds < 0.99 * base.seconds and refined.peak > base.peak
    least = min(p.reserved for p in plans.ranked)
    tight = plan(gpt, **HOW, device="cpu", rates=slow, device_memory=least - 1)
    assert tight.fits and tight.best.strategy.prefetch == 0 and not tight.best.strategy.offload
    assert not any(p.strategy.prefetch == 0 and p.fits for p in plans.ranked)


def test_a_search_compares_dtypes():
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    plans = plan(gpt, **HOW, device="cpu", mp_policy=policies)
    assert {p.strategy.mp_policy for p in plans.ranked} == set(policies)
    assert plans.best.strategy.mp_policy == policies[1]  # half as much is gathered
    assert ", bfloat16 and float32" in str(plans)


def test_tensor_parallelism():
    """A rank holds half of what is split, and its products are half as large; four all-reduces a block and step."""
    build, step = MODELS["GPT"]
    how = {"ranks": 8, "batch": 1, "sequence": 128, "step": step, "strategy": Strategy()}
    whole = plan(build, **how).best
    half = plan(build, **how, tensor_parallel=2, parallelize=split).best
    blocks = build().blocks
    numel = sum(p.numel() for b in blocks for m in (b.attention, b.mlp) for p in m.parameters() if p.dim() == 2)
    assert half.elements == pytest.approx(whole.elements - numel // 2, rel=0.01)
    assert half.flops < 0.75 * whole.flops
    assert half.collectives["tensor"] == 4 * len(blocks)
    assert half.sent["tensor"] == 4 * len(blocks) * 128 * 256 * 4  # an all-reduce of two ranks sends its tensor once
    assert sum(half.waits.values()) == pytest.approx(half.exposed)
    assert not torch.distributed.is_initialized()


def quantised_gpt() -> nn.Module:
    """The first products of each MLP sent in int8, the second stored in it; adapters would train beside these."""
    with torch.device("cpu"):
        model = models.GPT(3)
        for block in model.blocks:
            up, down = block.mlp[0], block.mlp[2]
            up.weight = nn.Parameter(GatheredInt8(up.weight.detach()), requires_grad=False)
            down.weight = nn.Parameter(StoredInt8(*quantise(down.weight.detach())), requires_grad=False)
    return model


def test_quantised_weights(fake_world):
    """What a rank holds and sends of them is what the engine does; what is computed with them runs on fake tensors."""
    fake_world(8)
    best = plan(quantised_gpt, **HOW, strategy=Strategy(micro_batch=4)).best
    recorded = fullshard.RecordingComm(fullshard.TorchComm())
    model = quantised_gpt()
    for unit in [*model.blocks, model]:
        fullshard.fully_shard(unit, comm=recorded)
    for _ in range(2):
        recorded.calls.clear()
        tokens(model, 4, 12).backward()
        model.zero_grad()
    use = fullshard.memory_use(model)
    assert best.memory["parameters"] == use.parameters
    stored = [block.mlp[2].weight.to_local() for block in model.blocks]
    assert all(type(weight) is StoredInt8 for weight in stored)
    plain = sum(p.numel() * 4 for p in model.parameters()) // 8
    assert use.parameters < plain - 2 * sum(weight.numel() for weight in stored)
    gathers = [call for call in recorded.calls if call.verb == "gather"]
    assert best.sent["gather"] == sum(call.nbytes * 7 // 8 for call in gathers)
    assert best.collectives["gather"] == len(gathers)


def test_communication_that_costs_nothing_exposes_nothing():
    fast = Rates(flops=1e9, bandwidth=1e18, between=1e18, latency=1e-12)
    slow = replace(fast, bandwidth=1e6)
    strategy = Strategy(micro_batch=4)
    free, dear = (plan(gpt, **HOW, strategy=strategy, rates=rates).best for rates in (fast, slow))
    assert free.exposed < 1e-6 < dear.exposed
    assert dear.compute == free.compute
    assert (
        dear.seconds > (dear.sent["gather"] + dear.sent["reduce"]) / slow.bandwidth
    )  # the link is never idle for long


def test_what_computation_cannot_hide_is_exposed_whenever_it_was_issued():
    """With overlap 0 the step is the sum of computation and all communication; a reduction has a rate of its own."""
    rates = Rates(flops=1e9, bandwidth=1e9, between=1e9, latency=1e-5, reduce=1e8)
    hidden, shown = (
        plan(gpt, **HOW, strategy=Strategy(micro_batch=4), rates=replace(rates, overlap=overlap)).best
        for overlap in (1.0, 0.0)
    )
    sending = hidden.sent["gather"] / 1e9 + hidden.sent["reduce"] / 1e8
    sending += 1e-5 * sum(hidden.collectives.values())
    assert shown.exposed == pytest.approx(sending)
    assert shown.compute == hidden.compute
    assert hidden.exposed < 0.9 * sending
    assert sum(shown.waits.values()) == pytest.approx(shown.exposed)


@pytest.mark.parametrize(
    ("shard", "replicate", "gather", "all_reduce"),
    [(4, 1, 100, 100), (4, 2, 100, 100), (16, 1, 24, 3), (8, 2, 100, 3), (64, 1, 24, 3)],
)
def test_axes_of_several_machines_use_the_links_between_them(shard, replicate, gather, all_reduce):
    """With 8 ranks on a machine: a ring's gather all 8 links together, an all-reduce of replicas the rank's own."""
    rates, axes = Rates(flops=1, bandwidth=100, between=3, latency=1), Axes(shard, replicate, node=8)
    assert [axes.bandwidth(rates, verb) for verb in ("gather", "reduce", "all_reduce")] == [gather, gather, all_reduce]


def test_large_buffers_have_a_factor():
    """One unit of 40 MB is slower by it than its bytes say; units below 32 MiB are not."""
    wide = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(10)])  # noqa: E731
    step = lambda model, batch, length: model(torch.ones(batch, 1024)).sum()  # noqa: E731
    rates = Rates(flops=1e15, bandwidth=1e9, between=1e9, latency=1e-9)
    for units, factor in (("model", 2), ("auto", 1)):
        whole, slow = (
            plan(wide, ranks=8, step=step, strategy=Strategy(units=units, prefetch=0), rates=given).best.exposed
            for given in (rates, replace(rates, large=0.5))
        )
        assert slow == pytest.approx(factor * whole, rel=0.01)


def measured() -> Rates:
    weight = torch.ones(256, 256)
    return fullshard.measure_rates(lambda: weight @ weight, 2 * 256**3, rounds=2)


@pytest.mark.gloo("rates of real communication")
def test_rates_are_measured_alike_on_all_ranks(run_ranks):
    first, second = run_ranks(measured, world=2)
    assert first == second
    assert 1e8 < first.flops < 1e13 and 1e7 < first.bandwidth < 1e11 and 1e7 < first.reduce < 1e11
    assert 1e-6 < first.latency < 0.1 and 0 <= first.overlap <= 1 and 0 < first.large <= 1


def test_rates_of_one_process():
    rates = measured()
    assert rates.flops > 1e8 and rates.bandwidth == rates.between == rates.copy / 2


def test_experts_on_their_own_mesh():
    """Each of 8 ranks has its own of 8 experts: nothing of them is gathered over 64 ranks, and nothing is padded."""
    build, step = MODELS["MoE"]
    how = {"ranks": 64, "batch": 1, "sequence": 128, "step": step, "strategy": Strategy()}
    shared, own = plan(build, **how).best, plan(build, **how, meshes={"*.mlp.up": (8, 8), "*.mlp.down": (8, 8)}).best
    assert own.padding < shared.padding / 10
    assert own.sent["gather"] < shared.sent["gather"] / 2
    assert own.memory["parameters"] == shared.memory["parameters"]  # padded, a rank has a whole expert too


def test_what_is_offloaded_is_not_on_the_device():
    here, away = (plan(gpt, **HOW, strategy=Strategy(micro_batch=4, offload=away)).best for away in (False, True))
    assert (
        away.memory["parameters"] == away.memory["optimizer"] == away.memory["gradients"] == 0 < here.most["gradients"]
    )
    assert away.peak < here.peak


def deep() -> nn.Module:
    return models.GPT(8)


@pytest.mark.parametrize("inside", [False, True])
def test_state_on_the_host_is_on_the_device_a_few_units_at_a_time(inside):
    """8 bytes an element: of all units, or of the largest and three others at most."""
    here, away = (
        plan(deep, **HOW, strategy=Strategy(micro_batch=4, step_in_backward=inside, state_on_host=hosted)).best
        for hosted in (False, True)
    )
    state = sorted(8 * sum(math.prod(shape) for shape, _, trains in costs.shards if trains) for costs in here.units)
    assert here.most["optimizer"] >= sum(state) > 0
    temporary = here.most["optimizer"] - sum(state)
    assert sum(state[:4]) <= away.most["optimizer"] <= sum(state[-4:]) + temporary < here.most["optimizer"]
    assert away.peak < here.peak
    assert away.seconds > here.seconds and "state on the host" in str(away.strategy)


def test_state_is_put_on_the_host_where_that_makes_a_strategy_fit():
    how: dict[str, Any] = {"layout": "rows", "reshard_after_forward": True, "prefetch": 0, "units": "auto"}
    how |= {
        "checkpointing": False,
        "micro_batch": 4,
        "offload": False,
        "step_in_backward": True,
        "accumulate": "reduced",
    }
    without, hosted = (
        plan(deep, **HOW, strategy=Strategy(**how, state_on_host=there)).best.reserved for there in (False, True)
    )
    found = plan(deep, **HOW, fixed=how, device_memory=(without + hosted) // 2)
    assert found.fits and [p.strategy.state_on_host for p in found.ranked if p.fits] == [True]
    enough = plan(deep, **HOW, fixed=how, device_memory=2 * without)
    assert enough.fits and not any(p.strategy.state_on_host for p in enough.ranked)


def test_solving_finds_the_largest_that_fits():
    how = {**HOW, "device": "cpu", "strategy": Strategy(layout="flat")}
    at = {n: plan(gpt, **{**how, "batch": n, "strategy": Strategy(layout="flat", micro_batch=n)}).best for n in (5, 6)}
    number, best = solve(gpt, "micro-batch", **how, device_memory=at[6].reserved - 1)
    assert (number, best.peak) == (5, at[5].peak)
    number, best = solve(gpt, "micro-batch", **how, device_memory=1000)
    assert (number, best) == (0, None)
    how["batch"] = 1
    peaks = {n: plan(gpt, **{**how, "ranks": n, "strategy": Strategy(layout="flat")}).best.peak for n in (2, 4)}
    assert peaks[4] < peaks[2]
    assert solve(gpt, "world", **how, device_memory=peaks[4])[0] == 4
    assert solve(gpt, "world", **how, device_memory=peaks[2])[0] == 2
    in_threes = {**how, "strategy": Strategy(replicate=3), "device_memory": 2**40}
    assert solve(gpt, "world", **in_threes)[0] == 3
    longest, best = solve(gpt, "sequence", **how, device_memory=peaks[4])
    assert 1 <= longest <= 12 and best.fits


@pytest.mark.parametrize("what", ["micro-batch", "sequence", "world"])
@pytest.mark.parametrize("memory", [200_000, 230_000, 600_000])
def test_what_is_solved_fits_as_a_search_says_and_the_next_does_not(what, memory):
    how: dict[str, Any] = {"ranks": 4, "batch": 2, "sequence": 12, "step": tokens, "device": "cpu"}
    how |= {"device_memory": memory}

    def planned(number: int) -> Plans:
        name = {"micro-batch": "batch", "sequence": "sequence", "world": "ranks"}[what]
        fixed = {"micro_batch": number} if what == "micro-batch" else {}
        return plan(gpt, **{**how, name: number}, fixed=fixed)

    number, best = solve(gpt, what, **how)
    if number:
        assert planned(number).best.seconds == best.seconds and best.fits
    following = {"micro-batch": number + 1, "sequence": number + max(1, number // 16), "world": number - 1}[what]
    if 1 <= following <= 12 or what == "micro-batch":  # the model takes 12 tokens
        assert not planned(following).fits


def test_a_solution_compares_what_a_search_compares():
    """Dtypes; offloading; worlds that a number of the strategy divides; and machines beyond the first."""
    how: dict[str, Any] = {"batch": 1, "sequence": 12, "step": tokens, "device": "cpu"}
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)]
    at = {"ranks": 4, "device_memory": 300_000, **how}
    both, swapped = (solve(gpt, "micro-batch", mp_policy=each, **at)[0] for each in (policies, policies[::-1]))
    assert both == swapped > solve(gpt, "micro-batch", mp_policy=policies[0], **at)[0]
    assert solve(gpt, "world", fixed={"reshard_after_forward": 3}, device_memory=10**9, **how)[0] == 3
    whole = solve(gpt, "world", ranks_per_node=2, device_memory=180_000, **how)[0]
    assert whole > 2 and whole % 2 == 0
    away = {**how, "device": "cuda", "ranks": 2}
    least = min(p.reserved for p in plan(gpt, **away, fixed={"offload": False}, device_memory=1).ranked)
    number, best = solve(gpt, "micro-batch", **away, device_memory=least - 1)
    assert number >= 1 and best.strategy.offload


def test_many_micro_batches_are_counted_as_if_each_were_simulated(monkeypatch):
    how = {**HOW, "batch": 12, "device": "cpu"}
    strategies = [
        Strategy(accumulate=accumulate, replicate=copies)
        for accumulate in ("reduced", "partial", "whole")
        for copies in (1, 2)
    ]
    few = plan(gpt, **how, strategy=strategies).ranked
    monkeypatch.setattr(schedule, "FIRST", 12)
    every = {p.strategy: p for p in plan(gpt, **how, strategy=strategies).ranked}
    for counted in few:
        simulated = every[counted.strategy]
        assert (counted.memory, counted.sent, counted.collectives) == (
            simulated.memory,
            simulated.sent,
            simulated.collectives,
        )
        assert counted.seconds == pytest.approx(simulated.seconds, rel=1e-9)
        assert counted.waits == pytest.approx(simulated.waits, rel=1e-6)


def test_a_large_world_takes_seconds():
    """1,024 ranks and 100 layers: 2.4 s on an idle core."""
    build = lambda: models.GPT(100)  # noqa: E731
    begin = time.process_time()
    plan(build, ranks=1024, sequence=12, step=tokens, strategy=Strategy())
    assert time.process_time() - begin < 5


def test_a_cpu_has_nothing_to_offload_to():
    """`CPUOffloadPolicy` does nothing there, so a plan says so, and a search does not try it."""
    how = {**HOW, "device": "cpu"}
    without, with_offload = (plan(gpt, **how, strategy=Strategy(micro_batch=4, offload=o)).best for o in (False, True))
    assert without.memory == with_offload.memory and not with_offload.strategy.offload
    none = plan(gpt, **how, device_memory=1000)
    assert not none.fits and not any(p.strategy.offload for p in none.ranked)


def test_a_wrap_policy_may_be_a_set_of_classes():
    one, other = (plan(gpt, **HOW, strategy=Strategy(micro_batch=4, units=u)).best for u in ("auto", {models.Block}))
    assert one.memory == other.memory


def placed(module: nn.Module) -> bool | dict[str, object]:
    return {"shard_placement_fn": lambda p: None} if isinstance(module, models.Block) else False


BAD = {
    "ranks": ({"ranks": 0}, "ranks must be a positive integer"),
    "a bool": ({"batch": True}, "batch must be a positive integer"),
    "a bool in a strategy": ({"strategy": Strategy(micro_batch=True)}, "micro_batch must be"),
    "a float": ({"sequence": 1.5}, "sequence must be a positive integer"),
    "micro-batch": ({"strategy": Strategy(micro_batch=3)}, "micro_batch must divide batch"),
    "replicas": ({"strategy": Strategy(replicate=3)}, "replicate must divide ranks"),
    "prefetch": ({"strategy": Strategy(prefetch=-1)}, "prefetch must be"),
    "optimizer": ({"optimizer": "Adamm"}, "no optimizer 'Adamm'"),
    "broken optimizer": ({"optimizer": lambda parameters: 1 / 0}, "could not run the optimizer"),
    "device": ({"device": "tpu"}, "device is invalid"),
    "rates": ({"rates": 3}, "rates is invalid"),
    "step": ({"step": lambda *_: 1 / 0}, "could not run one step"),
    "value of a fake": ({"step": lambda m, b, s: tokens(m, b, s) * tokens(m, b, s).item()}, "could not run one step"),
    "meshes": ({"meshes": {"*": 3}}, "meshes\\['\\*'\\] is invalid"),
    "meshes that are none": ({"meshes": 5}, "meshes is invalid"),
    "a mesh of words": ({"meshes": {"*": ("a", 2)}}, "meshes\\['\\*'\\] must be a positive integer"),
    "a mesh of a number": ({"meshes": {3: (2, 2)}}, "a key of meshes is invalid"),
    "an optimizer of whole matrices": ({"optimizer": "Muon"}, "torch.optim.Muon needs whole tensors"),
    "a mesh that does not divide": ({"meshes": {"*": (3, 1)}}, "product divides 8"),
    "a mesh of nothing": ({"meshes": {"*.experts.*": (2, 4)}}, "no parameter's name matches"),
    "layout": ({"strategy": Strategy(layout="diagonal")}, "layout"),
    "a word as a bool": ({"strategy": Strategy(checkpointing="no")}, "checkpointing is invalid"),
    "a word as a strategy": ({"strategy": "rows"}, "strategy is invalid"),
    "no strategies": ({"strategy": []}, "strategy is invalid"),
    "a word as a policy": ({"mp_policy": "bf16"}, "mp_policy is invalid"),
    "no policies": ({"mp_policy": []}, "mp_policy is invalid"),
    "no memory": ({"device_memory": 0}, "device_memory must be a positive integer"),
    "a word as memory": ({"device_memory": "80GB"}, "device_memory must be a positive integer"),
    "slices": ({"strategy": Strategy(micro_batch=4, reshard_after_forward=3)}, "reshard_after_forward"),
    "accumulate": ({"strategy": Strategy(accumulate="never")}, "accumulate is invalid"),
    "many steps": ({"strategy": Strategy(micro_batch=2, step_in_backward=True)}, "steps in every backward"),
    "tensor_parallel": ({"tensor_parallel": 2}, "belong together"),
    "parallelize": ({"parallelize": lambda model, mesh: None}, "belong together"),
    "broken parallelize": ({"tensor_parallel": 2, "parallelize": lambda model, mesh: 1 / 0}, "could not parallelize"),
    "placement": ({"strategy": Strategy(units=CustomPolicy(placed))}, "shard_placement_fn"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    change, words = BAD[name]
    with pytest.raises(ConfigError, match=words):
        plan(gpt, **{**HOW, "strategy": Strategy(micro_batch=4), **change})


def test_refused_models_and_rates(fake_world):
    with pytest.raises(ConfigError, match="needs a model"):
        plan(3, ranks=2)
    with pytest.raises(ConfigError, match="needs a model"):
        plan(lambda: 3, ranks=2)
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        plan(lambda: gpt().requires_grad_(False), **HOW)
    with pytest.raises(ConfigError, match=r"Rates\.flops must be a positive number"):
        Rates(0, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"Rates\.overlap must be a number from 0 to 1"):
        Rates(1, 1, 1, 1, overlap=1.5)
    with pytest.raises(ConfigError, match="memory of a device"):
        solve(gpt, "world", **HOW)
    with pytest.raises(ConfigError, match="micro-batch is what is solved for"):
        solve(gpt, "micro-batch", **HOW, device_memory=1, fixed={"micro_batch": 2})
    with pytest.raises(ConfigError, match="ranks_per_node must divide the world"):
        solve(gpt, "sequence", **HOW, device_memory=1, ranks_per_node=3)
    with pytest.raises(ConfigError, match="does not know what to solve for"):
        solve(gpt, "ranks", **HOW, device_memory=1)
    with pytest.raises(ConfigError, match="would change the model"):
        plan(gpt(), ranks=2, tensor_parallel=2, parallelize=split)
    fake_world(2)
    with pytest.raises(ConfigError, match="before it is sharded"):
        plan(fullshard.fully_shard(gpt()), ranks=2)


class OwnCheckpoints(nn.Module):
    """Cannot be checkpointed again: it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.lines[0](x).relu()
        return self.lines[1](x).relu() if self.calls % 2 else x


def test_a_model_that_cannot_be_checkpointed_is_planned_without():
    how = {"ranks": 2, "step": lambda model, batch, _: model(torch.ones(batch, 8)).sum()}

    def build() -> nn.Module:
        return nn.Sequential(*[OwnCheckpoints() for _ in range(3)])

    plans = plan(build, **how)
    assert not any(each.strategy.checkpointing for each in plans.ranked)
    assert "left out: checkpointing, with which the model raises CheckpointError" in str(plans)
    with pytest.raises(ConfigError, match="checkpointing=True"):
        plan(build, **how, fixed={"checkpointing": True})
    with pytest.raises(ConfigError, match="checkpointing=True"):  # without it nothing fits
        plan(build, **how, device_memory=1)
    plain = plan(gpt, **HOW)
    assert "left out" not in str(plain)


def test_a_unit_that_never_runs_has_no_state():
    """Its parameters get no gradients; AdamW makes their state with the first."""

    def step(model: nn.Module, batch: int, _: int) -> torch.Tensor:
        return model[2](model[0](torch.ones(batch, 8))).sum()

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)])

    skips = plan(build, ranks=1, step=step, strategy=Strategy(units=frozenset([nn.Sequential]))).best
    runs = plan(build, ranks=1, step=lambda m, b, _: m(torch.ones(b, 8)).sum(), strategy=Strategy()).best
    assert skips.most["parameters"] == runs.most["parameters"]
    assert 3 * skips.most["optimizer"] == 2 * runs.most["optimizer"]


def test_without_a_device_nothing_is_said_to_fit():
    how = {"ranks": 2, "sequence": 12}
    plans, checked = plan(gpt, **how), plan(gpt, **how, device_memory=2**31)
    assert "fits" not in str(plans) and "fits" in str(checked)
    assert plans.best.as_json()["fits"] is None and checked.best.as_json()["fits"] is True
    tight = plan(gpt, **how, device="cpu", device_memory=checked.best.peak // 2, strategy=Strategy()).best
    assert " too little" in str(tight)


def test_fixed_fields_are_not_searched():
    """Other fields are, and refined; what does not go with the fixed ones is left out."""
    how = {**HOW, "device": "cpu", "device_memory": 10**9}
    chosen = [p.strategy for p in plan(gpt, fixed={"layout": "flat", "prefetch": 2}, **how).ranked]
    assert {(strategy.layout, strategy.prefetch) for strategy in chosen} == {("flat", 2)}
    assert len({strategy.checkpointing for strategy in chosen}) == 2
    assert "whole" in {strategy.accumulate for strategy in chosen}
    stepped = [p.strategy for p in plan(gpt, fixed={"step_in_backward": True}, **how).ranked]
    assert {strategy.micro_batch for strategy in stepped} == {HOW["batch"]}
    offloaded = plan(gpt, **HOW, device_memory=1000, fixed={"offload": False})
    assert not any(p.strategy.offload for p in offloaded.ranked)
    for fixed, strategy, words in (
        ({"colour": 1}, None, "no field 'colour'"),
        ({"prefetch": -1}, None, "prefetch must be"),
        ({"layout": "flat"}, Strategy(), "set these fields in the strategy"),
        ({"offload": True}, None, "nothing to offload"),
        ({"state_on_host": True}, None, "nothing to offload"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(gpt, fixed=fixed, strategy=strategy, **how)


def test_the_command(capsys):
    """The example of its help; JSON; what fits, what does not, and what cannot be read."""
    words = [f"{EXAMPLE}:demo_model", "--ranks", "8", "--batch", "4", "--sequence", "128"]
    assert main(["plan", *words, "--memory", "2GiB"]) == 0
    assert "best: " in capsys.readouterr().out
    assert main(["plan", *words, "--memory", "1GiB", "--json", "--fix", "layout=rows", "micro_batch=2"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert {p["strategy"]["layout"] for p in answer["plans"]} == {"rows"}
    assert {p["strategy"]["micro_batch"] for p in answer["plans"]} == {2}
    assert main(["plan", *words, "--memory", "2GiB", "--solve", "micro-batch", "--device", "cpu"]) == 0
    assert "largest micro-batch that fits: " in capsys.readouterr().out
    assert main(["plan", *words, "--memory", "1MB", "--solve", "world"]) == 3
    assert "nothing fits; without --solve" in capsys.readouterr().out
    one = ["layout=rows", "micro_batch=4", "checkpointing=false", "reshard_after_forward=true", "prefetch=1"]
    peaks = []
    for units in ("auto", "Block", "GPT"):
        assert main(["plan", *words, "--json", "--fix", *one, f"units={units}"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["plans"][0]["peak"])
    assert peaks[0] == peaks[1] < peaks[2]


def test_warnings_of_the_command_are_without_source(tmp_path, capsys):
    (tmp_path / "one.py").write_text("from torch import nn\ndef build():\n    return nn.Embedding(8, 8)\n")
    assert main(["plan", f"{tmp_path}/one.py:build", "--sequence", "4"]) == 0
    told = capsys.readouterr().err
    assert told.startswith("fullshard: Units are the repeated blocks") and "UserWarning" not in told


@pytest.mark.parametrize(
    "words",
    [
        ["nothing.py:build"],
        [f"{EXAMPLE}:nothing"],
        ["nothing.json"],
        [f"{EXAMPLE}:demo_model", "--memory", "much"],
        [f"{EXAMPLE}:demo_model", "--memory", "80"],
        [f"{EXAMPLE}:demo_model", "--ranks", "12", "--ranks-per-node", "8"],
        [f"{EXAMPLE}:demo_model", "--ranks", "9223372036854775808"],
        [f"{EXAMPLE}:demo_model", "--fix", "layout=flat", "layout=rows"],
        [f"{EXAMPLE}:demo_model", "--dtype", "float17"],
        [f"{EXAMPLE}:demo_model", "--dtype", "int8"],
        [f"{EXAMPLE}:demo_model", "--fix", "units=Blok"],
        [f"{EXAMPLE}:demo_model", "--fix", "layout"],
        [f"{EXAMPLE}:demo_model", "--fix", "colour=red"],
        [f"{EXAMPLE}:demo_model", "--fix", "prefetch=many"],
        [f"{EXAMPLE}:demo_model", "--rates", "flops=fast"],
        [f"{EXAMPLE}:demo_model", "--ranks", "0"],
        [f"{EXAMPLE}:demo_model", "--solve", "world"],
        [f"{EXAMPLE}:initial_value"],
        [f"{EXAMPLE}:demo_model", "--tensor-parallel", "2"],
        [f"{EXAMPLE}:demo_model", "--tensor-parallel", "2", "--parallelize", "nothing.py:split"],
        [f"{EXAMPLE}:demo_model", "--fix", "reshard_after_forward=3"],
        [f"{EXAMPLE}:demo_model", "--fix", "mp_policy=bf16"],
    ],
    ids=" ".join,
)
def test_bad_arguments_of_the_command(words, capsys):
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith("fullshard: ")


def test_arguments_that_tyro_refuses(capsys):
    assert main(["plan", f"{EXAMPLE}:demo_model", "--solve", "None"]) == 2
    assert "--solve" in capsys.readouterr().err


def test_a_hugging_face_configuration(tmp_path, capsys):
    pytest.importorskip("transformers", reason="reads the configuration")
    config = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    split_in_two = ["plan", str(tmp_path), "--ranks", "4", "--sequence", "32", "--tensor-parallel", "2"]
    assert main([*split_in_two, "--fix", "layout=flat", "reshard_after_forward=2", "--mixed", "fp32", "bf16,fp32"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM on 8 ranks" in out and "tensor-parallel collectives" in out
    assert "kept after forward among 2" in out and "bfloat16 and float32" in out
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(path), "--ranks", "4", "--sequence", "32", "--dtype", "bf16"]) == 0
        assert "LlamaForCausalLM on 4 ranks" in capsys.readouterr().out
    refused = [
        ({"model_type": "none"}, "cannot be read: The checkpoint you are trying to load has model type `none`"),
        ({"num_attention_heads": 5}, "The hidden size (64) is not a multiple of the number of attention heads (5)"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "got:       LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "the configuration of a quantised model"),
    ]
    for change, words in refused:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert main(["plan", str(tmp_path), "--ranks", "4", "--sequence", "32"]) == 2
        assert words in capsys.readouterr().err
    gpt2 = {"model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    common = ["plan", str(tmp_path), "--ranks", "2", "--device", "cpu", "--memory", "1e2MiB", "--fix", "layout=flat"]
    assert main([*common, "--sequence", "65"]) == 2
    assert "--sequence of at most 64" in capsys.readouterr().err
    assert main([*common, "--solve", "sequence"]) == 0
    assert "largest sequence that fits, to 1 part in 16: 64" in capsys.readouterr().out


def test_planning_needs_no_process_group():
    assert not torch.distributed.is_initialized()
    plan(gpt, **HOW, strategy=Strategy(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert not torch.distributed.is_initialized()
    assert "torch.testing" not in str(sys.modules["fullshard.insight.planner.costs"].__dict__.keys())
