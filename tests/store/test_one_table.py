"""What a state dict carries and what a folder carries of an optimizer: the same, or the same refusal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import CheckpointError
from fullshard.checkpoint import whole
from fullshard.checkpoint.whole import Batch
from fullshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from ways import alone, on_ranks, shard, some_ways

FULL, SHARDED = StateDictOptions(full_state_dict=True), StateDictOptions()
Build = Callable[[Any], torch.optim.Optimizer]
Pair = tuple[Any, torch.optim.Optimizer]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of one rank that moves objects, as torch 2.11's fake one does not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(way: str, build: Build, steps: int, change: Callable[[Any], object] | None = None) -> Pair:
    torch.manual_seed(0)
    model: Any = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), way, alone)
    optimizer = build(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if change is not None:
        change(optimizer)
    return model, optimizer


def through_a_folder(folder: Path, saved: Pair, into: Pair) -> None:
    fullshard.save(folder, *saved)
    fullshard.load(folder, *into)


def through_a_state_dict(folder: Path, saved: Pair, into: Pair) -> None:
    state = get_optimizer_state_dict(*saved, options=FULL)
    set_optimizer_state_dict(*into, optim_state_dict=state, options=FULL)


def content(pair: Pair) -> dict[str, Any]:
    """All that an optimizer holds, whole, as plain values of one type for one thing. Collective."""
    state = get_optimizer_state_dict(*pair, options=FULL)
    found: dict[str, Any] = {}
    for name, own in state["state"].items():
        for key, value in own.items():
            found[f"{name}.{key}"] = (str(value.dtype), value.tolist()) if isinstance(value, Tensor) else value
    for number, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            found[f"{number}.{key}"] = (str(value.dtype), value.item()) if isinstance(value, Tensor) else value
    return found


def adamw(**settings: Any) -> Build:
    return lambda parameters: torch.optim.AdamW(parameters, **settings)


def sgd(**settings: Any) -> Build:
    return lambda parameters: torch.optim.SGD(parameters, **settings)


def counted(value: Callable[[], Any]) -> Callable[[Any], None]:
    """Step counts of another type."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["step"] = value()

    return change


