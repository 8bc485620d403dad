"""Errors of safetensors files and of adapters, in one process that shards nothing."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fullshard
from fullshard.store.formats import safetensors_header
from fullshard.store.formats.safetensors_folder import SafetensorsSource
from raising import assert_raises, put, raises, two_layers, words_of

INDEX = "model.safetensors.index.json"


def save(folder: Path, **options: object) -> None:
    fullshard.save_safetensors(two_layers(), folder / "out", **options)


def load(folder: Path, model: nn.Module | None = None, **options: object) -> None:
    """What `save` wrote, or what lies in the folder itself."""
    there = folder / "out"
    fullshard.load_safetensors(model or two_layers(), there if there.exists() else folder, **options)


def index(file: str) -> str:
    """An index that says that a weight lies in this file."""
    return json.dumps({"weight_map": {"0.weight": file}})


def adapted(**arguments: object) -> nn.Module:
    """Two layers with an adapter of rank 2."""
    peft = pytest.importorskip("peft", reason="needs peft, of the extra hf")
    return peft.get_peft_model(two_layers(), peft.LoraConfig(target_modules=["0"], **{"r": 2, **arguments}))


def save_adapter(folder: Path, model: nn.Module, adapter: object = True) -> None:
    fullshard.save_safetensors(model, folder / "out", adapter=adapter)


def tied() -> nn.Module:
    model = two_layers()
    model[1].weight = model[0].weight
    return model


def of_complex_numbers() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(2, dtype=torch.complex128))
    return model


def expanded() -> nn.Module:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(1).expand(2))
    return model


def two_adapters() -> nn.Module:
    model = adapted()
    model.add_adapter("french", model.peft_config["default"])
    model.base_model.set_adapter(["default", "french"])
    return model


def read_when_closed(folder: Path) -> None:
    source = SafetensorsSource(folder / "out")
    source.close()
    source.read("model.0.weight")


def write_a_long_index(folder: Path) -> None:
    with (folder / INDEX).open("w") as file:
        file.truncate(10**9)


FOLDERS = [
    (save, read_when_closed, "ConfigError: A checkpoint was closed and then read"),
    (lambda f: save(f, max_file_bytes=0), "ConfigError: max_file_bytes= is invalid ... a positive number of bytes"),
    (
        lambda _: list(fullshard.full_parameters(two_layers(), bucket_bytes=0)),
        "ConfigError: bucket_bytes= is invalid ... a positive number of bytes",
    ),
    (lambda f: save(f, dtype=torch.int8), "ConfigError: dtype= is invalid ... a floating-point torch.dtype, or None"),
    (lambda f: save(f, adapter=True, merge_lora=True), "ConfigError: adapter and merge_lora exclude each other"),
    (lambda f: load(f, adapter=True, base=True), "ConfigError: adapter and base exclude each other: the files contain"),
    (
        lambda _: list(fullshard.full_parameters(two_layers(), merge_lora=True)),
        "ConfigError: merge_lora: the model has no LoRA adapter",
    ),
    (save, put(f"out/{INDEX}", "{}"), load, "CheckpointError: A folder contains two models"),
    (load, "CheckpointError: There are no safetensors files of that name"),
    (write_a_long_index, load, "DamagedCheckpointError: An index of safetensors files is too long"),
    (put(INDEX, "{}"), load, "DamagedCheckpointError: An index of safetensors files is damaged"),
    (put(INDEX, index("../secret.safetensors")), load, "CheckpointError: A checkpoint names a file outside its"),
    (
        put(INDEX, index("model-00001-of-00002.safetensors")),
        load,
        "DamagedCheckpointError: A checkpoint names a file that does not exist",
    ),
    (
        put("notes.txt", "mine"),
        lambda f: fullshard.save_safetensors(two_layers(), f),
        "CheckpointError: The folder to write to already exists and is not empty",
    ),
    (put("model.safetensors", b"not a header"), load, "DamagedCheckpointError: A safetensors file is damaged, or is"),
    (
        lambda f: fullshard.save_safetensors(of_complex_numbers(), f / "out"),
        "CheckpointError: A tensor has a dtype that safetensors files do not support",
    ),
    (
        lambda f: save_file({"table": torch.ones(2)}, f / "model.safetensors"),
        lambda f: load(f, expanded()),
        "CheckpointError: Elements of a tensor share memory",
    ),
    (save, lambda f: load(f, tied()), "CheckpointError: A parameter is tied in the model"),
    (save, lambda f: load(f, nn.Linear(4, 4)), "CheckpointError: Safetensors files do not fit the model: names differ"),
    # Adapters.
    (lambda _: adapted(), lambda f: save(f, adapter=True), "ConfigError: The model has no PEFT adapter ... Sequential"),
    (lambda f: save_adapter(f, two_adapters()), "ConfigError: adapter=True needs exactly one active"),
    (lambda f: save_adapter(f, adapted(), "french"), "ConfigError: The model has no adapter of this name"),
    (
        lambda _: list(fullshard.full_parameters(adapted(use_dora=True), merge_lora=True)),
        "ConfigError: merge_lora: an adapter cannot be merged tensor by tensor",
    ),
    (lambda f: load(f, adapted(), adapter=True), "CheckpointError: A folder contains no PEFT adapter"),
    (
        lambda f: save_adapter(f, adapted(r=4)),
        lambda f: load(f, adapted(), adapter=True),
        "CheckpointError: An adapter's settings differ from the model",
    ),
]


@pytest.mark.parametrize("row", FOLDERS, ids=words_of)
def test_in_a_folder(tmp_path, row):
    assert_raises(row, tmp_path)


def test_adapters_without_peft(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises("ConfigError: Adapters are saved and loaded in"):
        save(tmp_path, adapter=True)


def test_a_disk_that_is_too_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with raises("CheckpointError: There is not enough disk space for"):
        save(tmp_path)


def test_more_names_than_a_file_can_have(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MOST_BYTES", 100)
    with raises("CheckpointError: The header of a safetensors file would be longer than readers accept"):
        save(tmp_path)
