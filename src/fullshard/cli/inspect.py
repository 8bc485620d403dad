"""`fullshard inspect PATH`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..text import size, table
from . import terminal

if TYPE_CHECKING:
    from ..exchange.inspect import Inspection, TensorInfo

STYLES = {"\\Aname .*": "bold", "(?m)^damaged: .*$": "bold red", "(?m)^hashes: all .*$": "bold green"}


@dataclass(frozen=True)
class InspectArguments:
    """Summarize a checkpoint and verify its hashes.

    Reads all files of a Fullshard checkpoint and compares them with the hashes in its manifest; other formats have no
    hashes. Examples:
        fullshard inspect runs/checkpoints
        fullshard inspect model.safetensors --tensors

    Exit code: 0 nothing is wrong, 1 files that differ from their hashes, 2 bad input: no checkpoint, an incomplete one
    (files are missing or truncated), or an unknown format.
    """

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """a file or a folder in any format that `fullshard convert` reads"""
    tensors: bool = False
    """also list every tensor with its shape, dtype, size and file"""
    json: bool = False
    """print one JSON object, for programs"""
    hashes: bool = True
    """compare hashes, which reads all files"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return terminal.run(InspectArguments, "inspect", arguments, _inspect)


def _inspect(options: InspectArguments) -> int:
    terminal.check_exists(Path(options.path))
    from ..exchange.inspect import inspect

    with terminal.progress("comparing hashes") as progress:
        inspection = inspect(options.path, hashes=options.hashes, progress=progress)
    if options.json:
        print(json.dumps(as_json(inspection), indent=1, default=str))
    else:
        lines = [*(tensor_table(inspection) if options.tensors else ()), *summary(inspection)]
        terminal.show("\n".join(lines), STYLES)
    return 1 if inspection.damage else 0


def tensor_table(inspection: Inspection) -> list[str]:
    """A header, one line per tensor, and an empty line."""
    rows = [("name", "shape", "dtype", "bytes", "file")]
    rows += [(t.name, _shape(t), _dtype(t), f"{t.nbytes:,}", _files(t)) for t in inspection.tensors]
    return [*table(rows, left=(0, 1, 2, 4)), ""]


def summary(inspection: Inspection) -> list[str]:
    """Lines with the format, sizes by group, ties, and damaged files."""
    lines = [f"{inspection.path}: {inspection.kind}"]
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in inspection.tensors:
        prefix = tensor.name.partition(".")[0]
        groups.setdefault(prefix if prefix in ("model", "optimizer") else "other", []).append(tensor)
    for title, tensors in groups.items():
        by_dtype: dict[str, int] = {}
        for tensor in tensors:
            by_dtype[_dtype(tensor)] = by_dtype.get(_dtype(tensor), 0) + tensor.nbytes
        dtypes = ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in by_dtype.items())
        elements = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in tensors)
        lines.append(f"{title}: {len(tensors):,} tensors, {elements:,} elements ({dtypes})")
    nbytes = sum(tensor.nbytes for tensor in inspection.tensors)
    lines.append(f"in all: {len(inspection.tensors):,} tensors, {size(nbytes)}")
    lines += [f"tied: {name} is {original}" for name, original in inspection.ties.items()]
    if inspection.values:
        lines.append(f"values: {', '.join(sorted(names_of(inspection.values)))}")
    if inspection.checked is None:
        lines.append("hashes: none compared")
    elif not inspection.damage:
        lines.append(f"hashes: all right ({size(inspection.checked)} of files)")
    return [*lines, *(f"damaged: {file}" for file in inspection.damage)]


def names_of(values: Mapping[str, Any]) -> list[str]:
    """The names of values, including those one level below."""
    names = []
    for key, value in values.items():
        inner = list(value) if isinstance(value, dict) else []
        names += [f"{key}.{name}" for name in inner] or [key]
    return names


def as_json(inspection: Inspection) -> dict[str, Any]:
    """The tensors and the summary as values for JSON. Sizes in bytes."""
    return {
        "path": str(inspection.path),
        "kind": inspection.kind,
        "tensors": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "dtype": _dtype(tensor),
                "bytes": tensor.nbytes,
                "files": tensor.files,
            }
            for tensor in inspection.tensors
        ],
        "ties": dict(inspection.ties),
        "values": names_of(inspection.values),
        "bytes": sum(tensor.nbytes for tensor in inspection.tensors),
        "hashed_bytes": inspection.checked,
        "damage": inspection.damage,
    }


def _shape(tensor: TensorInfo) -> str:
    return "x".join(map(str, tensor.shape)) or "-"


def _dtype(tensor: TensorInfo) -> str:
    from ..dtypes import dtype_name

    return dtype_name(tensor.dtype)


def _files(tensor: TensorInfo) -> str:
    more = f" and {len(tensor.files) - 1} more" if len(tensor.files) > 1 else ""
    return f"{tensor.files[0]}{more}" if tensor.files else "-"
