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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

import fullshard
from forged import DATA, DOTS, ONE_HASH, STEP, Change, Forged, copied, outcome, same, save_small, saved
from fullshard import CheckpointError, DamagedCheckpointError, FullshardError

MOST_MEMORY = 300 * 2**20
"""Bytes that an attack may cost, besides what it is."""
BIG = 10**18
WEIGHT = "model.0.weight"  # [4, 3], float32


class Runs:
    """Pickled, makes whoever reads it write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def canary(forged: Forged) -> Path:
    return forged.folder.parent / "canary"


# Code.


def code_in_metadata(forged: Forged) -> None:
    forged.metadata.planner_data["x"] = (Runs(canary(forged)),)
    forged.sign()


def code_instead_of_metadata(forged: Forged) -> None:
    forged.sign(metadata=pickle.dumps(Runs(canary(forged)), protocol=0))


def code_in_a_record(forged: Forged) -> None:
    forged.put_record(WEIGHT, saved(Runs(canary(forged))))
    forged.sign()


def code_beside_a_tensor(forged: Forged) -> None:
    forged.put_record(WEIGHT, saved([torch.zeros(4, 3), Runs(canary(forged))]))
    forged.sign()


def code_in_a_value(forged: Forged) -> None:
    """Where another program's checkpoint keeps a setting of the optimizer."""
    forged.put_record("optimizer.param_groups.0.lr", saved(Runs(canary(forged))))
    forged.sign()
    (forged.folder / "manifest.json").unlink()


# Names.


def names_a_file(name: str) -> Change:
    def attack(forged: Forged) -> None:
        (forged.folder.parent.parent / "outside.distcp").write_bytes((forged.folder / DATA).read_bytes())
        forged.place(WEIGHT).relative_path = name.format(outside=forged.folder.parent.parent / "outside.distcp")
        forged.sign()

    return attack


def manifest_names_a_file(forged: Forged) -> None:
    forged.sign()
    forged.manifest["files"]["../outside.distcp"] = {"bytes": 0, "sha256": []}
    forged.write_manifest(json.dumps(forged.manifest).encode())


def a_file_is_a_link(forged: Forged) -> None:
    outside = forged.folder.parent.parent / "outside.distcp"
    (forged.folder / DATA).rename(outside)
    (forged.folder / DATA).symlink_to(outside)


def the_manifest_is_a_link(forged: Forged) -> None:
    outside = forged.folder.parent.parent / "outside.json"
    (forged.folder / "manifest.json").rename(outside)
    (forged.folder / "manifest.json").symlink_to(outside)


def the_step_is_a_link(forged: Forged) -> None:
    outside = forged.folder.parent.parent / "outside"
    forged.folder.rename(outside)
    forged.folder.symlink_to(outside)


def latest_is_a_link(forged: Forged) -> None:
    (forged.folder.parent / "latest").unlink()
    (forged.folder.parent / "latest").symlink_to("/dev/zero")


def latest_is_a_pipe(forged: Forged) -> None:
    (forged.folder.parent / "latest").unlink()
    os.mkfifo(forged.folder.parent / "latest")


def the_data_is_a_pipe(forged: Forged) -> None:
    (forged.folder / DATA).unlink()
    os.mkfifo(forged.folder / DATA)


# Sizes.


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
        forged.sign()

    return attack


def no_parts_of_a_huge_tensor(forged: Forged) -> None:
    told = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([BIG]), [])
    forged.metadata.state_dict_metadata["state.weights"] = told
    forged.manifest["tensors"]["state.weights"] = {"shape": [BIG], "dtype": "float32"}
    forged.sign()


def one_part_many_times(forged: Forged) -> None:
    """A record of 6 elements, said to be two thousand parts of one tensor."""
    many, info = 2000, forged.place("state.weights")
    chunks = [ChunkStorageMetadata(torch.Size([6 * i]), torch.Size([6])) for i in range(many)]
    told = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([6 * many]), chunks)
    forged.metadata.state_dict_metadata["state.weights"] = told
    kind = next(type(index) for index in forged.metadata.storage_data)
    forged.metadata.storage_data |= {kind("state.weights", torch.Size([6 * i])): info for i in range(many)}
    forged.manifest["tensors"]["state.weights"]["shape"] = [6 * many]
    forged.sign()


