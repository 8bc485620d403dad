"""A checkpoint is untrusted input: nothing in it runs, no name leads out of its folder, no number takes the memory.

Each attack is made by `forged.py` with hashes that are right, so that only what reads it can refuse it.
"""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from files import Runs
from forged import (
    DATA,
    DCP_DATA,
    DOTS,
    ONE_HASH,
    STEP,
    Change,
    Forged,
    ForgedDcp,
    copied,
    facts,
    outcome,
    same,
    save_small,
    save_small_dcp,
    saved,
)
from fullshard import CheckpointError, FullshardError
from fullshard.store.pickles import look_through, read_pickle

MOST_MEMORY = 100 * 2**20
"""Bytes that an attack may cost, besides what it is."""
BIG = 10**18
WEIGHT = "model.0.weight"  # [4, 3], float32
ROW = 12  # bytes of a row of it


def outside(forged: Any) -> Path:
    return forged.folder.parent.parent / "outside.safetensors"


def write_manifest(forged: Forged) -> None:
    """Signed; the files' hashes stay as they are."""
    forged.write_manifest(json.dumps(forged.manifest).encode())


def linked(path: Callable[[Any], Path]) -> Change:
    """What is there is moved out, and a link to it takes its place."""

    def attack(forged: Any) -> None:
        path(forged).rename(outside(forged))
        path(forged).symlink_to(outside(forged))

    return attack


def replaced(path: Callable[[Any], Path], put: Callable[[Path], object]) -> Change:
    return lambda forged: (path(forged).unlink(), put(path(forged)))[0]


def latest(forged: Any) -> Path:
    return forged.folder.parent / "latest"


# Checkpoints of ours.


def shape_of(*shape: int) -> Change:
    """The weight of another shape, in one piece."""
    return lambda f: f.tensor(WEIGHT).update(
        shape=list(shape), pieces=[[*f.tensor(WEIGHT)["pieces"][0][:2], *[0] * len(shape), *shape]]
    )


def piece(**changes: int) -> Change:
    """The weight's piece with another number of its file, or another beginning."""

    def attack(forged: Forged) -> None:
        numbers = forged.tensor(WEIGHT)["pieces"][0]
        numbers[0], numbers[1] = changes.get("file", numbers[0]), changes.get("begin", numbers[1])

    return attack


def pieces(value: Any) -> Change:
    return lambda forged: forged.tensor(WEIGHT).update(pieces=value)


def parts_of(*rows: tuple[int, int]) -> Change:
    """The weight, told to be of these parts, one after the other: first row and number of rows."""

    def attack(forged: Forged) -> None:
        number, begin, *_ = forged.tensor(WEIGHT)["pieces"][0]
        parts = []
        for at, n in rows:
            parts.append([number, begin, at, 0, n, 3])
            begin += n * ROW
        forged.tensor(WEIGHT)["pieces"] = parts

    return attack


def many_parts(forged: Forged) -> None:
    """A tensor of 6 elements, said to be these parts of one tensor."""
    number, begin, *_ = forged.tensor("state.weights")["pieces"][0]
    parts = [[number, begin, 6 * i, 6] for i in range(2000)]
    forged.tensor("state.weights").update(shape=[12_000], pieces=parts)


def in_one_place(forged: Forged) -> None:
    forged.tensor("model.0.bias")["pieces"][0][:2] = forged.tensor(WEIGHT)["pieces"][0][:2]


def file_called(name: str) -> Change:
    """A file of another name in the place of the data."""

    def attack(forged: Forged) -> None:
        outside(forged).write_bytes((forged.folder / DATA).read_bytes())
        forged.manifest["files"] = {name.format(outside=outside(forged)): forged.manifest["files"][DATA]}

    return attack


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
    forged.manifest["tensors"][f"model.{DOTS}"] = forged.manifest["tensors"][WEIGHT]


def a_name_twice(forged: Forged) -> None:
    text = json.dumps(forged.manifest, separators=(",", ":"))
    twice = text.replace('"step":3', '"step":4,"step":3')
    assert twice != text
    forged.write_manifest(twice.encode())


