"""Safetensors folders: written in bounded memory, read by the library that defines them, and by us into any layout."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import struct
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import files
import fullshard
from fullshard import CheckpointError, ConfigError
from fullshard.errors import DamagedCheckpointError
from fullshard.store import in_place
from fullshard.store.formats import safetensors_folder
from fullshard.store.formats.own import write_checkpoint
from fullshard.store.formats.safetensors_folder import SafetensorsSource, new_safetensors
from fullshard.store.formats.safetensors_header import DTYPES
from fullshard.store.names import TensorEntry
from models import EXAMPLES
from quantised import GatheredInt8, StoredInt8, quantise
from test_tensor_parallel import Model, parallel_model
from ways import error_of, named_error, on_ranks, shard


def files_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as the library reads them."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def state_of(name: str) -> dict[str, Tensor]:
    """An example's state, a tied parameter once."""
    model = EXAMPLES[name].make()
    return {key: p.detach() for key, p in model.named_parameters()} | dict(model.named_buffers())


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(files.same(got[key], want[key]) for key in want)


# There and back.


@pytest.mark.parametrize(("way", "name"), [("rows", "odd_mlp"), ("flat", "tied_across"), ("wrapper", "tied_across")])
@on_ranks
def test_there_and_back(tmp_path, way, name):
    """Saved, read by the library, and loaded into a model with other numbers, which then is the same."""
    example = EXAMPLES[name]
    model = shard(example.make(), way, example.units, keep=True)
    inputs = example.batch(0, dist.get_rank())[0]
    with torch.no_grad():
        model(inputs)  # units stay gathered
    fullshard.save_safetensors(model, tmp_path / "one")
    fullshard.save_safetensors(model, tmp_path / "many", max_file_bytes=2000, dtype=torch.bfloat16)
    want = state_of(name)
    assert os.listdir(tmp_path / "one") == ["model.safetensors"] and same(files_in(tmp_path / "one"), want)
    narrow = {key: t.bfloat16() if t.is_floating_point() else t for key, t in want.items()}
    assert same(files_in(tmp_path / "many"), narrow)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in narrow.values())
    held = {file: [narrow[n].nbytes for n, f in index["weight_map"].items() if f == file]
            for file in set(index["weight_map"].values())}  # fmt: skip
    assert set(os.listdir(tmp_path / "many")) == {*held, "model.safetensors.index.json"} and len(held) > 1
    assert all(sum(sizes) <= 2000 or len(sizes) == 1 for sizes in held.values())

    for saved, expected in (("one", want), ("many", narrow)):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
            model(inputs)  # gathered, of the wrong numbers
        assert fullshard.load_safetensors(model, tmp_path / saved) == ([], [])
        got = dict(fullshard.full_parameters(model, buffers=True))
        assert same(got, {key: t.to(want[key].dtype) for key, t in expected.items()})
        reference = example.make()
        reference.load_state_dict(got, strict=False)
        model.eval(), reference.eval()
        assert torch.equal(model(inputs), reference(inputs)), "what was gathered before is computed with"


