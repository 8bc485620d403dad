"""Errors of `save` and `load`, in one process that shards nothing."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from forged import Forged
from fullshard.store import hashed
from fullshard.store.storage import LocalStorage, RemoteStorage
from raising import assert_raises, put, raises, step, two_layers, warns, wrapped


def saved(folder: Path, steps: tuple[int, ...] = (100,)) -> nn.Module:
    """A model that was saved in `folder` at these steps, with its optimizer."""
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    for number in steps:
        fullshard.save(folder, model, optimizer, step=number, state={"seen": 8})
    return model


def stepped(model: nn.Module, *optimizers: torch.optim.Optimizer) -> torch.optim.Optimizer:
    step(model)
    for optimizer in optimizers:
        optimizer.step()
    return optimizers[0]


def newest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text().strip()


def data(folder: Path) -> Path:
    """The file of a checkpoint that holds its tensors."""
    return next(newest(folder).glob("*.distcp"))


def load(folder: Path) -> None:
    fullshard.load(folder, two_layers())


def save(**options: Any) -> Callable[[Path], object]:
    return lambda f: fullshard.save(f, two_layers(), **options)


def flip_a_bit(folder: Path) -> None:
    written = bytearray(data(folder).read_bytes())
    written[len(written) // 2] ^= 1
    data(folder).write_bytes(written)


def forge(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A save, changed, with hashes made right (`Forged`: tests/forged.py)."""

    def forged(folder: Path) -> None:
        saved(folder)
        made = Forged(newest(folder))
        change(made)
        made.sign()

    return forged


def link_the_manifest(folder: Path) -> None:
    manifest = newest(folder) / "manifest.json"
    manifest.rename(folder / "elsewhere.json")
    manifest.symlink_to(folder / "elsewhere.json")


def drop_the_metadata(folder: Path) -> None:
    made = Forged(newest(folder))
    del made.manifest["files"][".metadata"]
    made.write_manifest(json.dumps(made.manifest).encode())
    (made.folder / ".metadata").unlink()


def two_optimizers(folder: Path) -> None:
    model = two_layers()
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    stepped(model, *optimizers)
    fullshard.save(folder, model, optimizers)


def load_an_optimizer(folder: Path, model: nn.Module | None = None) -> None:
    model = model or two_layers()
    fullshard.load(folder, model, torch.optim.Adam(model.parameters()))


def several_counts(folder: Path) -> None:
    """Saved where a number is wanted."""
    model = two_layers()
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    optimizer.state[model[0].weight]["step"] = torch.ones(2)
    fullshard.save(folder, model, optimizer)


def ring() -> list[object]:
    """A list that is in itself."""
    found: list[object] = []
    found.append(found)
    return found


CALLS = {
    "C195": lambda: fullshard.save(None, two_layers()),
    "C196": lambda: fullshard.save("memory://runs/first", two_layers(), asynchronous=True),
    "C201": lambda: fullshard.load("nowhere://runs/first", two_layers()),
    "K157": lambda: RemoteStorage("memory://runs/step-000000100"),
}
FOLDERS = {
    # Saving.
    "C197": save(step=-1),
    "C198": save(if_saving="skip"),
    "C199": lambda f: fullshard.save(f, two_layers().state_dict()),
    "C200": save(state={"model.step": 1}),
    "C185": two_optimizers,
    "K009": save(optimizers=torch.optim.AdamW(two_layers().parameters())),
    "K160": lambda f: fullshard.save(f, nn.Linear(4, 4, device="meta")),
    "K161": save(state={"ring": ring()}),
    "K162": save(state={"path": Path("/a/path")}),
    # Loading.
    "C278": lambda f: fullshard.load(f, two_layers(), step="1"),
    "K122": load,
    "K121": (saved, lambda f: fullshard.load(f, two_layers(), step=300)),
    "K019": (saved, lambda f: fullshard.load(f, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))),
    "K146": (saved, lambda f: fullshard.load(f, two_layers().to(torch.float8_e4m3fn))),
    "K152": (saved, lambda f: fullshard.load(f, nn.Linear(4, 4))),
    "K148": (save(), load_an_optimizer),
    "K118": (saved, lambda f: fullshard.load(f, two_layers(), state={"epoch": nn.Linear(1, 1)})),
    # Files that were changed.
    "K140": (saved, lambda f: data(f).unlink(), load),
    "K141": (saved, lambda f: data(f).write_bytes(data(f).read_bytes()[:-1]), load),
    "K144": (saved, flip_a_bit, load),
    "K042": (saved, put("latest", "step-00000200\n"), load),
    "K120": (forge(lambda made: made.manifest["values"]["state"].update(rng={"torch": 7})), load),
    "K124": (forge(lambda made: made.manifest.update(version=99)), load),
    "K129": (forge(lambda made: setattr(made.place("model.0.weight"), "relative_path", "__9_0.distcp")), load),
    "K142": (saved, drop_the_metadata, load),
    "K156": (saved, link_the_manifest, lambda f: fullshard.load(newest(f), two_layers())),
    "K155": lambda f: LocalStorage(f / "step-000000100"),
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])


