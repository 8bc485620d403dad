"""`fullshard inspect PATH`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from ..errors import FullshardError
from . import terminal
from .main import refuse

if TYPE_CHECKING:
    from ..exchange.inspect import Found, Inspection

STYLES = {"\\Aname .*": "bold", "(?m)^damaged: .*$": "bold red", "(?m)^hashes: all .*$": "bold green"}


@dataclass(frozen=True)
class Arguments:
    """Summarize a checkpoint and verify its hashes.

    All files of a Fullshard checkpoint are read and compared with the hashes that were written with them; other
    formats have none. Examples:

        fullshard inspect runs/checkpoints

        fullshard inspect model.safetensors --tensors

    Exit code: 0 nothing is wrong, 1 damage was found, 2 bad input: no checkpoint, half of one, or an unknown format.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """a file or a folder of any format that `fullshard convert` reads; its format is found out"""
    tensors: bool = False
    """also list every tensor with its shape, dtype, size and file"""
    json: bool = False
    """print one JSON object, for programs"""
    hashes: bool = True
    """compare hashes, for which all files are read"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    given = terminal.parsed(Arguments, "inspect", arguments)
    if isinstance(given, int):
        return given
    from ..exchange.inspect import inspect

    try:
        with terminal.progress("comparing hashes") as progress:
            found = inspect(given.path, hashes=given.hashes, progress=progress)
    except FullshardError as error:
        return refuse(str(error))
    if given.json:
        print(json.dumps(as_json(found), indent=1, default=str))
    else:
        show(found, tensors=given.tensors)
    return 1 if found.damage else 0


def show(found: Inspection, console: Console | None = None, *, tensors: bool = False) -> None:
    """Print the summary, and with `tensors` a table of all tensors before it; in colours on a terminal."""
    terminal.show("\n".join([*(table(found) if tensors else ()), *sums(found)]), STYLES, console)


def table(found: Inspection) -> list[str]:
    """A line for each tensor, below a heading."""
    rows = [("name", "shape", "dtype", "bytes", "file")]
    rows += [(one.name, _shape(one), _dtype(one), f"{one.nbytes:,}", _files(one)) for one in found.tensors]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {nbytes:>{widths[3]}}  {file}"
        for name, shape, dtype, nbytes, file in rows
    ]
    return [*lines, ""]


def sums(found: Inspection) -> list[str]:
    """The summary, in lines: format, sizes by group, ties, and whether files are damaged."""
    from ..names import size

    lines = [f"{found.path}: {found.kind}"]
    groups: dict[str, list[Found]] = {}
    for one in found.tensors:
        first = one.name.partition(".")[0]
        groups.setdefault(first if first in ("model", "optimizer") else "other", []).append(one)
    for title, own in groups.items():
        by_dtype: dict[str, int] = {}
        for one in own:
            by_dtype[_dtype(one)] = by_dtype.get(_dtype(one), 0) + one.nbytes
        dtypes = ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in by_dtype.items())
        elements = sum(one.nbytes // one.dtype.itemsize for one in own)
        lines.append(f"{title}: {len(own):,} tensors, {elements:,} elements ({dtypes})")
    lines.append(f"in all: {len(found.tensors):,} tensors, {size(sum(one.nbytes for one in found.tensors))}")
    lines += [f"tied: {name} is {known}" for name, known in found.ties.items()]
    if found.values:
        lines.append(f"values: {', '.join(sorted(names_of(found.values)))}")
    if found.checked is None:
        lines.append("hashes: none compared")
    elif not found.damage:
        lines.append(f"hashes: all right ({size(found.checked)} of files)")
    return [*lines, *(f"damaged: {one}" for one in found.damage)]


def names_of(values: Any) -> list[str]:
    """Names of the values, two levels of them."""
    names = []
    for key, value in values.items():
        inner = list(value) if isinstance(value, dict) else []
        names += [f"{key}.{one}" for one in inner] or [key]
    return names


def as_json(found: Inspection) -> dict[str, Any]:
    """The same, for programs. Sizes in bytes."""
    return {
        "path": str(found.path),
        "kind": found.kind,
        "tensors": [
            {
                "name": one.name,
                "shape": one.shape,
                "dtype": _dtype(one),
                "bytes": one.nbytes,
                "files": one.files,
            }
            for one in found.tensors
        ],
        "ties": dict(found.ties),
        "values": names_of(found.values),
        "bytes": sum(one.nbytes for one in found.tensors),
        "hashed_bytes": found.checked,
        "damage": found.damage,
    }


def _shape(one: Found) -> str:
    return "x".join(map(str, one.shape)) or "-"


def _dtype(one: Found) -> str:
    return str(one.dtype).removeprefix("torch.")


def _files(one: Found) -> str:
    return one.files[0] + (f" and {len(one.files) - 1} more" if len(one.files) > 1 else "") if one.files else "-"
