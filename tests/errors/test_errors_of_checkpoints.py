"""Errors of `save` and `load`, in one process that shards nothing."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from forged import Forged
from fullshard.store import hashed
from fullshard.store.storage import LocalStorage, RemoteStorage
from raising import raises, two_layers, warns, wrapped


def saved(folder: Path, steps: tuple[int, ...] = (100,)) -> nn.Module:
    """A model that was saved in `folder` at these steps, with its optimizer."""
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for step in steps:
        fullshard.save(folder, model, optimizer, step=step, state={"seen": 8})
    return model


def newest(folder: Path) -> Path:
    return folder / (folder / "latest").read_text().strip()


# Saving.


def test_a_folder_that_is_none():
    with raises("C195"):
        fullshard.save(None, two_layers())


def test_a_step_that_is_no_count(tmp_path):
    with raises("C197"):
        fullshard.save(tmp_path, two_layers(), step=-1)


def test_what_to_do_while_saving(tmp_path):
    with raises("C198"):
        fullshard.save(tmp_path, two_layers(), if_saving="skip")


def test_a_state_dict_in_place_of_the_model(tmp_path):
    with raises("C199"):
        fullshard.save(tmp_path, two_layers().state_dict())


@pytest.mark.parametrize("given", [{"optimizers": 3}, {"state": [1]}])
@pytest.mark.parametrize("call", [fullshard.save, fullshard.load])
def test_an_argument_of_another_type_is_named(tmp_path, call, given):
    with raises("C199"):
        try:
            call(tmp_path, two_layers(), **given)
        except fullshard.FullshardError as error:
            assert str(error).startswith(f"{call.__name__}({next(iter(given))}=)"), f"{error}"
            raise


def test_a_step_to_load_that_is_text(tmp_path):
    with raises("C278"):
        fullshard.load(tmp_path, two_layers(), step="1")


@pytest.mark.parametrize("below", ["", "runs/mine"])
@pytest.mark.parametrize("call", [fullshard.save, fullshard.load])
def test_a_file_where_the_folder_would_be(tmp_path, call, below):
    (tmp_path / "file").write_text("in the way")
    with raises("K191"):
        call(tmp_path / "file" / below, two_layers())


def test_a_name_of_state_that_is_the_models(tmp_path):
    with raises("C200"):
        fullshard.save(tmp_path, two_layers(), state={"model.step": 1})


def test_a_save_in_the_background_that_is_not_to_a_disk():
    with raises("C196"):
        fullshard.save("memory://runs/first", two_layers(), asynchronous=True)


def test_two_optimizers_of_one_parameter(tmp_path):
    model = two_layers()
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    model(torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with raises("C185"):
        fullshard.save(tmp_path, model, optimizers)


def test_an_optimizer_of_another_model(tmp_path):
    with raises("K009"):
        fullshard.save(tmp_path, two_layers(), torch.optim.AdamW(two_layers().parameters()))


def test_saving_before_there_are_values(tmp_path):
    with raises("K160"):
        fullshard.save(tmp_path, nn.Linear(4, 4, device="meta"))


def test_state_that_is_nested_within_itself(tmp_path):
    ring: list[object] = []
    ring.append(ring)
    with raises("K161"):
        fullshard.save(tmp_path, two_layers(), state={"ring": ring})


def test_state_that_loading_would_have_to_run_code_for(tmp_path):
    with raises("K162"):
        fullshard.save(tmp_path, two_layers(), state={"path": tmp_path})


# Loading.


def test_nothing_was_saved(tmp_path):
    with raises("K122"):
        fullshard.load(tmp_path, two_layers())


def test_whether_something_was_saved(tmp_path):
    """What K122 tells to ask."""
    assert not fullshard.Folder(tmp_path).names() and not fullshard.Folder(tmp_path / "not there").names()
    model = saved(tmp_path, (100, 200))
    if fullshard.Folder(tmp_path).names():
        assert fullshard.load(tmp_path, model).step == 200
    else:
        raise AssertionError("two were saved")


def test_a_step_that_was_not_saved(tmp_path):
    model = saved(tmp_path, (100, 200))
    with raises("K121"):
        fullshard.load(tmp_path, model, step=300)


def test_a_model_of_other_shapes(tmp_path):
    saved(tmp_path)
    with raises("K146"):
        fullshard.load(tmp_path, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))


def test_a_model_of_other_names(tmp_path):
    saved(tmp_path)
    with raises("K152"):
        fullshard.load(tmp_path, nn.Linear(4, 4))


def test_an_optimizer_that_was_not_saved(tmp_path):
    model = two_layers()
    fullshard.save(tmp_path, model)
    with raises("K148"):
        fullshard.load(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_state_of_another_name(tmp_path):
    model = saved(tmp_path)
    with raises("K118"):
        fullshard.load(tmp_path, model, state={"epoch": nn.Linear(1, 1)})


def test_a_file_that_is_missing(tmp_path):
    model = saved(tmp_path)
    next(newest(tmp_path).glob("*.distcp")).unlink()
    with raises("K140"):
        fullshard.load(tmp_path, model)


def test_a_file_that_is_truncated(tmp_path):
    model = saved(tmp_path)
    file = next(newest(tmp_path).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with raises("K141"):
        fullshard.load(tmp_path, model)


def test_a_file_that_is_not_what_was_written(tmp_path):
    model = saved(tmp_path)
    file = next(newest(tmp_path).glob("*.distcp"))
    written = bytearray(file.read_bytes())
    written[len(written) // 2] ^= 1
    file.write_bytes(written)
    with raises("K144"):
        fullshard.load(tmp_path, model)


def test_a_latest_that_names_nothing(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "latest").write_text("step-00000200\n")
    with raises("K042"):
        fullshard.load(tmp_path, model)


def test_the_checkpoint_before_a_damaged_one_is_loaded(tmp_path):
    model = saved(tmp_path, (100, 200))
    next(newest(tmp_path).glob("*.distcp")).unlink()
    with warns("W014"):
        assert fullshard.load(tmp_path, model, fall_back=True).step == 100


# Loading what was saved differently.


def test_steps_that_differ_within_a_flat_parameter(tmp_path, fake_world):
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    fullshard.save(tmp_path, model, optimizer)
    fake_world(1)
    flat = wrapped(use_orig_params=False)
    with raises("K149"):
        fullshard.load(tmp_path, flat, torch.optim.Adam(flat.parameters()))


def test_a_number_that_was_several(tmp_path):
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight]["step"] = torch.ones(2)
    fullshard.save(tmp_path, model, optimizer)
    with raises("K150"):
        fullshard.load(tmp_path, model, torch.optim.Adam(model.parameters()))


# Files that were changed, with hashes made right (`Forged`: tests/forged.py).


def forged(folder: Path) -> Forged:
    """A checkpoint of `two_layers` to be changed."""
    saved(folder)
    return Forged(newest(folder))


def test_random_generators_of_another_kind(tmp_path):
    made = forged(tmp_path)
    made.manifest["values"]["state"]["rng"] = {"torch": 7}
    made.sign()
    with raises("K120"):
        fullshard.load(tmp_path, two_layers())


def test_a_checkpoint_of_a_newer_format(tmp_path):
    made = forged(tmp_path)
    made.manifest["version"] = 99
    made.sign()
    with raises("K124"):
        fullshard.load(tmp_path, two_layers())


def test_a_tensor_in_a_file_that_there_is_not(tmp_path):
    made = forged(tmp_path)
    made.place("model.0.weight").relative_path = "__9_0.distcp"
    made.sign()
    with raises("K129"):
        fullshard.load(tmp_path, two_layers())


def test_a_manifest_that_is_a_link(tmp_path):
    model = saved(tmp_path)
    manifest = newest(tmp_path) / "manifest.json"
    manifest.rename(tmp_path / "elsewhere.json")
    manifest.symlink_to(tmp_path / "elsewhere.json")
    with raises("K156"):
        fullshard.load(newest(tmp_path), model)


def test_metadata_that_is_missing(tmp_path):
    model = saved(tmp_path)
    made = Forged(newest(tmp_path))
    del made.manifest["files"][".metadata"]
    made.write_manifest(json.dumps(made.manifest).encode())
    (made.folder / ".metadata").unlink()
    with raises("K142"):
        fullshard.load(tmp_path, model)


def test_hashes_of_a_package_that_is_not_installed(tmp_path, monkeypatch):
    model = saved(tmp_path)
    monkeypatch.setitem(hashed.KINDS, "xxh3_128", None)
    with raises("K112"):
        fullshard.load(tmp_path, model)


# Files that change while they are read.


def test_a_folder_that_there_is_not(tmp_path):
    with raises("K155"):
        LocalStorage(tmp_path / "step-000000100")


def test_an_address_that_there_is_not():
    with raises("K157"):
        RemoteStorage("memory://runs/step-000000100")


def test_a_file_that_is_removed_while_it_is_read(tmp_path):
    saved(tmp_path)
    storage = LocalStorage(newest(tmp_path))
    (newest(tmp_path) / "__0_0.distcp").unlink()
    with raises("K158"):
        storage.read("__0_0.distcp", 0, 100)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    saved(tmp_path)
    storage = LocalStorage(newest(tmp_path))
    (newest(tmp_path) / "__0_0.distcp").write_bytes(b"")
    with raises("K159"):
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


# Folders.


def test_an_address_of_no_known_kind():
    with raises("C201"):
        fullshard.load("nowhere://runs/first", two_layers())


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    saved(tmp_path)
    monkeypatch.setattr(fullshard.Folder, "remove", refuse)
    with warns("W012"):
        fullshard.save(tmp_path, two_layers(), step=200, keep_last=1)


def test_a_whole_model_is_loaded(tmp_path):
    saved(tmp_path)
    assert fullshard.load(tmp_path, two_layers()).step == 100
