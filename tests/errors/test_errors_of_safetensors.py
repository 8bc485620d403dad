"""Errors of safetensors files and of adapters, in one process that shards nothing."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard
from fullshard.store.formats import safetensors_header
from fullshard.store.formats.safetensors_folder import SafetensorsSource
from raising import assert_raises, put, raises, two_layers

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


FOLDERS = {
    "C187": (save, read_when_closed),
    "C188": lambda f: save(f, max_file_bytes=0),
    "C189": lambda _: list(fullshard.full_parameters(two_layers(), bucket_bytes=0)),
    "C190": lambda f: save(f, dtype=torch.int8),
    "C191": lambda f: save(f, adapter=True, merge_lora=True),
    "C192": lambda f: load(f, adapter=True, base=True),
    "C193": lambda _: list(fullshard.full_parameters(two_layers(), merge_lora=True)),
    "K086": (save, put(f"out/{INDEX}", "{}"), load),
    "K087": load,
    "K088": (write_a_long_index, load),
    "K089": (put(INDEX, "{}"), load),
    "K090": (put(INDEX, index("../secret.safetensors")), load),
    "K091": (put(INDEX, index("model-00001-of-00002.safetensors")), load),
    "K094": (put("notes.txt", "mine"), lambda f: fullshard.save_safetensors(two_layers(), f)),
    "K100": (put("model.safetensors", b"not a header"), load),
    "K101": lambda f: fullshard.save_safetensors(of_complex_numbers(), f / "out"),
    "K115": (save, lambda f: load(f, tied())),
    "K152": (save, lambda f: load(f, nn.Linear(4, 4))),
    # Adapters.
    "C182": (lambda _: adapted(), lambda f: save(f, adapter=True)),
    "C183": lambda f: save_adapter(f, two_adapters()),
    "C184": lambda f: save_adapter(f, adapted(), "french"),
    "C194": lambda _: list(fullshard.full_parameters(adapted(use_dora=True), merge_lora=True)),
    "K039": lambda f: load(f, adapted(), adapter=True),
    "K040": (lambda f: save_adapter(f, adapted(r=4)), lambda f: load(f, adapted(), adapter=True)),
}


@pytest.mark.parametrize("code", FOLDERS)
def test_in_a_folder(tmp_path, code):
    assert_raises(code, FOLDERS[code], tmp_path)


def test_adapters_without_peft(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises("C181"):
        save(tmp_path, adapter=True)


def test_a_disk_that_is_too_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with raises("K093"):
        save(tmp_path)


def test_more_names_than_a_file_can_have(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MOST_BYTES", 100)
    with raises("K102"):
        save(tmp_path)
