"""Errors of `save`, `load`, safetensors files and `convert`, in one process that shards nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from raising import raises, two_layers, warns
from torch import nn

import fullshard
from fullshard.store.formats.safetensors_folder import SafetensorsSource


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


# Safetensors files.


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


def test_a_dtype_that_safetensors_files_do_not_have(tmp_path):
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(2, dtype=torch.complex128))
    with raises("K101"):
        fullshard.save_safetensors(model, tmp_path / "out")


# Formats.


def test_casting_to_integers(tmp_path):
    with raises("C088"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.pt", dtype=torch.int8)


def test_a_format_that_cannot_be_written(tmp_path):
    with raises("C089"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b", to="deepspeed")


def test_converting_onto_something(tmp_path):
    with raises("K020"):
        fullshard.convert(tmp_path / "a.pt", tmp_path)


def test_converting_into_a_folder_that_there_is_not(tmp_path):
    with raises("K021"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "not" / "b.pt")


def test_converting_nothing(tmp_path):
    with raises("K025"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


def test_converting_what_is_being_written(tmp_path):
    (tmp_path / "step-00000100.saving-1a2b").mkdir()
    with raises("K026"):
        fullshard.convert(tmp_path / "step-00000100.saving-1a2b", tmp_path / "b.safetensors")


def test_converting_a_file_of_old(tmp_path):
    torch.save(two_layers().state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with raises("K027"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


def test_converting_a_checkpoint_without_a_model(tmp_path):
    torch.save({"optimizer": torch.optim.AdamW(two_layers().parameters()).state_dict(), "step": 8}, tmp_path / "a.pt")
    with raises("K024"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", model_only=True)


def test_converting_an_empty_file(tmp_path):
    (tmp_path / "a.pt").touch()
    with raises("K028"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


def test_converting_one_file_of_a_checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with raises("K029"):
        fullshard.convert(tmp_path / "manifest.json", tmp_path / "b.safetensors")


def test_converting_a_text(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing of a model")
    with raises("K030"):
        fullshard.convert(tmp_path / "notes.txt", tmp_path / "b.safetensors")


def test_converting_an_empty_folder(tmp_path):
    (tmp_path / "a").mkdir()
    with raises("K031"):
        fullshard.convert(tmp_path / "a", tmp_path / "b.safetensors")


def test_converting_half_a_checkpoint_of_dcp(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__0_0.distcp").touch()
    with raises("K032"):
        fullshard.convert(tmp_path / "a", tmp_path / "b.safetensors")


def test_converting_a_folder_whose_writing_did_not_end(tmp_path):
    (tmp_path / "a" / "step-00000100.saving-1a2b").mkdir(parents=True)
    with raises("K033"):
        fullshard.convert(tmp_path / "a", tmp_path / "b.safetensors")


def test_converting_a_folder_of_texts(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").touch()
    with raises("K034"):
        fullshard.convert(tmp_path / "a", tmp_path / "b.safetensors")


def test_converting_a_file_that_is_truncated(tmp_path):
    torch.save(two_layers().state_dict(), tmp_path / "whole.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:500])
    with raises("K051"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


def test_converting_a_file_that_holds_no_model(tmp_path):
    torch.save(["nothing", "of", "a", "model"], tmp_path / "a.pt")
    with raises("K107"):
        fullshard.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


def test_a_whole_model_is_loaded(tmp_path):
    saved(tmp_path)
    assert fullshard.load(tmp_path, two_layers()).step == 100
