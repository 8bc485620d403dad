"""Which checkpoint of a folder is meant, whatever was done to the folder: copied, moved, merged, renamed, pruned."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn

import fullshard
from forged import Forged
from fullshard import CheckpointError, DamagedCheckpointError
from fullshard.exchange.inspect import inspect
from fullshard.store.folder import Folder
from fullshard.store.remote import RemoteFolder, folder_at
from ways import error_of


def model_of(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value), nn.init.constant_(model.bias, value)
    return model


def save(folder: Any, step: int, **options: Any) -> None:
    """A checkpoint whose values are its step."""
    fullshard.save(folder, model_of(float(step)), step=step, rng=False, **options)


def loaded(folder: Any, **options: Any) -> int:
    """The step of what is loaded; every value is that step's."""
    model = model_of(-1.0)
    found = fullshard.load(folder, model, rng=False, **options)
    assert all(bool((p == found.step).all()) for p in model.parameters()), (found, list(model.parameters()))
    return found.step


def name_of(step: int, turn: int = 1) -> str:
    return f"step-{step:09d}" + (f".{turn}" if turn > 1 else "")


def both_kinds(folder: Path) -> list[Folder]:
    """The same folder as a path, and as the address of an object store."""
    return [Folder(folder), RemoteFolder(f"file://{folder}")]


# In which order they were saved.


def test_a_folder_that_was_copied_in_any_order(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    for order in ((3, 2, 1), (2, 3, 1)):
        copy = tmp_path / str(order)
        for at, step in enumerate(order):
            shutil.copytree(tmp_path / "run" / name_of(step), copy / name_of(step))
            for path in (copy / name_of(step)).rglob("*"):
                os.utime(path, (1000.0 + at, 1000.0 + at))
        for folder in both_kinds(copy):
            assert folder.names() == [name_of(1), name_of(2), name_of(3)]
        assert loaded(copy) == 3  # `latest` was not copied
        inspect(copy)
    os.truncate(copy / name_of(3) / "rank-0.safetensors", 100)
    with pytest.warns(UserWarning, match="trying the checkpoint before it"):
        assert loaded(copy, fall_back=True) == 2
    save(copy, 4, keep_last=2)
    assert Folder(copy).names() == [name_of(3), name_of(4)]


def test_a_clock_that_was_wrong(tmp_path: Path, monkeypatch: Any) -> None:
    """Ahead, set back, and stopped: the order is that of the saves."""
    for folder in (Folder(tmp_path / "path"), RemoteFolder(f"file://{tmp_path}/address")):
        for step, ahead in ((1, 86400.0), (2, 0.0), (3, -86400.0), (4, -86400.0)):
            with monkeypatch.context() as clock:
                now = time.time() + ahead
                clock.setattr(time, "time", lambda now=now: now)
                save(folder, step)
        save(folder, 2)  # a run that went back to step 1: of step 2 there are two now
        assert folder.names() == [name_of(1), name_of(2), name_of(3), name_of(4), name_of(2, 2)]
        save(folder, 3, keep_last=2)
        assert folder.names() == [name_of(2, 2), name_of(3, 2)]
        assert loaded(folder) == 3


def test_equal_times_and_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    names = [name_of(9), name_of(10), name_of(11)]
    for step in (9, 10, 11):
        save(tmp_path, step)
        forged = Forged(tmp_path / name_of(step))
        forged.manifest["time"] = 1000.0
        forged.sign()
    assert all(folder.names() == names for folder in both_kinds(tmp_path))
    for name, text in ((names[1], b""), (names[2], b'{"sha256":"')):
        (tmp_path / name / "manifest.json").write_bytes(text)
    assert all(folder.names() == names for folder in both_kinds(tmp_path))  # damage is reported, not passed over
    (tmp_path / "latest").unlink()
    with pytest.raises(DamagedCheckpointError):
        loaded(tmp_path)
    save(tmp_path, 12)
    assert Folder(tmp_path).names()[-1] == name_of(12)


# Files that were moved, and folders that were renamed.


def test_files_that_were_moved_up_a_folder(tmp_path: Path) -> None:
    """Any part of them: the checkpoint that lacks them is damaged, and what lies above is not taken for one."""
    for step in (1, 2):
        save(tmp_path / "whole", step)
    files = sorted(path.name for path in (tmp_path / "whole" / name_of(2)).iterdir())
    assert len(files) == 2
    for moved in (some for n in (1, 2) for some in itertools.combinations(files, n)):
        folder = tmp_path / "+".join(moved)
        shutil.copytree(tmp_path / "whole", folder)
        for file in moved:
            (folder / name_of(2) / file).rename(folder / file)
        assert isinstance(error_of(lambda: loaded(folder)), DamagedCheckpointError)  # noqa: B023
        assert isinstance(error_of(lambda: inspect(folder)), CheckpointError)  # noqa: B023
        with warnings.catch_warnings(record=True):
            assert loaded(folder, fall_back=True) == 1, moved


def test_a_checkpoint_that_has_checkpoints_in_it(tmp_path: Path) -> None:
    """Of a save into the folder of a checkpoint, and of a copy into the folder above: the newest that `save` made."""
    nested = tmp_path / name_of(1)
    save(tmp_path, 1)
    save(nested, 2)
    with pytest.warns(UserWarning, match="also contains checkpoint files itself"):
        assert loaded(nested) == 2
    assert loaded(nested, step=2) == 2
    assert loaded(tmp_path) == 1
    for to in (tmp_path, tmp_path / "alone"):
        shutil.copytree(nested / name_of(2), to, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="also contains checkpoint files itself"):
        assert loaded(tmp_path) == 1
    assert loaded(tmp_path / "alone") == 2


def test_a_renamed_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / name_of(1)).rename(tmp_path / name_of(2))
    save(tmp_path, 5)
    with pytest.raises(DamagedCheckpointError, match="step 1"):
        loaded(tmp_path, step=2)
    (tmp_path / "latest").write_text(name_of(2))
    with pytest.raises(DamagedCheckpointError, match="step 1"):
        loaded(tmp_path)
    with pytest.warns(UserWarning, match="trying the checkpoint before it"):
        assert loaded(tmp_path, fall_back=True) == 5
    assert loaded(tmp_path / name_of(2)) == 1  # named as it is


