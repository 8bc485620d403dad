"""Parameters without dims, plain values, NaN, conjugated ones, ties that come and go, a device without memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fullshard
from fullshard import CheckpointError
from fullshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from ways import alone, on_ranks, shard

WHOLE = StateDictOptions(full_state_dict=True)
PLAIN = {"step": 2, "scale": 1.0, "warm": False, "none": None, "rule": "slow", "wide": 2**60 + 1, "odd": float("inf")}
Build = Callable[[Any], torch.optim.Optimizer]


class Scaled(nn.Module):
    """Of the smallest parameter some ranks have nothing."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Plain(torch.optim.Optimizer):
    """Momentum, and plain values beside it; some of which it makes in its first step, others later."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("average", torch.zeros_like(p)).add_(p.grad)
                state["step"] = state.get("step", 0) + 1
                state.setdefault("warm", True)
                if state["step"] > 1:
                    state.update(PLAIN)
                p.sub_(state["average"], alpha=group["lr"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def made(way: str, seed: int, build: Build = adamw) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Scaled(1) if way == "rows" else Scaled()  # which refuses parameters without dims
    if way != "plain":
        model = shard(model, way, alone)
    return model, build(model.parameters())


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    found = {f"model.{k}": v.clone() for k, v in get_model_state_dict(model, options=WHOLE).items()}
    for name, state in get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"].items():
        found |= {f"{name}.{k}": v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    return found


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Names of what is not the same, of the same type."""
    return [f"{name}: {got.get(name)} is not {want.get(name)}" for name in got.keys() | want.keys()
            if type(got.get(name)) is not type(want.get(name))
            or not (torch.equal if isinstance(want[name], Tensor) else operator.eq)(got[name], want[name])]  # fmt: skip


def plain_of(state: Any) -> dict[str, Any]:
    """All that is no tensor, with its type."""
    return {key: (type(value), value) for key, value in state.items() if not isinstance(value, Tensor)}


def loaded(folder: Path, way: str, build: Build, want: dict[str, Any]) -> list[str]:
    """What differs, of the whole state, and of what this rank's optimizer has of any tensor that it holds."""
    model, optimizer = made(way, 1, build)
    fullshard.load(folder, model, optimizer)
    found = [plain_of(optimizer.state.get(p, {})) for p in optimizer.param_groups[0]["params"] if p.numel()]
    wrong = [str(one) for one in found if one != plain_of(PLAIN if build is Plain else {})]
    return wrong + differences(whole(model, optimizer), want)


def through_everything(folder: Path, build: Build) -> dict[str, Any]:
    """Train, then save and load by each way: in a folder, and in state dicts, whole and sharded; train on."""
    problems: dict[str, list[str]] = {}
    for way, other in (("rows", "rows"), ("flat", "originals"), ("wrapper", "flat"), ("originals", "wrapper")):
        model, optimizer = made(way, 0, build)
        train(model, optimizer)
        fullshard.save(folder / way, model, optimizer)
        want = whole(model, optimizer)
        problems[f"{way} to {other}"] = loaded(folder / way, other, build, want)
        for options in (WHOLE, StateDictOptions()):
            into, its = made(way, 1, build)
            set_model_state_dict(into, get_model_state_dict(model, options=options), options=options)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(into, its, state, options=options)
            problems[f"{way} {options}"] = differences(whole(into, its), want)
        train(into, its)
        train(model, optimizer)
        problems[f"{way} on"] = differences(whole(into, its), whole(model, optimizer))
    return {what: found for what, found in problems.items() if found}


@pytest.mark.parametrize("build", [adamw, Plain])
def test_no_dims_and_plain_values_are_kept(run_ranks: Any, tmp_path: Path, build: Build) -> None:
    """Parameters without dims; state that is no tensor, with its type: on two ranks, on one, converted, on two."""
    assert run_ranks(through_everything, tmp_path, build) == [{}, {}]
    fullshard.convert(tmp_path / "flat", tmp_path / "flat.pt")
    fullshard.convert(tmp_path / "flat.pt", tmp_path / "again")
    model, optimizer = made("plain", 1, build)
    fullshard.load(tmp_path / "flat", model, optimizer)
    want = whole(model, optimizer)
    assert not loaded(tmp_path / "again", "plain", build, want)
    train(model, optimizer)
    fullshard.save(tmp_path / "plain", model, optimizer)
    for way in ("flat", "wrapper"):
        assert run_ranks(loaded, tmp_path / "plain", way, build, whole(model, optimizer)) == [[], []]


def test_nan_is_equal_to_nan(tmp_path: Path, fake_world: Any) -> None:
    """State that is NaN for all parameters of one tensor: trained, saved, and loaded into the same, by either way."""
    fake_world(1)
    model: Any = shard(nn.Sequential(nn.Linear(2, 2)), "flat", alone)
    optimizer = torch.optim.NAdam(fullshard.optimizer_view(model))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["mu_product"] = torch.tensor(float("nan"))
    fullshard.save(tmp_path, model, optimizer)
    fullshard.load(tmp_path, model, optimizer)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    assert all(state["mu_product"].isnan() for state in optimizer.state.values())


