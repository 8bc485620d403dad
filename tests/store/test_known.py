"""What was settled at the last save is used while it is true, and no longer: every save is as a first one."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fullshard
from fullshard import CheckpointError
from fullshard.store import known, metadata, telling
from fullshard.store.plan import Told

pytestmark = pytest.mark.gloo("counts what a process knows of its last save")


class Head(nn.Module):
    """A linear map with another name for its weight, if asked for, and a buffer of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def made() -> tuple[Any, torch.optim.Optimizer]:
    model = fullshard.fully_shard(Head())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = {
    "nothing": step,
    "no state yet": lambda model, optimizer: optimizer.state.clear(),
    "another rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.3),
    "a rate that is a tensor": lambda model, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.3)),
    "a longer buffer": lambda model, optimizer: model.register_buffer("seen", torch.arange(5.0)),
    "a buffer of another dtype": lambda model, optimizer: model.register_buffer("seen", torch.arange(3)),
    "another name": lambda model, optimizer: model.register_buffer("also_seen", model.seen),
    "a buffer less": lambda model, optimizer: model.__delattr__("seen"),
    "one rank forgets": lambda model, optimizer: known.forget(model) if dist.get_rank() == 1 else None,
    "the first rank forgets": lambda model, optimizer: known.forget(model) if dist.get_rank() == 0 else None,
}


def saved_again(folder: Path) -> dict[str, Any]:
    """Saves, changes something, saves again; and saves the same once more with nothing known; for each change."""
    found = {}
    told: list[bool] = []

    def counting(*given: Any) -> Told:
        answer = tell(*given)
        told.append(answer.plan is not None)
        return answer

    tell = telling._told
    with mock.patch.object(telling, "_told", counting):
        for change, act in CHANGES.items():
            told.clear()
            model, optimizer = made()
            step(model, optimizer)
            where = folder / change
            fullshard.save(where, model, optimizer, step=1, state={"numbers": torch.arange(3.0)})
            act(model, optimizer)
            fullshard.save(where, model, optimizer, step=2, state={"numbers": torch.arange(3.0) + 1})
            known.forget(model)
            fullshard.save(where, model, optimizer, step=3, state={"numbers": torch.arange(3.0) + 1})
            assert content(where / "step-000000002") == content(where / "step-000000003"), change
            found[change] = told[:]
    return found


def content(path: Path) -> tuple[Any, ...]:
    """What is in a checkpoint: PyTorch's reader's view of the metadata, and all values."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    state = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in metadata.state_dict_metadata.items()
        if hasattr(facts, "size")
    }
    dcp.load(state, checkpoint_id=path)
    places = {(index.fqn, tuple(index.offset or ())): i.relative_path for index, i in metadata.storage_data.items()}
    return {n: t.tolist() for n, t in state.items()}, metadata.planner_data, places


def test_a_save_is_what_it_would_be_with_nothing_known(run_ranks: Any, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(saved_again, tmp_path)):
        assert all(told[0] and told[-1] for told in found.values()), found  # in full
        again = {change: told[1:-1] for change, told in found.items()}
        assert again["nothing"] == again["another rate"] == [False]
        assert again["a rate that is a tensor"] == [False, True]  # which the first rank adds, and notices late
        assert again["the first rank forgets"] == [rank == 0, True]  # asked again
        assert again["one rank forgets"] == [rank == 1, True]


def on_two_groups(folder: Path) -> list[int]:
    """One model saved over all ranks and by each alone, in turn: nobody goes by what is known of another group."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    steps = []
    model = nn.Linear(3, 3)
    for number in range(1, 4):
        with torch.no_grad():
            model.weight.fill_(number)
        fullshard.save(folder / "all", model, step=number)
        fullshard.save(folder / f"rank {dist.get_rank()}", model, step=number, process_group=alone)
        for where in ("all", f"rank {dist.get_rank()}"):
            other = nn.Linear(3, 3)
            steps.append(fullshard.load(folder / where, other, process_group=alone, rng=False).step)
            assert torch.equal(other.weight, model.weight)
    return steps


def test_groups_are_told_apart(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(on_two_groups, tmp_path) == [[1, 1, 2, 2, 3, 3]] * 2


def test_a_model_that_is_gone_is_forgotten(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(gone, tmp_path) == [0, 0]


def gone(folder: Path) -> int:
    before = len(known._known)
    model, optimizer = made()
    fullshard.save(folder, model, optimizer)
    assert len(known._known) == before + 1
    del model, optimizer
    gc.collect()
    return len(known._known) - before


def at_random(folder: Path, seed: int) -> None:
    """Saves at random moments, in the background or not, with changes in between; all load as what was saved."""
    chosen = random.Random(seed)
    model, optimizer = made()
    step(model, optimizer)
    for number in range(1, 9):
        change = chosen.choice([*CHANGES, "nothing", "nothing"])
        if hasattr(model, "seen") or change not in ("another name", "a buffer less"):
            CHANGES[change](model, optimizer)
        given = [optimizer] if chosen.random() < 0.8 else []
        state = {"numbers": torch.arange(chosen.randint(1, 3)), "plain": number}
        fullshard.save(folder, model, given, step=number, state=state, asynchronous=chosen.random() < 0.5).wait()
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        if given:
            tensors |= {f"{i}.{k}": v for i, own in enumerate(optimizer.state.values()) for k, v in own.items()}
        want = {name: whole(tensor) for name, tensor in tensors.items()}
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        loaded = fullshard.load(folder, model, given, rng=False)
        assert (loaded.step, loaded.state["plain"]) == (number, number)
        assert torch.equal(loaded.state["numbers"], state["numbers"])
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            assert torch.equal(whole(tensor), want[name]), (seed, number, change, name)
        for i, own in enumerate(optimizer.state.values() if given else ()):
            assert all(torch.equal(whole(own[key]), want[f"{i}.{key}"]) for key in own), (seed, number, change)


def whole(tensor: Any) -> torch.Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


@pytest.mark.parametrize("seed", [0, 1])
def test_saves_at_random_load_as_what_was_saved(run_ranks: Any, tmp_path: Path, seed: int) -> None:
    run_ranks(at_random, tmp_path, seed, timeout=120)


class Noting:
    """Notes whether garbage is searched for when it is asked for its state, which may fail."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.collected: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        self.collected.append(gc.isenabled())
        if self.fails:
            raise ValueError("no state")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def test_no_garbage_is_searched_for_while_pieces_are_listed(tmp_path: Path, monkeypatch: Any) -> None:
    """Among millions of them it takes most of the time: while a save is planned, and while metadata is read."""
    for fails in (False, True):
        noting = Noting(fails)
        with pytest.raises(CheckpointError) if fails else nullcontext():
            fullshard.save(tmp_path, nn.Linear(2, 2), state={"noting": noting})
        assert noting.collected == [False] and gc.isenabled()
    collected = []
    monkeypatch.setattr(metadata, "look_through", lambda _: collected.append(gc.isenabled()))
    fullshard.load(tmp_path, nn.Linear(2, 2), strict=False)
    assert collected == [False] and gc.isenabled()