def test_without_a_manifest_nothing_is_checked_and_that_is_said(tmp_path: Path) -> None:
    """Of a folder of DCP's; without it files of ours are no checkpoint."""
    save(tmp_path / "ours", 0)
    fullshard.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    with pytest.warns(UserWarning, match="no manifest.json"):
        loaded(tmp_path / "dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded(tmp_path / "dcp", check=False)  # nothing was to be checked
    (tmp_path / "ours" / name_of(0) / "manifest.json").unlink()
    for reads in (loaded, inspect):
        with pytest.raises(CheckpointError):
            reads(tmp_path / "ours" / name_of(0))


# A save beside it.


@pytest.mark.parametrize("opened", [False, True])
def test_a_checkpoint_that_is_removed_while_it_is_loaded(tmp_path: Path, monkeypatch: Any, opened: bool) -> None:
    """Before its files are opened and after: the newer one is loaded, unless one was named."""
    save(tmp_path, 1)
    steps, plain = [1], Folder.storage

    def replaced(self: Folder, name: str) -> Any:
        storage = plain(self, name) if opened else None
        if len(steps) < 4:
            steps.append(steps[-1] + 1)
            save(tmp_path, steps[-1], keep_last=1)
        return storage or plain(self, name)

    monkeypatch.setattr(Folder, "storage", replaced)
    assert loaded(tmp_path) == 4
    if not opened:
        return
    steps[:] = [4]
    with pytest.raises(CheckpointError, match="removed while it was being read"):
        loaded(tmp_path, step=4)
    (newest,) = Folder(tmp_path).names()
    steps[:] = [Folder(tmp_path).step_of(newest)]
    with pytest.raises(CheckpointError, match="removed while it was being read"):
        loaded(tmp_path / newest)


def test_the_first_start_and_a_restart_by_one_call(tmp_path: Path) -> None:
    model = model_of(7.0)
    start = fullshard.load(tmp_path / "run", model, missing_ok=True)
    assert start.path is None and start.step == 0 and bool((model.weight == 7.0).all())
    save(tmp_path / "run", 3)
    assert loaded(tmp_path / "run", missing_ok=True) == 3
    with pytest.raises(CheckpointError, match="step 4"):
        loaded(tmp_path / "run", missing_ok=True, step=4)


# Object stores.


def test_a_save_into_a_store_that_was_broken_off(tmp_path: Path) -> None:
    """Its marker says when it began: a day later what is whole is kept, and the rest is removed."""
    folder = RemoteFolder(f"file://{tmp_path}")
    save(folder, 1)
    old = str(time.time() - 25 * 3600.0)
    marker, broken = tmp_path / name_of(1) / "saving", tmp_path / name_of(3)
    marker.write_text(old)  # it ended between the manifest and its marker's removal
    broken.mkdir()
    (broken / "saving").write_text(old)
    save(folder, 2)
    assert folder.names() == [name_of(1), name_of(2)] and not marker.exists() and not broken.exists()
    for text in ("", "yesterday", "nan"):
        broken.mkdir()
        (broken / "saving").write_text(text)
        save(folder, 4)
        assert abs(float((broken / "saving").read_text()) - time.time()) < 3600.0  # it may have begun just now
        shutil.rmtree(broken)


def test_a_local_path_written_as_an_address(tmp_path: Path) -> None:
    for address in (f"file://{tmp_path}", f"local://{tmp_path}"):
        folder = folder_at(address)
        assert type(folder) is Folder and folder.path == tmp_path
    save(f"file://{tmp_path}", 1)
    assert (tmp_path / "lock").exists() and loaded(tmp_path) == 1


# What another user may have prepared.


def test_links_and_pipes_in_the_way(tmp_path: Path) -> None:
    """A save neither writes outside of its folder nor waits for a reader of a pipe."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    for step, prepare in enumerate((lambda path: path.symlink_to(victim),) * 2 + (os.mkfifo,)):
        prepare(run / "latest.new")
        save(run, step)
        assert loaded(run) == step and victim.read_text() == "precious"
    for prepare in (lambda path: path.symlink_to(victim), os.mkfifo, os.mkdir):
        (run / "lock").rmdir() if (run / "lock").is_dir() else (run / "lock").unlink()
        prepare(run / "lock")
        with pytest.raises(CheckpointError, match="lock"):
            save(run, 4)
        assert victim.read_text() == "precious"


TWO = nn.Sequential(model_of(1.0), model_of(1.0))
KINDS = {
    "fullshard": lambda folder: save(folder, 1),
    "dcp": lambda folder: dcp.save({"model": TWO.state_dict()}, checkpoint_id=folder),
    "safetensors": lambda folder: fullshard.save_safetensors(TWO, folder, max_file_bytes=30),
    "deepspeed": lambda folder: shutil.copytree(Path(__file__).parent / "data" / "zero3", folder),
}

IN_PLACE = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "holes": lambda path: path.touch() or os.truncate(path, 2**40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_in_place_of_a_file(tmp_path: Path, kind: str) -> None:
    """An error that says where, at once: nobody waits for a pipe, or reads what has no end."""

    def late(*_: Any) -> None:
        raise AssertionError("it hangs")

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError):
        inspect(tmp_path / "pipe")
    KINDS[kind](tmp_path / "whole")
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**30, limits[1]))  # bytes
    try:
        for file, what in itertools.product(files, IN_PLACE):
            if file.name == "lock":
                continue  # nobody reads it
            copy = tmp_path / f"{file.name} {what}"
            shutil.copytree(tmp_path / "whole", copy)
            (copy / file).unlink()
            IN_PLACE[what](copy / file)
            signal.alarm(60)
            with pytest.raises(CheckpointError) as caught:
                fullshard.convert(copy, tmp_path / "copy.pt")
            if kind == "fullshard":
                with pytest.raises(CheckpointError):
                    loaded(copy / name_of(1) if file.name != "latest" else copy)
            signal.alarm(0)
            assert str(copy) in str(caught.value) or file.name in str(caught.value), (file, what, caught.value)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