SIGNED: dict[str, tuple[Change, str]] = {
    "a huge shape": (shape_of(BIG), "beyond its end"),
    "a shape beyond all numbers": (shape_of(BIG, BIG, BIG), "shape"),
    "a shape larger than its file": (shape_of(10**9), "beyond its end"),
    "a shape below zero": (shape_of(-2, -6), "has shape"),
    "a shape of many dims": (shape_of(*[1] * 100), "shape"),
    "no parts of a huge tensor": (lambda f: f.tensor(WEIGHT).update(shape=[BIG], pieces=[]), "elements"),
    "one part many times": (many_parts, "more than all files"),
    "two tensors in one place": (in_one_place, "share bytes"),
    "a piece below zero": (piece(begin=-512), "beyond its end"),
    "a piece beyond the file": (piece(begin=2**61), "beyond its end"),
    "a file of no such number": (piece(file=1), "in file 1"),
    "a file of a number below zero": (piece(file=-1), "in file -1"),
    "a piece of words": (pieces(["here"]), "a part"),
    "a piece of fractions": (pieces([[0, 0.5, 0, 0, 4, 3]]), "a part"),
    "a piece of few numbers": (pieces([[0, 0, 4]]), "a part"),
    "pieces that are a number": (pieces(7), "manifest"),
    "parts that overlap": (parts_of((0, 2), (1, 2)), "twice"),
    "a part that is missing": (parts_of((0, 2)), "not hold all elements"),
    "a part twice, another missing": (parts_of((0, 2), (1, 1), (3, 1)), "twice"),
    "a part outside": (parts_of((0, 2), (3, 2)), "part at"),
    "a part before the first": (parts_of((-1, 2), (1, 3)), "part at"),
    "a dtype of another kind": (lambda f: f.tensor(WEIGHT).update(dtype="int32"), "dtype"),
    "a dtype of more bytes": (lambda f: f.tensor(WEIGHT).update(dtype="complex128"), "bytes"),
    "a dtype that is none": (lambda f: f.tensor(WEIGHT).update(dtype="save"), "no dtype"),
    "a dtype that is a number": (lambda f: f.tensor(WEIGHT).update(dtype=4), "no dtype"),
    "deep values": (order(nested(400)), "nested"),
    "groups of no kind": (value_of([1], "optimizer", "param_groups"), "groups"),
    "groups of numbers": (value_of([{"params": [1]}], "optimizer", "param_groups"), "numbers"),
    "groups without parameters": (value_of(None, "optimizer", "param_groups", 0, "params"), "groups"),
    "a rate in words": (value_of("0.1", "optimizer", "param_groups", 0, "lr"), "different type"),
    "state of no kind": (value_of([1], "optimizer", "scalars"), "optimizer state"),
    "a tensor that is not there": (order({"$tensor": "model.none"}), "no tensor of this name"),
    "a value of a new kind": (order({"$code": "os.system"}), "a kind unknown"),
    "a device that is none": (order({"$device": "nowhere"}), "a kind unknown"),
    "a long name": (long_name, "1000006 characters"),
    "keys of one hash in values": (order({"$pairs": [[key, 0] for key in ONE_HASH]}), "a kind unknown"),
    "tuples of one hash": (order({"$set": [{"$tuple": [key]} for key in ONE_HASH]}), "a kind unknown"),
    "a key twice": (order({"$pairs": [[1, "right"], [1, "wrong"]]}), "a kind unknown"),
}
"""What is made of a checkpoint before it is signed, and a word in the error."""

MANIFESTS: dict[str, tuple[Change, str]] = {
    "a file in the folder above": (file_called("../outside.safetensors"), "outside its folder"),
    "a file by an absolute path": (file_called("{outside}"), "outside its folder"),
    "a file with a backslash": (file_called("..\\outside.safetensors"), "outside its folder"),
    "a file with a zero": (file_called("outside\0.safetensors"), "outside its folder"),
    "the folder itself": (file_called("."), "outside its folder"),
    "values of no kind": (lambda f: f.manifest.update(values=[1]), "manifest"),
    "values of other ranks": (lambda f: f.manifest.update(ranks=[{"rng": 1}] * 7), "7 ranks"),
    "a step below zero": (lambda f: f.manifest.update(step=-1), "manifest"),
    "a world that is text": (lambda f: f.manifest.update(world="4"), "manifest"),
    "a tie to nothing": (lambda f: f.manifest.update(ties={"a": "b"}), "tie"),
    "the manifest hides a file": (lambda f: f.manifest["files"].pop(DATA), "in file 0, of 0"),  # nor its hash
}
"""What is made of the manifest alone."""

