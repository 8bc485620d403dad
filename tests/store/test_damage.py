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
from awkward import STEPS, differences, make, train, train_and_save, whole

import fullshard
from forged import Forged, all_of, copied, outcome, same, save_small, small
from fullshard import CheckpointError, ConfigError, DamagedCheckpointError, FullshardError

NEWEST = "step-000000002"


def flip(path: Path, at: float = 0.6) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def of_a_newer_format(folder: Path) -> None:
    forged = Forged(folder)
    forged.manifest |= {"version": 3, "news": "that nobody knows yet"}
    forged.write_manifest(json.dumps(forged.manifest).encode())


def from_another(folder: Path) -> None:
    """The file of the same rank in the checkpoint before."""
    (folder / "__0_0.distcp").write_bytes((folder.parent / "step-000000001" / "__0_0.distcp").read_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], object], type[CheckpointError], tuple[str, ...]]] = {
    "a file is cut": (lambda f: cut(f / "__0_0.distcp"), DamagedCheckpointError, ("truncated", "__0_0.distcp")),
    "a file has grown": (lambda f: grow(f / "__0_0.distcp"), DamagedCheckpointError, ("longer", "__0_0.distcp")),
    "a file is gone": (lambda f: (f / "__0_0.distcp").unlink(), DamagedCheckpointError, ("missing", "__0_0.distcp")),
    "a bit of a tensor": (lambda f: flip(f / "__0_0.distcp"), DamagedCheckpointError, ("xxh3", "__0_0.distcp")),
    "a bit of the metadata": (lambda f: flip(f / ".metadata"), DamagedCheckpointError, ("xxh3", ".metadata")),
    "a bit of the manifest": (lambda f: flip(f / "manifest.json"), DamagedCheckpointError, ("manifest", "hash")),
    "the manifest is cut": (lambda f: cut(f / "manifest.json"), DamagedCheckpointError, ("manifest", "damaged")),
    "the manifest is empty": (
        lambda f: (f / "manifest.json").write_bytes(b""), DamagedCheckpointError, ("manifest", "damaged")),
    "the metadata is gone": (lambda f: (f / ".metadata").unlink(), DamagedCheckpointError, ("missing", ".metadata")),
    "the manifest is gone": (
        lambda f: (f / "manifest.json").unlink(), DamagedCheckpointError, ("latest", NEWEST, "step-000000001")),
    "a file is another's": (from_another, DamagedCheckpointError, ("__0_0.distcp",)),
    "latest names nothing": (
        lambda f: (f.parent / "latest").write_text("step-000000009\n"), DamagedCheckpointError,
        ("latest", "step-000000009", NEWEST)),
    "latest is empty": (lambda f: (f.parent / "latest").write_text(""), DamagedCheckpointError, ("latest", NEWEST)),
    "latest leads away": (
        lambda f: (f.parent / "latest").write_text("../step-000000002"), DamagedCheckpointError, ("latest", NEWEST)),
    "a newer format": (of_a_newer_format, CheckpointError, ("newer", "version 3", "update")),
}  # fmt: skip
"""What is done to the newest checkpoint, the error, and words in it."""


def try_all(folders: dict[str, Path], way: str) -> dict[str, tuple[str, str, list[str]]]:
    """For each the class and text of the error, and what has changed of the model."""
    model, optimizer = make(way, seed=1)
    train(model, optimizer, range(1))
    before, found = whole(model, optimizer), {}
    for kind, folder in folders.items():
        try:
            fullshard.load(folder, model, optimizer)
            found[kind] = ("nothing", "", [])
        except FullshardError as error:
            found[kind] = (type(error).__name__, str(error), differences(whole(model, optimizer), before))
    return found


def fall_back(folders: dict[str, Path], way: str) -> dict[str, tuple[str, list[str]]]:
    """For each which was loaded, and what differs from what the one before would have given."""
    found = {}
    for kind, folder in folders.items():
        model, optimizer = make(way, seed=1)
        want, other = make(way, seed=2)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            loaded = fullshard.load(folder, model, optimizer, fall_back=True, rng=False)
            fullshard.load(folder / "step-000000001", want, other, rng=False)
        found[kind] = (Path(loaded.path).name, differences(whole(model, optimizer), whole(want, other)))
    return found


def save_two(way: str, folder: Path) -> None:
    model, optimizer = make(way)
    train(model, optimizer, range(1))
    fullshard.save(folder, model, optimizer, step=1)
    train(model, optimizer, range(1, 2))
    fullshard.save(folder, model, optimizer, step=2)


