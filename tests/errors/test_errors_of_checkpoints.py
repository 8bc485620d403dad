"""Errors of `save` and `load`, in one process that shards nothing."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fullshard
from forged import Forged, ForgedDcp
from fullshard.store import hashed
from fullshard.store.read import Files
from fullshard.store.storage import LocalStorage, RemoteStorage
from raising import assert_raises, nested, put, raises, sharded, step, two_layers, warns, words_of, wrapped


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
    return next(newest(folder).glob("rank-*.safetensors"))


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


def another_file(folder: Path) -> None:
    """A folder of DCP's that names a file which is not there."""
    dcp.save({"model": two_layers().state_dict()}, checkpoint_id=folder, no_dist=True)
    made = ForgedDcp(folder)
    made.place("model.0.weight").relative_path = "__9_0.distcp"
    made.sign()


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


def with_buffer(values: torch.Tensor) -> nn.Module:
    model = two_layers()
    model.register_buffer("extra", values)
    return model


def numbered(folder: Path) -> nn.Module:
    """A checkpoint from a file that plain PyTorch saved: its optimizer numbers the parameters."""
    model = two_layers()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    file = folder.with_suffix(".pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    folder.rmdir()
    fullshard.convert(file, folder)
    return model


def with_state(value: Callable[[torch.Tensor], object], model: nn.Module | None = None) -> tuple[Any, Any]:
    """A model and its optimizer, with a value of each parameter in its state."""
    model = model or two_layers()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        optimizer.state[parameter]["history"] = value(parameter)
    return model, optimizer


def sparse() -> torch.Tensor:
    """Create it in a test: others look at the storages of all tensors alive."""
    return torch.eye(2).to_sparse()


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


CALLS = [
    (lambda: fullshard.save(None, two_layers()), "ConfigError: The folder of checkpoints must be a path or an address"),
    (
        lambda: fullshard.save("memory://runs/first", two_layers(), asynchronous=True),
        "ConfigError: asynchronous=True requires a local or shared file system",
    ),
    (lambda: fullshard.load("nowhere://runs/first", two_layers()), "ConfigError: An address cannot be used"),
    (
        lambda: RemoteStorage("memory://runs/step-000000100"),
        "DamagedCheckpointError: There is no such checkpoint ... memory://runs/step-000000100",
    ),
]
FOLDERS = [
    # Saving.
    (save(step=-1), "ConfigError: save(step=) is invalid"),
    (save(step=torch.tensor(True)), "ConfigError: save(step=) is invalid ... tensor(True)"),
    (save(step=np.float64(3)), "ConfigError: save(step=) is invalid ... np.float64(3.0)"),
    (save(keep_last=0), "ConfigError: save(keep_last=) is invalid ... at least 1"),
    (save(if_saving="skip"), "ConfigError: save(if_saving=) is invalid ... 'wait' or 'refuse' ... 'skip' ... remedy"),
    (save(asynchronous="yes"), "ConfigError: save(asynchronous=) is invalid ... 'until_step' ... 'yes' ... remedy"),
    (save(state={1: 2}), "ConfigError: save(state=) has an invalid name ... expected ... 1 ... remedy"),
    (lambda f: fullshard.save(f, two_layers().state_dict()), "ConfigError: save(model=) is invalid"),
    (save(state={"model.step": 1}), "ConfigError: save(state=) has an invalid name"),
    (two_optimizers, "ConfigError: Two optimizers update one parameter"),
    (save(optimizers=torch.optim.AdamW(two_layers().parameters())), "CheckpointError: The optimizer updates a tensor"),
    (lambda f: fullshard.save(f, nn.Linear(4, 4, device="meta")), "CheckpointError: A tensor of the model has no"),
    (
        lambda f: fullshard.save(f, with_buffer(quantised())),
        "CheckpointError: A tensor of one of torch's ... model.extra",
    ),
    (save(state={"scaled": quantised()}), "CheckpointError: A tensor of one of torch's quantized ... state.scaled"),
    (
        lambda f: fullshard.save(f, two_layers(), state={"of": {"pairs": sparse()}}),
        "CheckpointError: A tensor of layout torch.sparse_coo cannot ... state.of.pairs ... to_dense()",
    ),
    (
        lambda f: fullshard.save(f, with_buffer(sparse().to_sparse_csr())),
        "CheckpointError: A tensor of layout torch.sparse_csr cannot be saved ... model.extra ... to_dense()",
    ),
    *(
        (
            lambda f, put=put: fullshard.save(f, *with_state(lambda _: put(sparse()))),
            f"CheckpointError: A tensor of layout torch.sparse_coo cannot ... optimizer.state.0.weight.history{end}\n",
        )
        for put, end in ((lambda t: t, ""), (lambda t: [t], ".0"), (lambda t: {"a": t}, ".a"))
    ),
    (
        save(state={"ring": ring()}),
        "CheckpointError: A value cannot be saved in a checkpoint ... at most 60 nested containers",
    ),
    (save(state={"path": Path("/a/path")}), "CheckpointError: A value cannot be saved in a checkpoint ... state.path"),
    # Loading.
    (lambda f: fullshard.load(f, two_layers(), step="1"), "ConfigError: load(step=) is invalid"),
    (lambda f: fullshard.load(f, two_layers(), strict="x"), "ConfigError: load(strict=) is invalid ... True or False"),
    (
        lambda f: fullshard.load(f, two_layers(), cast=torch.bfloat16),
        "ConfigError: load(cast=) is invalid ... True or False ... torch.bfloat16 ... pass cast=True",
    ),
    (load, "CheckpointError: There is no checkpoint in"),
    (saved, lambda f: fullshard.load(f, two_layers(), step=300), "CheckpointError: There is no checkpoint of this"),
    (
        saved,
        lambda f: fullshard.load(f, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))),
        "CheckpointError: Values to load do not fit the model: a tensor has a different shape ... (8, 4)",
    ),
    (
        saved,
        lambda f: fullshard.load(f, two_layers().to(torch.float8_e4m3fn)),
        "CheckpointError: Values to load do not fit the model: a tensor has a different dtype",
    ),
    (
        saved,
        lambda f: fullshard.load(f, nn.Linear(4, 4)),
        "CheckpointError: A checkpoint does not fit the model ... model.weight",
    ),
    (
        saved,
        lambda f: fullshard.load(f, nn.Sequential(two_layers())),
        "CheckpointError: A checkpoint does not fit the model ... the model's names have the prefix '0.'",
    ),
    (
        saved,
        lambda f: fullshard.load(f, (model := two_layers()), torch.optim.SGD(model.parameters(), momentum=0.9)),
        "CheckpointError: A checkpoint does not fit ... exp_avg ... pass an optimizer of the class it was saved from",
    ),
    (
        lambda f: fullshard.save(f, with_buffer(torch.ones(3).expand(4, 3))),
        lambda f: fullshard.load(f, with_buffer(torch.ones(3).expand(4, 3))),
        "CheckpointError: Elements of a tensor share memory ... model.extra",
    ),
    (
        numbered,
        load_an_optimizer,
        "CheckpointError: A checkpoint numbers the parameters ... [0, 1, 2, 3] ... fullshard.save",
    ),
    (save(), load_an_optimizer, "CheckpointError: A checkpoint was saved without an optimizer; nothing was loaded"),
    (
        saved,
        lambda f: fullshard.load(f, two_layers(), state={"epoch": nn.Linear(1, 1)}),
        "CheckpointError: A checkpoint has no state of this name; nothing was loaded",
    ),
    # Files that were changed.
    (saved, lambda f: data(f).unlink(), load, "DamagedCheckpointError: A file of a checkpoint is missing"),
    (
        saved,
        lambda f: data(f).write_bytes(data(f).read_bytes()[:-1]),
        load,
        "DamagedCheckpointError: A file of a checkpoint is truncated",
    ),
    (saved, flip_a_bit, load, "DamagedCheckpointError: A file of a checkpoint is damaged: its contents"),
    (
        saved,
        put("latest", "step-00000200\n"),
        load,
        "DamagedCheckpointError: The file 'latest' does not name a complete",
    ),
    (
        forge(lambda made: made.manifest["values"]["state"].update(rng={"torch": 7})),
        load,
        "DamagedCheckpointError: The saved state of the random generators is invalid",
    ),
    (
        forge(lambda made: made.manifest.update(version=99)),
        load,
        "CheckpointError: This version of Fullshard cannot read ... version 99",
    ),
    (
        another_file,
        load,
        "DamagedCheckpointError: A file of a checkpoint is missing ... model.0.weight",
    ),
    (lambda f: Files(LocalStorage(f)), "DamagedCheckpointError: A folder is not a complete checkpoint"),
    (
        saved,
        link_the_manifest,
        lambda f: fullshard.load(newest(f), two_layers()),
        "DamagedCheckpointError: A checkpoint's manifest",
    ),
    (lambda f: LocalStorage(f / "step-000000100"), "DamagedCheckpointError: There is no such checkpoint"),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