AS_IT_IS: dict[str, tuple[Change, str]] = {
    "a file is a link": (linked(lambda f: f.folder / DATA), "missing"),
    "the manifest is a link": (linked(lambda f: f.folder / "manifest.json"), "not name a complete checkpoint"),
    "the step is a link": (linked(lambda f: f.folder), "not name a complete checkpoint"),
    "latest is a link": (replaced(latest, lambda path: path.symlink_to("/dev/zero")), "latest"),
    "latest is a pipe": (replaced(latest, os.mkfifo), "latest"),
    "the data is a pipe": (replaced(lambda f: f.folder / DATA, os.mkfifo), "missing"),
    "a huge manifest": (lambda f: os.truncate(f.folder / "manifest.json", 2**40), "too large"),
    "deep JSON": (lambda f: f.write_manifest(b'{"values":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "manifest"),
    "a name twice": (a_name_twice, "duplicate"),
}
"""Nothing is signed but by the attack."""

ATTACKS = {
    name: (change, word, sign)
    for table, sign in ((SIGNED, Forged.sign), (MANIFESTS, write_manifest), (AS_IT_IS, lambda forged: None))
    for name, (change, word) in table.items()
}


# Folders of DCP's.


def runs(forged: ForgedDcp) -> Runs:
    return Runs(forged.folder.parent / "canary")


def record(made: Any, name: str = WEIGHT) -> Change:
    """Another record in a tensor's place; `made` is saved, or makes the bytes of the forged folder."""
    return lambda forged: forged.put_record(name, made(forged) if callable(made) else saved(made))


def setting(name: str, value: Any) -> Change:
    """Another record in the place of a setting of the optimizer."""
    return lambda forged: forged.put_record(f"optimizer.param_groups.0.{name}", saved(value(forged)))


def names_a_file(name: str) -> Change:
    def attack(forged: ForgedDcp) -> None:
        outside(forged).write_bytes((forged.folder / DCP_DATA).read_bytes())
        forged.place(WEIGHT).relative_path = name.format(outside=outside(forged))

    return attack


def metadata_of_shape(*shape: int) -> Change:
    """The weight of another shape, told in as many places as there are."""

    def attack(forged: ForgedDcp) -> None:
        told = forged.metadata.state_dict_metadata[WEIGHT]
        told.size, told.chunks[0].sizes = torch.Size(shape), torch.Size(shape)
        told.chunks[0].offsets = torch.Size([0] * len(shape))
        for index, info in list(forged.metadata.storage_data.items()):
            if index.fqn == WEIGHT:
                del forged.metadata.storage_data[index]
                object.__setattr__(index, "offset", torch.Size([0] * len(shape)))
                forged.metadata.storage_data[index] = info

    return attack


def chunks_of_weight(size: int, chunks: list[ChunkStorageMetadata]) -> Change:
    """A record of 12 elements, said to be these parts of one tensor."""

    def attack(forged: ForgedDcp) -> None:
        info, kind = forged.place(WEIGHT), next(type(index) for index in forged.metadata.storage_data)
        told = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([size]), chunks)
        forged.metadata.state_dict_metadata[WEIGHT] = told
        forged.metadata.storage_data |= {kind(WEIGHT, chunk.offsets): info for chunk in chunks}

    return attack


MANY = [ChunkStorageMetadata(torch.Size([12 * i]), torch.Size([12])) for i in range(2000)]


def place_of(**changes: int) -> Change:
    return lambda forged: vars(forged.place(WEIGHT)).update(changes)


def rows_of(*rows: tuple[int, int]) -> Change:
    """The weight, told to be of these parts: first row and number of rows."""

    def attack(forged: ForgedDcp) -> None:
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


def compressed(zeros: int) -> Callable[[ForgedDcp], bytes]:
    """The record with packed elements: so many zeros."""

    def repacked(forged: ForgedDcp) -> bytes:
        buffer = BytesIO()
        with zipfile.ZipFile(BytesIO(forged.record(WEIGHT))) as old, zipfile.ZipFile(buffer, "w") as new:
            for info in old.infolist():
                packed = zipfile.ZipInfo(info.filename)
                packed.compress_type = zipfile.ZIP_DEFLATED if info.filename.endswith("data/0") else zipfile.ZIP_STORED
                with new.open(packed, "w") as member, old.open(info) as source:
                    source._expected_crc = None  # checksums were not computed
                    for at in range(0, zeros if packed.compress_type else 1, 2**20):
                        member.write(bytes(min(2**20, zeros - at)) if packed.compress_type else source.read())
        return buffer.getvalue()

    return repacked


def directory_says(field: int, value: Callable[[int], int]) -> Callable[[ForgedDcp], bytes]:
    """The record, whose zip directory says something else of `data/0`, in 4 bytes from `field` on."""

    def changed(forged: ForgedDcp) -> bytes:
        data = bytearray(forged.record(WEIGHT))
        begin = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
        struct.pack_into("<I", data, begin + field, value(len(data)))
        return bytes(data)

    return changed


def parts_of_many(forged: ForgedDcp) -> None:
    """One list of many parts without elements, for two tensors."""
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 3]))] * 1000
    empty = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([0, 3]), chunks)
    forged.metadata.state_dict_metadata |= {WEIGHT: empty, "model.2.weight": empty}


