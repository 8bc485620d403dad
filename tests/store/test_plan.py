"""Who writes what: every rank knows it by itself, and what ranks compare finds what does not fit."""

from __future__ import annotations

import gc
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from assembled import assembled, rectangles
from fullshard import CheckpointError
from fullshard.store import manifest, plan
from fullshard.store.names import TensorEntry
from fullshard.store.piece import Piece
from fullshard.store.plan import fingerprint
from fullshard.store.ranks import Ranks
from ways import on_ranks

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


class Head(nn.Module):
    """Two linear maps and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def sharded(layers: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    """A model of `layers` heads whose optimizer has stepped."""
    model: Any = fullshard.fully_shard(nn.Sequential(*(Head() for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


# Rectangles.


def cut(data: st.DataObject, offsets: tuple[int, ...], sizes: tuple[int, ...], most: int = 3) -> list[Rectangle]:
    """Rectangles that are every element of one once."""
    dims = [dim for dim, extent in enumerate(sizes) if extent > 1]
    if not most or not dims or data.draw(st.booleans()):
        return [(offsets, sizes)]
    dim = data.draw(st.sampled_from(dims))
    at = data.draw(st.integers(1, sizes[dim] - 1))
    low = (*sizes[:dim], at, *sizes[dim + 1 :])
    high = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    begin = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    return [*cut(data, offsets, low, most - 1), *cut(data, begin, high, most - 1)]


def total(rectangles: list[Rectangle]) -> int:
    return sum(fingerprint(*each) for each in rectangles) % plan.PRIME


@given(data=st.data(), shape=st.lists(st.integers(1, 2**20), max_size=4).map(tuple))
def test_fingerprints_of_all_elements_add_up_to_the_whole(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """And of none that lack some, hold some twice, or lie elsewhere though they have as many."""
    parts = cut(data, (0,) * len(shape), shape)
    whole = fingerprint((0,) * len(shape), shape)
    assert total(parts) == whole
    one = data.draw(st.sampled_from(parts))
    rest = [part for part in parts if part is not one]
    assert total(rest) != whole
    assert total([*parts, one]) != whole
    if shape:
        offsets, sizes = one
        dim = data.draw(st.integers(0, len(shape) - 1))
        moved = (*offsets[:dim], offsets[dim] + data.draw(st.integers(1, 9)), *offsets[dim + 1 :])
        assert total([*rest, (moved, sizes)]) != whole


HALF = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("offsets", "numel"),
    [([(0, 0), (0, 0)], 8), ([(0, 0)], 8), ([(0, 0), (1, 0)], 16)],
    ids=["twice, and as many elements as there are", "half", "overlapping"],
)
def test_not_every_element_once(offsets: list[tuple[int, int]], numel: int) -> None:
    pieces = [Piece("weight", (4, 4), at, (2, 4), HALF) for at in offsets]
    with pytest.raises(CheckpointError, match=rf"(?s)every element.*weight.*16 elements.*{numel} in all"):
        plan._written_by_others(pieces, {"weight": TensorEntry((4, 4), torch.float32)}, Ranks())


# Ranks.


def exchanged(folder: Path) -> list[Any]:
    """What ranks exchange before they write, by call and size: of a first save and a second; of one of a larger model,
    and of one whose values differ between ranks."""
    calls: list[tuple[str, int]] = []

    def noting(method: str, call: Any) -> Any:
        def noted(self: Any, value: Any) -> Any:
            numel = value.numel() if isinstance(value, torch.Tensor) else len(pickle.dumps(value))
            calls.append((method, numel))
            return call(self, value)

        return noted

    found = []
    small, large = sharded(1), sharded(20)
    with mock.patch.multiple(Ranks, **{each: noting(each, getattr(Ranks, each)) for each in ("all", "sum", "gather")}):
        for (model, optimizer), state in ((small, 1), (small, 1), (large, 1), (small, dist.get_rank())):
            calls.clear()
            fullshard.save(folder, model, optimizer, rng=False, state={"number": state})
            found.append(calls[1:-1])  # without whether a save goes on, and where pieces were written
    return found


@pytest.mark.gloo("notes the calls of a class, which threads share")
def test_a_first_save_tells_nothing(run_ranks: Any, tmp_path: Path) -> None:
    """Digests, and a number for each tensor, however large the model is."""
    for first, second, larger, differing in run_ranks(exchanged, tmp_path):
        assert [call for call, _ in first] == ["all", "sum"]
        assert first == second
        assert larger == [first[0], ("sum", 20 * first[1][1])]
        assert [call for call, _ in differing] == ["all", "gather", "sum"]


@on_ranks
def test_tensors_that_only_some_ranks_have(tmp_path: Path) -> None:
    """Stages of a pipeline, each of names of its own."""
    world = range(dist.get_world_size())
    meshes = [DeviceMesh("cpu", [rank]) for rank in world]
    rank = dist.get_rank()
    layer: Any = nn.Linear(3 + rank, 2)
    nn.init.constant_(layer.weight, rank + 1)
    model = nn.ModuleDict({f"stage-{rank}": fullshard.fully_shard(layer, mesh=meshes[rank])})
    fullshard.save(tmp_path, model)
    whole = assembled(tmp_path / "step-000000000")
    assert all((whole[f"model.stage-{rank}.weight"] == rank + 1).all() for rank in world)
    loaded = nn.ModuleDict({f"stage-{rank}": nn.Linear(3 + rank, 2) for rank in world})
    fullshard.load(tmp_path, loaded)
    for rank in world:
        assert (loaded[f"stage-{rank}"].weight == rank + 1).all()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@on_ranks
def test_ties_and_optimizers_of_stages(tmp_path: Path) -> None:
    """Each of a pipeline's stages has its own; loaded as stages and as one model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(world)]

    def stages(ranks: Any, lr: float = 0.5) -> tuple[Any, Any]:
        model = nn.ModuleDict({f"stage-{of_rank}": Tied() for of_rank in ranks})
        if len(ranks) == 1:
            fullshard.fully_shard(model[f"stage-{rank}"], mesh=meshes[rank])
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for (name, parameter), of_rank in zip(model.named_parameters(), ranks, strict=True):
            parameter.grad = torch.full_like(parameter, 1.0 + of_rank)
            assert name.startswith(f"stage-{of_rank}")
        return model, optimizer

    model, optimizer = stages([rank])
    optimizer.step()
    fullshard.save(tmp_path, model, optimizer)
    ties = manifest.parse((tmp_path / "step-000000000" / "manifest.json").read_bytes(), "").ties
    assert ties == {f"model.stage-{r}.last.weight": f"model.stage-{r}.first.weight" for r in range(world)}
    for ranks in ([rank], range(world)):
        loaded, other = stages(ranks, lr=0.1)
        fullshard.load(tmp_path, loaded, other, strict=len(ranks) == world)
        assert other.param_groups[0]["lr"] == 0.5
        averages = [state["exp_avg"] for state in other.state.values()]
        sums = [float(getattr(average, "_local_tensor", average).sum()) for average in averages]
        assert sums == pytest.approx([1.6 * (1 + r) for r in ranks])
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with pytest.raises(fullshard.DivergenceError, match="different optimizer groups"):
        fullshard.save(tmp_path, model, optimizer)


