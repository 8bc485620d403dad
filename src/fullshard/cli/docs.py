"""`fullshard docs PATH-OR-PACKAGE`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import FullshardError
from ..reference import Keywords, find, markdown, package, site, write
from . import terminal
from .main import printable, refuse


@dataclass(frozen=True)
class Arguments:
    """Write a reference of any Python package: a page and an index of names for every file.

    From the source alone; nothing is imported. Examples:

        fullshard docs torch.distributed.fsdp

        fullshard docs src/mine --out reference --markdown

    Exit code: 0 all was read, 1 some files could not be parsed, which are
    named (their pages show their text), 2 bad input.
    """

    package: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH-OR-PACKAGE")]
    """a folder, a .py file, or the name of an installed package"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """where to write, `NAME-reference` if not given; empty, not there, or written by this command before"""
    markdown: bool = False
    """write Markdown with front matter in place of HTML"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    given = terminal.parsed(Arguments, "docs", arguments)
    if isinstance(given, int):
        return given
    try:
        place = find(given.package)
        out = given.out or Path(f"{place.name}-reference")
        with terminal.progress("reading") as advance:
            done = iter(range(1, len(place.files) + 1))
            found = package(place, lambda path: advance(path, next(done), len(place.files)))
        keywords = Keywords(found)
        written = write(out, markdown.texts(keywords) if given.markdown else site.alone(keywords))
    except FullshardError as error:
        return refuse(str(error))
    for fault in found.faults:
        print(printable(f"  {fault}"))
    start = out / ("names.md" if given.markdown else "index.html")
    broken = f", {len(found.faults)} could not be parsed" if found.faults else ""
    print(printable(f"{len(found.files)} files{broken}; {len(written)} pages: {start}"))
    return 1 if found.faults else 0