def long_name_in_metadata(forged: ForgedDcp) -> None:
    forged.metadata.state_dict_metadata[f"model.{DOTS}"] = forged.metadata.state_dict_metadata[WEIGHT]


DCP: dict[str, tuple[Change, str]] = {
    "code in metadata": (lambda f: f.metadata.planner_data.update(x=(runs(f),)), "posix.system"),
    "code in a record": (record(lambda f: saved(runs(f))), "record"),
    "code beside a tensor": (record(lambda f: saved([torch.zeros(4, 3), runs(f)])), "record"),
    "code in a value": (setting("lr", runs), "contains posix.system"),
    "a file in the folder above": (names_a_file("../outside.distcp"), "outside its folder"),
    "a file by an absolute path": (names_a_file("{outside}"), "outside its folder"),
    "a file with a backslash": (names_a_file("..\\outside.distcp"), "outside its folder"),
    "a file with a zero": (names_a_file("outside\0.distcp"), "outside its folder"),
    "the folder itself": (names_a_file("."), "outside its folder"),
    "a huge shape": (metadata_of_shape(BIG), "has only"),
    "a shape beyond all numbers": (metadata_of_shape(BIG, BIG, BIG), "shape"),
    "a shape larger than its record": (metadata_of_shape(10**9), "bytes"),
    "a shape below zero": (metadata_of_shape(-2, -6), "damaged"),
    "no parts of a huge tensor": (chunks_of_weight(BIG, []), "elements"),
    "one part many times": (chunks_of_weight(12 * len(MANY), MANY), "bytes"),
    "an offset below zero": (place_of(offset=-512), "damaged"),
    "a length below zero": (place_of(length=-1), "damaged"),
    "an offset beyond the file": (place_of(offset=2**61), "truncated"),
    "a length of two records": (place_of(length=1), "bytes"),
    "parts that overlap": (rows_of((0, 2), (1, 2)), "twice"),
    "a part that is missing": (rows_of((0, 2)), "not hold all elements"),
    "a part twice, another missing": (rows_of((0, 2), (1, 1), (3, 1)), "twice"),
    "a part outside": (rows_of((0, 2), (3, 2)), "part at"),
    "a part below zero": (rows_of((-1, 2), (1, 3)), "part at"),
    "a record of another dtype": (record(torch.zeros(4, 3, dtype=torch.float64)), "float64"),
    "a record of another shape": (record(torch.zeros(3, 4)), "shape"),
    "a record of a stretched number": (record(torch.zeros(1).expand(10**9)), "shape"),
    "a record that is no tensor": (record({"a": 1}), "record"),
    "a record that is text": (record(lambda f: b"no zip" * 50), "record"),
    "a packed record": (record(compressed(48)), "compressed"),
    "a bomb": (record(compressed(2**27)), "compressed"),
    "data beyond its record": (record(directory_says(42, lambda size: size - 40)), "truncated"),
    "data of two sizes": (record(directory_says(20, lambda size: 4)), "compressed"),  # its neighbour's for the rest
    "a long path": (lambda f: f.metadata.planner_data.update({WEIGHT: ("model", DOTS)}), "not a short name or"),
    "a path of many keys": (lambda f: f.metadata.planner_data.update({WEIGHT: ("model",) * 1000}), "too many keys"),
    "a list of parts for many tensors": (parts_of_many, "parts in"),
    "a long name": (long_name_in_metadata, "1000006 characters"),
    "keys of one hash": (
        lambda f: setattr(f.metadata, "planner_data", dict.fromkeys(ONE_HASH, ("model",))),
        "10198 keys have the same hash"),
    "keys of one hash in a setting": (
        setting("betas", lambda f: dict.fromkeys(ONE_HASH, 0)), "10198 keys have the same hash"),
}  # fmt: skip
"""What is made of a folder of DCP's before its metadata is written, and a word in the error."""

