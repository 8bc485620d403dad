"""The header of a safetensors file, parsed and validated.

    8 bytes        length N of the header, little-endian
    N bytes        JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, and
                   "__metadata__": {text: text} or not; padded with spaces
    the rest       elements, row-major, little-endian; offsets count from here, without holes or overlaps

The format is that of https://github.com/huggingface/safetensors (README, "Format"). Whatever a header says is checked
against the size of its file before any memory is taken by it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, DamagedCheckpointError
from ..source import Entry, checked_shape
from ..tree import unique_keys

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""By the names that the format has for them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_BYTES = 100_000_000
"""Of a header, as the safetensors library has it."""
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LARGEST = 2**63 - 1  # what torch counts in


@dataclass(frozen=True)
class Header:
    """A header that fits its file.

    Attributes:
        entries: by name, in the order of the data.
        begins: by name, where elements begin in the file, in bytes.
    """

    entries: dict[str, Entry]
    begins: dict[str, int]


def read_header(read: Callable[[int, int], bytes], size: int, called: str) -> Header:
    """The header of a file. What the safetensors library refuses is refused.

    Args:
        read: gives the file's bytes from one on, so many.
        size: of the file, in bytes.
        called: the file, for errors.

    Raises:
        DamagedCheckpointError: it is no safetensors file, or not whole.
        CheckpointError: it has a dtype that is not known here.
    """
    length = _LENGTH.unpack(read(0, _LENGTH.size))[0] if size >= _LENGTH.size else None
    if length is None or length > min(size - _LENGTH.size, MOST_BYTES):
        raise _damaged(called, f"a header of at most {min(max(size - 8, 0), MOST_BYTES)} bytes", f"length {length}")
    try:
        listed = json.loads(read(_LENGTH.size, length).decode(), object_pairs_hook=unique_keys, parse_int=_count)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError too
        raise _damaged(called, "a header in JSON, every name once", f"{type(error).__name__}: {error}"[:300]) from None
    if not isinstance(listed, dict):
        raise _damaged(called, "a header with names", f"{type(listed).__name__}")
    metadata = {} if listed.get(METADATA) is None else listed[METADATA]
    listed.pop(METADATA, None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(called, f"{METADATA} of texts", repr(metadata)[:100])
    try:
        "".join([*listed, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError as error:  # half a character, which JSON can write
        raise _damaged(called, "names in UTF-8", str(error)) from None
    data = _LENGTH.size + length
    tensors = sorted(
        ((*_offsets(name, facts, called), name) for name, facts in listed.items()), key=lambda tensor: tensor[:2]
    )
    entries, at = {}, 0
    for begin, end, name in tensors:
        if begin != at:
            raise _damaged(called, f"{name!r} at {at}, where the tensor before it ends", f"at {begin}")
        entries[name] = _entry(name, listed[name], end - begin, called)
        at = end
    if data + at != size:
        problem = "truncated" if data + at > size else "longer than its header says"
        raise _damaged(called, f"{data + at} bytes", f"{size}: it is {problem}")
    return Header(entries, {name: data + begin for begin, _, name in tensors})


def parse_json(data: bytes, called: str) -> Any:
    """JSON of which no name is there twice.

    Raises:
        DamagedCheckpointError: it is something else.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(called, "JSON, every name once", f"{type(error).__name__}: {error}"[:300]) from None


def _count(text: str) -> int:
    return -1 if text.startswith("-") else int(text)  # -0 is no count


def _offsets(name: str, facts: Any, called: str) -> tuple[int, int]:
    offsets = facts.get("data_offsets") if isinstance(facts, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise _damaged(called, f"{name!r} with data_offsets [begin, end]", repr(facts)[:200])
    return offsets[0], offsets[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _entry(name: str, facts: dict[str, Any], nbytes: int, called: str) -> Entry:
    shape, kind = facts.get("shape"), facts.get("dtype")
    if unknown := facts.keys() - {"shape", "dtype", "data_offsets"}:
        raise _damaged(called, f"{name!r} with dtype, shape and data_offsets", f"{min(unknown)!r}"[:100])
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(
            f"A safetensors file has a dtype that cannot be read: {called}",
            parameter=name,
            expected=", ".join(DTYPES),
            got=repr(kind)[:100],
        )
    try:
        entry = Entry(checked_shape(name, shape), DTYPES[kind])
    except ValueError as error:
        raise _damaged(called, f"{name!r} with a shape", str(error)) from None
    if entry.nbytes != nbytes:
        raise _damaged(called, f"{name!r}: {entry.nbytes} bytes, for {entry}", f"{nbytes}")
    return entry


def _damaged(called: str, expected: str, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"A safetensors file is damaged, or is none: {called}",
        expected=expected,
        got=got,
        remedy="copy it again from where it was whole",
    )


def make_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A header, and where in the file each tensor begins, in bytes: one after the other.

    Raises:
        CheckpointError: a dtype that the format does not have.
    """
    listed: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    begins, at = {}, 0
    for name, entry in entries.items():
        if entry.dtype not in NAMES:
            raise CheckpointError(
                "A tensor is of a dtype that safetensors files do not have.",
                parameter=name,
                expected=", ".join(map(str, NAMES)),
                got=entry.dtype,
                remedy="cast it before it is saved",
            )
        begins[name] = at
        offsets = [at, at + entry.nbytes]
        listed[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_BYTES:
        raise CheckpointError(
            "The header of a safetensors file would be longer than readers take.",
            expected=f"at most {MOST_BYTES} bytes",
            got=f"{len(text)}, for {len(entries)} tensors",
            remedy="a smaller max_file_bytes",
        )
    data = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, {name: data + begin for name, begin in begins.items()}
