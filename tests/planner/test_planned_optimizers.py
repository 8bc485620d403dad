"""Optimizers with owners as `fullshard.plan` computes them, beside gloo ranks: state, bytes sent, and the peak."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allocations import mark, watch
from plan import GPT, language
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import ConfigError, MixedPrecisionPolicy, Plan, Strategy, comm_hooks, plan
from fullshard.cli.main import main
from fullshard.optim import on_owners, owners, replicas

SEQUENCE = 24


def build() -> nn.Module:
    return GPT(3, 96, 512)


def muon_and_adamw(named_parameters: Any) -> list[torch.optim.Optimizer]:
    named = list(named_parameters)
    matrices = [p for name, p in named if p.ndim == 2 and name.startswith("blocks")]
    ids = {id(p) for p in matrices}
    return [fullshard.Muon(matrices), torch.optim.AdamW([p for _, p in named if id(p) not in ids], fused=True)]


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return fullshard.OwnerOptimizer(parameters, torch.optim.Adafactor, lr=0.01)


def adamw_on_owners(parameters: Any) -> torch.optim.Optimizer:
    return fullshard.OwnerOptimizer(parameters, torch.optim.AdamW)


def elementwise(parameters: Any) -> torch.optim.Optimizer:
    return fullshard.OwnerOptimizer(parameters, torch.optim.AdamW, elementwise=True)


MAKES: dict[str, Callable[[Any], Any]] = {
    "Muon": muon_and_adamw,
    "Adafactor": adafactor,
    "AdamW": adamw_on_owners,
    "elementwise": elementwise,
}


def trained(name: str, layout: str, shape: tuple[int, ...]) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
    """The sharded model, its optimizers, and the mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = build()
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=mesh, layout=layout)
    fullshard.fully_shard(model, mesh=mesh, layout=layout)
    make = MAKES[name]
    made = make(model.named_parameters() if name == "Muon" else list(model.parameters()))
    return model, made if isinstance(made, list) else [made], mesh


def planned(name: str, layout: str, shape: tuple[int, ...], device: str, **fields: Any) -> Plan:
    replicate = shape[0] if len(shape) > 1 else 1
    how = {"ranks": math.prod(shape), "sequence": SEQUENCE, "step": language, "device": device}
    strategy = Strategy(layout=layout, replicate=replicate, **fields)
    return plan(build, **how, strategy=strategy, optimizer=MAKES[name]).best


def state_and_bytes(name: str, layout: str, shape: tuple[int, ...]) -> dict[str, int]:
    """On this rank: bytes of state, and those sent to others in the second step, by axis, with the exchanges."""
    model, optimizers, mesh = trained(name, layout, shape)
    verbs = {mesh.get_group("shard"): "owners"} | ({mesh.get_group("replicate"): "replicas"} if len(shape) > 1 else {})
    sent = dict.fromkeys(("owners", "replicas", "owners, times", "replicas, times"), 0)
    exchange = dist.all_to_all_single

    def counted(out: Any, data: Any, out_splits: Any, splits: Any, **options: Any) -> Any:
        group = options["group"]
        sent[verbs[group]] += (sum(splits) - splits[dist.get_rank(group)]) * data.element_size()
        sent[f"{verbs[group]}, times"] += 1
        return exchange(out, data, out_splits, splits, **options)

    for _ in range(2):
        language(model, 1, SEQUENCE).backward()
        sent.update(dict.fromkeys(sent, 0))
        with mock.patch.object(dist, "all_to_all_single", counted):
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    return {**sent, "state": sum(fullshard.memory_use(model, optimizer).optimizer for optimizer in optimizers)}


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_owners_hold_and_send_what_is_planned(run_ranks, name, layout, shape):
    """To the byte: the most state of a rank, and what the busiest rank sends over each axis."""
    ranks = run_ranks(state_and_bytes, name, layout, shape, world=math.prod(shape))
    best = planned(name, layout, shape, "cpu")
    assert best.owners is not None
    assert best.owners.state == max(rank["state"] for rank in ranks)
    for verb in ("owners", "replicas"):
        assert best.sent.get(verb, 0) == ranks[best.owners.rank][verb]
        assert best.collectives.get(verb, 0) == ranks[best.owners.rank][f"{verb}, times"]
    sends = (name, len(shape)) != ("elementwise", 1)
    assert any(best.sent.get(verb, 0) for verb in ("owners", "replicas")) is sends


