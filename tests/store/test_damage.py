"""Damage found on load: each kind is told apart in one error, nothing is changed, and the newest whole one is found."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward import differences, whole
from torch import nn

import fullshard
from forged import Forged, all_of, copied, outcome, same, save_small, small
from fullshard import CheckpointError, ConfigError, DamagedCheckpointError, FullshardError
from ways import error_of, named_error, on_ranks

NEWEST, OLDER = "step-000000002", "step-000000001"
DATA = "rank-0.safetensors"
NEWER = "a newer format"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[int(0.6 * len(data))] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def of_a_newer_format(folder: Path) -> None:
    forged = Forged(folder)
    forged.manifest |= {"version": 4, "news": "that nobody knows yet"}
    forged.write_manifest(json.dumps(forged.manifest).encode())


def from_another(folder: Path) -> None:
    """The file of the same rank in the checkpoint before."""
    (folder / DATA).write_bytes((folder.parent / OLDER / DATA).read_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a file is cut": (lambda f: cut(f / DATA), ("truncated", DATA)),
    "a file has grown": (lambda f: (f / DATA).write_bytes((f / DATA).read_bytes() + b"more"), ("longer", DATA)),
    "a file is gone": (lambda f: (f / DATA).unlink(), ("missing", DATA)),
    "a bit of a tensor": (lambda f: flip(f / DATA), ("xxh3", DATA)),
    "a bit of the manifest": (lambda f: flip(f / "manifest.json"), ("manifest", "hash")),
    "the manifest is cut": (lambda f: cut(f / "manifest.json"), ("manifest", "damaged")),
    "the manifest is empty": (lambda f: (f / "manifest.json").write_bytes(b""), ("manifest", "damaged")),
    "the manifest is gone": (lambda f: (f / "manifest.json").unlink(), ("latest", NEWEST, OLDER)),
    "a file is another's": (from_another, (DATA,)),
    "latest names nothing": (
        lambda f: (f.parent / "latest").write_text("step-000000009\n"), ("latest", "step-000000009", NEWEST)),
    "latest is empty": (lambda f: (f.parent / "latest").write_text(""), ("latest", NEWEST)),
    "latest leads away": (lambda f: (f.parent / "latest").write_text(f"../{NEWEST}"), ("latest", NEWEST)),
    NEWER: (of_a_newer_format, ("cannot read", "version 4", "update")),
}  # fmt: skip
"""What is done to the newest checkpoint, and words in the error."""


def made(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Two units of rows, and their AdamW, which has stepped once."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for layer in model:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_two(folder: Path) -> None:
    for step in (1, 2):
        fullshard.save(folder, *made(step), step=step)


def load_all(folders: dict[str, Path]) -> None:
    """The error changes nothing; `fall_back` loads the newest whole one, unless it is no damage."""
    for kind, folder in folders.items():
        model, optimizer = made(3)
        before = whole(model, optimizer)
        error = error_of(lambda: fullshard.load(folder, model, optimizer))  # noqa: B023
        assert type(error) is (CheckpointError if kind == NEWER else DamagedCheckpointError), (kind, error)
        assert not named_error(error, *DAMAGE[kind][1]), (kind, error)
        assert not differences(whole(model, optimizer), before), kind
        if kind != NEWER:
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                loaded = fullshard.load(folder, model, optimizer, fall_back=True, rng=False)
            assert Path(loaded.path).name == (NEWEST if kind.startswith("latest") else OLDER), kind
            assert not differences(whole(model, optimizer), whole(*made(loaded.step))), kind


def test_damage_is_told_and_nothing_is_changed(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(save_two, tmp_path / "whole")
    folders = {}
    for kind, (harm, _) in DAMAGE.items():
        folders[kind] = copied(tmp_path / "whole", tmp_path / kind)
        harm(folders[kind] / NEWEST)
    run_ranks(load_all, folders)


def test_another_optimizer_is_told(tmp_path: Path) -> None:
    save_small(tmp_path)
    model, _ = small(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = all_of(model, optimizer)
    with pytest.raises(CheckpointError, match=r"(?s)exp_avg.*momentum_buffer|momentum_buffer.*exp_avg"):
        fullshard.load(tmp_path, model, optimizer)
    assert same(all_of(model, optimizer), before)


def test_another_model_is_told(tmp_path: Path) -> None:
    save_small(tmp_path)
    others = {"shape": small(1, hidden=5), "names": small(1, names=("first", "second")), "dtype": small(1)}
    others["dtype"][0].counter = torch.tensor([1.0, 2.0])
    for what, (model, optimizer) in others.items():
        before = all_of(model, optimizer)
        error = error_of(lambda: fullshard.load(tmp_path, model, optimizer))  # noqa: B023
        assert not named_error(error, what, "nothing was loaded", kinds=CheckpointError), error
        assert not isinstance(error, DamagedCheckpointError) and same(all_of(model, optimizer), before), what


def test_state_and_random_numbers_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    save_small(tmp_path)
    model, optimizer = small(1)
    before = all_of(model, optimizer)
    with pytest.raises(CheckpointError, match="no state of this name"):
        fullshard.load(tmp_path, model, optimizer, state={"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)})
    assert same(all_of(model, optimizer), before)
    forged = Forged(tmp_path / "step-000000003")
    forged.manifest["values"]["state"]["rng"]["torch"] = {"$tensor": "state.weights"}
    forged.sign()
    error, unchanged, _ = outcome(tmp_path)
    assert isinstance(error, DamagedCheckpointError) and "random generators" in str(error) and unchanged


def test_a_folder_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:  # which others than this user may look into
        folder, root = Path(name), os.geteuid() == 0
        (folder / "lock").touch()
        folder.chmod(0o555)
        os.seteuid(65534) if root else None
        try:
            with pytest.raises(CheckpointError, match="ermission denied") as caught:
                fullshard.save(folder, small(0)[0], step=1, patience=0.0)
        finally:
            os.seteuid(0) if root else None
        assert str(folder) in str(caught.value) and [path.name for path in folder.iterdir()] == ["lock"]
        folder.chmod(0o755)


@on_ranks
def test_arguments_that_cannot_be_used(tmp_path: Path) -> None:
    model, _ = small(0)
    for given in ({"step": -1}, {"step": True}, {"keep_last": 0}, {"if_saving": "never"}, {"state": {"rng": 1}}):
        with pytest.raises(ConfigError):
            fullshard.save(tmp_path, model, **given)
    assert list(tmp_path.iterdir()) == []
    torch.distributed.barrier()
    with pytest.raises(FullshardError, match="a path or an address"):
        fullshard.save("" if torch.distributed.get_rank() else tmp_path, model)
