"""A checkpoint is untrusted input: nothing in it runs, no name leads out of its folder, no number takes the memory.

Each attack is made by `forged.py` with hashes that are right, so that only what reads it can refuse it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from files import Runs
from forged import DATA, DOTS, ONE_HASH, STEP, Change, Forged, copied, facts, outcome, same, save_small, saved
from fullshard import CheckpointError, FullshardError
from fullshard.store.pickles import look_through

MOST_MEMORY = 100 * 2**20
"""Bytes that an attack may cost, besides what it is."""
BIG = 10**18
WEIGHT = "model.0.weight"  # [4, 3], float32


def runs(forged: Forged) -> Runs:
    return Runs(forged.folder.parent / "canary")


def outside(forged: Forged) -> Path:
    return forged.folder.parent.parent / "outside.distcp"


def write_manifest(forged: Forged) -> None:
    """Signed; the files' hashes stay as they are."""
    forged.write_manifest(json.dumps(forged.manifest).encode())


def record(made: Any, name: str = WEIGHT) -> Change:
    """Another record in a tensor's place; `made` is saved, or makes the bytes of the forged folder."""
    return lambda forged: forged.put_record(name, made(forged) if callable(made) else saved(made))


def foreign(setting: str, value: Any) -> Change:
    """Where another program's checkpoint keeps a setting of the optimizer: without a manifest."""

    def attack(forged: Forged) -> None:
        forged.put_record(f"optimizer.param_groups.0.{setting}", saved(value(forged)))
        forged.sign()
        (forged.folder / "manifest.json").unlink()

    return attack


def names_a_file(name: str) -> Change:
    def attack(forged: Forged) -> None:
        outside(forged).write_bytes((forged.folder / DATA).read_bytes())
        forged.place(WEIGHT).relative_path = name.format(outside=outside(forged))

    return attack


def linked(path: Callable[[Forged], Path]) -> Change:
    """What is there is moved out, and a link to it takes its place."""

    def attack(forged: Forged) -> None:
        path(forged).rename(outside(forged))
        path(forged).symlink_to(outside(forged))

    return attack


def replaced(path: Callable[[Forged], Path], put: Callable[[Path], object]) -> Change:
    return lambda forged: (path(forged).unlink(), put(path(forged)))[0]


def latest(forged: Forged) -> Path:
    return forged.folder.parent / "latest"


def metadata_of_shape(*shape: int) -> Change:
    """The tensor of another shape, told in as many places as there are."""

    def attack(forged: Forged) -> None:
        for name in ("state.weights", WEIGHT):
            told = forged.metadata.state_dict_metadata[name]
            told.size, told.chunks[0].sizes = torch.Size(shape), torch.Size(shape)
            told.chunks[0].offsets = torch.Size([0] * len(shape))
            forged.manifest["tensors"][name]["shape"] = list(shape)
            for index, info in list(forged.metadata.storage_data.items()):
                if index.fqn == name:
                    del forged.metadata.storage_data[index]
                    object.__setattr__(index, "offset", torch.Size([0] * len(shape)))
                    forged.metadata.storage_data[index] = info

    return attack


def parts_of_weights(size: int, chunks: list[ChunkStorageMetadata]) -> Change:
    """A record of 6 elements, said to be these parts of one tensor."""

    def attack(forged: Forged) -> None:
        info, kind = forged.place("state.weights"), next(type(index) for index in forged.metadata.storage_data)
        told = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([size]), chunks)
        forged.metadata.state_dict_metadata["state.weights"] = told
        forged.metadata.storage_data |= {kind("state.weights", chunk.offsets): info for chunk in chunks}
        forged.manifest["tensors"]["state.weights"] = {"shape": [size], "dtype": "float32"}

    return attack


MANY = [ChunkStorageMetadata(torch.Size([6 * i]), torch.Size([6])) for i in range(2000)]


def place_of(**changes: int) -> Change:
    return lambda forged: vars(forged.place(WEIGHT)).update(changes)


def parts_of(*rows: tuple[int, int]) -> Change:
    """The weight, told to be of these parts: first row and number of rows."""

    def attack(forged: Forged) -> None:
        info, kind = forged.place(WEIGHT), next(type(index) for index in forged.metadata.storage_data)
        told = forged.metadata.state_dict_metadata[WEIGHT]
        told.chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([n, 3])) for at, n in rows]
        parts = {}
        for at, n in rows:
            forged.put_record(WEIGHT, saved(torch.zeros(max(n, 0), 3)))
            parts[kind(WEIGHT, torch.Size([at, 0]))] = type(info)(info.relative_path, info.offset, info.length)
        kept = {i: one for i, one in forged.metadata.storage_data.items() if i.fqn != WEIGHT}
        forged.metadata.storage_data = kept | parts

    return attack


