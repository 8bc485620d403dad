"""ZeRO-3 folders: one that DeepSpeed 0.19.8 wrote on three ranks (`data/zero3.py`), and what is wrong with others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from files import Runs, rewritten, same
from fullshard import CheckpointError, convert
from fullshard.exchange.detect import kind_of
from fullshard.store.formats.deepspeed import DeepSpeedSource

HERE = Path(__file__).parent / "data"
STEP = "global_step2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(HERE / "zero3", tmp_path / "zero3")
    return tmp_path / "zero3"


@pytest.mark.parametrize("inner", ["", STEP])
def test_it_reads_what_deepspeed_says_the_values_are(inner: str) -> None:
    values = torch.load(HERE / "zero3-values.pt", weights_only=True)
    assert kind_of(HERE / "zero3" / inner) == "deepspeed"
    with DeepSpeedSource(HERE / "zero3" / inner) as source:
        assert source.ties == {"model.head.weight": "model.emb.weight"}
        names = {name for name in [*source.entries, *source.ties] if name.startswith("model.")}
        assert names == {f"model.{name}" for name in values}
        for name, (value, *states) in values.items():
            known = source.ties.get(f"model.{name}", f"model.{name}")
            assert same(source.read(known), value)
            if value.dim() == 2:
                assert same(source.read(known, (1, 1), (2, 2)), value[1:3, 1:3])
            for key, state in zip(("exp_avg", "exp_avg_sq"), states, strict=False):
                assert same(source.read(f"optimizer.state.{known.removeprefix('model.')}.{key}"), state.view_as(value))
        assert float(source.read("optimizer.state.scale.step")) == 2
        groups = [(group["lr"], group["params"]) for group in source.values["optimizer"]["param_groups"]]
        assert groups == [(0.02, ["l1.bias", "emb.weight"]), (0.01, ["scale", "l1.weight"])]
        assert source.values["state"]["epoch"] == 3 and source.values["state"]["global_steps"] == 2


def test_a_converted_one_loads_into_a_plain_model(tmp_path: Path) -> None:
    values = torch.load(HERE / "zero3-values.pt", weights_only=True)
    done = convert(HERE / "zero3", tmp_path / "a.pt", dtype=torch.float32, model_only=True)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value[0].to(loaded[name].dtype)) for name, value in values.items())
    assert loaded["frozen.weight"].dtype == torch.float32 and loaded["steps"].dtype == torch.int64
    assert "optimizer state (12 tensors)" in done.left_out


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_rank_that_is_missing_is_named(folder: Path, kind: str) -> None:
    (file,) = (folder / STEP).glob(f"*rank_1_*{kind}_states.pt")
    file.unlink()
    with pytest.raises(CheckpointError, match="incomplete checkpoint") as told:
        DeepSpeedSource(folder)
    assert told.value.rank == 1


def test_ranks_missing_on_both_sides_are_noticed(folder: Path) -> None:
    for file in (folder / STEP).glob("*rank_2_*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="incomplete checkpoint") as told:
        DeepSpeedSource(folder)
    assert (told.value.expected, told.value.got) == ("3 ranks", "2 ranks")


@pytest.mark.parametrize("name", ["../zero3", "/etc", "..", "a/b"])
def test_latest_does_not_lead_out_of_the_folder(folder: Path, name: str) -> None:
    (folder / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="does not name a folder"):
        kind_of(folder)


def test_pickles_do_not_run(folder: Path, tmp_path: Path) -> None:
    (file,) = (folder / STEP).glob("*rank_0_*optim_states.pt")

    def put(content: Any) -> None:
        content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["lr"] = Runs(tmp_path / "ran")

    rewritten(file, put)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        DeepSpeedSource(folder)
    assert not (tmp_path / "ran").exists()


def shorter(content: Any) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[0] = groups[0][:-1].clone()


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "shorter-wrong size": (shorter, "wrong size"),
    "stage-not written by ZeRO-3": (
        lambda content: content["optimizer_state_dict"].update(zero_stage=2), "not written by ZeRO-3"),
    "fewer-structure of ZeRO-3": (
        lambda content: content["optimizer_state_dict"]["fp32_flat_groups"].pop(), "structure of ZeRO-3"),
    "nothing": (lambda content: content.clear(), "structure of ZeRO-3"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(folder: Path, wrong: str) -> None:
    change, told = WRONG[wrong]
    (file,) = (folder / STEP).glob("*rank_1_*optim_states.pt")
    rewritten(file, change)
    with pytest.raises(CheckpointError, match=told):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_01_model_states.pt"])
def test_other_ways_of_parallelism_are_refused(folder: Path, name: str) -> None:
    (folder / STEP / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not written by ZeRO-3|parallelism"):
        DeepSpeedSource(folder)
