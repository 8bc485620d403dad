"""`offload_by_budget`: which units it chooses, and that training goes on as if they had been built so."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_extensions import WIDE, network
from test_extensions import shard as shard_extensions
from test_offload import LateHome, here
from torch import nn

import fullshard
from fullshard import fully_shard, offload_by_budget
from fullshard.api.offloading import choose
from fullshard.shard import units_of
from fullshard.text import size
from fullshard.torch_private.local_tensor import plain_tensors
from quantised import GatheredInt8
from raising import raises
from simulated import by_nccl, simulated
from test_parking import moving
from test_tensor_parallel import batch, parallel_model
from training import compare_tensors, full_gradients, full_parameters
from ways import every_way, layers, shard

OFFLOADING = importlib.import_module("fullshard.api.offloading")
WIDTH, BLOCKS = 8, 4


class Net(nn.Module):
    """Four blocks, of which the second is twice as large, and a norm in the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [WIDTH, 2 * WIDTH, WIDTH, WIDTH]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size, bias=False), nn.Tanh(), nn.Linear(size, WIDTH, bias=False))
            for size in sizes
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def sharded(**options: Any) -> Any:
    model = Net()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


BLOCK = 2 * WIDTH * WIDTH // 2 * (4 + 4 + 8)
"""Bytes of a block on one of two ranks: parameters, gradients, and AdamW's state."""
ROOT = 2 * WIDTH // 2 * 16


@pytest.mark.parametrize(
    ("budget", "names"),
    [
        (5 * BLOCK + ROOT, []),
        (5 * BLOCK + ROOT - 1, ["blocks.3"]),
        (4 * BLOCK + ROOT, ["blocks.3"]),
        (3 * BLOCK + ROOT, ["blocks.3", "blocks.2"]),
        (2 * BLOCK + ROOT + 1, ["blocks.3", "blocks.1"]),  # with the large one, one of the two after it can stay
        (BLOCK + ROOT, ["blocks.3", "blocks.2", "blocks.1"]),
        (ROOT, ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]),
        (0, ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "(root)"]),
    ],
)
def test_the_last_units_leave_first(fake_world, budget: int, names: list[str]) -> None:
    fake_world(2)
    result = offload_by_budget(sharded(), budget)
    assert list(result.units) == names
    assert result.host + result.device == 5 * BLOCK + ROOT and result.device <= budget == result.budget
    text = str(result)
    assert f"of a budget of {size(budget)}" in text and all(name in text for name in names)


def test_what_stays_counts_as_asked(fake_world) -> None:
    fake_world(2)
    model = sharded()
    for parameter in model.blocks[3].parameters():
        parameter.requires_grad_(False)  # no gradient, no state
    halves = fullshard.CPUOffloadPolicy(pin_memory=False)
    result = offload_by_budget(model, 0, state_bytes=2, policy=halves)
    elements = (BLOCK // 16) * 4 + ROOT // 16
    assert result.host == elements * (4 + 4 + 2) + BLOCK // 16 * 4


def test_a_choice_fits_and_nothing_in_it_can_stay() -> None:
    draw = random.Random(7)
    for _ in range(300):
        sizes = [draw.choice([0, draw.randint(1, 20)]) for _ in range(draw.randint(1, 9))]
        budget = draw.randint(0, sum(sizes) + 2)
        chosen = choose(sizes, budget)
        left = sum(sizes) - sum(sizes[index] for index in chosen)
        assert left <= budget and chosen == sorted(set(chosen))
        assert all(left + sizes[index] > budget for index in chosen)


def homes(policy: object, device: torch.device) -> LateHome:
    return LateHome()


def trained(way: str, half: bool) -> tuple[Any, Any]:
    """A model of that way after three steps, with about half of its bytes at home or without; and its optimizer."""
    model = shard(layers(), way, lambda model: list(model)[:2])
    if half:
        before = [id(parameter) for parameter in model.parameters()]
        whole = offload_by_budget(model, 1e9)
        with mock.patch.object(OFFLOADING, "home_of", homes), moving(True):
            result = offload_by_budget(model, whole.device // 2)
        assert result.units and result.device
        assert [id(parameter) for parameter in model.parameters()] == before
        at_home = [unit.buckets[0].home is not None for unit in units_of(model) if unit.buckets]
        assert True in at_home and False in at_home
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 5, dtype=torch.float64) * (step + 1)).square().sum().backward()
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    return model, optimizer