@pytest.mark.parametrize("row", FOLDERS, ids=words_of)
def test_in_a_folder(tmp_path, row):
    assert_raises(row, tmp_path)


@pytest.mark.parametrize("given", [{"optimizers": 3}, {"state": [1]}])
@pytest.mark.parametrize("call", [fullshard.save, fullshard.load])
def test_an_argument_of_another_type_is_named(tmp_path, call, given):
    with raises(f"ConfigError: {call.__name__}({next(iter(given))}=) is invalid"):
        call(tmp_path, two_layers(), **given)


@pytest.mark.parametrize("container", [list, dict])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_sharded_tensors_in_containers_of_optimizer_state(tmp_path, fake_world, layout, container):
    fake_world(1)
    model, optimizer = with_state(lambda p: container([(0, p.detach().clone())]), sharded(layout=layout))
    with raises("CheckpointError: Optimizer state 'history' has tensors that are split over ranks ... weight"):
        fullshard.save(tmp_path, model, optimizer)


def test_a_save_while_parameters_are_whole(tmp_path, fake_world):
    """The instance has no name before its model has run."""
    fake_world(1)
    model = nested()
    with (
        fullshard.FullyShardedDataParallel.summon_full_params(model),
        raises("PhaseError: A model cannot ... 0.weight"),
    ):
        fullshard.save(tmp_path, model)


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_steps_that_are_not_of_pythons_int(tmp_path, step):
    model = two_layers()
    fullshard.save(tmp_path, model, step=step, keep_last=np.int32(1))
    assert fullshard.load(tmp_path, model, step=step).step == 3


