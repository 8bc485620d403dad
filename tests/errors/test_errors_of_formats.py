"""Errors of `convert`: what is no checkpoint, is half of one, or is damaged."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor, ones
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from files import archive, rewritten, under
from forged import save_small
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.exchange.inspect import inspect
from fullshard.store import pickles
from fullshard.store.formats.deepspeed import DeepSpeedSource
from fullshard.store.formats.own import CheckpointSource, write_checkpoint
from fullshard.store.formats.torch_file import TorchFileSource
from fullshard.store.names import TensorEntry
from raising import assert_raises, put, raises, two_layers, words_of

ENTRIES = {"model.weight": TensorEntry((4,), torch.float32)}
SAVING = "step-00000100.saving-1a2b"
ZERO3 = Path(__file__).parents[1] / "store" / "data" / "zero3"
"""What DeepSpeed wrote: ZeRO-3, three ranks."""


def converted(folder: Path, **options: object) -> None:
    """FOLDER/a, a file or a folder, as safetensors."""
    fullshard.convert(folder / "a", folder / "b.safetensors", **options)


def saved(content: object, **how: Any) -> Callable[[Path], None]:
    return lambda f: torch.save(content, f / "a", **how)


def created_and_saved(create: Callable[[], object]) -> Callable[[Path], None]:
    """As `saved`, of what other tests, which look at the storages of all tensors alive, must not find."""
    return lambda f: torch.save(create(), f / "a")


WHOLE = two_layers().state_dict()
OPTIMIZER = torch.optim.AdamW(two_layers().parameters()).state_dict()
ASKED = [
    (
        lambda f: converted(f, dtype=torch.int8),
        "ConfigError: dtype= is invalid ... a floating-point torch.dtype",
    ),
    (
        lambda f: converted(f, dtype="bf16"),
        "ConfigError: dtype= is invalid ... a floating-point torch.dtype ... bf16",
    ),
    (
        save_small,
        lambda f: fullshard.convert(next(f.glob("**/rank-0.safetensors")), f / "b.pt"),
        "CheckpointError: is a single file of a checkpoint ... rank-0.safetensors",
    ),
    (lambda f: converted(f, to="deepspeed"), "ConfigError: Cannot write the format"),
    (lambda f: converted(f, to="torch"), "ConfigError: The name b.safetensors has the suffix of ... remedy"),
    (
        lambda f: fullshard.convert(f / "a", f / "b.pt", to="dcp"),
        "ConfigError: The name b.pt has the suffix of ... dcp",
    ),
    (lambda f: fullshard.convert("", f / "b.pt"), "ConfigError: The path to read is empty ... '.'"),
    (lambda f: fullshard.convert(f / "a", ""), "ConfigError: The path to write is empty ... '.'"),
    (lambda f: inspect(""), "ConfigError: The path to inspect is empty ... '.'"),
    (lambda f: fullshard.convert(f / "a", f), "CheckpointError: already exists, and is not overwritten"),
    (lambda f: fullshard.convert(f / "a", f / "not" / "b.pt"), "CheckpointError: does not exist ... create it first"),
    (saved(WHOLE), lambda f: fullshard.convert(f / "a", f / ("b" * 300)), "CheckpointError: cannot be written"),
    (
        saved({"optimizer": OPTIMIZER, "step": 8}),
        lambda f: converted(f, model_only=True),
        "CheckpointError: The checkpoint contains no model",
    ),
    (
        lambda f: (f / SAVING).mkdir(),
        lambda f: fullshard.convert(f / SAVING, f / "b.safetensors"),
        "CheckpointError: is an incomplete checkpoint",
    ),
    (
        put("manifest.json", "{}"),
        lambda f: fullshard.convert(f / "manifest.json", f / "b.safetensors"),
        "CheckpointError: is a single file of a checkpoint",
    ),
    (
        lambda f: (f / "a" / "manifest.json").mkdir(parents=True),
        lambda f: inspect(f / "a"),
        "CheckpointError: has no complete checkpoint ... a folder with the files",
    ),
    (lambda f: fullshard.convert("/proc/self/mem", f / "b.safetensors"), "CheckpointError: /proc/self/mem cannot be"),
    # Folders of PyTorch's `torch.distributed.checkpoint`, tensor by tensor; and of DeepSpeed.
    (
        save_small,
        lambda f: CheckpointSource(f).read("model.2.weight"),
        "DamagedCheckpointError: A checkpoint has no tensor of",
    ),
    (
        lambda f: write_checkpoint(f.parent, ENTRIES, {}, {}, lambda name: torch.ones(3)),
        "CheckpointError: The folder to write to already exists",
    ),
    (
        lambda f: write_checkpoint(f / "a", ENTRIES, {}, {}, lambda name: torch.ones(3)),
        "CheckpointError: A tensor does not match its entry",
    ),
    (DeepSpeedSource, "CheckpointError: is not a DeepSpeed checkpoint"),
]


@pytest.mark.parametrize("row", ASKED, ids=words_of)
def test_what_is_asked_for(tmp_path, row):
    assert_raises(row, tmp_path)


# What is there: FOLDER/a is made, and then converted.


def truncated(folder: Path) -> None:
    """A file of which half is there."""
    saved(WHOLE)(folder)
    (folder / "a").write_bytes((folder / "a").read_bytes()[:500])


def too_short(folder: Path) -> None:
    """A file whose directory says more than there is."""
    saved(WHOLE)(folder)
    data = bytearray((folder / "a").read_bytes())
    last = data.rfind(b"PK\1\2")
    struct.pack_into("<II", data, last + 20, 10**6, 10**6)
    (folder / "a").write_bytes(data)


def no_storage(folder: Path) -> None:
    """A pickle of something that stands where a storage should."""
    torch.save({"weight": torch.ones(4)}, folder / "whole.pt")
    data = (folder / "whole.pt").read_bytes()
    (folder / "a").write_bytes(data.replace(b"storage", b"garbage").replace(b"FloatStorage", b"FloatGarbage"))


def ranks(folder: Path) -> Iterator[tuple[int, Path]]:
    """As each of two ranks in turn, with the file that it saves."""
    (folder / "a").mkdir()
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        yield rank, folder / "a" / f"rank{rank}.pt"
        torch.distributed.destroy_process_group()


def parts(folder: Path, more: int = 0, key: str = "model") -> None:
    """What each of two ranks holds, as a program with PyTorch's FSDP saves it."""
    for rank, file in ranks(folder):
        whole = FSDP(nn.Linear(4, 4 + more * rank), use_orig_params=True)
        with FSDP.state_dict_type(whole, fullshard.StateDictType.SHARDED_STATE_DICT):
            torch.save({"model": {}, key: whole.state_dict()}, file)


