"""Storage that users replaced is taken over by whatever reads or writes a model's values, not only by forwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import state_dict as helpers
from fullshard.state_dict import StateDictOptions
from ways import WRAPPERS, children, inner, on_ranks, shard

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """Sizes that divide nothing, a buffer, and a tied weight."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.head = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)
        self.third = nn.Linear(3, 3)
        self.third.weight = self.head.weight
        self.register_buffer("scale", torch.full((3,), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.head(self.second(self.first(x)))) * self.scale


def units(model: nn.Module) -> list[nn.Module]:
    return children(model)[:2]  # the root holds the tied weight


def on_meta(way: str) -> Any:
    with torch.device("meta"):
        model = Net()
    model.third.weight = model.head.weight
    return shard(model, way, units)


def filled(way: str) -> Any:
    """A model whose storage was replaced, and that has not run since."""
    wrapped = way in WRAPPERS
    model = shard(Net(5), way, units) if wrapped else on_meta(way)
    model.load_state_dict((Net() if wrapped else shard(Net(), way, units)).state_dict(), assign=True)
    if way != "wrapper":
        inner(model).third.weight = inner(model).head.weight  # torch assigns a tensor to each name
    return model


def values(model: Any) -> dict[str, Tensor]:
    return helpers.get_model_state_dict(model, options=FULL)


def differing(got: dict[str, Any], want: dict[str, Tensor]) -> str:
    if sorted(got) != sorted(want):
        return f"names {sorted(got)}"
    wrong = [k for k in want if got[k].is_meta or not torch.equal(got[k].detach(), want[k].to(got[k].dtype))]
    return f"values of {wrong}" if wrong else ""


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in state.items()}


def batch() -> Tensor:
    return torch.ones(2, 5)


def step(model: Any, parameters: Any) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(batch()).square().mean().backward()
    optimizer.step()


def readers(way: str, folder: str) -> dict[str, Callable[[], str]]:
    """What reads or writes the values of a model that was filled but has not run; each returns what is wrong."""
    want = {name: value.clone() for name, value in Net().state_dict().items()}
    other = {name: value + 1 for name, value in want.items()}
    named = [name for name, _ in Net().named_parameters()]
    sent = other if dist.get_rank() == 0 else {}

    def after(change: Callable[[Any], Any], expected: dict[str, Tensor] = want) -> str:
        model = filled(way)
        result = change(model)
        model = result if isinstance(result, nn.Module) else model
        wrong = differing(values(model), expected)
        model(batch().to(next(iter(model.parameters())).dtype))
        return wrong + differing(values(model), expected)

    def optimizer_state() -> str:
        model = filled(way)
        optimizer = torch.optim.Adam(model.parameters())
        found = helpers.get_optimizer_state_dict(model, optimizer, options=FULL)
        wrong = differing({k: v["exp_avg"] for k, v in found["state"].items()}, {k: want[k] * 0 for k in named})
        for name in named:
            found["state"][name]["exp_avg"] = want[name] + 2
        helpers.set_optimizer_state_dict(model, optimizer, found, options=FULL)
        model(batch())
        found = helpers.get_optimizer_state_dict(model, optimizer, options=FULL)
        return wrong + differing({k: v["exp_avg"] for k, v in found["state"].items()}, {k: want[k] + 2 for k in named})

    def view() -> str:
        model, plain = filled(way), Net()
        step(model, fullshard.optimizer_view(model))
        step(plain, plain.parameters())
        got, expected = values(model), plain.state_dict()
        return "".join(k for k in expected if not torch.allclose(got[k], expected[k], atol=1e-6))

    def saved() -> str:
        fullshard.save(f"{folder}/{way}", filled(way))
        model = shard(Net(5), way, units)
        fullshard.load(f"{folder}/{way}", model)
        return differing(values(model), want) + after(lambda model: fullshard.load(f"{folder}/{way}", model))

    def gathered() -> str:
        return differing(dict(fullshard.full_parameters(filled(way))), {name: want[name] for name in named})

    def ours() -> str:
        model = filled(way)
        state = fullshard.optimizer_state_dict(model, torch.optim.Adam(model.parameters()))["state"]
        return "".join(name for name in state if any(value.is_meta for value in state[name].values()))

    def parked(model: Any) -> None:
        fullshard.park(model)
        fullshard.resume(model)

    def unsharded(model: Any) -> None:
        with fullshard.keep_gathered(model):
            model(batch())

    found = {
        "get full": lambda: after(lambda model: None),
        "get sharded": lambda: differing(whole(helpers.get_model_state_dict(filled(way))), want),
        "set full": lambda: after(lambda m: helpers.set_model_state_dict(m, dict(other), options=FULL), other),
        "from rank 0": lambda: after(lambda m: helpers.set_model_state_dict(m, sent, options=FROM_RANK_0), other),
        "load": lambda: after(lambda model: model.load_state_dict(dict(other)), other),
        "assign whole": lambda: after(lambda model: model.load_state_dict(dict(other), assign=True), other),
        "optimizer": optimizer_state,
        "view": view,
        "copy": lambda: after(copy.deepcopy),
        "save": saved,
        "whole": gathered,
        "cast": lambda: after(lambda model: model.double()),
        "park": lambda: after(parked),
        "keep": lambda: after(unsharded),
    }
    if way not in WRAPPERS:
        found["ours"] = ours
    return found


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper", "originals"])
@on_ranks
def test_readers_and_writers_take_over(way: str, tmp_path: Path) -> list[str]:
    problems = []
    for name, reader in readers(way, str(tmp_path)).items():
        try:
            wrong = reader()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        problems += [f"{name}: {wrong}"] if wrong else []
    return problems


