"""The header of a safetensors file, parsed and validated.

    8 bytes        length N of the header, little-endian
    N bytes        JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, and
                   optionally "__metadata__": {text: text}; padded with spaces
    the rest       elements, row-major, little-endian; offsets count from here, without gaps or overlaps

Source of the format: https://github.com/huggingface/safetensors (README, "Format"). All numbers in a header are checked
against the size of the file before memory is allocated for them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import CheckpointError, DamagedCheckpointError
from ..names import TensorEntry, checked_shape
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
"""Name in the format -> dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_BYTES = 100_000_000
"""The longest header; the limit of the safetensors library."""
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LARGEST = 2**63 - 1  # torch counts in int64


def read_header(read: Callable[[int, int], bytes], size: int, location: str) -> dict[str, tuple[TensorEntry, int]]:
    """Read a file's header. Refuses every file that the safetensors library refuses.

    Args:
        read: `read(position, nbytes)` returns bytes of the file.
        size: of the file, in bytes.
        location: the file, for errors.

    Returns:
        The tensors by name, in the order of their elements, each with the position of its first byte in the file.

    Raises:
        DamagedCheckpointError: it is not a safetensors file, or is truncated.
        CheckpointError: it has an unsupported dtype.
    """
    length = _LENGTH.unpack(read(0, _LENGTH.size))[0] if size >= _LENGTH.size else None
    if length is None or length > min(size - _LENGTH.size, MOST_BYTES):
        raise _damaged(location, f"a header of at most {min(max(size - 8, 0), MOST_BYTES)} bytes", f"length {length}")
    header = parse_json(read(_LENGTH.size, length), location, _count)
    if not isinstance(header, dict):
        raise _damaged(location, "a dict of tensors", f"{type(header).__name__}")
    metadata = header.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(location, f"{METADATA}, a dict of strings", repr(metadata)[:100])
    try:
        "".join([*header, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON allows
        raise _damaged(location, "names in UTF-8", str(error)) from None
    data = _LENGTH.size + length
    tensors = sorted(
        ((*_offsets(name, fields, location), name) for name, fields in header.items()), key=lambda tensor: tensor[:2]
    )
    places, end = {}, 0
    for start, stop, name in tensors:
        if start != end:
            raise _damaged(location, f"{name!r} at {end}, where the previous tensor ends", f"at {start}")
        places[name] = _entry(name, header[name], stop - start, location), data + start
        end = stop
    if data + end != size:
        problem = "truncated" if data + end > size else "longer than its header says"
        raise _damaged(location, f"{data + end} bytes", f"{size}: it is {problem}")
    return places


def parse_json(data: bytes, location: str, parse_int: Callable[[str], int] = int) -> Any:
    """Parse JSON in which no object has the same name twice.

    Raises:
        DamagedCheckpointError: invalid JSON, or a repeated name.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=unique_keys, parse_int=parse_int)
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError and JSONDecodeError
        expected = "JSON in which every name occurs once"
        raise _damaged(location, expected, f"{type(error).__name__}: {error}"[:300]) from None


def _count(text: str) -> int:
    return -1 if text.startswith("-") else int(text)  # -0 is invalid too


def _offsets(name: str, fields: Any, location: str) -> tuple[int, int]:
    offsets = fields.get("data_offsets") if isinstance(fields, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise _damaged(location, f"{name!r} with data_offsets [begin, end]", repr(fields)[:200])
    return offsets[0], offsets[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _entry(name: str, fields: dict[str, Any], nbytes: int, location: str) -> TensorEntry:
    shape, kind = fields.get("shape"), fields.get("dtype")
    if unknown := fields.keys() - {"shape", "dtype", "data_offsets"}:
        raise _damaged(location, f"{name!r} with dtype, shape and data_offsets", f"{min(unknown)!r}"[:100])
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(
            f"A safetensors file has an unsupported dtype: {location}",
            parameter=name,
            expected=", ".join(DTYPES),
            got=repr(kind)[:100],
        )
    try:
        entry = TensorEntry(checked_shape(name, shape), DTYPES[kind])
    except ValueError as error:
        raise _damaged(location, f"{name!r} with a shape", str(error)) from None
    if entry.nbytes != nbytes:
        raise _damaged(location, f"{name!r}: {entry.nbytes} bytes, for {entry}", f"{nbytes}")
    return entry


def _damaged(location: str, expected: str, got: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"A safetensors file is damaged, or is not a safetensors file: {location}",
        expected=expected,
        got=got,
        remedy="copy it again from an intact source",
    )


def make_header(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A header for tensors without gaps, and by name the position of each tensor in the file, in bytes.

    Raises:
        CheckpointError: a dtype that the format does not have, or a header that is too long.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for name, entry in entries.items():
        if entry.dtype not in NAMES:
            raise CheckpointError(
                "A tensor has a dtype that safetensors files do not support.",
                parameter=name,
                expected=", ".join(map(str, NAMES)),
                got=entry.dtype,
                remedy="cast it before saving",
            )
        starts[name] = end
        end += entry.nbytes
        offsets = [starts[name], end]
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_BYTES:
        raise CheckpointError(
            "The header of a safetensors file would be longer than readers accept.",
            expected=f"at most {MOST_BYTES} bytes",
            got=f"{len(text)}, for {len(entries)} tensors",
            remedy="pass a smaller max_file_bytes",
        )
    data = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, {name: data + start for name, start in starts.items()}
