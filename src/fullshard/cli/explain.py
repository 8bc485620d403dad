"""`fullshard explain CODE`."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from ..errors import ConfigError
from . import terminal
from .main import refuse

_DATA = Path(__file__).with_name("errors.json")
"""The error index, which docs/_errors/page.py makes of the source."""


@dataclass(frozen=True)
class Arguments:
    """Explain an error or a warning by its code, the last line of its message: what it means, and what to do.

    The same is in docs/errors.md. Example:

        fullshard explain D016

    Exit code: 0 it was explained, 2 there is no such code.
    """

    code: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CODE")]
    """as in the message: C017"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    given = terminal.parsed(Arguments, "explain", arguments)
    if isinstance(given, int):
        return given
    try:
        code, entry = find(given.code)
    except ConfigError as error:
        return refuse(str(error))
    show(code, entry)
    return 0


def find(code: str) -> tuple[str, dict[str, Any]]:
    """A code as it is written, and its entry; `c17` will do for C017.

    Raises:
        ConfigError: there is no such code; names those that are nearly so.
    """
    known: dict[str, dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))
    short = re.fullmatch(r"([A-Za-z])(\d{1,3})", code.strip())
    name = f"{short[1].upper()}{int(short[2]):03d}" if short else code.strip().upper()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
        raise ConfigError(
            "No error or warning of this version has this code.",
            expected=f"a letter and three digits, such as {', '.join(sorted(near))}"
            if near
            else "a letter and three digits, such as C017",
            got=code,
            remedy="look at the last line of the message, which begins with code:",
            code="C207",
        )
    return name, known[name]


def show(code: str, entry: dict[str, Any], console: Console | None = None) -> None:
    """Print an entry: in colours on a terminal, as plain text elsewhere."""
    lines = [f"{code}  {entry['kind']}", "", *textwrap.indent(entry["text"], "  ").split("\n")]
    for title, text in (("What it means", entry["means"]), ("What to do", entry["do"])):
        if text:
            lines += ["", title, *textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")]
    lines += ["", "Raised by", *(f"  fullshard/{place}" for place in entry["where"])]
    if entry["example"] is not None:
        lines += ["", "Shown by the test", f"  {entry['example']}"]
    lines += ["", f"docs/errors.md#{code.lower()}"]
    styles = {
        rf"\A{code}.*": "bold red",
        r"(?m)^(What it means|What to do|Raised by|Shown by the test)$": "bold",
        r"(?m)^    remedy: .*$": "yellow",
    }
    terminal.show("\n".join(lines), styles, console)
