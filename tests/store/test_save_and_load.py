"""A checkpoint of any number of ranks, in any layout, by either front-end, loads into any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from awkward import STEPS, Awkward, differences, load_and_compare, make, parts, train, train_and_save, whole
from torch import Tensor, nn

import fullshard
from assembled import assembled, rectangles
from fullshard.store.remote import RemoteFolder
from ways import on_ranks, shard

PAIRS = [  # saved in one way, loaded in another, on so many ranks
    ("rows", "flat", 3),
    ("wrapper", "rows", 4),
    ("flat", "originals", 3),
    ("blocks", "wrapper", 1),
    ("owner", "plain", 1),
    ("flat", "flat", 2),  # the same: training goes on bit for bit
]


@pytest.mark.parametrize(("saved", "loaded", "world"), PAIRS)
def test_what_two_ranks_save_others_load(run_ranks: Any, tmp_path: Path, saved: str, loaded: str, world: int) -> None:
    uses = {"uses": loaded == "wrapper"}
    before = run_ranks(train_and_save, saved, tmp_path, uses)
    after = run_ranks(load_and_compare, loaded, tmp_path, before[0][0], uses, rng=saved == loaded, world=world)
    assert not any(problems for problems, _ in after)
    assert saved != loaded or [losses for _, losses in after] == [losses for _, losses in before]


def test_replicas_share_the_writing_and_other_meshes_load(run_ranks: Any, tmp_path: Path) -> None:
    (want, _), *_ = run_ranks(train_and_save, "rows", tmp_path, {"hybrid": True}, world=4)
    writers = [file for file, name, *_ in rectangles(tmp_path / "step-000000002") if name.startswith("model.blocks")]
    assert len(set(writers)) == 4, writers
    for way, world in (("flat", 2), ("rows", 3)):
        for problems, _ in run_ranks(load_and_compare, way, tmp_path, want, {}, rng=False, world=world):
            assert not problems


@pytest.mark.parametrize("way", ["flat", "rows"])
def test_files_can_be_read_without_fullshard(run_ranks: Any, tmp_path: Path, way: str) -> None:
    """By the library of their format: every element is where the key of its rectangle says."""
    (want, _), *_ = run_ranks(train_and_save, way, tmp_path, {})
    found = assembled(tmp_path / "step-000000002")
    weights = {name: value for name, value in want.items() if name.startswith("model.")}
    assert weights and not differences({name: found[name] for name in weights}, weights)


def save_behind(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Saves in the background, trains on meanwhile, saves again; what all was at the first save."""
    model, optimizer = make("rows")
    train(model, optimizer, range(STEPS))
    first = fullshard.save(folder, model, optimizer, step=STEPS, asynchronous=True)
    then = whole(model, optimizer)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    second = fullshard.save(folder, model, optimizer, step=2 * STEPS, asynchronous=True)
    assert first.done and first.wait() == folder / "step-000000002"
    assert second.wait() == folder / "step-000000004" and second.done
    return then, fullshard.Folder(folder).names()


@pytest.mark.gloo("a rank waits for its writer")
@pytest.mark.timeout(600)  # two processes import torch, on a machine that may be busy
def test_what_is_saved_in_the_background_is_what_was_there(run_ranks: Any, tmp_path: Path) -> None:
    (want, names), _ = run_ranks(save_behind, tmp_path, timeout=400)
    assert names == ["step-000000002", "step-000000004"]
    for problems, _ in run_ranks(load_and_compare, "rows", tmp_path / names[0], want):
        assert not problems


def test_an_address_of_fsspec_serves_as_a_folder(run_ranks: Any, tmp_path: Path) -> None:
    url = RemoteFolder(f"file://{tmp_path}")
    for _ in range(2):
        (want, _), _ = run_ranks(train_and_save, "flat", url, keep_last=2)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["latest", "step-000000002", "step-000000002.2"]
    assert not (tmp_path / names[1] / "saving").exists()
    for problems, _ in run_ranks(load_and_compare, "rows", url, want, {}, rng=False, world=3):
        assert not problems
    model, optimizer = make("plain")
    with pytest.raises(fullshard.ConfigError, match="asynchronous=True requires a local or shared file system"):
        fullshard.save(url, model, optimizer, asynchronous=True)