def compressed(zeros: int) -> Callable[[Forged], bytes]:
    """The record with packed elements: so many zeros."""

    def repacked(forged: Forged) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(forged.record(WEIGHT))) as old, zipfile.ZipFile(buffer, "w") as new:
            for info in old.infolist():
                packed = zipfile.ZipInfo(info.filename)
                packed.compress_type = zipfile.ZIP_DEFLATED if info.filename.endswith("data/0") else zipfile.ZIP_STORED
                with new.open(packed, "w") as member, old.open(info) as source:
                    source._expected_crc = None  # checksums were not computed
                    for at in range(0, zeros if packed.compress_type else 1, 2**20):
                        member.write(bytes(min(2**20, zeros - at)) if packed.compress_type else source.read())
        return buffer.getvalue()

    return repacked


def directory_says(field: int, value: Callable[[int], int]) -> Callable[[Forged], bytes]:
    """The record, whose zip directory says something else of `data/0`, in 4 bytes from `field` on."""

    def changed(forged: Forged) -> bytes:
        data = bytearray(forged.record(WEIGHT))
        begin = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
        struct.pack_into("<I", data, begin + field, value(len(data)))
        return bytes(data)

    return changed


def metadata_is(data: bytes) -> Change:
    return lambda forged: forged.sign(metadata=data)


def huge_metadata(forged: Forged) -> None:
    os.truncate(forged.folder / ".metadata", 2**40)  # takes no room on the disk
    forged.manifest["files"][".metadata"] = {"bytes": 2**40, "sha256": ["0" * 64] * 2**16}


def value_of(value: Any, *path: Any) -> Change:
    """Another one among the manifest's values; None removes it."""

    def attack(forged: Forged) -> None:
        place = forged.manifest["values"]
        for key in path[:-1]:
            place = place[key]
        place.pop(path[-1])
        place |= {} if value is None else {path[-1]: value}

    return attack


def order(value: Any) -> Change:
    return value_of(value, "state", "order")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def long_name(forged: Forged) -> None:
    forged.metadata.state_dict_metadata[f"model.{DOTS}"] = forged.metadata.state_dict_metadata[WEIGHT]
    forged.manifest["tensors"][f"model.{DOTS}"] = forged.manifest["tensors"][WEIGHT]


def a_name_twice(forged: Forged) -> None:
    text = json.dumps(forged.manifest, separators=(",", ":"))
    twice = text.replace('"step":3', '"step":4,"step":3')
    assert twice != text
    forged.write_manifest(twice.encode())


SIGNED: dict[str, tuple[Change, str]] = {
    "code in metadata": (lambda f: f.metadata.planner_data.update(x=(runs(f),)), "posix.system"),
    "code in a record": (record(lambda f: saved(runs(f))), "record"),
    "code beside a tensor": (record(lambda f: saved([torch.zeros(4, 3), runs(f)])), "record"),
    "a file in the folder above": (names_a_file("../outside.distcp"), "not in its own folder"),
    "a file by an absolute path": (names_a_file("{outside}"), "not in its own folder"),
    "a file with a backslash": (names_a_file("..\\outside.distcp"), "not in its own folder"),
    "a file with a zero": (names_a_file("outside\0.distcp"), "not in its own folder"),
    "the folder itself": (names_a_file("."), "not in its own folder"),
    "a huge shape": (metadata_of_shape(BIG), "is kept in"),
    "a shape beyond all numbers": (metadata_of_shape(BIG, BIG, BIG), "shape"),
    "a shape larger than its record": (metadata_of_shape(10**9), "bytes"),
    "a shape below zero": (metadata_of_shape(-2, -6), "damaged"),
    "no parts of a huge tensor": (parts_of_weights(BIG, []), "elements"),
    "one part many times": (parts_of_weights(6 * len(MANY), MANY), "bytes"),
    "an offset below zero": (place_of(offset=-512), "damaged"),
    "a length below zero": (place_of(length=-1), "damaged"),
    "an offset beyond the file": (place_of(offset=2**61), "truncated"),
    "a length of two records": (place_of(length=1), "bytes"),
    "parts that overlap": (parts_of((0, 2), (1, 2)), "twice"),
    "a part that is missing": (parts_of((0, 2)), "not hold all elements"),
    "a part twice, another missing": (parts_of((0, 2), (1, 1), (3, 1)), "twice"),
    "a part outside": (parts_of((0, 2), (3, 2)), "part at"),
    "a part below zero": (parts_of((-1, 2), (1, 3)), "part at"),
    "a record of another dtype": (record(torch.zeros(4, 3, dtype=torch.float64)), "float64"),
    "a record of another shape": (record(torch.zeros(3, 4)), "shape"),
    "a record of a stretched number": (record(torch.zeros(1).expand(10**9)), "shape"),
    "a record that is no tensor": (record({"a": 1}), "record"),
    "a record that is text": (record(lambda f: b"no zip" * 50), "record"),
    "a packed record": (record(compressed(48)), "compressed"),
    "a bomb": (record(compressed(2**27)), "compressed"),
    "data beyond its record": (record(directory_says(42, lambda size: size - 40)), "beyond the record"),
    "data of two sizes": (record(directory_says(20, lambda size: 4)), "compressed"),  # its neighbour's for the rest
    "deep values": (order(nested(400)), "nested"),
    "groups of no kind": (value_of([1], "optimizer", "param_groups"), "groups"),
    "groups of numbers": (value_of([{"params": [1]}], "optimizer", "param_groups"), "groups"),
    "groups without parameters": (value_of(None, "optimizer", "param_groups", 0, "params"), "groups"),
    "a rate in words": (value_of("0.1", "optimizer", "param_groups", 0, "lr"), "different type"),
    "state of no kind": (value_of([1], "optimizer", "scalars"), "optimizer state"),
    "a tensor that is not there": (order({"$tensor": "model.none"}), "missing"),
    "a value of a new kind": (order({"$code": "os.system"}), "does not know"),
    "a device that is none": (order({"$device": "nowhere"}), "does not know"),
    "the manifest tells of others": (
        lambda f: f.manifest["tensors"][WEIGHT].update(dtype="float64"), "different tensors"),
    "a long path": (lambda f: f.metadata.planner_data.update({WEIGHT: ("model", DOTS)}), "not of names and numbers"),
    "a long name": (long_name, "1000006 characters"),
    "keys of one hash": (
        lambda f: setattr(f.metadata, "planner_data", dict.fromkeys(ONE_HASH, ("model",))),
        "more than 10000 integers"),
    "keys of one hash in values": (order({"$pairs": [[key, 0] for key in ONE_HASH]}), "does not know"),
    "tuples of one hash": (order({"$set": [{"$tuple": [key]} for key in ONE_HASH]}), "does not know"),
    "a key twice": (order({"$pairs": [[1, "right"], [1, "wrong"]]}), "does not know"),
}  # fmt: skip
"""What is made of a checkpoint before it is signed, and a word in the error."""