def differences(way: str, folder: str) -> list[str]:
    here.crossings.clear()
    model, optimizer = trained(way, True)
    crossings = dict(here.crossings)
    plain, _ = trained(way, False)
    problems = [] if crossings.get("to_device") and crossings.get("bring") else ["nothing crossed"]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        pairs = [(ours, theirs), (ours.grad, theirs.grad)]
        for one, other in pairs:
            one, other = (getattr(t, "_local_tensor", t) for t in (one, other))
            if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
                problems.append(f"{way}: {tuple(ours.shape)}")
    fullshard.save(folder, model, optimizer)
    fullshard.load(folder, plain)
    return problems


@every_way
@pytest.mark.gloo("processes")
def test_the_same_bits(run_ranks: Callable, tmp_path: Path, way: str) -> None:
    assert run_ranks(differences, way, str(tmp_path / "saved"), world=2) == [[], []]


def on_meta() -> list[str]:
    """Chosen before there are values, which then go to host memory."""
    with torch.device("meta"):
        model = sharded()
    with mock.patch.object(OFFLOADING, "home_of", homes):
        offload_by_budget(model, 2 * BLOCK + ROOT)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model(torch.ones(2, WIDTH)).sum().backward()
    plain = sharded()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(0.01)
    plain(torch.ones(2, WIDTH)).sum().backward()
    problems = compare_tensors("gradient", full_gradients(model), full_gradients(plain), 0.0)
    problems += compare_tensors("parameter", full_parameters(model), full_parameters(plain), 0.0)
    return problems + ([] if sum(b.home is not None for u in units_of(model) for b in u.buckets) == 2 else ["homes"])


@pytest.mark.gloo("processes")
def test_a_model_without_values(run_ranks: Callable) -> None:
    assert run_ranks(on_meta, world=2) == [[], []]


