"""Errors of `convert`: what is no checkpoint, is half of one, or is damaged."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ones
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from files import archive
from forged import save_small
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.exchange.inspect import inspect
from fullshard.store.formats import pickled
from fullshard.store.formats.dcp import DcpSink, DcpSource
from fullshard.store.formats.deepspeed import DeepSpeedSource
from fullshard.store.formats.torch_file import TorchFileSource
from fullshard.store.source import Entry
from raising import raises, two_layers

Made = Callable[[Path], object]


def converted(folder: Path, **options: object) -> None:
    """What `make` put into FOLDER/a, a file or a folder, as safetensors."""
    fullshard.convert(folder / "a", folder / "b.safetensors", **options)


# What is asked for.


def test_casting_to_integers(tmp_path):
    with raises("C088"):
        converted(tmp_path, dtype=torch.int8)


def test_a_format_that_cannot_be_written(tmp_path):
    with raises("C089"):
        converted(tmp_path, to="deepspeed")


def test_onto_something(tmp_path):
    with raises("K020"):
        fullshard.convert(tmp_path / "a", tmp_path)


def test_into_a_folder_that_there_is_not(tmp_path):
    with raises("K021"):
        fullshard.convert(tmp_path / "a", tmp_path / "not" / "b.pt")


def test_a_checkpoint_without_a_model(tmp_path):
    torch.save({"optimizer": torch.optim.AdamW(two_layers().parameters()).state_dict(), "step": 8}, tmp_path / "a")
    with raises("K024"):
        converted(tmp_path, model_only=True)


def test_a_name_that_no_file_can_have(tmp_path):
    torch.save(two_layers().state_dict(), tmp_path / "a")
    with raises("K023"):
        fullshard.convert(tmp_path / "a", tmp_path / ("b" * 300))


# What is there: FOLDER/a is made, and then converted.


def half_written(folder: Path) -> None:
    """A save that was broken off."""
    (folder / "a" / "step-00000100.saving-1a2b").mkdir(parents=True)


def half_of_dcp(folder: Path) -> None:
    """Without .metadata, which is written last."""
    (folder / "a").mkdir()
    (folder / "a" / "__0_0.distcp").touch()


def texts(folder: Path) -> None:
    """A folder of something else."""
    (folder / "a").mkdir()
    (folder / "a" / "notes.txt").touch()


def truncated(folder: Path) -> None:
    """A file of which half is there."""
    torch.save(two_layers().state_dict(), folder / "whole.pt")
    (folder / "a").write_bytes((folder / "whole.pt").read_bytes()[:500])


def too_short(folder: Path) -> None:
    """A file whose directory says more than there is."""
    torch.save(two_layers().state_dict(), folder / "a")
    data = bytearray((folder / "a").read_bytes())
    last = data.rfind(b"PK\1\2")
    struct.pack_into("<II", data, last + 20, 10**6, 10**6)
    (folder / "a").write_bytes(data)


def metadata_that_is_a_folder(folder: Path) -> None:
    """Metadata that cannot be read."""
    (folder / "a" / ".metadata").mkdir(parents=True)


def no_storage(folder: Path) -> None:
    """A pickle of something that stands where a storage should."""
    torch.save({"weight": torch.ones(4)}, folder / "whole.pt")
    data = (folder / "whole.pt").read_bytes()
    (folder / "a").write_bytes(data.replace(b"storage", b"garbage").replace(b"FloatStorage", b"FloatGarbage"))


WRONG: dict[str, Made] = {
    "K025": lambda folder: None,
    "K027": lambda folder: torch.save(two_layers().state_dict(), folder / "a", _use_new_zipfile_serialization=False),
    "K028": lambda folder: (folder / "a").touch(),
    "K030": lambda folder: (folder / "a").write_text("nothing of a model"),
    "K031": lambda folder: (folder / "a").mkdir(),
    "K032": half_of_dcp,
    "K033": half_written,
    "K034": texts,
    "K056": metadata_that_is_a_folder,
    "K051": truncated,
    "K054": too_short,
    "K083": lambda folder: archive(folder / "a", b"(iposix\nsystem\n."),
    "K085": no_storage,
    "K104": lambda folder: torch.save({"optimizer": {"state": {0: "lost"}, "param_groups": []}}, folder / "a"),
    "K107": lambda folder: torch.save(["nothing", "of", "a", "model"], folder / "a"),
}


@pytest.mark.parametrize("code", WRONG)
def test_what_cannot_be_converted(tmp_path, code):
    WRONG[code](tmp_path)
    with raises(code):
        converted(tmp_path)


def test_looking_into_what_is_no_checkpoint(tmp_path):
    metadata_that_is_a_folder(tmp_path)
    with raises("K035"):
        inspect(tmp_path / "a")


def test_a_file_that_cannot_be_read(tmp_path):
    with raises("K036"):
        fullshard.convert("/proc/self/mem", tmp_path / "b.safetensors")


def test_one_file_of_a_checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with raises("K029"):
        fullshard.convert(tmp_path / "manifest.json", tmp_path / "b.safetensors")


def test_what_is_being_written(tmp_path):
    (tmp_path / "step-00000100.saving-1a2b").mkdir()
    with raises("K026"):
        fullshard.convert(tmp_path / "step-00000100.saving-1a2b", tmp_path / "b.safetensors")


def test_a_file_of_a_machine_of_another_byte_order(tmp_path, monkeypatch):
    torch.save(two_layers().state_dict(), tmp_path / "a")
    monkeypatch.setattr(sys, "byteorder", "big")
    with raises("K044"):
        converted(tmp_path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    torch.save(two_layers().state_dict(), tmp_path / "a")
    with TorchFileSource(tmp_path / "a") as source, (tmp_path / "a").open("r+b") as file, raises("K159"):
        file.truncate(100)
        source.read("model.0.weight")


def test_a_pickle_that_is_too_large(tmp_path, monkeypatch):
    torch.save(two_layers().state_dict(), tmp_path / "a")
    monkeypatch.setattr(pickled, "LARGEST", 100)
    with raises("K081"):
        converted(tmp_path)


# Folders of PyTorch's `torch.distributed.checkpoint`, tensor by tensor.

ENTRIES = {"model.weight": Entry((4,), torch.float32)}


def test_a_tensor_that_there_is_not(tmp_path):
    save_small(tmp_path)
    with DcpSource(tmp_path) as source, raises("K057"):
        source.read("model.2.weight")


def test_a_checkpoint_in_the_place_of_another(tmp_path):
    with raises("K058"):
        DcpSink(tmp_path, ENTRIES, {})


def test_a_tensor_that_was_not_announced_so(tmp_path):
    with raises("K059"):
        DcpSink(tmp_path / "a", ENTRIES, {}).write("model.weight", torch.ones(3))


def test_a_tensor_that_was_announced_and_not_written(tmp_path):
    with raises("K060"):
        DcpSink(tmp_path / "a", ENTRIES, {}).finish()


# Folders of DeepSpeed and of PyTorch's FSDP.


def test_a_folder_that_deepspeed_did_not_write(tmp_path):
    with raises("K062"):
        DeepSpeedSource(tmp_path)


def test_files_of_ranks_that_hold_whole_models(tmp_path):
    (tmp_path / "a").mkdir()
    for rank in range(2):
        torch.save(two_layers().state_dict(), tmp_path / "a" / f"rank{rank}.pt")
    with raises("K075"):
        converted(tmp_path)


def ranks_save(folder: Path, model: Callable[[int], nn.Module], key: str = "model") -> None:
    """Each of two ranks saves the parts that it holds, as a program with PyTorch's FSDP does."""
    (folder / "a").mkdir()
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        whole = FSDP(model(rank), use_orig_params=True)
        with FSDP.state_dict_type(whole, fullshard.StateDictType.SHARDED_STATE_DICT):
            torch.save({"model": {}, key: whole.state_dict()}, folder / "a" / f"rank{rank}.pt")
        torch.distributed.destroy_process_group()


def test_files_of_two_models(tmp_path):
    ranks_save(tmp_path, lambda rank: nn.Linear(4, 4 + 2 * rank))
    with raises("K077"):
        converted(tmp_path)


def test_parts_of_neither_model_nor_optimizer(tmp_path):
    ranks_save(tmp_path, lambda rank: nn.Linear(4, 4), key="average")
    with raises("K105"):
        converted(tmp_path)


def test_parts_of_columns(tmp_path):
    (tmp_path / "a").mkdir()
    columns = ChunkShardingSpec(dim=1, placements=["rank:0/cpu", "rank:1/cpu"])
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        torch.save({"model": {"weight": ones(columns, 4, 4)}}, tmp_path / "a" / f"rank{rank}.pt")
        torch.distributed.destroy_process_group()
    with raises("K078"):
        converted(tmp_path)