@on_ranks
def test_buffers_are_kept(tmp_path):
    """The first rank's are written, and every rank reads them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    fullshard.fully_shard(model)
    model[1].running_mean.fill_(5.0 + dist.get_rank())
    model[1].num_batches_tracked.fill_(7)
    fullshard.save_safetensors(model, tmp_path / "saved", dtype=torch.float16)
    saved = files_in(tmp_path / "saved")
    assert saved.keys() == model.state_dict().keys()
    assert saved["1.num_batches_tracked"].item() == 7 and saved["1.running_mean"].dtype == torch.float16
    model[1].num_batches_tracked.zero_()
    fullshard.load_safetensors(model, tmp_path / "saved")
    assert model[1].running_mean.tolist() == [5.0] * 3 and model[1].num_batches_tracked.item() == 7


def load_elsewhere(folder: Path) -> None:
    """Into models made without values, on other ranks; and only what this rank owns is read."""
    example = EXAMPLES["odd_mlp"]
    want, read, plain = state_of("odd_mlp"), [], SafetensorsSource.fill

    def counting(source: SafetensorsSource, copies: list[Any]) -> None:
        read.extend(copy.target.numel() for copy in copies)
        plain(source, copies)

    for way in ("rows", "flat", "wrapper"):
        with torch.device("meta"):
            model = example.build()
        materialize = {"param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False)}
        model = shard(model, way, example.units, **(materialize if way == "wrapper" else {}))
        if way != "wrapper":
            model.to_empty(device="cpu")
        read.clear()
        with mock.patch.object(SafetensorsSource, "fill", counting):
            fullshard.load_safetensors(model, folder)
        assert same(dict(fullshard.full_parameters(model)), want)
        everyone: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, sum(read))
        assert sum(everyone) == sum(t.numel() for t in want.values()), (way, everyone)


def test_loads_on_other_ranks_what_each_owns(run_ranks, tmp_path):
    save_file(state_of("odd_mlp"), tmp_path / "model.safetensors")
    run_ranks(load_elsewhere, tmp_path, world=3)


@on_ranks(world=4)
def test_tensor_parallel_parameters(tmp_path):
    model = parallel_model(fullshard, (2, 2), hidden=9)
    fullshard.save_safetensors(model, tmp_path / "saved")
    want = {name: p.detach() for name, p in Model(hidden=9).named_parameters()}
    assert same(files_in(tmp_path / "saved"), want)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fullshard.load_safetensors(model, tmp_path / "saved")
    assert same(dict(fullshard.full_parameters(model)), want)


def test_without_ranks(tmp_path):
    """In one process, of a plain model, with every dtype that files have; odd sizes stay aligned."""
    values = [torch.arange(3).to(dtype) for dtype in DTYPES.values()] + [torch.tensor(2.0), torch.empty(0, 4)]
    model = nn.Module()
    for i, value in enumerate(values):
        model.register_buffer(f"b{i}", value.clone())
    (tmp_path / "saved").mkdir()  # empty: as good as none
    fullshard.save_safetensors(model, tmp_path / "saved")
    read = load_file(tmp_path / "saved" / "model.safetensors")
    for buffer in model.buffers():
        buffer.zero_()
    fullshard.load_safetensors(model, tmp_path / "saved")
    assert read.keys() == model.state_dict().keys()
    for i, value in enumerate(values):
        assert files.same(read[f"b{i}"], value) and files.same(model.state_dict()[f"b{i}"], value), value.dtype


@on_ranks
def test_tensor_subclasses_are_refused(tmp_path):
    """Written: refused by name. Read into: as well, and nothing is changed."""
    folder = tmp_path / "saved"
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(GatheredInt8(torch.ones(4, 4)))
    fullshard.fully_shard(model)
    error = error_of(lambda: fullshard.save_safetensors(model, folder / "own"))
    problems = named_error(error, "weight", "tensor subclass", kinds=CheckpointError)
    assert not folder.exists()
    dist.barrier()

    fullshard.save_safetensors(fullshard.fully_shard(nn.Linear(4, 4, bias=False)), folder / "plain")
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(StoredInt8(*quantise(model.weight.data)), requires_grad=False)
    fullshard.fully_shard(model)
    before = model.weight._local_tensor.quantised.clone()
    error = error_of(lambda: fullshard.load_safetensors(model, folder / "plain"))
    assert torch.equal(model.weight._local_tensor.quantised, before)
    return problems + named_error(error, "nothing was loaded", "weight", "StoredInt8", kinds=CheckpointError)


# What does not fit is refused on every rank, and nothing is changed.


NORM, TIED = "blocks.1.norm1.weight", "head.weight"
WRONG = (
    (lambda state: state.pop(NORM), NORM),
    (lambda state: state.update(stranger=torch.zeros(1)), "stranger"),
    (lambda state: state.update({NORM: torch.zeros(3, 2)}), "(3, 2)"),
    (lambda state: state.update({NORM: state[NORM].int()}), "torch.int32"),
    (lambda state: state.update({NORM: state[NORM].to(torch.float8_e4m3fn)}), "float8"),
    (lambda state: state.update({TIED: torch.zeros_like(state["tokens.weight"])}), "different values"),
)


@on_ranks
def test_what_does_not_fit(tmp_path):
    """Each error leaves the model as it was."""
    example = EXAMPLES["tied_across"]
    model = shard(example.make(), "flat", example.units)
    before = {name: t.clone() for name, t in fullshard.full_parameters(model)}
    for number, (change, said) in enumerate(WRONG):
        path = tmp_path / f"{number}.safetensors"
        if dist.get_rank() == 0:
            state = {name: t.clone() + 1 for name, t in state_of("tied_across").items()}
            change(state)
            save_file(state, path)
        dist.barrier()
        error = error_of(lambda: fullshard.load_safetensors(model, path))  # noqa: B023
        assert not named_error(error, said, kinds=CheckpointError), error
        assert same(dict(fullshard.full_parameters(model)), before)


@on_ranks
def test_names_that_are_left_alone(tmp_path):
    example = EXAMPLES["tied_across"]
    want = state_of("tied_across")
    state = {name: t + 1 for name, t in want.items() if name != "norm.weight"}
    state[TIED] = state.pop("tokens.weight")
    if dist.get_rank() == 0:
        save_file({**state, "stranger": torch.zeros(1)}, tmp_path / "model.safetensors")
    dist.barrier()
    model = shard(example.make(), "rows", example.units)
    assert fullshard.load_safetensors(model, tmp_path, strict=False) == (["norm.weight"], ["stranger"])
    got = dict(fullshard.full_parameters(model))
    assert torch.equal(got["norm.weight"], want["norm.weight"])
    assert torch.equal(got["tokens.weight"], want["tokens.weight"] + 1), "given under its other name"


def cannot_write(folder: Path) -> str:
    """The first rank's disk is full."""
    model = shard(EXAMPLES["odd_mlp"].make(), "rows", EXAMPLES["odd_mlp"].units)
    rank = dist.get_rank()
    fsync = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch.object(safetensors_folder.os, "fsync", fsync) if rank == 0 else contextlib.nullcontext():
        error = error_of(
            lambda: fullshard.save_safetensors(model, folder / "saved", max_file_bytes=300, bucket_bytes=300)
        )
    dist.barrier()
    assert isinstance(error, CheckpointError)
    return str(error)