def subclasses_and_parallel() -> list[str]:
    """Units of tensor subclasses, and of tensor-parallel parameters, that are moved after they were built."""
    problems = []
    for name, build, inputs in (
        ("subclasses", lambda: shard_extensions(fullshard, network()), lambda step: torch.ones(3, WIDE) * (step + 1)),
        ("tensor parallel", lambda: parallel_model(fullshard, (2, 2)), lambda step: batch(step, dist.get_rank() // 2)),
    ):
        results = []
        for moves in (False, True):
            model, before = build(), set()
            if moves:
                before = {id(parameter) for parameter in model.parameters()}
                with mock.patch.object(OFFLOADING, "home_of", homes), moving(True):
                    offload_by_budget(model, 0)
                if before != {id(parameter) for parameter in model.parameters()}:
                    problems.append(f"{name}: other parameters")
                if not all(b.home is not None for u in units_of(model) for b in u.buckets):
                    problems.append(f"{name}: not all units moved")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
            for step in range(3):
                model(inputs(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([detached(parameter._local_tensor).clone() for parameter in model.parameters()])
        if not all(map(torch.equal, *results)):
            problems.append(f"{name}: other values")
    return problems


def detached(tensor: Any) -> Any:
    """`values` is a method of plain tensors."""
    return tensor.values.detach() if type(tensor) is GatheredInt8 else tensor.detach()


@pytest.mark.gloo("processes")
def test_subclasses_and_tensor_parallel_parameters(run_ranks: Callable) -> None:
    assert run_ranks(subclasses_and_parallel, world=4) == [[]] * 4


def page_locked() -> list[str]:
    """On a simulated device: page-locked memory of the chosen units alone, and the same numbers."""
    results = []
    for budget in (None, 3 * BLOCK + ROOT):
        with ExitStack() as stack:
            stack.enter_context(by_nccl())
            stack.enter_context(simulated())
            model = sharded()
            if budget is not None:
                home = fullshard.shard.offload.Home(torch.device("cpu"), torch.device("cpu"), pinned=True)
                with mock.patch.object(OFFLOADING, "home_of", lambda *asked, home=home: home):
                    offload_by_budget(model, budget)
                pinned = [next(block.parameters())._local_tensor.is_pinned() for block in [*model.blocks, model.norm]]
                assert pinned == [False, False, True, True, False], pinned
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(2, WIDTH)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([p._local_tensor.clone() for p in model.parameters()])
    return [f"{i}" for i, (one, other) in enumerate(zip(*results, strict=True)) if not torch.equal(one, other)]


def page_locked_subclasses() -> list[str]:
    """On a simulated device: tensors inside subclasses are page-locked, also those that users put there later."""
    problems, results = [], []
    for moves in (False, True):
        with by_nccl(), simulated():
            model = shard_extensions(fullshard, network())
            if moves:
                home = fullshard.shard.offload.Home(torch.device("cpu"), torch.device("cpu"), pinned=True)
                with mock.patch.object(OFFLOADING, "home_of", lambda *asked, home=home: home):
                    offload_by_budget(model, 0)
            for step in range(2):
                model(torch.ones(3, WIDE)).square().sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(parameter - 0.1 * parameter.grad)
                        parameter.grad = None
                        if step == 1:
                            parameter.data = parameter.data.clone()
            model(torch.ones(3, WIDE))
            inner = [plain for p in model.parameters() for plain in plain_tensors(p)]
            if any(plain.is_pinned() is not moves for plain in inner):
                problems.append(f"page-locked: {[plain.is_pinned() for plain in inner]}")
            results.append([plain.detach().clone() for plain in inner])
    return problems + ([] if all(map(torch.equal, *results)) else ["other values"])


@pytest.mark.gloo("processes")
@pytest.mark.parametrize("what", [page_locked, page_locked_subclasses], ids=lambda what: what.__name__)
def test_on_a_simulated_device(run_ranks: Callable, what: Callable) -> None:
    assert run_ranks(what, world=2) == [[], []]


def test_what_it_refuses(fake_world) -> None:
    fake_world(2)
    with raises("ConfigError: offload_by_budget takes a sharded model"):
        offload_by_budget(nn.Linear(2, 2), 0)
    model = sharded()
    for budget in (-1, "all", True, float("nan")):
        with raises("ConfigError: offload_by_budget(budget=) is invalid"):
            offload_by_budget(model, budget)  # type: ignore[arg-type]
    for state_bytes in (-8, float("inf")):
        with raises("ConfigError: offload_by_budget(state_bytes=) is invalid"):
            offload_by_budget(model, 0, state_bytes=state_bytes)
    assert "0 B in" not in (text := str(offload_by_budget(model, float("inf")))) and "without a budget" in text
    with raises("ConfigError: offload_by_budget(policy=) is invalid"):
        offload_by_budget(model, 0, policy=fullshard.OffloadPolicy())  # type: ignore[arg-type]
    with fullshard.keep_gathered(model), raises("PhaseError: offload_by_budget was called inside keep_gathered"):
        offload_by_budget(model, 0)
    fullshard.park(model)
    with raises("PhaseError: offload_by_budget was called for a model that is already parked"):
        offload_by_budget(model, 0)
    fullshard.resume(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    with raises("ConfigError: offload_by_budget was called after training began ... has had gradients"):
        offload_by_budget(model, 0)
    other = sharded()
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(other.parameters()).step()
    with raises("ConfigError: offload_by_budget was called after training began ... has stepped"):
        offload_by_budget(other, 0)
