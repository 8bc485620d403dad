"""Checksums of a zip file's records, put in after the records were written.

PyTorch reserves space without knowing what will be written there: the checksums (CRC-32) of those records are 0. It
does not look at them; other programs that read zip files do. Layout: PKWARE's APPNOTE, sections 4.3.9 (descriptor),
4.3.12 (central directory), 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import IO

END = struct.Struct("<4s4H2LH")  # of a file without a comment
LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
ENTRY = struct.Struct("<4s6H3L5H2L")
CRC_IN_ENTRY = 16  # bytes


def put_sums(file: IO[bytes], sums: Mapping[str, tuple[int, int]]) -> None:
    """Write checksums into a zip file without a comment.

    Args:
        file: open for reading and writing.
        sums: by a record's name, without the archive's own folder: where its data end, in bytes, and the sum.
    """
    position, entries = _directory(file)
    file.seek(position)
    data = file.read(entries)
    at = 0
    while at < len(data):
        fields = ENTRY.unpack_from(data, at)
        name_size, extra, comment = fields[10:13]
        name = data[at + ENTRY.size : at + ENTRY.size + name_size].decode().partition("/")[2]
        if name in sums:
            end, crc = sums[name]
            _put(file, position + at + CRC_IN_ENTRY, crc)
            file.seek(end)
            if file.read(4) == b"PK\7\10":  # a data descriptor
                _put(file, end + 4, crc)
        at += ENTRY.size + name_size + extra + comment


def _put(file: IO[bytes], position: int, crc: int) -> None:
    file.seek(position)
    file.write(struct.pack("<L", crc))


def _directory(file: IO[bytes]) -> tuple[int, int]:
    """Where the central directory lies, and its size, in bytes."""
    end = file.seek(-END.size, 2)
    fields = END.unpack(file.read(END.size))
    size, position = fields[5], fields[6]
    file.seek(end - LOCATOR.size)
    locator = LOCATOR.unpack(file.read(LOCATOR.size))
    if locator[0] == b"PK\6\7":
        file.seek(locator[2])
        fields = END64.unpack(file.read(END64.size))
        size, position = fields[8], fields[9]
    return position, size