@pytest.mark.parametrize("strict", [True, False])
def test_the_model_alone_of_a_checkpoint_that_numbers_parameters(tmp_path, strict):
    folder = tmp_path / "a"
    folder.mkdir()
    expected, model = numbered(folder).state_dict(), two_layers()
    fullshard.load(folder, model, strict=strict)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.items())
    with raises("CheckpointError: A checkpoint numbers the parameters of its optimizer"):
        fullshard.load(folder, model, torch.optim.AdamW(model.parameters()), strict=strict)


@pytest.mark.parametrize("below", ["", "runs/mine"])
@pytest.mark.parametrize("call", [fullshard.save, fullshard.load])
def test_a_file_where_the_folder_would_be(tmp_path, call, below):
    (tmp_path / "file").write_text("in the way")
    with raises("CheckpointError: is a file; fullshard.save and fullshard.load use a folder"):
        call(tmp_path / "file" / below, two_layers())


def test_whether_something_was_saved(tmp_path):
    """As the error for an empty folder says."""
    assert not fullshard.Folder(tmp_path).names() and not fullshard.Folder(tmp_path / "not there").names()
    model = saved(tmp_path, (100, 200))
    assert fullshard.Folder(tmp_path).names() and fullshard.load(tmp_path, model).step == 200


def test_the_checkpoint_before_a_damaged_one_is_loaded(tmp_path):
    model = saved(tmp_path, (100, 200))
    data(tmp_path).unlink()
    with warns("UserWarning: is damaged; trying the checkpoint before it"):
        assert fullshard.load(tmp_path, model, fall_back=True).step == 100


def test_several_counts_where_one_is_wanted(tmp_path):
    several_counts(tmp_path)
    with raises("CheckpointError: Values to load do not fit the model: a tensor has a different shape ... weight.step"):
        load_an_optimizer(tmp_path)


def test_steps_that_differ_within_a_flat_parameter(tmp_path, fake_world):
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    model.requires_grad_(True)
    fullshard.save(tmp_path, model, stepped(model, optimizer))
    fake_world(1)
    with raises("CheckpointError: State 'step' differs between parameters of one ... 1.weight"):
        load_an_optimizer(tmp_path, wrapped(use_orig_params=False))


def test_hashes_of_a_package_that_is_not_installed(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setitem(hashed.KINDS, "xxh3_128", None)
    with raises("CheckpointError: A checkpoint's files"):
        load(tmp_path)


@pytest.mark.parametrize("end", ["cannot be read", "is truncated"])
def test_a_file_that_is_removed_or_cut_while_it_is_read(tmp_path, end):
    saved(tmp_path)
    storage = LocalStorage(newest(tmp_path))
    data(tmp_path).unlink() if end == "cannot be read" else data(tmp_path).write_bytes(b"")
    with raises(f"DamagedCheckpointError: A file of a checkpoint {end}"):
        storage.read("rank-0.safetensors", 0, 100)


# Saves in the background, and of two programs.


def test_a_save_while_another_goes_on(tmp_path):
    large = torch.zeros(30_000_000)
    saving = fullshard.save(tmp_path, two_layers(), state={"large": large}, step=1, asynchronous=True)
    with raises("CheckpointError: A background save is still running"):
        fullshard.save(tmp_path, two_layers(), step=2, if_saving="refuse")
    assert not saving.done  # says so at once, while its process writes
    saving.wait()


def test_a_save_in_the_background_that_fails(tmp_path):
    folder = tmp_path / "checkpoints"
    saving = fullshard.save(folder, nn.Linear(4096, 2048), asynchronous=True)  # large enough to be renamed in time
    folder.rename(tmp_path / "elsewhere")  # at once: the writer may be about to put things there
    with raises("CheckpointError: A background save failed ... rank 0: FileNotFoundError"):
        saving.wait()


def test_a_folder_that_another_program_saves_into(tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with raises("CheckpointError: Another process is saving into the same folder"):
            fullshard.save(tmp_path, two_layers(), patience=0.1)


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    saved(tmp_path)
    monkeypatch.setattr(fullshard.Folder, "remove", refuse)
    with warns("UserWarning: An old checkpoint could not be removed"):
        fullshard.save(tmp_path, two_layers(), step=200, keep_last=1)