def test_a_failing_write_is_told_on_all_ranks(run_ranks, tmp_path):
    assert all("No space left" in text for text in run_ranks(cannot_write, tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_what_was_announced(tmp_path):
    entries = {"model.a": TensorEntry((2,), torch.float32), "model.b": TensorEntry((3,), torch.int8)}
    right = {"model.a": torch.ones(2), "model.b": torch.ones(3, dtype=torch.int8)}
    wrong = {"optimizer.state.a.exp_avg": TensorEntry((2,), torch.float32)}
    with pytest.raises(CheckpointError, match=r"optimizer\.state"), new_safetensors(tmp_path / "x", wrong):
        pass
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(CheckpointError, match="match its entry"), new_safetensors(tmp_path / "x", entries) as new:
            new[1]({**right, "model.a": wrong}.__getitem__)
    assert not list(tmp_path.iterdir())
    with new_safetensors(tmp_path / "x", entries) as (folder, write):
        write(right.__getitem__)
        assert folder.is_dir() and not (tmp_path / "x").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


# A folder is not trusted.


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header(facts: str, name: str = "a") -> bytes:
    return f'{{"{name}": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]{facts}}}}}'.encode()


HEADERS = {
    "minus zero": header("").replace(b"[0,", b"[-0,"),
    "half a character": header("", r"\ud800"),
    "not a number": header(', "x": NaN'),
    "infinity": header(', "x": -Infinity'),
    "a number without end": header(', "x": 1e999'),
    "deep": header(f', "x": {"[" * 300}{"]" * 300}'),
    "a sign": header("").replace(b"[1]", b"[+1]"),
    "text as a size": header("").replace(b"[1]", b'["1"]'),
}
DAMAGED = {what: raw(text, bytes(4)) for what, text in HEADERS.items()} | {
    "half a character of metadata": raw(b'{"__metadata__": {"a": "\\ud800"}}'),
    "empty": b"",
    "header longer than the file": raw({"a": tensor(0, 4, [1])}, bytes(4), length=1 << 40),
    "header of 2^64 - 1": raw({}, length=2**64 - 1),
    "no JSON": raw(b"\xff\xfe{"),
    "nested": raw(b"[" * 100_000),
    "a list": raw([]),
    "truncated": raw({"a": tensor(0, 8, [2])}, bytes(7)),
    "too long": raw({"a": tensor(0, 8, [2])}, bytes(9)),
    "overlapping": raw({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)),
    "a hole": raw({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12)),
    "shape bigger than data": raw({"a": tensor(0, 8, [3])}, bytes(8)),
    "shape that overflows": raw({"a": tensor(0, 0, [2**62, 2**62])}),
    "a million dims": raw({"a": tensor(0, 4, [2**62] * 1_000_000)}, bytes(4)),
    "negative shape": raw({"a": tensor(0, 4, [-1, -1])}, bytes(4)),
    "shape of booleans": raw({"a": tensor(0, 4, [True])}, bytes(4)),
    "offsets backwards": raw({"a": tensor(4, 0, [1])}, bytes(4)),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "metadata": raw({"__metadata__": {"a": 1}}),
    "a name twice": raw(b'{"a": %b, "a": %b}' % ((json.dumps(tensor(0, 4, [1])).encode(),) * 2), bytes(4)),
}


def test_damaged_files_are_refused(tmp_path):
    """With words of where; and the library refuses them too."""
    path = tmp_path / "model.safetensors"
    for what, data in DAMAGED.items():
        path.write_bytes(data)
        error = error_of(lambda: SafetensorsSource(tmp_path))
        assert isinstance(error, DamagedCheckpointError) and str(tmp_path) in str(error), what
        assert not taken_by(load_file, path) or what == "a name twice", what


def test_an_unknown_dtype_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(raw({"a": tensor(0, 4, [1], "F31")}, bytes(4)))
    with pytest.raises(CheckpointError, match="F31"):
        SafetensorsSource(tmp_path)


def index(folder: Path, weight_map: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("how", ["../secret.safetensors", "absolute", "link", "sub/../../secret.safetensors", "..", ""])
def test_names_cannot_leave_the_folder(tmp_path, how):
    secret = tmp_path / "secret.safetensors"
    save_file({"a": torch.ones(1)}, secret)
    name = {"absolute": str(secret), "link": "model-00001.safetensors"}.get(how, how)
    folder = index(tmp_path / "folder", {"a": name})
    if how == "link":
        (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside its folder"):
        SafetensorsSource(folder)


def test_links_of_the_hub_cache_and_within_the_folder_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir(), snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "beef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    with SafetensorsSource(snapshot) as source:
        assert source.read("model.a").item() == 1
    (tmp_path / "alias").symlink_to(snapshot)  # the folder that a user names may be a link
    assert SafetensorsSource(tmp_path / "alias").entries == {"model.a": TensorEntry((1,), torch.float32)}


def test_an_index_that_is_not_of_its_files(tmp_path):
    """Names that a file or the index lacks, a file that is not there, and what is no index."""
    one, two = "one.safetensors", "two.safetensors"
    save_file({"a": torch.ones(1), "d": torch.ones(1)}, tmp_path / one)
    save_file({"b": torch.ones(1)}, tmp_path / two)
    for wrong in ({"a": one, "d": one, "b": two, "c": two}, {"a": one}, {"b": two, "a": "three.safetensors"},
                  {}, {"a": 1}, []):  # fmt: skip
        with pytest.raises(DamagedCheckpointError):
            SafetensorsSource(index(tmp_path, wrong))
    assert len(SafetensorsSource(index(tmp_path, {"a": one, "d": one, "b": two})).entries) == 3


def test_one_name_in_two_files(tmp_path):
    folder = index(tmp_path / "folder", {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.ones(1)}, folder / "two.safetensors")
    with pytest.raises(DamagedCheckpointError, match="do not match their index"):
        SafetensorsSource(folder)


def test_two_models_in_one_folder(tmp_path):
    save_file({"a": torch.ones(1)}, index(tmp_path, {"a": "model.safetensors"}) / "model.safetensors")
    with pytest.raises(CheckpointError, match="two models"):
        SafetensorsSource(tmp_path)
    assert list(SafetensorsSource(tmp_path / "model.safetensors.index.json").entries) == ["model.a"]
    assert list(SafetensorsSource(tmp_path / "model.safetensors").entries) == ["model.a"]


def test_rectangles_of_unaligned_tensors(tmp_path):
    """Other writers need not align: what is read is right all the same."""
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    header = {"a": tensor(0, 1, [1], "U8"), "b": tensor(1, 25, [2, 3])}
    (tmp_path / "model.safetensors").write_bytes(raw(header, b"\7" + values.numpy().tobytes()))
    with SafetensorsSource(tmp_path) as source:
        assert torch.equal(source.read("model.b"), values)
        assert torch.equal(source.read("model.b", (1, 1), (1, 2)), values[1:, 1:])


# What the library refuses, and what changes under a reader.


def taken_by(reader: Any, path: Path) -> bool:
    try:
        reader(path)
    except (CheckpointError, SafetensorError):
        return False
    return True


def by_us(path: Path) -> None:
    with SafetensorsSource(path) as source:
        for name in source.entries:
            source.read(name)


def test_what_the_library_refuses_is_refused(tmp_path):
    """Headers with bytes changed at random; and two in which we differ, or not."""
    path, rng = tmp_path / "model.safetensors", random.Random(time.time_ns() // 10**9 // 86400)
    good = [header(""), header("", "name.weight"), b'{"__metadata__": {"a": "b"}}', b"{}   "]
    for _ in range(400):
        text = bytearray(rng.choice(good))
        at = rng.randrange(len(text))
        text[at : at + rng.randrange(2)] = bytes([rng.choice(b'0123456789{}[]",:-.eE \\ud' + bytes(range(256)))])
        path.write_bytes(raw(bytes(text), b"" if b"F32" not in text else bytes(4)))
        assert taken_by(load_file, path) or not taken_by(by_us, path), text
    path.write_bytes(raw(b'{"__metadata__": null, "a": %b}' % header("")[6:-1], bytes(4)))
    assert taken_by(load_file, path) and taken_by(by_us, path)
    path.write_bytes(raw({"a": tensor(0, 0, [0, 2**62, 2**62])}))
    assert not taken_by(by_us, path), "torch cannot make it"


@pytest.mark.parametrize("left", [0, 1000])
def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path, left):
    """Mapped into memory it would end the process."""
    path = tmp_path / "model.safetensors"
    model = nn.Linear(100, 100)
    save_file(dict(model.state_dict()), path)

    def cut(name: str) -> str:
        os.truncate(path, left)
        return name

    with pytest.raises(DamagedCheckpointError, match=r"truncated(.|\n)*model\.safetensors"):
        fullshard.load_safetensors(model, tmp_path, rename=cut)


def test_two_names_that_become_one(tmp_path):
    model = nn.Linear(2, 2, bias=False)
    save_file({"old.weight": torch.ones(2, 2), "new.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"two tensors in the files one name(.|\n)*old\.weight"):
        fullshard.load_safetensors(model, tmp_path, rename=lambda name: name.partition(".")[2])
    with pytest.raises(ConfigError, match="bucket_bytes= is invalid"):
        fullshard.save_safetensors(model, tmp_path / "other", bucket_bytes="1GB")


def test_what_killed_saves_left_is_removed(tmp_path):
    """By a later save of the same folder that is complete; but not what a process still writes."""
    before = ".saved.saving-"
    for name in (f"{before}01234567", f"{before}89abcdef", ".other.saving-01234567", f"{before}notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"1")
    with in_place._locked(tmp_path / f"{before}89abcdef"):
        fullshard.save_safetensors(nn.Linear(3, 2), tmp_path / "saved")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"saved", f"{before}89abcdef", ".other.saving-01234567", f"{before}notes"}


@pytest.mark.parametrize("what", ["a write", "the last sync", "room"])
def test_a_save_that_fails_leaves_no_folder(tmp_path, monkeypatch, what):
    target = tmp_path / "runs" / "a" / "saved"
    fails = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    sync = mock.Mock(side_effect=lambda path: path == target.parent and fails())
    patched = {"a write": (os, "fsync", fails), "room": (shutil, "disk_usage", fails),
               "the last sync": (in_place, "sync", sync)}  # fmt: skip
    monkeypatch.setattr(*patched[what])

    def own() -> None:
        write_checkpoint(target, {"model.a": TensorEntry((2,), torch.float32)}, {}, {}, lambda name: torch.ones(2))

    for save in (lambda: fullshard.save_safetensors(nn.Linear(3, 2), target), own)[: 1 if what == "room" else 2]:
        with pytest.raises((CheckpointError, OSError), match="No space"):
            save()
        assert not list(tmp_path.iterdir()), list(tmp_path.rglob("*"))
