"""Optimizer state that is no tensor: kept, with its type, in checkpoints and in state dicts, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fullshard
from fullshard.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from ways import WAYS, shard

PLAIN = {"step": 2, "scale": 1.0, "warm": False, "none": None, "rule": "slow", "wide": 2**60 + 1, "odd": float("inf")}


class Plain(torch.optim.Optimizer):
    """Momentum, and plain values beside it; some of which it makes in its first step, others later."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

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


def made(way: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 3))  # of the smallest, some ranks have nothing
    if way != "plain":
        model = shard(model, way, lambda whole: [])
    return model, Plain(model.parameters())


def train(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_of(state: Any) -> dict[str, Any]:
    """All that is no tensor, with its type."""
    return {key: (type(value), value) for key, value in state.items() if not isinstance(value, Tensor)}


WANT = plain_of(PLAIN)


def problems_of(model: Any, optimizer: Any, what: str) -> list[str]:
    """Of what this rank's optimizer has: of every tensor that it holds any of, the same as was saved."""
    tensors = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    found = [plain_of(optimizer.state.get(p, {})) for p in tensors]
    return [f"{what}: {one}" for one in found if one != WANT]


def through_everything(folder: Path, ways: list[str]) -> list[str]:
    problems = []
    for way in ways:
        model, optimizer = made(way)
        train(model, optimizer)
        fullshard.save(folder / way, model, optimizer)
        into, its = made(way)
        fullshard.load(folder / way, into, its)
        problems += problems_of(into, its, f"{way}, a folder")
        for full in (True, False):
            options = StateDictOptions(full_state_dict=full)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            found = [plain_of(own) for own in state["state"].values()]
            problems += [f"{way}, {full}: {one}" for one in found if one != WANT]
            into, its = made(way)
            set_optimizer_state_dict(into, its, state, options=options)
            problems += problems_of(into, its, f"{way}, {full}")
    return problems


def loaded(folder: Path, ways: list[str]) -> list[str]:
    problems = []
    for saved in WAYS:
        for way in ways:
            model, optimizer = made(way)
            fullshard.load(folder / saved, model, optimizer)
            problems += problems_of(model, optimizer, f"{saved} to {way}")
    return problems


def test_plain_values_are_kept_with_their_types(run_ranks: Any, tmp_path: Path) -> None:
    """Saved on two ranks and loaded there; then loaded on one."""
    for problems in run_ranks(through_everything, tmp_path, [*WAYS], world=2):
        assert not problems, "\n".join(problems)
    assert not loaded(tmp_path, ["plain"])
    fullshard.convert(tmp_path / "rows", tmp_path / "rows.pt")
    state = torch.load(tmp_path / "rows.pt", weights_only=True)["optimizer"]["state"]
    assert all(plain_of(one) == WANT for one in state.values()), state
    fullshard.convert(tmp_path / "rows.pt", tmp_path / "again")
    model, optimizer = made("plain")
    fullshard.load(tmp_path / "again", model, optimizer)
    assert not problems_of(model, optimizer, "converted")
    model, optimizer = made("plain")
    train(model, optimizer)
    fullshard.save(tmp_path / "one", model, optimizer)
    for problems in run_ranks(onto_two, tmp_path / "one", world=2):
        assert not problems, "\n".join(problems)


def onto_two(folder: Path) -> list[str]:
    problems = []
    for way in WAYS:
        model, optimizer = made(way)
        fullshard.load(folder, model, optimizer)
        problems += problems_of(model, optimizer, f"one to {way}")
    return problems
