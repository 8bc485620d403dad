"""What models and optimizers can hold: each kind of it goes through a checkpoint onto other ranks."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from awkward import differences
from torch import Tensor, nn

import fullshard
from fullshard.store.tree import from_json, to_json
from quantised import StoredInt8, quantise
from test_tensor_parallel import Model, data_rank, parallel_model
from ways import children, shard, whole_state


def step_once(model: Any, optimizers: list[Any], x: Tensor) -> None:
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


# Tensor parallelism and sharding on one dim.


def save_parallel(folder: Path) -> dict[str, Tensor]:
    model = parallel_model(fullshard, (2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    step_once(model, [optimizer], torch.randn(2, 6, generator=torch.Generator().manual_seed(data_rank((2, 2))[0])))
    fullshard.save(folder, model, optimizer)
    return wholes(model, optimizer)


def load_parallel(folder: Path, shape: tuple[int, int] | None, want: dict[str, Tensor]) -> list[str]:
    if shape is None:
        torch.manual_seed(1)
        model: Any = shard(Model(), "flat", lambda model: model.blocks)
    else:
        model = parallel_model(fullshard, shape)
    optimizer = torch.optim.AdamW(model.parameters())
    fullshard.load(folder, model, optimizer, rng=False)
    return differences(wholes(model, optimizer), want)


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = plain(parameter.detach())
        found |= {f"{name}.{key}": plain(value) for key, value in optimizer.state[parameter].items()}
    return found


def plain(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def test_tensor_parallel_parameters_go_to_other_meshes(run_ranks: Any, tmp_path: Path) -> None:
    want, *_ = run_ranks(save_parallel, tmp_path, world=4)
    for shape, world in (((1, 2), 2), (None, 3)):
        for problems in run_ranks(load_parallel, tmp_path, shape, want, world=world):
            assert not problems, (shape, problems)


# Tensor subclasses.


def quantised_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = layers()
    for index in (0, 2):
        weight = StoredInt8(*quantise(model[index].weight.detach()))
        model[index].weight = nn.Parameter(weight, requires_grad=False)
    if dist.is_initialized() and dist.get_world_size() > 1:
        for index in (0, 2):
            fullshard.fully_shard(model[index])
        fullshard.fully_shard(model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def outputs(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 5)).detach().clone()


def save_quantised(folder: Path) -> Tensor:
    model, optimizer = quantised_model(0)
    step_once(model, [optimizer], torch.ones(2, 5))
    fullshard.save(folder, model, optimizer)
    return outputs(model)


def load_quantised(folder: Path) -> Tensor:
    model, optimizer = quantised_model(1)
    fullshard.load(folder, model, optimizer, rng=False)
    return outputs(model)


def test_quantised_parameters_are_kept_as_they_are(run_ranks: Any, tmp_path: Path) -> None:
    want, _ = run_ranks(save_quantised, tmp_path)
    for world in (1, 3):
        for got in run_ranks(load_quantised, tmp_path, world=world):
            assert torch.equal(got, want), world
    manifest = (tmp_path / "step-000000000" / "manifest.json").read_text()
    assert '"model.0.weight.quantised":{"shape":[7,5],"dtype":"int8"}' in manifest


# Optimizers.


class RowWise(torch.optim.Optimizer):
    """State that is not of the parameter's shape: the mean square of each row's gradient, as Adafactor keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = p.grad.square().mean(-1, keepdim=True) if p.ndim > 1 else p.grad.square()
                state = self.state[p]
                state["row"] = state["row"] * 0.9 + square if state else square
                p.sub_(group["lr"] * p.grad / (state["row"].sqrt() + 1e-3))


BUILDS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "views": lambda model: [torch.optim.AdamW(fullshard.optimizer_view(model))],
    "two": lambda model: [
        torch.optim.SGD([*model.parameters()][:1], lr=0.1, momentum=0.9),
        torch.optim.AdamW([*model.parameters()][1:], amsgrad=True),
    ],
    "without state": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "factored": lambda model: [RowWise(model.parameters())],
    "a rate that is a tensor": lambda model: [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))],
}


def train_with(way: str, build: str, steps: range, folder: Path | None, save: bool) -> dict[str, Tensor]:
    torch.manual_seed(0 if save else 1)
    model = shard(layers(), way, children) if way != "plain" else layers()
    optimizers = BUILDS[build](model)
    if folder is not None and not save:
        fullshard.load(folder, model, optimizers, rng=False)
    for step in steps:
        step_once(model, optimizers, torch.randn(4, 5, generator=torch.Generator().manual_seed(step)))
        if folder is not None and save and step == 1:
            fullshard.save(folder, model, optimizers)
    return whole_state(model)