def whole_models(folder: Path) -> None:
    """All of it, of each rank."""
    for _, file in ranks(folder):
        torch.save(WHOLE, file)


def no_shards(folder: Path) -> None:
    """A tensor of parts without their list."""
    (folder / "a").mkdir()
    module = ShardedTensor.__module__
    archive(folder / "a" / "rank0.pt", under("weight", f"c{module}\nShardedTensor\n)\x81".encode("latin1")))


def columns(folder: Path) -> None:
    """Parts of columns, with the number of their rank."""
    for rank, file in ranks(folder):
        weight = ones(ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]), 4, 4)
        weight.local_shards()[0].tensor.fill_(rank)
        torch.save({"model": {"weight": weight}}, file)


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: None, "CheckpointError: does not exist"),
    (saved(WHOLE, _use_new_zipfile_serialization=False), "CheckpointError: is in the format of torch.save"),
    (put("a"), "CheckpointError: is empty"),
    (put("a", "nothing of a model"), "CheckpointError: is not a checkpoint of a known format ... a file of torch.save"),
    (lambda f: (f / "a").mkdir(), "CheckpointError: is empty"),
    (put("a/rank-0.safetensors"), "CheckpointError: is an incomplete checkpoint: it has no manifest.json"),
    (lambda f: (f / "a" / SAVING).mkdir(parents=True), "CheckpointError: has no complete checkpoint"),
    (put("a/notes.txt"), "CheckpointError: is not a checkpoint of a known format ... notes.txt"),
    (truncated, "CheckpointError: is not a complete zip file (File is not a zip file)"),
    (too_short, "CheckpointError: is truncated ... 1,001,536 bytes"),
    (
        lambda f: (f / "a" / ".metadata").mkdir(parents=True),
        "CheckpointError: has no complete checkpoint ... a folder with the files",
    ),
    (whole_models, "CheckpointError: has 2 files of torch.save, none with parts of sharded tensors"),
    (lambda f: parts(f, more=2), "CheckpointError: belongs to a different checkpoint than the"),
    (no_shards, "CheckpointError: ShardedTensor is damaged (TypeError"),
    (lambda f: archive(f / "a", b"(iposix\nsystem\n."), "CheckpointError: the pickle uses INST, an opcode"),
    (no_storage, "CheckpointError: refers to something other than a tensor's storage"),
    (saved({"optimizer": {"state": {0: "lost"}, "param_groups": []}}), "CheckpointError: the state of an optimizer is"),
    (lambda f: parts(f, key="average"), "CheckpointError: a sharded tensor belongs to neither the model"),
    (
        saved({"weight": torch.ones(4, dtype=torch.complex64).conj()}),
        "CheckpointError: is not supported: a tensor is a conjugated or negated view",
    ),
    (
        created_and_saved(lambda: {"model": {"a": torch.eye(2).to_sparse()}}),
        "CheckpointError: contains a sparse tensor, which is not supported ... model.a ... to_dense()",
    ),
    (
        created_and_saved(lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}),
        "CheckpointError: contains a nested tensor, which is not supported ... model.a ... unbind()",
    ),
    (saved({("a", "b"): torch.ones(2)}), "CheckpointError: is not supported: a dict or set has a key of type tuple"),
    (
        lambda f: dcp.save({"weight": torch.ones(2), "at": datetime(2026, 1, 1)}, checkpoint_id=f / "a", no_dist=True),
        "CheckpointError: contains datetime.datetime, not a tensor or plain value",
    ),
    (saved(["nothing", "of", "a", "model"]), "CheckpointError: does not contain a state dict"),
]