@on_ranks
def test_what_ranks_hold_without_knowing_of_each_other_is_written_once(tmp_path: Path) -> None:
    """A norm beside tensor-parallel layers is such a tensor; ranks write in turns."""
    torch.manual_seed(0)
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())]
    layer: Any = fullshard.fully_shard(nn.Linear(3, 2), mesh=meshes[dist.get_rank()])
    path = fullshard.save(tmp_path, layer).wait()
    found = [(name, file) for file, name, *_ in rectangles(Path(str(path))) if name.startswith("model.")]
    assert len(found) == 2
    assert set(dict(found).values()) == {"rank-0.safetensors", "rank-1.safetensors"}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(4, 4, bias=False))


@on_ranks
def test_scalars_are_those_of_a_rank_that_holds_the_parameter(tmp_path: Path) -> None:
    """Each rank holds one of two weights, and counts the other's steps wrong."""
    model: Any = fullshard.fully_shard(two_layers(), layout="owner")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    absent = [parameter for parameter in model.parameters() if not parameter._local_tensor.numel()]
    assert len(absent) == 1
    optimizer.state[absent[0]]["step"].fill_(7.0)
    fullshard.save(tmp_path, model, optimizer)
    plain = two_layers()
    loaded = torch.optim.AdamW(plain.parameters())
    fullshard.load(tmp_path, plain, loaded, rng=False)
    assert [float(loaded.state[parameter]["step"]) for parameter in plain.parameters()] == [1.0, 1.0]


@on_ranks
def test_groups_are_told_apart(tmp_path: Path) -> None:
    """One model saved over all ranks and by each alone, in turn."""
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
    """Among millions of them it takes most of the time: while a save is planned, and while a manifest is read."""
    for fails in (False, True):
        noting = Noting(fails)
        with pytest.raises(CheckpointError) if fails else nullcontext():
            fullshard.save(tmp_path, nn.Linear(2, 2), state={"noting": noting})
        assert noting.collected == [False] and gc.isenabled()
    collected = []
    read = manifest._manifest
    monkeypatch.setattr(manifest, "_manifest", lambda *args: (collected.append(gc.isenabled()), read(*args))[1])
    fullshard.load(tmp_path, nn.Linear(2, 2), strict=False)
    assert collected == [False] and gc.isenabled()
