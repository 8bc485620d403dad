"""What models and optimizers can hold: each kind of it goes through a checkpoint onto other ranks."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.store.tree import from_json, to_json
from quantised import StoredInt8, quantise
from test_tensor_parallel import Model, parallel_model
from training import full
from ways import children, shard, whole_parameters

MESHES = {"two by two": (2, 2), "one by two": (1, 2)}


def parallel(way: str) -> Any:
    """Tensor parallelism and sharding, on one dim; or sharding alone."""
    if way in MESHES:
        return parallel_model(fullshard, MESHES[way])
    return shard(Model(), way, lambda model: model.blocks)


def layers(way: str) -> Any:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model if way == "plain" else shard(model, way, children)


def quantised(way: str) -> Any:
    """Weights of a class of their own, and biases that are trained."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(StoredInt8(*quantise(layer.weight.detach())), requires_grad=False)
    return model if way == "plain" else shard(model, way, children)


class RowWise(torch.optim.Optimizer):
    """State that is not of the parameter's shape: the mean square of each row's gradient, as Adafactor keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            square = p.grad.square().mean(-1, keepdim=True) if p.ndim > 1 else p.grad.square()
            state = self.state[p]
            state["row"] = state["row"] * 0.9 + square if state else square
            p.sub_(0.1 * p.grad / (state["row"].sqrt() + 1e-3))


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)]


PROGRAMS: dict[str, tuple[Callable[[str], Any], Callable[[Any], list[torch.optim.Optimizer]]]] = {
    "views": (layers, lambda model: [torch.optim.AdamW(fullshard.optimizer_view(model))]),
    "two": (layers, lambda model: [
        torch.optim.SGD([*model.parameters()][:1], lr=0.1, momentum=0.9),
        torch.optim.AdamW([*model.parameters()][1:], amsgrad=True),
    ]),
    "without state": (layers, lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)]),
    "factored": (layers, lambda model: [RowWise(model.parameters())]),
    "a rate that is a tensor": (layers, lambda model: [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))]),
    "quantised": (quantised, adamw),
    "parallel": (parallel, adamw),
}  # fmt: skip


def run(program: str, way: str, folder: Path, save: bool) -> list[dict[str, Tensor]]:
    """What it is at the save, or after the load; and after two steps more. Every rank has the same batch."""
    torch.manual_seed(0 if save else 1)
    build, optimize = PROGRAMS[program]
    model = build(way)
    optimizers = optimize(model)
    found = []
    for step in range(4):
        x = torch.randn(4, 6 if program == "parallel" else 5, generator=torch.Generator().manual_seed(step))
        if step == 2:
            (fullshard.save if save else fullshard.load)(folder, model, optimizers, rng=False)
        if step >= 2:
            wrapped, trained = way == "originals", ((n, p) for n, p in model.named_parameters() if p.requires_grad)
            values = whole_parameters(model) if wrapped else {name: full(p) for name, p in trained}
            found.append({**values, "output": model(x).detach().clone()})
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step() if save or step >= 2 else None
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("program", "saved", "loaded"),
    [
        ("views", ("rows", 2), [("flat", 3)]),
        ("two", ("flat", 2), [("originals", 3)]),
        ("without state", ("rows", 2), [("flat", 1)]),
        ("factored", ("rows", 2), [("rows", 3)]),
        ("a rate that is a tensor", ("rows", 2), [("rows", 3)]),
        ("quantised", ("rows", 2), [("plain", 1), ("rows", 3)]),
        ("parallel", ("two by two", 4), [("one by two", 2), ("flat", 3)]),
    ],
)
def test_programs_go_on_as_if_nothing_had_been(
    run_ranks: Any, tmp_path: Path, program: str, saved: tuple[str, int], loaded: list[tuple[str, int]]
) -> None:
    want = run_ranks(run, program, saved[0], tmp_path, True, world=saved[1])[0]
    for way, world in loaded:
        for got in run_ranks(run, program, way, tmp_path, False, world=world):
            for later, name in itertools.product((False, True), want[0]):
                rounding = {"rtol": 1e-5, "atol": 1e-6} if later or name == "output" else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(got[later][name], want[later][name], **rounding)
    if program == "quantised":
        manifest = (tmp_path / "step-000000000" / "manifest.json").read_text()
        assert '"model.0.weight.quantised":{"shape":[7,5],"dtype":"int8",' in manifest


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


def all_state(at: int, factor: float) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = fullshard.fully_shard(Counted(), layout="rows")
    return model, {"place": Position(at), "shared": Sharable(at), "ema": Averages(model, factor)}


def saved_state(folder: Path) -> None:
    rank = dist.get_rank()
    model, state = all_state(rank + 1, 3.0)
    model.calls = 7
    fullshard.save(folder, model, state={**state, "epoch": 4, "mine": {"rank": rank}, "many": (1, {2.5, 3.5}, b"x")})


def loaded_state(folder: Path, names: list[str]) -> None:
    rank, plain = dist.get_rank(), {"epoch": 4, "many": (1, {2.5, 3.5}, b"x")}
    model, state = all_state(0, 0.0)
    loaded = fullshard.load(folder, model, state={name: state[name] for name in names}, rng=False)
    for name, value in state["ema"].tensors.items():
        assert torch.equal(full(value), full(model.get_parameter(name)) * 3.0)
    assert model.calls == 7
    if dist.get_world_size() == 2:
        assert state["place"].at == state["shared"].at == (rank + 1) * 11
        assert loaded.state == {**plain, "mine": {"rank": rank}}
    else:
        assert state["shared"].at == 3 and loaded.state == plain
        assert loaded.of_ranks["mine"] == [{"rank": 0}, {"rank": 1}]


def test_what_ranks_have_of_their_own_comes_back_to_them(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(saved_state, tmp_path)
    run_ranks(loaded_state, tmp_path, ["place", "shared", "ema"])
    run_ranks(loaded_state, tmp_path, ["shared", "ema"], world=3)
    with pytest.raises(fullshard.CheckpointError, match=r"differed between the ranks[^.]*nothing was loaded"):
        run_ranks(loaded_state, tmp_path, ["place"], world=3)


def saved_calls(folder: Path) -> None:
    model = Counted()
    model.calls = dist.get_rank()
    fullshard.save(folder, fullshard.fully_shard(model))


def test_extra_state_that_differed_on_another_number_of_ranks_is_named(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(saved_calls, tmp_path)
    with pytest.raises(fullshard.CheckpointError, match=r"differed between the ranks[^?]*model\._extra_state"):
        fullshard.load(tmp_path, Counted(), rng=False)


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