ENDLESS = b"\x80\x02K\x01\x85q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(50))
"""Puts a tuple of 2^50 numbers, each of its items twice the same tuple, into place 50."""
METADATA: dict[str, tuple[Callable[[ForgedDcp], bytes], str]] = {
    "code instead of metadata": (lambda f: pickle.dumps(runs(f), protocol=0), "instruction"),
    "room for many objects": (lambda f: b"\x80\x02Nr\xff\xff\xff\x7f.", "object number"),  # LONG_BINPUT: of 16 GiB
    "a key without end": (lambda f: ENDLESS + b"}h\x32Ns.", "key of type tuple"),
    "a long bytearray": (lambda f: b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b".", "instruction"),
}
"""What is in the place of the metadata."""


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


@pytest.fixture(scope="module")
def whole_dcp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of DCP's, and what it holds."""
    return save_small_dcp(tmp_path_factory.mktemp("whole"))


def assert_refused(root: Path, word: str, canary: Path, **given: Any) -> None:
    before = peak(anew=True)
    error, unchanged, _ = outcome(root, **given)
    assert isinstance(error, CheckpointError) and word in str(error) and len(str(error)) < 2000, error
    assert unchanged and not canary.exists() and peak() - before < MOST_MEMORY


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(whole: Any, tmp_path: Path, attack: str) -> None:
    root = copied(whole[0], tmp_path / "root")
    change, word, sign = ATTACKS[attack]
    change(forged := Forged(root / STEP))
    sign(forged)
    assert_refused(root, word, root / "canary")


@pytest.mark.parametrize("attack", [*DCP, *METADATA])
def test_attacks_by_folders_of_dcp_are_refused(whole_dcp: Any, tmp_path: Path, attack: str) -> None:
    forged = ForgedDcp(copied(whole_dcp[0], tmp_path / "root" / "dcp"))
    if attack in DCP:
        change, word = DCP[attack]
        change(forged)
        forged.sign()
    else:
        made, word = METADATA[attack]
        forged.sign(made(forged))
    assert_refused(forged.folder, word, forged.folder.parent / "canary", check=False)


def test_forging_alone_is_no_attack(whole: Any, tmp_path: Path) -> None:
    """What is signed anew and not changed loads: the attacks are refused for what they are."""
    root = copied(whole[0], tmp_path / "root")
    Forged(root / STEP).sign()
    error, _, values = outcome(root)
    assert error is None and same(values, whole[1])
    parts_of((0, 3), (3, 1))(forged := Forged(root / STEP))
    forged.sign()
    error, _, values = outcome(root)
    assert error is None and same(values, whole[1])


def test_forging_a_folder_of_dcp_is_no_attack(whole_dcp: Any, tmp_path: Path) -> None:
    forged = ForgedDcp(copied(whole_dcp[0], tmp_path / "dcp"))
    forged.put_record(WEIGHT, forged.record(WEIGHT))
    forged.sign()
    error, _, values = outcome(forged.folder, check=False)
    assert error is None and same(values, whole_dcp[1])
    rows_of((0, 3), (3, 1))(forged)
    forged.sign()
    error, _, values = outcome(forged.folder, check=False)
    assert error is None and values[WEIGHT].abs().sum() == 0