MANIFESTS: dict[str, tuple[Change, str]] = {
    "the manifest names a file above": (
        lambda f: f.manifest["files"].update({"../outside.distcp": {"bytes": 0, "sha256": []}}),
        "not in its own folder"),
    "huge metadata": (huge_metadata, "too large"),
    "values of no kind": (lambda f: f.manifest.update(values=[1]), "manifest"),
    "values of other ranks": (lambda f: f.manifest.update(ranks=[{"rng": 1}] * 7), "7 ranks"),
    "a step below zero": (lambda f: f.manifest.update(step=-1), "manifest"),
    "a world that is text": (lambda f: f.manifest.update(world="4"), "manifest"),
    "a tie to nothing": (lambda f: f.manifest.update(ties={"a": "b"}), "tie"),
    "the manifest hides a file": (lambda f: f.manifest["files"].pop(DATA), "does not tell of a file"),  # nor its hash
}  # fmt: skip
"""What is made of the manifest alone."""

AS_IT_IS: dict[str, tuple[Change, str]] = {
    "code instead of metadata": (lambda f: f.sign(metadata=pickle.dumps(runs(f), protocol=0)), "instruction"),
    "code in a value": (foreign("lr", runs), "record"),
    "a file is a link": (linked(lambda f: f.folder / DATA), "missing"),
    "the manifest is a link": (linked(lambda f: f.folder / "manifest.json"), "names no whole checkpoint"),
    "the step is a link": (linked(lambda f: f.folder), "names no whole checkpoint"),
    "latest is a link": (replaced(latest, lambda path: path.symlink_to("/dev/zero")), "latest"),
    "latest is a pipe": (replaced(latest, os.mkfifo), "latest"),
    "the data is a pipe": (replaced(lambda f: f.folder / DATA, os.mkfifo), "missing"),
    "room for many objects": (metadata_is(b"\x80\x02Nr\xff\xff\xff\x7f."), "object number"),  # LONG_BINPUT: of 16 GiB
    "a long bytearray": (metadata_is(b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"."), "instruction"),
    "a huge manifest": (lambda f: os.truncate(f.folder / "manifest.json", 2**40), "too large"),
    "deep JSON": (lambda f: f.write_manifest(b'{"values":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "manifest"),
    "keys of one hash in a foreign setting": (
        foreign("betas", lambda f: dict.fromkeys(ONE_HASH, 0)), "more than 10000 integers"),
    "a name twice": (a_name_twice, "twice"),
}  # fmt: skip
"""Nothing is signed but by the attack."""

ATTACKS = {
    name: (change, word, sign)
    for table, sign in ((SIGNED, Forged.sign), (MANIFESTS, write_manifest), (AS_IT_IS, lambda forged: None))
    for name, (change, word) in table.items()
}


def peak(anew: bool = False) -> int:
    """The most bytes of memory that this process has had; from now on, if `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with one checkpoint, and what it holds."""
    root = tmp_path_factory.mktemp("whole")
    return root, save_small(root)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(whole: Any, tmp_path: Path, attack: str) -> None:
    root = copied(whole[0], tmp_path / "root")
    change, word, sign = ATTACKS[attack]
    change(forged := Forged(root / STEP))
    sign(forged)
    before = peak(anew=True)
    error, unchanged, _ = outcome(root / STEP if not (root / STEP / "manifest.json").exists() else root)
    assert isinstance(error, CheckpointError) and word in str(error) and len(str(error)) < 2000, error
    assert unchanged and not (root / "canary").exists() and peak() - before < MOST_MEMORY


def test_forging_alone_is_no_attack(whole: Any, tmp_path: Path) -> None:
    """What is signed anew and not changed loads: the attacks are refused for what they are."""
    root = copied(whole[0], tmp_path / "root")
    forged = Forged(root / STEP)
    forged.put_record(WEIGHT, forged.record(WEIGHT))
    forged.sign()
    error, _, values = outcome(root)
    assert error is None and same(values, whole[1])
    parts_of((0, 3), (3, 1))(forged)
    forged.sign()
    error, _, values = outcome(root)
    assert error is None and values[WEIGHT].abs().sum() == 0


# Bytes at random.


ENDS = [0, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, swap, repeat, blank, or put a number that is the end of some range."""
    size = len(data)
    at, other, n = draw.randrange(size), draw.randrange(size), draw.randint(1, 16)
    part, there, number = data[at : at + n], data[other : other + n], draw.choice(ENDS).to_bytes(8, "little")
    swapped = bytearray(data)
    swapped[at : at + n], swapped[other : other + n] = there, part
    width = draw.choice([1, 2, 4, 8])
    return draw.choice([
        data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
        data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
        data[:at],
        data[:at] + data[at + n :],
        bytes(swapped),
        data[:at] + part + data[at:],
        data[:at] + number[:width] + data[at + 8 :],
    ])  # fmt: skip


def fuzz(folder: Path, want: dict[str, Any], seed: int) -> str:
    """One change of one file, undone afterwards; what came of it.

    As it is, the change has to be found. Signed, or where there is no manifest, it may say something else that is a
    checkpoint: then there is only to be no other exception, and no memory taken.
    """
    draw = random.Random(seed)
    originals = {path: path.read_bytes() for path in (folder / STEP).iterdir()}
    path, forged = draw.choice(sorted(originals)), Forged(folder / STEP)
    way = draw.choice(["as it is", "signed", "without a manifest"])
    try:
        if way == "signed" and path.name == "manifest.json":
            body = originals[path]
            forged.write_manifest(mutate(body[body.index(b'"manifest":') + 11 : -2], draw))
        else:
            path.write_bytes(mutate(originals[path], draw))
        if way == "signed" and path.name != "manifest.json":
            forged.manifest["files"][path.name] = facts(path)
            write_manifest(forged)
        elif way == "without a manifest":
            (folder / STEP / "manifest.json").unlink()
        error, unchanged, values = outcome(folder if way != "without a manifest" else folder / STEP)
        if error is not None:
            assert isinstance(error, FullshardError) and unchanged, (seed, way, path.name, error)
            return "refused"
        assert way != "as it is" or path.read_bytes() == originals[path] or same(values, want), (seed, path.name)
        return "loaded"
    finally:
        for name, data in originals.items():
            name.write_bytes(data)


def test_bytes_at_random(whole: Any, tmp_path: Path) -> None:
    root = copied(whole[0], tmp_path / "root")
    before = peak(anew=True)
    found = [fuzz(root, whole[1], seed) for seed in range(150)]
    assert found.count("refused") > 100 and peak() - before < MOST_MEMORY, found
    assert outcome(root)[0] is None


def test_pickles_of_the_usual_kind_are_let_through() -> None:
    """Also those in which numbers and names are long."""
    for value in ([2**40, -1, 3.5, "ü" * 300, b"x" * 300, None, True, (1, (2,), ()), {"a": [{}]}], list(range(70_000))):
        for protocol in (2, 4, 5):
            if protocol > 2 or not isinstance(value[4], bytes):  # that names an encoder, which no metadata does
                look_through(pickle.dumps(value, protocol=protocol))
    for bad in (b"", b"\x80\x04", b"\x80\x04N", b"\x80\x04X\xff\xff\xff\xff.", b"\x80\x04cos", b"\x80\x04\x82\x01."):
        with pytest.raises(pickle.UnpicklingError):
            look_through(bad)