def peak_of_a_rank(name: str, layout: str, shape: tuple[int, ...], rank: int) -> int:
    """The most bytes in the third step, of a rank in a fake world: gloo's threads keep buffers for a while."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    with watch() as watched:
        model, optimizers, _ = trained(name, layout, shape)
        for step in range(3):
            with mark(str(step)):
                language(model, 1, SEQUENCE).backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
    return watched.windows["2"].peak


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize(("name", "layout"), [*[(name, "rows") for name in MAKES], ("Muon", "flat")])
def test_the_peak_with_owners_is_what_the_allocator_reports(in_a_process, name, layout, shape):
    best = planned(name, layout, shape, "cuda")  # as in test_planned_runs.py
    assert best.owners is not None
    peak = in_a_process(peak_of_a_rank, name, layout, shape, best.owners.rank)
    assert best.peak == pytest.approx(peak, rel=0.03)


def step_of_a_rank(name: str, layout: str, shape: tuple[int, ...], rank: int) -> int:
    """State of a rank, and the most bytes that its second step takes besides, where every piece goes to a device.

    That device is "cpu:0": torch takes it for another one than "cpu", copies to it, and has the copy there.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    elsewhere = {"device_of": lambda group: torch.device("cpu", 0)}
    patched = [mock.patch.multiple(module, **elsewhere) for module in (on_owners, replicas)]
    with watch() as watched, patched[0], patched[1]:
        model, (optimizer,), _ = trained(name, layout, shape)
        for step in range(2):
            language(model, 1, SEQUENCE).backward()
            with mark(str(step)):
                optimizer.step()
            model.zero_grad()
    step = watched.windows["1"]
    return step.peak - step.start + fullshard.memory_use(model, optimizer).optimizer


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize(("name", "layout"), [("AdamW", "rows"), ("AdamW", "flat"), ("Adafactor", "rows")])
def test_pieces_of_offloaded_units_are_counted_on_the_device(in_a_process, name, layout, shape):
    """An owner's state is on the device, as it assembles whole parameters there; and so are copies of the pieces."""
    best, here = (planned(name, layout, shape, "cuda", offload=offload) for offload in (True, False))
    measured = in_a_process(step_of_a_rank, name, layout, shape, best.owners.rank)
    assert best.owners.state + best.owners.temporary == pytest.approx(measured, rel=0.01)
    assert best.owners.state == here.owners.state and best.owners.temporary > here.owners.temporary
    assert best.sent == here.sent
    assert best.memory["optimizer"] >= best.owners.state


def test_state_of_elements_stays_with_offloaded_units():
    """Stepped where they are: on the host. Muon's momentum is there too; what it orthogonalizes comes to the device."""
    elements, muon = (planned(name, "rows", (2, 2), "cuda", offload=True) for name in ("elementwise", "Muon"))
    counts = 4 * len([*build().parameters()])  # of steps
    assert 0 < elements.owners.state <= counts and muon.owners.state <= counts
    here = planned("Muon", "rows", (2, 2), "cuda")
    assert here.owners.state > muon.owners.state and muon.owners.temporary > muon.sent["owners"]


WIDE = 64