def load_elsewhere(way: str, folder: Path, want: dict[str, Tensor]) -> list[str]:
    """Into a model that was made without memory; and into one that was compiled, whose names are the model's."""
    with torch.device("meta"):
        model: Any = Awkward(False)
    model = shard(model, way, parts)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    fullshard.load(folder, model, optimizer, rng=False)
    other, its = make(way, seed=1)
    fullshard.load(folder, torch.compile(other, backend="eager"), its, rng=False)
    return differences(whole(model, optimizer), want) + differences(whole(other, its), want)


def test_models_on_the_meta_device_and_compiled_ones_load(run_ranks: Any, tmp_path: Path) -> None:
    (want, _), _ = run_ranks(train_and_save, "rows", tmp_path)
    for way in ("rows", "flat"):
        assert run_ranks(load_elsewhere, way, tmp_path, want, world=3) == [[]] * 3


@on_ranks
def test_state_that_was_made_since_the_save_is_dropped(tmp_path: Path) -> None:
    """Loaded is what was saved before the optimizer had updated the bias."""
    model = fullshard.fully_shard(nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in (model.weight, model.bias):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        if parameter is model.weight:
            fullshard.save(tmp_path, model, optimizer)
    fullshard.load(tmp_path, model, optimizer, rng=False)
    assert [name for name, parameter in model.named_parameters() if parameter in optimizer.state] == ["weight"]


@on_ranks
def test_in_the_middle_of_a_step_a_save_is_refused(tmp_path: Path) -> None:
    model, _ = make("rows")
    model.blocks[1].register_forward_hook(lambda *args: fullshard.save(tmp_path, model))
    with pytest.raises(fullshard.FullshardError, match="in the middle of a step"):
        model(torch.arange(6))
    assert not fullshard.Folder(tmp_path).names()


def test_a_warning_names_the_line_that_called_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(UserWarning, match=r"no manifest\.json") as found:
        fullshard.load(tmp_path, model)
    assert found[0].filename == __file__


class Counting(nn.Module):
    """A module with state that is not a tensor."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_of_a_compiled_model_loads_into_one_that_is_not(tmp_path: Path) -> None:
    saved, loaded = nn.Sequential(nn.Linear(2, 2), Counting()), nn.Sequential(nn.Linear(2, 2), Counting())
    saved[1].count = 3
    fullshard.save(tmp_path, torch.compile(saved))
    fullshard.load(tmp_path, loaded)
    assert loaded[1].count == 3


@pytest.mark.parametrize("turn", [1, -1])
def test_a_model_in_ddp_has_the_names_of_the_model(tmp_path: Path, fake_world: Any, turn: int) -> None:
    """As `get_model_state_dict` has them."""
    fake_world(1)
    plain = nn.Linear(2, 2)
    saved, loaded = (nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), plain)[::turn]
    fullshard.save(tmp_path, saved)
    fullshard.load(tmp_path, loaded)
    for theirs, ours in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("turn", [1, -1])
def test_a_checkpoint_without_a_name_of_the_model_warns(tmp_path: Path, turn: int) -> None:
    """With strict=False nothing was loaded, without a word; a prefix that explains it is named."""
    saved, into = (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))[::turn]
    fullshard.save(tmp_path, saved)
    with pytest.warns(
        UserWarning, match=f"none was loaded(.|\\n)*{('model', '', 'checkpoint')[1 - turn]}'s names.*'0.'"
    ):
        assert fullshard.load(tmp_path, into, strict=False).untouched
    with pytest.warns(UserWarning, match="gain, ... of the model"):
        fullshard.load(tmp_path, Gain(), strict=False)


class Gain(nn.Module):
    """A model of one parameter, whose name no other has."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