@pytest.mark.parametrize("way", ["rows", "flat"])
@on_ranks
def test_set_model_state_dict_fills_a_model_on_meta(way: str) -> list[str]:
    """`set_model_state_dict` onto a model on the meta device fills it, whatever the form of the values."""
    problems = []
    source = shard(Net(), way, units)
    want = values(source)
    states: dict[str, tuple[dict[str, Any], Any]] = {
        "from rank 0": (want if dist.get_rank() == 0 else {}, FROM_RANK_0),
        "whole": (want, FULL),
        "whole, no options": (want, None),
        "sharded": (helpers.get_model_state_dict(source), None),
    }
    for name, (state, options) in states.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = on_meta(way).to(dtype)
            model.scale = model.scale.float()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                keys = helpers.set_model_state_dict(model, dict(state), options=options)
            got = values(model)
            wrong = differing(got, want) or ("" if str(keys) == "<All keys matched successfully>" else str(keys))
            if not wrong and any(got[key].dtype != dtype for key in got if key != "scale"):
                wrong = "dtype"
            before = {key: value.clone() for key, value in got.items()}
            model(batch().to(dtype)).float().square().mean().backward()
            optimizer.step()
            moved = [key for key, value in values(model).items() if not torch.equal(value, before[key])]
            wrong = wrong or ("" if len(moved) == len(before) - 1 else f"only {moved} trained")
            problems += [f"{name}, {dtype}: {wrong}"] if wrong else []
    return problems


@on_ranks
def test_some_values_of_a_unit_on_meta_are_refused() -> list[str]:
    """Values for a part of a unit are refused, and nothing has changed; those of whole units are loaded."""
    problems = []
    state = dict(Net().state_dict())
    of_one_unit = {name: value for name, value in state.items() if name.startswith("first.")}
    model = on_meta("rows")
    lenient = StateDictOptions(full_state_dict=True, strict=False)
    helpers.set_model_state_dict(model, dict(of_one_unit), options=lenient)
    if model.first.weight.is_meta or not model.second.weight.is_meta:
        problems.append("one unit's values")
    of_one_unit.pop("first.bias")
    for options, kind, words in (
        (lenient, fullshard.CheckpointError, "values for only some parameters"),
        (FULL, RuntimeError, "Missing key"),
    ):
        model = on_meta("rows")
        try:
            helpers.set_model_state_dict(model, dict(of_one_unit), options=options)
            problems.append(f"{words}: nothing was raised")
        except kind as error:
            problems += [] if words in str(error) and "first.bias" in str(error) else [str(error)]
        if not model.first.weight.is_meta:
            problems.append(f"{words}: changed")
    return problems


@on_ranks
def test_units_of_several_modules_are_assigned_in_parts() -> list[str]:
    """A unit of several modules, which are assigned one after the other: to memory from meta, and to another dtype."""
    problems = []
    want = Net().state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        state = {name: value.to(dtype) for name, value in want.items()}
        for start in ("meta", "memory"):
            with torch.device("meta" if start == "meta" else "cpu"):
                model = Net(5)
            fullshard.fully_shard([model.first, model.second])
            fullshard.fully_shard(model)
            model.load_state_dict(dict(state), assign=True)
            wrong = differing(values(model), state)
            model(batch().to(dtype))
            problems += [f"{dtype}, {start}: {wrong}"] if wrong else []
    return problems


@on_ranks
def test_a_plain_load_onto_meta_warns() -> list[str]:
    """A load without `assign` cannot fill the meta device: PyTorch's warning says so, as of a plain model."""
    model = on_meta("rows")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_state_dict(Net().state_dict())
    text = "copying from a non-meta parameter in the checkpoint to a meta parameter"
    return [] if sum(text in str(w.message) for w in caught) >= 5 else [str([str(w.message) for w in caught])]