def bytes_of_a_step(name: str, blocks: int) -> tuple[int, int]:
    """The most that a step allocates besides, as allocated and as planned, with batches of four matrices' values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    owners.BATCH = 4 * 4 * WIDE * WIDE // (2 if name == "Muon" else 1)
    make: Any = {"Muon": fullshard.Muon, "Adafactor": adafactor}[name]

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(blocks)])

    def step(model: nn.Module, micro_batch: int, sequence: int) -> torch.Tensor:
        return model(torch.zeros(micro_batch, WIDE)).sum()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with watch() as watched:
        ours = fullshard.fully_shard(model())
        optimizer = make(ours.parameters())
        for number in range(3):
            step(ours, 1, 1).backward()
            with mark(str(number)):
                optimizer.step()
    dist.destroy_process_group()
    best = plan(model, ranks=2, sequence=1, step=step, device="cpu", strategy=Strategy(), optimizer=make).best
    assert best.owners is not None
    return watched.windows["2"].peak - watched.windows["2"].start, best.owners.temporary


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_step_with_owners_takes_no_more_memory_with_more_batches(in_a_process, name):
    """Of few batches, whatever the model: at most eight times the values of one (with a matrix' temporaries beside)."""
    matrix = (2 if name == "Muon" else 4) * WIDE * WIDE
    (small, planned_small), (large, planned_large) = (in_a_process(bytes_of_a_step, name, n) for n in (40, 80))
    assert small == pytest.approx(large, rel=0.01) and large <= (8 * 4 + 4) * matrix
    assert (planned_small, planned_large) == pytest.approx((small, large), rel=0.15)


def test_a_list_of_optimizers_without_owners():
    """Named parameters, and several element-wise optimizers: state as that of one."""

    def both(parameters: Any) -> list[torch.optim.Optimizer]:
        matrices, others = ([p for p in parameters if (p.ndim == 2) is matrix] for matrix in (True, False))
        return [torch.optim.AdamW(matrices), torch.optim.AdamW(others)]

    def by_name(named_parameters: Any) -> list[torch.optim.Optimizer]:
        assert "blocks.0.attention.qkv.weight" in dict(named_parameters)
        return both([p for _, p in named_parameters])

    how = {"ranks": 4, "sequence": SEQUENCE, "step": language, "strategy": Strategy(replicate=2)}
    one, two, named = (plan(build, **how, optimizer=optimizer).best for optimizer in ("AdamW", both, by_name))
    assert one.most["optimizer"] == pytest.approx(named.most["optimizer"], rel=0.02)
    assert one.memory["optimizer"] == two.memory["optimizer"] == named.memory["optimizer"]


def test_norms_that_an_optimizer_reads_are_ones():
    how = {"ranks": 4, "sequence": SEQUENCE, "step": language, "strategy": Strategy()}
    best = plan(build, **how, optimizer=torch.optim.Adafactor).best
    assert 0 < best.memory["optimizer"] < best.memory["parameters"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": Strategy(step_in_backward=True)}, "step_in_backward does not go with"),
        (
            {"tensor_parallel": 2, "parallelize": lambda model, mesh: None, "strategy": Strategy()},
            "tensor_parallel does not go with",
        ),
        ({"optimizer": fullshard.Muon}, "Muon: a parameter is not a matrix"),
        ({"optimizer": lambda named_parameters: 1 / 0}, "could not run the optimizer"),
    ],
    ids=["steps in the backward", "tensor-parallel", "vectors", "broken"],
)
def test_refused_with_owners(change, words):
    how = {"ranks": 4, "sequence": SEQUENCE, "step": language, "strategy": Strategy(), "optimizer": elementwise}
    with pytest.raises(ConfigError, match=words):
        plan(build, **{**how, **change})


def test_a_search_with_owners():
    """It compares layouts, copies and the rest, without steps in the backward."""
    plans = plan(build, ranks=4, ranks_per_node=2, batch=2, sequence=SEQUENCE, step=language, optimizer=elementwise)
    assert {p.strategy.replicate for p in plans.ranked} == {1, 2}
    assert not any(p.strategy.step_in_backward for p in plans.ranked)
    assert "exchange of new values" in str(next(p for p in plans.ranked if p.strategy.replicate == 2))


HOOKS: dict[str, dict[str, Any]] = {
    "rank 4": {"matrix_approximation_rank": 4},
    "without memory": {"matrix_approximation_rank": 2, "use_error_feedback": False, "warm_start": False},
}


def power_sgd(name: str, start: int) -> tuple[comm_hooks.PowerSGDState, Callable[..., Any]]:
    return comm_hooks.PowerSGDState(None, start_powerSGD_iter=start, **HOOKS[name]), comm_hooks.powerSGD_hook


def hooked(
    name: str, layout: str, shape: tuple[int, ...], start: int, around: Callable[[Any], Any] = lambda hook: hook
) -> tuple[nn.Module, fullshard.RecordingComm]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    recorded = fullshard.RecordingComm(fullshard.TorchComm())
    model = build()
    for unit in [*model.blocks, model]:
        fullshard.fully_shard(unit, mesh=mesh, layout=layout, comm=recorded)
    state, hook = power_sgd(name, start)
    model.register_comm_hook(state, around(hook))
    return model, recorded


def planned_with_hook(name: str, layout: str, shape: tuple[int, ...], device: str) -> Plan:
    how = {"ranks": math.prod(shape), "sequence": SEQUENCE, "step": language, "device": device}
    strategy = Strategy(layout=layout, replicate=shape[0])
    return plan(build, **how, strategy=strategy, comm_hook=power_sgd(name, 1000)).best