CASES: dict[str, tuple[Build, Build, Callable[[Any], object] | None, dict[str, Any]]] = {
    "momentum, into an optimizer without": (sgd(lr=0.1, momentum=0.9), sgd(lr=0.5), None, {"0.momentum": 0.9}),
    "amsgrad, into one without": (adamw(amsgrad=True), adamw(), None, {"0.amsgrad": True}),
    "into amsgrad": (adamw(), adamw(amsgrad=True), None, {"0.amsgrad": False}),
    "Adam's, into AdamW": (
        torch.optim.Adam,
        adamw(),
        None,
        {"0.decoupled_weight_decay": True},
    ),
    "a tensor, into a whole number": (adamw(lr=torch.tensor(0.25), foreach=False), adamw(lr=1), None, {"0.lr": 0.25}),
    "a number, into a tensor": (
        adamw(lr=0.25),
        adamw(lr=torch.tensor(0.5), foreach=False),
        None,
        {"0.lr": ("torch.float32", 0.25)},
    ),
    "double, into a tensor of single": (
        adamw(lr=torch.tensor(0.5, dtype=torch.float64), foreach=False),
        adamw(lr=torch.tensor(0.25), foreach=False),
        None,
        {"0.lr": ("torch.float32", 0.5)},
    ),
    "whole counts": (adamw(), adamw(), counted(lambda: 7), {"0.bias.step": ("torch.float32", 7.0)}),
    "whole counts in tensors": (adamw(), adamw(), counted(lambda: torch.tensor(7)), {}),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", CASES)
@some_ways
def test_a_folder_carries_what_a_state_dict_does(tmp_path: Path, case: str, way: str) -> None:
    build, build_other, change, want = CASES[case]
    results = []
    for through in (through_a_folder, through_a_state_dict):
        into = trained("flat", build_other, 0)
        through(tmp_path, trained(way, build, 2, change), into)
        results.append(content(into))
        model, optimizer = into
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    assert results[0] == results[1]
    assert {key: results[0].get(key) for key in want} == want


@pytest.mark.usefixtures("one_rank")
def test_a_count_of_one_element_fills_one_without_dims(tmp_path: Path) -> None:
    """It was found out when the model had been filled."""
    saved = trained("rows", adamw(), 2, counted(lambda: torch.tensor([7.0])))
    model, optimizer = trained("rows", adamw(), 1)
    through_a_folder(tmp_path, saved, (model, optimizer))
    assert all(state["step"].shape == () and state["step"] == 7 for state in optimizer.state.values())


@pytest.mark.usefixtures("one_rank")
def test_a_count_that_would_be_rounded(tmp_path: Path) -> None:
    saved = trained("rows", adamw(), 2, counted(lambda: torch.tensor(2**24 + 1, dtype=torch.float64)))
    into = trained("rows", adamw(), 1)
    with pytest.raises(CheckpointError, match=r"float64 into torch.float32 would round(.|\n)*0.weight.step"):
        through_a_folder(tmp_path, saved, into)
    fullshard.load(tmp_path, *into, cast=True)
    assert all(state["step"] == 2**24 for state in into[1].state.values())


class Steps(torch.optim.AdamW):
    """Counts its steps."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


@pytest.mark.usefixtures("one_rank")
def test_a_description_that_is_enough_needs_no_step(tmp_path: Path) -> None:
    """By the settings' names; of an optimizer of others a step tells that it keeps other state."""
    fullshard.save(tmp_path, *trained("rows", adamw(), 2))
    for way in ("rows", "wrapper"):
        model, optimizer = trained(way, Steps, 0)
        fullshard.load(tmp_path, model, optimizer)
        assert not vars(optimizer).get("steps") and optimizer.state
    with pytest.raises(CheckpointError, match=r"names differ(.|\n)*momentum_buffer"):
        fullshard.load(tmp_path, *trained("rows", sgd(lr=0.1, momentum=0.9), 0))


class Counting(torch.optim.SGD):
    """SGD whose state counts steps in Python, as many optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def test_counts_of_python_stay_numbers_where_they_are(fake_world):
    fake_world(1)
    model = fullshard.fully_shard(nn.Linear(3, 2))
    optimizer = Counting(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = fullshard.optimizer_state_dict(model, optimizer)
    optimizer.step()
    fullshard.load_optimizer_state_dict(model, optimizer, state)
    assert [entry["step"] for entry in optimizer.state.values()] == [1, 1]
    assert {type(entry["step"]) for entry in optimizer.state.values()} == {int}


def ours(saved: Pair, into: Pair) -> None:
    """By `optimizer_state_dict`, which programs save themselves."""
    file = io.BytesIO()
    torch.save(fullshard.optimizer_state_dict(*saved)["groups"], file)
    file.seek(0)
    state = fullshard.optimizer_state_dict(*saved) | {"groups": torch.load(file)}
    fullshard.load_optimizer_state_dict(*into, state)


def halves(one: dict[str, Any], other: dict[str, Any]) -> Build:
    def build(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], **one}, {"params": rest, **other}])

    return build


@pytest.mark.usefixtures("one_rank")
def test_settings_of_parameters_in_our_own_state_dict() -> None:
    """They were those of a group's number: the biases of two groups were given the first one's."""
    saved = trained("rows", halves({"lr": 0.1}, {"lr": 0.2}), 1)
    model = trained("rows", adamw(), 0)[0]
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW(
        [{"params": rest, "lr": 1}, {"params": [first], "lr": torch.tensor(1.0)}], foreach=False
    )
    ours(saved, (model, optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.2 and torch.equal(optimizer.param_groups[1]["lr"], torch.tensor(0.1))
    with pytest.raises(CheckpointError, match=r"different values of 'lr'(.|\n)*lr=0.1, as 0.weight"):
        ours(saved, trained("rows", adamw(), 0))


class Listed(nn.ParameterList):
    def forward(self) -> torch.Tensor:
        return self[0].sum() + self[1].sum()


def test_settings_of_parameters_whose_names_are_numbers(fake_world) -> None:
    """They were taken for the numbers of groups: both had the settings of the wrong parameters, or none."""
    fake_world(1)
    model = fullshard.fully_shard(Listed([torch.ones(2), torch.ones(3)]))

    def optimizer(*rates: float) -> torch.optim.Optimizer:
        pairs = zip(reversed([*model.parameters()]), rates, strict=True)
        return torch.optim.AdamW([{"params": [parameter], "lr": rate} for parameter, rate in pairs])

    into = optimizer(1.0, 1.0)
    state = fullshard.optimizer_state_dict(model, optimizer(0.1, 0.2))
    fullshard.load_optimizer_state_dict(model, into, state)
    assert [group["lr"] for group in into.param_groups] == [0.1, 0.2]


@on_ranks
def test_state_on_other_layouts(tmp_path: Path) -> list[str]:
    """Of ranks that hold nothing of some parameters: the same through a folder and through state dicts."""
    problems = []
    ways = ("rows", "flat", "wrapper", "originals")
    for number, way in enumerate(ways):
        for case in ("momentum, into an optimizer without", "into amsgrad", "whole counts"):
            build, build_other, change, _ = CASES[case]
            results = []
            for through in (through_a_folder, through_a_state_dict):
                into = trained(ways[number - 1], build_other, 0)
                through(tmp_path / f"{way} {case}", trained(way, build, 2, change), into)
                results.append(content(into))
            if results[0] != results[1]:
                problems.append(f"{way} {case}: {results}")
    return problems


@on_ranks
def test_whole_values_in_bounded_batches() -> list[str]:
    """State dicts of weights and of state, by each way: no batch is larger than is said, or than one tensor."""
    problems = []
    largest = 4 * 4 * 4  # bytes
    for way in ("rows", "flat", "wrapper", "originals"):
        model, optimizer = trained(way, adamw(), 1)
        want = content((model, optimizer)), get_model_state_dict(model, options=FULL)
        sizes: list[int] = []
        pack = Batch.pack

        def counted(batch: Any, pack: Any = pack, sizes: list[int] = sizes) -> None:
            pack(batch)
            sizes.append(sum(one.nbytes for one in batch.wanted))

        with mock.patch.object(whole, "BATCH_BYTES", largest), mock.patch.object(Batch, "pack", counted):
            got = content((model, optimizer)), get_model_state_dict(model, options=FULL)
        if len(sizes) < 4 or max(sizes) > largest:
            problems.append(f"{way}: batches of {sizes} bytes")
        if got[0] != want[0] or not all(torch.equal(got[1][name], value) for name, value in want[1].items()):
            problems.append(f"{way}: other values")
    return problems


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("stepped", [True, False])
def test_state_that_was_saved_apart_becomes_that_of_a_tied_parameter(tmp_path, stepped):
    """Of equal values under both names, single values among them."""

    def made(tied: bool, step: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied(tied)
        optimizer = torch.optim.AdamW(model.parameters())
        if step:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    tied, apart, again = made(True, True), made(False, False), made(True, stepped)
    fullshard.save(tmp_path / "tied", *tied)
    fullshard.load(tmp_path / "tied", *apart)
    fullshard.save(tmp_path / "apart", *apart)
    fullshard.load(tmp_path / "apart", *again)
    (want,), (got,) = (optimizer.state.values() for _, optimizer in (tied, again))
    assert all(torch.equal(got[key], want[key]) for key in want)