@pytest.mark.parametrize("row", WRONG, ids=words_of)
def test_what_cannot_be_converted(tmp_path, row):
    prepare, words = row
    prepare(tmp_path)
    with raises(words):
        converted(tmp_path)


def test_parts_of_columns(tmp_path):
    columns(tmp_path)
    fullshard.convert(tmp_path / "a", tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["weight"].tolist() == [[0, 0, 1, 1]] * 4


def test_a_file_of_a_machine_of_another_byte_order(tmp_path, monkeypatch):
    saved(WHOLE)(tmp_path)
    monkeypatch.setattr(sys, "byteorder", "big")
    with raises("CheckpointError: was written on a machine with a different byte order"):
        converted(tmp_path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    saved(WHOLE)(tmp_path)
    with (
        TorchFileSource(tmp_path / "a") as source,
        (tmp_path / "a").open("r+b") as file,
        raises("DamagedCheckpointError: A file of a checkpoint is truncated ... 64 more bytes"),
    ):
        file.truncate(100)
        source.read("model.0.weight")


def test_a_pickle_that_is_too_large(tmp_path, monkeypatch):
    saved(WHOLE)(tmp_path)
    monkeypatch.setattr(pickles, "LARGEST", 100)
    with raises("CheckpointError: the pickle is too large for a checkpoint"):
        converted(tmp_path)


# Folders that DeepSpeed wrote, with something changed.

Content = dict[str, Any]


def frozen_of_another_size(content: Content) -> None:
    """A part of a frozen parameter that is too short."""
    content["frozen_param_fragments"] = {name: torch.ones(1) for name in content["frozen_param_fragments"]}


def buffer_that_is_a_parameter(content: Content) -> None:
    """One name for both."""
    name = next(iter(content["frozen_param_shapes"]))
    content["buffer_names"] = [*content["buffer_names"], name]
    content["module"][name] = torch.ones(3)


CHANGED: list[tuple[str, Callable[[Content], object], str]] = [
    (
        "optim",
        lambda content: content["optimizer_state_dict"]["fp32_flat_groups"].append(torch.ones(3)),
        "CheckpointError: has different numbers of parameter groups and flat groups",
    ),
    ("model", frozen_of_another_size, "CheckpointError: a partition has the wrong size"),
    (
        "model",
        lambda content: content["module"].update({"more.weight": torch.ones(3)}),
        "CheckpointError: has no elements of a parameter",
    ),
    (
        "model",
        lambda content: content["module"].update(dict.fromkeys(content["buffer_names"], 7)),
        "CheckpointError: has a value in place of a tensor",
    ),
    ("model", buffer_that_is_a_parameter, "CheckpointError: has two tensors of the same name"),
]


@pytest.mark.parametrize("row", CHANGED, ids=words_of)
def test_a_file_of_deepspeed_that_was_changed(tmp_path, row):
    step = shutil.copytree(ZERO3, tmp_path / "zero3") / "global_step2"
    kind, change, words = row
    (file,) = step.glob(f"*rank_0_*{kind}_states.pt")
    rewritten(file, change)
    with raises(words):
        fullshard.convert(step, tmp_path / "a.safetensors")