@pytest.mark.parametrize("world", [2, 1])
def test_damage_is_told_and_nothing_is_changed(run_ranks: Any, tmp_path: Path, world: int) -> None:
    run_ranks(save_two, "rows", tmp_path / "whole", world=2)
    folders = {}
    for kind, (harm, _, _) in DAMAGE.items():
        folders[kind] = copied(tmp_path / "whole", tmp_path / kind)
        harm(folders[kind] / NEWEST)
    way = "rows" if world > 1 else "plain"
    for rank in run_ranks(try_all, folders, way, world=world, timeout=120):
        for kind, (_, error, words) in DAMAGE.items():
            name, text, changed = rank[kind]
            assert name == error.__name__, (kind, name, text)
            assert all(word in text for word in words) and not changed, (kind, text, changed)
    of_others = {kind: folder for kind, folder in folders.items() if DAMAGE[kind][1] is DamagedCheckpointError}
    for rank in run_ranks(fall_back, of_others, way, world=world, timeout=120):
        for kind, (name, different) in rank.items():
            expected = NEWEST if kind.startswith("latest") else "step-000000001"
            assert name == expected and (different == [] or name == NEWEST), (kind, name, different)


def differs(way: str, folder: Path, what: str) -> tuple[str, str, list[str]]:
    model, optimizer = make(way, seed=1)
    if what == "optimizer":
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    train(model, optimizer, range(1))
    before = whole(model, optimizer)
    try:
        fullshard.load(folder, model, optimizer)
        return "nothing", "", []
    except FullshardError as error:
        return type(error).__name__, str(error), differences(whole(model, optimizer), before)


def test_another_optimizer_or_none_is_told(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(train_and_save, "flat", tmp_path / "adamw")
    run_ranks(save_bare, "flat", tmp_path / "bare")
    for name, text, changed in run_ranks(differs, "flat", tmp_path / "adamw", "optimizer"):
        assert name == "CheckpointError" and "momentum_buffer" in text and "exp_avg" in text and not changed, text
    for name, text, changed in run_ranks(differs, "flat", tmp_path / "bare", ""):
        assert name == "CheckpointError" and "without an optimizer" in text and not changed, text


def save_bare(way: str, folder: Path) -> None:
    fullshard.save(folder, make(way)[0], step=STEPS)


def test_another_model_is_told(tmp_path: Path) -> None:
    save_small(tmp_path)
    others = {
        "shape": small(1, hidden=5),
        "names": small(1, names=("first", "second")),
        "dtype": small(1),
    }
    others["dtype"][0].counter = torch.tensor([1.0, 2.0])
    for what, (model, optimizer) in others.items():
        before = all_of(model, optimizer)
        with pytest.raises(CheckpointError) as raised:
            fullshard.load(tmp_path, model, optimizer)
        assert not isinstance(raised.value, DamagedCheckpointError)
        assert what in str(raised.value) and "nothing was loaded" in str(raised.value)
        assert same(all_of(model, optimizer), before), what


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


def test_there_is_none(tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "nothing", "no folder"), (tmp_path, "no checkpoint in")):
        error, unchanged, _ = outcome(folder)
        assert isinstance(error, CheckpointError) and f"{words} {folder}" in str(error) and unchanged
    save_small(tmp_path)
    error, unchanged, _ = outcome(tmp_path, step=4)
    assert isinstance(error, CheckpointError) and "step 4" in str(error) and "steps 3" in str(error) and unchanged


def as_nobody(folder: Path) -> tuple[str, str]:
    """Saves without the right to write there."""
    model, optimizer = make("rows")
    with ActsAs(65534):
        try:
            fullshard.save(folder, model, optimizer, step=1, patience=0.0)
        except FullshardError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


class ActsAs:
    """Acts as another user within, if this process may."""

    def __init__(self, user: int) -> None:
        self.user = user

    def __enter__(self) -> None:
        if os.geteuid() == 0:
            os.seteuid(self.user)

    def __exit__(self, *exc: object) -> None:
        if os.getuid() == 0:
            os.seteuid(0)


def test_a_folder_that_cannot_be_written(run_ranks: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lock").touch()
        folder.chmod(0o555)
        for error, text in run_ranks(as_nobody, folder):
            assert error == "CheckpointError" and "ermission denied" in text and str(folder) in text, text
        assert [path.name for path in folder.iterdir()] == ["lock"]
        folder.chmod(0o755)


def test_arguments_that_cannot_be_used(run_ranks: Any, tmp_path: Path) -> None:
    model, _ = small(0)
    for given in ({"step": -1}, {"step": True}, {"keep_last": 0}, {"if_saving": "never"}, {"state": {"rng": 1}}):
        with pytest.raises(ConfigError):
            fullshard.save(tmp_path, model, **given)
    assert list(tmp_path.iterdir()) == []
    for text in run_ranks(one_without_a_folder, tmp_path):
        assert "a path or an address" in text


def one_without_a_folder(folder: Path) -> str:
    model, _ = make("rows")
    try:
        fullshard.save("" if torch.distributed.get_rank() else folder, model)
    except FullshardError as error:
        return str(error)
    return "nothing"
