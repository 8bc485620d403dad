"""Values in files from elsewhere that are meant to take hours, all memory, or to reach what they must not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

import fullshard
from forged import DOTS, ONE_HASH, STEP, Forged, ForgedDcp, outcome, save_small_dcp
from fullshard import CheckpointError, DamagedCheckpointError
from fullshard.generators import Generators
from fullshard.store import entries, read
from fullshard.store.formats import safetensors_folder
from fullshard.store.formats.own import CheckpointSource
from fullshard.store.formats.torch_file import TorchFileSource
from fullshard.store.storage import LocalStorage


def test_classes_stay_as_they_are(tmp_path: Path) -> None:
    """A pickle may set attributes of what it names: they are not those of the process."""
    folder, _ = save_small_dcp(tmp_path)
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    ForgedDcp(folder).sign(metadata=b"\x80\x02" + name + b"N}X\x07\x00\x00\x00changedK\x01s\x86b.")
    error, unchanged, _ = outcome(folder, check=False)
    assert isinstance(error, CheckpointError) and unchanged and not hasattr(Metadata, "changed")


def test_files_of_torch_with_such_values(tmp_path: Path) -> None:
    for number, state in enumerate(({DOTS: torch.ones(1)}, {"step": dict.fromkeys(ONE_HASH, 0), "model": {}})):
        path = tmp_path / f"{number}.pt"
        torch.save(state, path)
        with pytest.raises(CheckpointError) as caught:
            TorchFileSource(path)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("kind", ["manifest.json", ".metadata"])
def test_what_lists_tensors_may_be_as_long_as_these(tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    """A job of thousands of ranks has more than any fixed limit; holes in files are no data."""
    dcp, _ = save_small_dcp(tmp_path)
    folder = dcp if kind == ".metadata" else tmp_path / "ours" / STEP
    monkeypatch.setattr(read, "MOST_WHOLE", 1024)
    assert (folder / kind).stat().st_size > 1024
    with CheckpointSource(folder) as source:
        assert source.read("model.0.weight").numel()
    for path in sorted(folder.iterdir(), reverse=True):  # of which holes make 8 GiB
        os.truncate(path, 2**33)
    with pytest.raises(DamagedCheckpointError, match="too large"):
        CheckpointSource(folder)


def test_the_manifest_of_many_small_pieces_is_shorter_than_four_times_their_files(tmp_path: Path) -> None:
    """What `most_listed` relies on, at its worst: one element in each piece, long names, groups and ties of them."""
    name = "layer_" * 30
    model = torch.nn.ModuleDict({f"{name}{n}": torch.nn.Linear(1, 1, bias=False) for n in range(200)})
    for n in range(0, 200, 2):
        model[f"{name}{n}"].weight = model[f"{name}{n + 1}"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which has no state
    path = fullshard.save(tmp_path, model, optimizer).wait()
    storage = LocalStorage(Path(str(path)))
    sizes = dict(storage.sizes)
    assert sizes.pop("manifest.json") < 4 * sum(sizes.values())


def test_what_is_saved_can_be_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    """Large values: bytes are kept beside the manifest; of text what is too much is refused before it is written."""
    monkeypatch.setattr(entries, "MOST_JSON", 50_000)
    large = os.urandom(200_000)
    model = torch.nn.Linear(2, 2)
    state = {"bytes": {"it": large}, "array": np.arange(50_000), "text": "a" * 20_000, "bytearray": bytearray(70_000)}
    fullshard.save(tmp_path, model, state=state)
    found = fullshard.load(tmp_path, model).state
    assert found["bytes"] == {"it": large} and found["text"] == state["text"] and found["bytearray"] == bytes(70_000)
    assert (found["array"] == state["array"]).all()
    assert (tmp_path / "step-000000000" / "manifest.json").stat().st_size < 50_000
    with pytest.raises(CheckpointError, match="too long") as caught:
        fullshard.save(tmp_path, model, state={"few": [1], "many": list(range(20_000))})
    assert "many" in str(caught.value)
    assert len(fullshard.Folder(tmp_path).names()) == 1


def test_many_keys_of_more_than_61_bits(tmp_path: Path) -> None:
    """A loader's 64-bit hashes are loaded; integers that were chosen for equal hashes are refused when they are saved.

    A number that a list repeats is one key at most.
    """
    model = torch.nn.Linear(2, 2)
    state = {"seen": {n * 2**44 + n for n in range(2**20 - 11_000, 2**20)}, "list": [2**63] * 20_000}
    state["count"] = dict.fromkeys(state["seen"], 1)
    fullshard.save(tmp_path / "ours", model, state=state)
    assert fullshard.load(tmp_path / "ours", model).state == state
    for target in ("torch.pt", "dcp"):
        fullshard.convert(tmp_path / "ours", tmp_path / target, to=target.removesuffix(".pt").removeprefix("torch."))
        fullshard.convert(tmp_path / target, tmp_path / f"{target}-back")
    with pytest.raises(CheckpointError, match=r"10198 keys have the same hash"):
        fullshard.save(tmp_path / "refused", model, state={"set": set(ONE_HASH)})


def test_what_would_be_refused_when_loaded_is_not_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"too long to be loaded(.|\n)*parameter: +state\.kkk"):
        fullshard.save(tmp_path, model, state={"k" * 2500: torch.ones(2)})
    fullshard.save(tmp_path, model, state={"k" * 2500: 1}, step=1)
    with pytest.raises(fullshard.ConfigError, match=r"less than 2\*\*62"):
        fullshard.save(tmp_path, model, step=2**62)
    assert fullshard.load(tmp_path, model).step == 1 and len(fullshard.Folder(tmp_path).names()) == 1


def test_a_sharded_state_that_is_not_there(tmp_path: Path, fake_world: Any) -> None:
    """A sharded tensor of an object, which the files lack: an error, rather than whatever memory holds."""
    fake_world(1)
    model = fullshard.fully_shard(torch.nn.Linear(2, 2))
    average = mock.Mock(state_dict=lambda: {"weight": model.weight.detach()})
    fullshard.save(tmp_path, model, state={"average": average})
    forged = Forged(tmp_path / "step-000000000")
    forged.manifest["values"]["state"]["average"]["weight"]["$tensor"] += ".not"
    forged.sign()
    average.state_dict = lambda: {"weight.not": model.weight.detach()}
    with pytest.raises(DamagedCheckpointError, match="has no tensor of this name"):
        fullshard.load(tmp_path, model, state={"average": average})
    assert not average.load_state_dict.called


def test_the_state_of_an_accelerators_generator(monkeypatch: Any) -> None:
    """Checked before anything is changed, as all others are."""
    state = Generators().state_dict()
    state["accelerator"] = torch.zeros(3, dtype=torch.uint8)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    with pytest.raises(RuntimeError, match="RNG state"):
        Generators().check(state)


def test_a_link_that_takes_a_files_place(tmp_path: Path, monkeypatch: Any) -> None:
    """Between the look at a name and the opening of its file."""
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "elsewhere"):
        save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    inside = safetensors_folder._inside

    def swapped(folder: Path, name: str) -> Path:
        found = inside(folder, name)
        found.unlink()
        found.symlink_to(tmp_path / "elsewhere" / "model.safetensors")
        return found

    monkeypatch.setattr(safetensors_folder, "_inside", swapped)
    with pytest.raises(OSError, match="symbolic links"):
        safetensors_folder.SafetensorsSource(tmp_path)