@pytest.mark.parametrize("code", FOLDERS)
def test_in_a_folder(tmp_path, code):
    assert_raises(code, FOLDERS[code], tmp_path)


@pytest.mark.parametrize("given", [{"optimizers": 3}, {"state": [1]}])
@pytest.mark.parametrize("call", [fullshard.save, fullshard.load])
def test_an_argument_of_another_type_is_named(tmp_path, call, given):
    with pytest.raises(fullshard.ConfigError, match=rf"\A{call.__name__}\({next(iter(given))}=\)") as caught:
        call(tmp_path, two_layers(), **given)
    assert caught.value.code == "C199"


@pytest.mark.parametrize("below", ["", "runs/mine"])
@pytest.mark.parametrize("call", [fullshard.save, fullshard.load])
def test_a_file_where_the_folder_would_be(tmp_path, call, below):
    (tmp_path / "file").write_text("in the way")
    with raises("K191"):
        call(tmp_path / "file" / below, two_layers())


def test_whether_something_was_saved(tmp_path):
    """What K122 tells to ask."""
    assert not fullshard.Folder(tmp_path).names() and not fullshard.Folder(tmp_path / "not there").names()
    model = saved(tmp_path, (100, 200))
    assert fullshard.Folder(tmp_path).names() and fullshard.load(tmp_path, model).step == 200


def test_the_checkpoint_before_a_damaged_one_is_loaded(tmp_path):
    model = saved(tmp_path, (100, 200))
    data(tmp_path).unlink()
    with warns("W014"):
        assert fullshard.load(tmp_path, model, fall_back=True).step == 100


def test_several_counts_where_one_is_wanted(tmp_path):
    several_counts(tmp_path)
    with raises("K019"):
        load_an_optimizer(tmp_path)


def test_steps_that_differ_within_a_flat_parameter(tmp_path, fake_world):
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    model.requires_grad_(True)
    fullshard.save(tmp_path, model, stepped(model, optimizer))
    fake_world(1)
    with raises("K014"):
        load_an_optimizer(tmp_path, wrapped(use_orig_params=False))


def test_hashes_of_a_package_that_is_not_installed(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setitem(hashed.KINDS, "xxh3_128", None)
    with raises("K112"):
        load(tmp_path)


@pytest.mark.parametrize("code", ["K158", "K159"])
def test_a_file_that_is_removed_or_cut_while_it_is_read(tmp_path, code):
    saved(tmp_path)
    storage = LocalStorage(newest(tmp_path))
    data(tmp_path).unlink() if code == "K158" else data(tmp_path).write_bytes(b"")
    with raises(code):
        storage.read("__0_0.distcp", 0, 100)


# Saves in the background, and of two programs.


def test_a_save_while_another_goes_on(tmp_path):
    large = torch.zeros(30_000_000)
    saving = fullshard.save(tmp_path, two_layers(), state={"large": large}, step=1, asynchronous=True)
    with raises("K154"):
        fullshard.save(tmp_path, two_layers(), step=2, if_saving="refuse")
    assert not saving.done  # says so at once, while its process writes
    saving.wait()


def test_a_save_in_the_background_that_fails(tmp_path):
    folder = tmp_path / "checkpoints"
    saving = fullshard.save(folder, two_layers(), asynchronous=True)
    folder.rename(tmp_path / "elsewhere")  # at once: the writer may be about to put things there
    with raises("K041"):
        saving.wait()


def test_a_folder_that_another_program_saves_into(tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with raises("K043"):
            fullshard.save(tmp_path, two_layers(), patience=0.1)


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    saved(tmp_path)
    monkeypatch.setattr(fullshard.Folder, "remove", refuse)
    with warns("W012"):
        fullshard.save(tmp_path, two_layers(), step=200, keep_last=1)