def test_scalars_of_another_type(tmp_path: Path) -> None:
    model, optimizer = made("plain", 0)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["step"] = "2"
    fullshard.save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"'step' .* different type"):
        fullshard.load(tmp_path, *made("plain", 1))


class Tied(nn.Sequential):
    def __init__(self, tied: bool) -> None:
        super().__init__(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        if tied:
            self[1].weight = self[0].weight


def tied(with_ties: bool, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = shard(Tied(with_ties), "flat", alone)
    optimizer = torch.optim.AdamW(fullshard.optimizer_view(model), lr=0.3)
    for _ in range(steps):
        model(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.1
    return model, optimizer


def test_ties_that_are_none_any_more(tmp_path: Path, fake_world: Any) -> None:
    """Each of the parameters gets what they had together: values, state and settings."""
    fake_world(1)
    fullshard.save(tmp_path, *(before := tied(True)))
    model, optimizer = tied(False, steps=0)
    optimizer.param_groups[0]["lr"] = 0.9
    fullshard.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    want = whole(*before)
    want |= {name.replace("0.", "1."): value for name, value in want.items()}
    assert len(want) == 8 and not differences(whole(model, optimizer), want)


def test_ties_that_were_none(tmp_path: Path, fake_world: Any) -> None:
    """Two values are not one; the same value twice is, as programs save that know of no ties."""
    fake_world(1)
    fullshard.save(tmp_path / "two", *tied(False))
    model, optimizer = tied(True)
    want = whole(model, optimizer)
    with pytest.raises(CheckpointError, match="tied in the model, but the files hold different values"):
        fullshard.load(tmp_path / "two", model, optimizer)
    assert not differences(whole(model, optimizer), want)
    separate = Tied(False)
    separate[1].weight.data.copy_(separate[0].weight.data)
    fullshard.save(tmp_path / "one", separate)
    fullshard.load(tmp_path / "one", model)
    assert torch.equal(whole(model, optimizer)["model.0.weight"], separate[0].weight)


@pytest.mark.parametrize("view", [Tensor.conj, lambda tensor: tensor.conj().imag])
def test_conjugated_and_negated_values(tmp_path: Path, view: Any) -> None:
    """They are views that say so, of memory that holds something else."""

    def values() -> Tensor:
        return view(torch.randn(3, dtype=torch.complex64))

    model, mine = nn.Linear(2, 2), values()
    model.register_buffer("buffer", values())
    model.parameter = nn.Parameter(values())
    want = [one.detach().clone().resolve_conj() for one in (model.buffer, model.parameter, mine)]
    fullshard.save(tmp_path, model, state={"mine": {"it": mine}})
    model.buffer, model.parameter = values(), nn.Parameter(values())
    loaded = fullshard.load(tmp_path, model)
    assert all(map(torch.equal, (model.buffer, model.parameter, loaded.state["mine"]["it"]), want))


def test_a_default_device_without_memory(tmp_path: Path) -> None:
    """What is loaded and saved is where the model is, whatever new tensors are on."""
    model, optimizer = made("plain", 0)
    train(model, optimizer)
    want, state = whole(model, optimizer), {"mine": {"it": torch.ones(2)}}
    with torch.device("meta"):
        fullshard.save(tmp_path, model, optimizer, state=state)
        fullshard.save(tmp_path, model, optimizer, step=1, asynchronous=True).wait()
    model, optimizer = made("plain", 1)
    with torch.device("meta"):
        loaded = fullshard.load(tmp_path, model, optimizer, step=0)
    assert torch.equal(loaded.state["mine"]["it"], torch.ones(2))
    assert not differences(whole(model, optimizer), want)


def test_no_hook_learns_of_the_step_that_makes_state(tmp_path: Path) -> None:
    """State is learnt from a step that changes nothing: hooks, counters, settings; nor does a patched step run."""
    fullshard.save(tmp_path, *made("plain", 0))
    model, optimizer = made("plain", 1)
    train(model, optimizer)
    fullshard.save(tmp_path, model, optimizer)
    calls: list[str] = []

    class Counts(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    optimizer = Counts(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    for_all = register_optimizer_step_pre_hook(lambda *args: calls.append("all"))
    optimizer.step = lambda *args: calls.append("patched")  # type: ignore[method-assign]
    try:
        fullshard.load(tmp_path, model, optimizer)
    finally:
        for_all.remove()
    assert not calls and "count" not in optimizer.param_groups[0]
    assert len(optimizer.state) == 3 and optimizer._optimizer_step_pre_hooks


class Meets(torch.optim.Adam):
    """Communicates in its step, as optimizers of whole matrices do."""

    def step(self, closure: Any = None) -> Any:
        torch.distributed.barrier()
        return super().step(closure)


@pytest.mark.gloo("ranks in one process take turns in such steps: a lock")
@on_ranks
def test_an_optimizer_that_communicates_and_lacks_state_on_one_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = Meets(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fullshard.save(tmp_path, model, optimizer)
    want = optimizer.state[model.weight]["exp_avg"].clone()
    if torch.distributed.get_rank() == 0:
        optimizer.state.clear()
    fullshard.load(tmp_path, model, optimizer)
    assert want.any() and torch.equal(optimizer.state[model.weight]["exp_avg"], want)