@pytest.mark.parametrize(
    ("build", "saved", "loaded", "world"),
    [
        ("views", "rows", "flat", 3),
        ("two", "flat", "originals", 3),
        ("without state", "rows", "flat", 1),
        ("factored", "rows", "rows", 3),
        ("a rate that is a tensor", "rows", "rows", 3),
    ],
)
def test_optimizers_go_on_as_if_nothing_had_been(
    run_ranks: Any, tmp_path: Path, build: str, saved: str, loaded: str, world: int
) -> None:
    """Every rank has the same batch, so that steps are the same on any number of ranks."""
    want, _ = run_ranks(train_with, saved, build, range(4), tmp_path, True)
    for got in run_ranks(train_with, loaded, build, range(2, 4), tmp_path, False, world=world):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


# Other state.


class Position:
    """A loader's place: one number a rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + int(state["seen"]) * 10


class Sharable(Position):
    """One that is loaded on any number of ranks."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.at = sum(state["at"] for state in states)


class Counted(nn.Linear):
    """A module with state of its own besides parameters."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Averages:
    """Sharded tensors that are no parameters, such as moving averages."""

    def __init__(self, model: Any, factor: float) -> None:
        self.tensors = {name: p.detach().clone() * factor for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors = state


def save_state(folder: Path) -> dict[str, Tensor]:
    rank = dist.get_rank()
    model = fullshard.fully_shard(Counted(), layout="rows")
    model.calls = 7
    state = {"place": Position(rank + 1), "shared": Sharable(rank + 1), "ema": Averages(model, 3.0), "epoch": 4}
    fullshard.save(folder, model, state={**state, "mine": {"rank": rank}, "many": (1, {2.5, 3.5}, b"x")})
    return {name: plain(value) for name, value in state["ema"].tensors.items()}


def load_state(folder: Path, names: list[str]) -> dict[str, Any]:
    rank = dist.get_rank()
    model = fullshard.fully_shard(Counted(), layout="rows")
    all_state: dict[str, Any] = {"place": Position(0), "shared": Sharable(0), "ema": Averages(model, 0.0)}
    state = {name: all_state[name] for name in names}
    loaded = fullshard.load(folder, model, state=state, rng=False)
    return {
        "rank": rank,
        "calls": model.calls,
        "places": {name: one.at for name, one in state.items() if name != "ema"},
        "ema": {name: plain(value) for name, value in all_state["ema"].tensors.items()},
        "state": loaded.state,
        "of_ranks": loaded.of_ranks,
    }


def test_what_ranks_have_of_their_own_comes_back_to_them(run_ranks: Any, tmp_path: Path) -> None:
    ema, _ = run_ranks(save_state, tmp_path)
    for got in run_ranks(load_state, tmp_path, ["place", "shared", "ema"]):
        own = got["rank"] + 1
        assert got["places"] == {"place": own * 11, "shared": own * 11} and got["calls"] == 7
        assert got["state"] == {"epoch": 4, "many": (1, {2.5, 3.5}, b"x"), "mine": {"rank": got["rank"]}}
        assert not differences(got["ema"], ema)
    for got in run_ranks(load_state, tmp_path, ["shared", "ema"], world=3):
        assert got["places"] == {"shared": 3} and not differences(got["ema"], ema)
        assert got["state"] == {"epoch": 4, "many": (1, {2.5, 3.5}, b"x")}
        assert got["of_ranks"]["mine"] == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(fullshard.CheckpointError, match=r"differed between the ranks[^.]*nothing was loaded"):
        run_ranks(load_state, tmp_path, ["place"], world=3)


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "none": None, "numbers": [1, 2.5, math.inf, -math.inf, 2**80, True], "tuple": (1, (2,)),
        "sets": [{1}, frozenset((2,))],
        "bytes": b"\x00\xff", "complex": 1 + 2j, "dtype": torch.bfloat16, "size": torch.Size((3, 4)),
        "device": torch.device("cpu"), "keys": {1: "a", (2, "b"): None}, "counter": collections.Counter({5: 2}),
        "dollar": {"$tuple": "text"}, "numpy": [np.float32(0.5), np.int64(3), np.bool_(True)],
        "tensor": torch.arange(3), "array": np.arange(6.0).reshape(2, 3),
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    found = from_json(to_json(value, "x", tensors), lambda name: tensors[name])
    assert torch.equal(found.pop("tensor"), value.pop("tensor"))
    np.testing.assert_array_equal(found.pop("array"), value.pop("array"))
    assert found == value and type(found["size"]) is torch.Size and type(found["counter"]) is collections.Counter
    assert math.isnan(from_json(to_json(math.nan, "x", {}), tensors.__getitem__))


@pytest.mark.parametrize("value", [object(), lambda: 1, nn.Linear(1, 1), np.array(["text"]), range(3)])
def test_what_is_not_plain_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(fullshard.CheckpointError, match=r"parameter: state\.mine\.here"):
        to_json({"here": value}, "state.mine", {})