def kept_and_sent(name: str, layout: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Of the third backward, the second that is compressed: bytes of gradients and residuals; sent between replicas."""
    model, recorded = hooked(name, layout, shape, 1)
    for _ in range(3):
        model.zero_grad()
        recorded.calls.clear()
        language(model, 1, SEQUENCE).backward()
    calls = [call for call in recorded.calls if call.verb == "all_reduce" and call.world == shape[0]]
    calls = [call for call in calls if call.dtype == torch.float32]  # not which parameters were used
    sent = sum(2 * call.nbytes * (shape[0] - 1) // shape[0] for call in calls)
    return fullshard.memory_use(model).gradients, sent, len(calls)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.gloo("counts what is sent")
def test_power_sgd_keeps_and_sends_what_is_planned(run_ranks, name, layout, shape):
    ranks = run_ranks(kept_and_sent, name, layout, shape, world=math.prod(shape))
    best = planned_with_hook(name, layout, shape, "cpu")
    assert (best.most["gradients"], best.sent["all_reduce"], best.collectives["all_reduce"]) == ranks[0]
    exact = plan(
        build, ranks=math.prod(shape), sequence=SEQUENCE, step=language, strategy=best.strategy, device="cpu"
    ).best
    assert best.sent["all_reduce"] < exact.sent["all_reduce"]
    others = ("gather", "reduce")
    assert [best.sent.get(verb) for verb in others] == [exact.sent.get(verb) for verb in others]


def peak_with_power_sgd(name: str, layout: str, shape: tuple[int, ...]) -> tuple[int, list[int]]:
    """The most bytes in the fourth step, and what each call of the hook allocates in it, in order."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    calls = itertools.count()

    def marked(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: Any, gradient: Any) -> None:
            with mark(f"hook {next(calls)}"):
                hook(state, gradient)

        return call

    with watch() as watched:
        model, _ = hooked(name, layout, shape, 1, marked)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(4):
            with mark(str(step)):
                language(model, 1, SEQUENCE).backward()
                optimizer.step()
                model.zero_grad()
    of_hooks = [watched.windows[f"hook {call}"] for call in range(12, 16)]
    return watched.windows["3"].peak, [window.peak - window.start for window in of_hooks]


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("name", HOOKS)
def test_the_peak_with_power_sgd_is_what_the_allocator_reports(in_a_process, name, layout):
    peak, of_hooks = in_a_process(peak_with_power_sgd, name, layout, (2, 2))
    best = planned_with_hook(name, layout, (2, 2), "cuda")
    assert best.peak == pytest.approx(peak, rel=0.03)
    *blocks, root = [unit.passing for unit in best.units]
    assert [*reversed(blocks), root] == pytest.approx(of_hooks, rel=0.03)


def test_refused_hooks():
    how = {"ranks": 4, "sequence": SEQUENCE, "step": language}
    with pytest.raises(ConfigError, match="this strategy has none"):
        plan(build, **how, strategy=Strategy(), comm_hook=power_sgd("rank 4", 0))
    with pytest.raises(ConfigError, match="comm_hook is invalid"):
        plan(build, **how, strategy=Strategy(), comm_hook=comm_hooks.bf16_compress_hook)
    packed = MixedPrecisionPolicy(all_reduce_dtype=torch.int8)
    with pytest.raises(ConfigError, match="both determine how gradients are sent"):
        plan(build, **how, strategy=Strategy(replicate=2), mp_policy=packed, comm_hook=power_sgd("rank 4", 0))
    plans = plan(build, **how, ranks_per_node=2, comm_hook=power_sgd("rank 4", 0))
    assert {p.strategy.replicate for p in plans.ranked} == {2}


OPTIMIZERS = """
import torch

import fullshard


def owners(parameters):
    return fullshard.OwnerOptimizer(parameters, torch.optim.AdamW)
"""


def test_the_command(tmp_path, capsys):
    example, path = str(Path(__file__).parents[2] / "examples" / "model.py"), tmp_path / "optimizers.py"
    path.write_text(OPTIMIZERS)
    words = ["plan", f"{example}:demo_model", "--ranks", "4", "--sequence", "64", "--fix", "replicate=2", "layout=rows"]
    assert main([*words, "--optimizer", f"{path}:owners", "--power-sgd", "2", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["plans"][0]
    assert main([*words, "--json"]) == 0
    neither = json.loads(capsys.readouterr().out)["plans"][0]
    assert both["sent"]["owners"] > 0 and both["owner_imbalance"] >= 1 and "owners" not in neither["sent"]
    assert both["sent"]["all_reduce"] < neither["sent"]["all_reduce"]
    assert main([*words, "--optimizer", f"{path}:nothing"]) == 2
    assert main([*words, "--power-sgd", "0"]) == 2
    for number, text in enumerate(["import sys\nsys.exit()", "def build():\n    raise SystemExit(3)"]):
        (tmp_path / f"exits{number}.py").write_text(text)
        assert main(["plan", f"{tmp_path}/exits{number}.py:build", "--ranks", "4"]) == 2
        assert "SystemExit" in capsys.readouterr().err