def place_of(**changes: int) -> Change:
    def attack(forged: Forged) -> None:
        for key, value in changes.items():
            setattr(forged.place(WEIGHT), key, value)
        forged.sign()

    return attack


def parts_of(*rows: tuple[int, int], shape: tuple[int, int] = (4, 3)) -> Change:
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
        forged.sign()

    return attack


def record_of(value: Any) -> Change:
    def attack(forged: Forged) -> None:
        forged.put_record(WEIGHT, saved(value))
        forged.sign()

    return attack


def compressed(nbytes: int) -> Change:
    """A record whose elements are packed: so many zeros."""

    def attack(forged: Forged) -> None:
        forged.put_record(WEIGHT, repacked(forged.record(WEIGHT), nbytes))
        forged.sign()

    return attack


def repacked(record: bytes, zeros: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            packed = zipfile.ZipInfo(info.filename)
            packed.compress_type = zipfile.ZIP_DEFLATED if info.filename.endswith("data/0") else zipfile.ZIP_STORED
            with new.open(packed, "w") as member:
                if not packed.compress_type:
                    member.write(open_member(old, info))
                else:
                    for at in range(0, zeros, 2**20):
                        member.write(bytes(min(2**20, zeros - at)))
    return buffer.getvalue()


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as member:
        member._expected_crc = None  # checksums were not computed
        return member.read()


def data_beyond_its_record(forged: Forged) -> None:
    """`data/0` is said to have the right size, and to begin at the record's end."""
    data = bytearray(forged.record(WEIGHT))
    entry = data.rindex(b"data/0")
    begin = data.rindex(b"PK\1\2", 0, entry)
    data[begin + 42 : begin + 46] = struct.pack("<I", len(data) - 40)
    forged.put_record(WEIGHT, bytes(data))
    forged.sign()


def data_of_two_sizes(forged: Forged) -> None:
    """What the archive holds is shorter than what it stands for: the rest would be its neighbour's."""
    data = bytearray(forged.record(WEIGHT))
    begin = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
    data[begin + 20 : begin + 24] = struct.pack("<I", 4)
    forged.put_record(WEIGHT, bytes(data))
    forged.sign()


def room_for_many_objects(forged: Forged) -> None:
    """LONG_BINPUT: room for 2**31 objects, 16 GiB, in 10 bytes."""
    forged.sign(metadata=b"\x80\x02Nr\xff\xff\xff\x7f.")


def a_long_bytearray(forged: Forged) -> None:
    forged.sign(metadata=b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b".")


def a_huge_manifest(forged: Forged) -> None:
    os.truncate(forged.folder / "manifest.json", 2**40)  # takes no room on the disk


def huge_metadata(forged: Forged) -> None:
    os.truncate(forged.folder / ".metadata", 2**40)
    forged.manifest["files"][".metadata"] = {"bytes": 2**40, "sha256": ["0" * 64] * 2**16}
    forged.write_manifest(json.dumps(forged.manifest).encode())


def deep_json(forged: Forged) -> None:
    forged.write_manifest(b'{"values":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def deep_values(forged: Forged) -> None:
    value: Any = 1
    for _ in range(400):
        value = [value]
    forged.manifest["values"]["state"]["order"] = value
    forged.sign()


def manifest_with(**changes: Any) -> Change:
    def attack(forged: Forged) -> None:
        forged.manifest |= changes
        forged.write_manifest(json.dumps(forged.manifest).encode())

    return attack


def value_of(value: Any, *path: str) -> Change:
    def attack(forged: Forged) -> None:
        place = forged.manifest["values"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        forged.sign()

    return attack


def manifest_hides_a_file(forged: Forged) -> None:
    """What the manifest does not tell of is not checked by its hash."""
    del forged.manifest["files"][DATA]
    forged.write_manifest(json.dumps(forged.manifest).encode())


def manifest_of_other_tensors(forged: Forged) -> None:
    forged.manifest["tensors"][WEIGHT]["dtype"] = "float64"
    forged.sign()


# Values that are meant to take hours.


def long_path(forged: Forged) -> None:
    forged.metadata.planner_data[WEIGHT] = ("model", DOTS)
    forged.sign()


def long_name(forged: Forged) -> None:
    forged.metadata.state_dict_metadata[f"model.{DOTS}"] = forged.metadata.state_dict_metadata[WEIGHT]
    forged.manifest["tensors"][f"model.{DOTS}"] = forged.manifest["tensors"][WEIGHT]
    forged.sign()


def keys_of_one_hash(forged: Forged) -> None:
    forged.metadata.planner_data = dict.fromkeys(ONE_HASH, ("model",))
    forged.sign()


def values_with_keys_of_one_hash(forged: Forged) -> None:
    forged.manifest["values"]["state"]["order"] = {"$pairs": [[key, 0] for key in ONE_HASH]}
    forged.sign()


def tuples_of_one_hash(forged: Forged) -> None:
    forged.manifest["values"]["state"]["order"] = {"$set": [{"$tuple": [key]} for key in ONE_HASH]}
    forged.sign()


def a_key_twice(forged: Forged) -> None:
    forged.manifest["values"]["state"]["order"] = {"$pairs": [[1, "right"], [1, "wrong"]]}
    forged.sign()


def a_rate_in_words(forged: Forged) -> None:
    forged.manifest["values"]["optimizer"]["param_groups"][0]["lr"] = "0.1"
    forged.sign()


def groups_without_parameters(forged: Forged) -> None:
    del forged.manifest["values"]["optimizer"]["param_groups"][0]["params"]
    forged.sign()


def a_foreign_setting_of_one_hash(forged: Forged) -> None:
    """Where another program's checkpoint keeps a setting of the optimizer."""
    forged.put_record("optimizer.param_groups.0.betas", saved(dict.fromkeys(ONE_HASH, 0)))
    forged.sign()
    (forged.folder / "manifest.json").unlink()


def a_name_twice(forged: Forged) -> None:
    text = json.dumps(forged.manifest, separators=(",", ":"))
    twice = text.replace('"step":3', '"step":4,"step":3')
    assert twice != text
    forged.write_manifest(twice.encode())


ATTACKS: dict[str, tuple[Change, str]] = {
    "code in metadata": (code_in_metadata, "posix.system"),
    "code instead of metadata": (code_instead_of_metadata, "instruction"),
    "code in a record": (code_in_a_record, "record"),
    "code beside a tensor": (code_beside_a_tensor, "record"),
    "code in a value": (code_in_a_value, "record"),
    "a file in the folder above": (names_a_file("../outside.distcp"), "not in its own folder"),
    "a file by an absolute path": (names_a_file("{outside}"), "not in its own folder"),
    "a file with a backslash": (names_a_file("..\\outside.distcp"), "not in its own folder"),
    "a file with a zero": (names_a_file("outside\0.distcp"), "not in its own folder"),
    "the folder itself": (names_a_file("."), "not in its own folder"),
    "the manifest names a file above": (manifest_names_a_file, "not in its own folder"),
    "a file is a link": (a_file_is_a_link, "missing"),
    "the manifest is a link": (the_manifest_is_a_link, "names no whole checkpoint"),
    "the step is a link": (the_step_is_a_link, "names no whole checkpoint"),
    "latest is a link": (latest_is_a_link, "latest"),
    "latest is a pipe": (latest_is_a_pipe, "latest"),
    "the data is a pipe": (the_data_is_a_pipe, "missing"),
    "a huge shape": (metadata_of_shape(BIG), "is kept in"),
    "a shape beyond all numbers": (metadata_of_shape(BIG, BIG, BIG), "shape"),
    "a shape larger than its record": (metadata_of_shape(10**9), "bytes"),
    "a shape below zero": (metadata_of_shape(-2, -6), "damaged"),
    "no parts of a huge tensor": (no_parts_of_a_huge_tensor, "elements"),
    "one part many times": (one_part_many_times, "bytes"),
    "an offset below zero": (place_of(offset=-512), "damaged"),
    "a length below zero": (place_of(length=-1), "damaged"),
    "an offset beyond the file": (place_of(offset=2**61), "truncated"),
    "a length of two records": (place_of(length=1), "bytes"),
    "parts that overlap": (parts_of((0, 2), (1, 2)), "twice"),
    "a part that is missing": (parts_of((0, 2)), "not hold all elements"),
    "a part twice, another missing": (parts_of((0, 2), (1, 1), (3, 1)), "twice"),
    "a part outside": (parts_of((0, 2), (3, 2)), "part at"),
    "a part below zero": (parts_of((-1, 2), (1, 3)), "part at"),
    "a record of another dtype": (record_of(torch.zeros(4, 3, dtype=torch.float64)), "float64"),
    "a record of another shape": (record_of(torch.zeros(3, 4)), "shape"),
    "a record of a stretched number": (record_of(torch.zeros(1).expand(10**9)), "shape"),
    "a record that is no tensor": (record_of({"a": 1}), "record"),
    "a record that is text": (lambda f: (f.put_record(WEIGHT, b"no zip" * 50), f.sign())[0], "record"),
    "a packed record": (compressed(48), "compressed"),
    "a bomb": (compressed(2**29), "compressed"),
    "data beyond its record": (data_beyond_its_record, "beyond the record"),
    "data of two sizes": (data_of_two_sizes, "compressed"),
    "room for many objects": (room_for_many_objects, "object number"),
    "a long bytearray": (a_long_bytearray, "instruction"),
    "a huge manifest": (a_huge_manifest, "too large"),
    "huge metadata": (huge_metadata, "too large"),
    "deep JSON": (deep_json, "manifest"),
    "deep values": (deep_values, "nested"),
    "values of no kind": (manifest_with(values=[1]), "manifest"),
    "values of other ranks": (manifest_with(ranks=[{"rng": 1}] * 7), "7 ranks"),
    "a step below zero": (manifest_with(step=-1), "manifest"),
    "a world that is text": (manifest_with(world="4"), "manifest"),
    "a tie to nothing": (manifest_with(ties={"a": "b"}), "tie"),
    "groups of no kind": (value_of([1], "optimizer", "param_groups"), "groups"),
    "groups of numbers": (value_of([{"params": [1]}], "optimizer", "param_groups"), "groups"),
    "state of no kind": (value_of([1], "optimizer", "scalars"), "optimizer state"),
    "a tensor that is not there": (value_of({"$tensor": "model.none"}, "state", "order"), "missing"),
    "a value of a new kind": (value_of({"$code": "os.system"}, "state", "order"), "does not know"),
    "a device that is none": (value_of({"$device": "nowhere"}, "state", "order"), "does not know"),
    "the manifest hides a file": (manifest_hides_a_file, "does not tell of a file"),
    "the manifest tells of others": (manifest_of_other_tensors, "different tensors"),
    "a long path": (long_path, "not of names and numbers"),
    "a long name": (long_name, "1000006 characters"),
    "keys of one hash": (keys_of_one_hash, "more than 10000 integers"),
    "keys of one hash in values": (values_with_keys_of_one_hash, "does not know"),
    "tuples of one hash": (tuples_of_one_hash, "does not know"),
    "keys of one hash in a foreign setting": (a_foreign_setting_of_one_hash, "more than 10000 integers"),
    "a key twice": (a_key_twice, "does not know"),
    "a name twice": (a_name_twice, "twice"),
    "a rate in words": (a_rate_in_words, "different type"),
    "groups without parameters": (groups_without_parameters, "groups"),
}
"""What is made of a checkpoint, and a word in the error."""


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
    change, word = ATTACKS[attack]
    change(Forged(root / STEP))
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
    error, _, values = outcome(root)
    assert error is None and values[WEIGHT].abs().sum() == 0


# Bytes at random.


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, swap, repeat, blank, or put a number that is the end of some range."""
    made, size = bytearray(data), len(data)
    kind, at, n = draw.randrange(7), draw.randrange(size), draw.randint(1, 16)
    if kind == 0:
        made[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        made[at] = draw.randrange(256)
    elif kind == 2:
        del made[at:]
    elif kind == 3:
        del made[at : at + n]
    elif kind == 4:
        other = draw.randrange(size)
        made[at : at + n], made[other : other + n] = made[other : other + n], made[at : at + n]
    elif kind == 5:
        made[at:at] = made[at : at + n]
    else:
        number = draw.choice([0, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
        made[at : at + 8] = number.to_bytes(8, "little")[: draw.choice([1, 2, 4, 8])]
    return bytes(made)


def fuzz(folder: Path, want: dict[str, Any], seed: int) -> str:
    """One change of one file, undone afterwards; what came of it.

    As it is, the change has to be found. Signed, or where there is no manifest, it may say something else that is a
    checkpoint: then there is only to be no other exception, and no memory taken.
    """
    draw = random.Random(seed)
    originals = {path: path.read_bytes() for path in (folder / STEP).iterdir()}
    path = draw.choice(sorted(originals))
    way = draw.choice(["as it is", "signed", "without a manifest"])
    try:
        if way == "signed" and path.name == "manifest.json":
            body = originals[path]
            Forged(folder / STEP).write_manifest(mutate(body[body.index(b'"manifest":') + 11 : -2], draw))
        else:
            path.write_bytes(mutate(originals[path], draw))
        if way == "signed" and path.name != "manifest.json":
            resign(folder / STEP, path)
        elif way == "without a manifest":
            (folder / STEP / "manifest.json").unlink()
        error, unchanged, values = outcome(folder if way != "without a manifest" else folder / STEP)
        if error is not None:
            assert isinstance(error, FullshardError), (seed, way, path.name, error)
            assert unchanged, (seed, way, path.name, error)
            return "refused"
        assert way != "as it is" or path.read_bytes() == originals[path] or same(values, want), (seed, path.name)
        return "loaded"
    finally:
        for name, data in originals.items():
            name.write_bytes(data)


def resign(folder: Path, path: Path) -> None:
    """Make the manifest's hash of one file right."""
    from forged import facts

    body = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    body["files"][path.name] = facts(path)
    Forged.write_manifest(type("Where", (), {"folder": folder})(), json.dumps(body).encode())


def test_bytes_at_random(whole: Any, tmp_path: Path) -> None:
    root = copied(whole[0], tmp_path / "root")
    before = peak(anew=True)
    found = [fuzz(root, whole[1], seed) for seed in range(300)]
    assert found.count("refused") > 200 and peak() - before < MOST_MEMORY, found
    assert outcome(root)[0] is None


def test_pickles_of_the_usual_kind_are_let_through() -> None:
    """Also those in which numbers and names are long."""
    from fullshard.store.pickles import look_through

    for value in ([2**40, -1, 3.5, "ü" * 300, b"x" * 300, None, True, (1, (2,), ()), {"a": [{}]}], list(range(70_000))):
        for protocol in (2, 4, 5):
            if protocol == 2 and isinstance(value[4], bytes):
                continue  # names an encoder, which no metadata does
            look_through(pickle.dumps(value, protocol=protocol))
    for bad in (b"", b"\x80\x04", b"\x80\x04N", b"\x80\x04X\xff\xff\xff\xff.", b"\x80\x04cos", b"\x80\x04\x82\x01."):
        with pytest.raises(pickle.UnpicklingError):
            look_through(bad)
    assert issubclass(DamagedCheckpointError, fullshard.CheckpointError)
