"""Errors of safetensors files and of adapters, in one process that shards nothing."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from torch import nn

import fullshard
from fullshard.store.formats import safetensors_header
from fullshard.store.formats.safetensors_folder import SafetensorsSource
from raising import raises, two_layers


def test_a_dtype_that_parameters_cannot_be_cast_to(tmp_path):
    with raises("C190"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out", dtype=torch.int8)


def test_files_of_no_bytes(tmp_path):
    with raises("C188"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out", max_file_bytes=0)


def test_buckets_of_no_bytes():
    with raises("C189"):
        list(fullshard.full_parameters(two_layers(), bucket_bytes=0))


def test_an_adapter_and_the_model_it_was_merged_into(tmp_path):
    with raises("C191"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out", adapter=True, merge_lora=True)


def test_an_adapter_and_the_base_model(tmp_path):
    with raises("C192"):
        fullshard.load_safetensors(two_layers(), tmp_path, adapter=True, base=True)


def test_merging_where_there_is_no_adapter():
    with raises("C193"):
        list(fullshard.full_parameters(two_layers(), merge_lora=True))


def test_an_adapter_of_a_model_that_has_none(tmp_path):
    pytest.importorskip("peft", reason="needs peft, of the extra hf")
    with raises("C182"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out", adapter=True)


def test_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with raises("K094"):
        fullshard.save_safetensors(two_layers(), tmp_path)


def test_a_folder_without_safetensors_files(tmp_path):
    with raises("K087"):
        fullshard.load_safetensors(two_layers(), tmp_path)


def test_a_folder_of_two_models(tmp_path):
    fullshard.save_safetensors(two_layers(), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")
    with raises("K086"):
        fullshard.load_safetensors(two_layers(), tmp_path / "out")


def test_an_index_that_names_no_files(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with raises("K089"):
        fullshard.load_safetensors(two_layers(), tmp_path)


def test_an_index_that_leads_out_of_its_folder(tmp_path):
    index = {"weight_map": {"0.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises("K090"):
        fullshard.load_safetensors(two_layers(), tmp_path)


def test_an_index_of_files_that_are_missing(tmp_path):
    index = {"weight_map": {"0.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises("K091"):
        fullshard.load_safetensors(two_layers(), tmp_path)


def test_a_safetensors_file_that_is_damaged(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with raises("K100"):
        fullshard.load_safetensors(two_layers(), tmp_path)


def test_files_of_other_names(tmp_path):
    fullshard.save_safetensors(two_layers(), tmp_path / "out")
    with raises("K116"):
        fullshard.load_safetensors(nn.Linear(4, 4), tmp_path / "out")


def test_files_with_two_values_of_a_tied_weight(tmp_path):
    fullshard.save_safetensors(two_layers(), tmp_path / "out")
    tied = two_layers()
    tied[1].weight = tied[0].weight
    with raises("K115"):
        fullshard.load_safetensors(tied, tmp_path / "out")


def test_adapters_without_peft(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises("C181"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out", adapter=True)


def adapted(**arguments: object) -> nn.Module:
    """Two layers with an adapter of rank 2."""
    peft = pytest.importorskip("peft", reason="needs peft, of the extra hf")
    return peft.get_peft_model(two_layers(), peft.LoraConfig(target_modules=["0"], **{"r": 2, **arguments}))


def test_an_adapter_of_a_name_that_there_is_not(tmp_path):
    with raises("C184"):
        fullshard.save_safetensors(adapted(), tmp_path / "out", adapter="french")


def test_a_folder_without_an_adapter(tmp_path):
    with raises("K039"):
        fullshard.load_safetensors(adapted(), tmp_path, adapter=True)


def test_an_adapter_of_another_rank(tmp_path):
    fullshard.save_safetensors(adapted(r=4), tmp_path / "out", adapter=True)
    with raises("K040"):
        fullshard.load_safetensors(adapted(), tmp_path / "out", adapter=True)


def test_merging_what_is_no_sum(tmp_path):
    with raises("C194"):
        list(fullshard.full_parameters(adapted(use_dora=True), merge_lora=True))


def test_a_file_that_was_closed(tmp_path):
    fullshard.save_safetensors(two_layers(), tmp_path / "out")
    source = SafetensorsSource(tmp_path / "out")
    source.close()
    with raises("C187"):
        source.read("model.0.weight")


def test_a_dtype_that_safetensors_files_do_not_have(tmp_path):
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(2, dtype=torch.complex128))
    with raises("K101"):
        fullshard.save_safetensors(model, tmp_path / "out")


def test_an_index_that_is_too_long(tmp_path):
    with (tmp_path / "model.safetensors.index.json").open("w") as file:
        file.truncate(10**9)
    with raises("K088"):
        fullshard.load_safetensors(two_layers(), tmp_path)


def test_a_disk_that_is_too_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    with raises("K093"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out")


def test_more_names_than_a_file_can_have(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MOST_BYTES", 100)
    with raises("K102"):
        fullshard.save_safetensors(two_layers(), tmp_path / "out")


def test_two_adapters_at_once(tmp_path):
    model = adapted()
    model.add_adapter("french", model.peft_config["default"])
    model.base_model.set_adapter(["default", "french"])
    with raises("C183"):
        fullshard.save_safetensors(model, tmp_path / "out", adapter=True)
