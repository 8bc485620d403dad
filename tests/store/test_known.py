"""What was settled at the last save is used while it is true, and no longer: every save is as a first one."""

from __future__ import annotations

import gc
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
from ways import on_ranks


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


@on_ranks
def test_groups_are_told_apart(tmp_path: Path) -> None:
    """One model saved over all ranks and by each alone, in turn: nobody goes by what is known of another group."""
    own = f"rank {dist.get_rank()}"
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    for number in range(1, 4):
        nn.init.constant_(model.weight, number)
        fullshard.save(tmp_path / "all", model, step=number)
        fullshard.save(tmp_path / own, model, step=number, process_group=alone)
        for where in ("all", own):
            assert fullshard.load(tmp_path / where, other, process_group=alone, rng=False).step == number
            assert torch.equal(other.weight, model.weight)


@pytest.mark.gloo("counts what a process knows")
@on_ranks
def test_a_model_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    before = len(known._known)
    model, optimizer = made()
    fullshard.save(tmp_path, model, optimizer)
    assert len(known._known) == before + 1
    del model, optimizer
    gc.collect()
    assert len(known._known) == before


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