def test_the_header_of_a_file_decides_nothing(whole: Any, tmp_path: Path) -> None:
    """It is for other programs: where tensors lie, what they are and how long, the manifest alone says."""
    root = copied(whole[0], tmp_path / "root")
    data = (root / STEP / DATA).read_bytes()
    length = int.from_bytes(data[:8], "little")
    for header in (b"[" * length, data[8 : 8 + length].replace(b'"F32"', b'"F64"'), b"\xff" * length):
        (root / STEP / DATA).write_bytes(b"\xff" * 8 + header + data[8 + length :])
        Forged(root / STEP).sign()
        error, _, values = outcome(root)
        assert error is None and same(values, whole[1])


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

    As it is, the change has to be found. Signed, it may say something else that is a checkpoint: there is only to be
    no other exception, and no memory taken.
    """
    draw = random.Random(seed)
    originals = {path: path.read_bytes() for path in (folder / STEP).iterdir()}
    path, forged = draw.choice(sorted(originals)), Forged(folder / STEP)
    signed = draw.random() < 0.5
    try:
        if signed and path.name == "manifest.json":
            body = originals[path]
            forged.write_manifest(mutate(body[body.index(b'"manifest":') + 11 : -2], draw))
        else:
            path.write_bytes(mutate(originals[path], draw))
        if signed and path.name != "manifest.json":
            forged.manifest["files"][path.name] = facts(path)
            write_manifest(forged)
        error, unchanged, values = outcome(folder)
        if error is not None:
            assert isinstance(error, FullshardError) and unchanged, (seed, signed, path.name, error)
            return "refused"
        assert signed or path.read_bytes() == originals[path] or same(values, want), (seed, path.name)
        return "loaded"
    finally:
        for name, data in originals.items():
            name.write_bytes(data)


def fuzz_dcp(folder: Path, seed: int) -> str:
    """The same of a folder without hashes."""
    draw = random.Random(seed)
    path = draw.choice(sorted(folder.iterdir()))
    original = path.read_bytes()
    try:
        path.write_bytes(mutate(original, draw))
        error, unchanged, _ = outcome(folder, check=False)
        assert error is None or (isinstance(error, FullshardError) and unchanged), (seed, path.name, error)
        return "loaded" if error is None else "refused"
    finally:
        path.write_bytes(original)


def test_bytes_at_random(whole: Any, whole_dcp: Any, tmp_path: Path) -> None:
    root = copied(whole[0], tmp_path / "root")
    before = peak(anew=True)
    results = [fuzz(root, whole[1], seed) for seed in range(150)]
    assert results.count("refused") > 80, results
    dcp = copied(whole_dcp[0], tmp_path / "dcp")
    results = [fuzz_dcp(dcp, seed) for seed in range(100)]
    assert results.count("refused") > 20 and peak() - before < MOST_MEMORY, results
    assert outcome(root)[0] is None and outcome(dcp, check=False)[0] is None


def test_nothing_is_left_to_run() -> None:
    """Whatever calls, sets attributes or hashes is replaced: the unpickler in C does none of it."""
    value = [Counted(2), {"a": 1}, {"a": 1, 2: 3}, {1}, frozenset((1,)), Runs(Path("ran"))]
    for protocol in (1, 2, 4, 5):
        opcodes = {opcode.name for opcode, _, _ in pickletools.genops(look_through(pickle.dumps(value, protocol)))}
        assert not opcodes & {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "SETITEM", "SETITEMS", "ADDITEMS", "FROZENSET"}
        calls = [read_pickle(pickle.dumps(value, protocol))[at] for at in (0, 5)]
        assert [call.name for call in calls] == ["copy_reg._reconstructor" if protocol < 2 else NAME, "posix.system"]
        assert calls[0].state == {"n": 2}


class Counted:
    """With an attribute, set by BUILD."""

    def __init__(self, n: int) -> None:
        self.n = n


NAME = f"{Counted.__module__}.Counted"


def test_pickles_of_the_usual_kind_are_let_through() -> None:
    """Also those in which numbers and names are long."""
    for value in ([2**40, -1, 3.5, "ü" * 300, b"x" * 300, None, True, (1, (2,), ()), {"a": [{}]}], list(range(70_000))):
        for protocol in (2, 4, 5):
            if protocol > 2 or not isinstance(value[4], bytes):  # that names an encoder, which no metadata does
                look_through(pickle.dumps(value, protocol=protocol))
    for bad in (b"", b"\x80\x04", b"\x80\x04N", b"\x80\x04X\xff\xff\xff\xff.", b"\x80\x04cos", b"\x80\x04\x82\x01."):
        with pytest.raises(pickle.UnpicklingError):
            look_through(bad)
