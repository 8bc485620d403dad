"""`fullshard explain TOPIC`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..errors import ConfigError
from . import terminal
from .main import refuse

_PAGE = Path(__file__).with_name("errors.md")
"""A link to docs/errors.md; a package has a copy. A section is a topic, whose first paragraph says it in one line."""


@dataclass(frozen=True)
class Arguments:
    """Explain the topic that the last line of an error or a warning names: what happened, why, and what to do.

    Without a topic: list them all. The same is in docs/errors.md. Example:

        fullshard explain optimizer-built-early

    Exit code: 0 it was explained, 2 there is no such topic.
    """

    topic: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TOPIC")] = None
    """as in the message, after `more:      fullshard explain`"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    parsed = terminal.parsed(Arguments, "explain", arguments)
    if isinstance(parsed, int):
        return parsed
    if parsed.topic is None:
        width = max(map(len, topics()))
        print("\n".join(f"{name.ljust(width)}  {summary(text)}" for name, text in topics().items()))
        return 0
    try:
        show(*find(parsed.topic))
    except ConfigError as error:
        return refuse(str(error))
    return 0


def topics() -> dict[str, str]:
    """Each topic with the text of its section, in the page's order."""
    _, *parts = re.split(r"(?m)^## (.+)\n", _PAGE.read_text(encoding="utf-8"))
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def summary(text: str) -> str:
    """What a topic's section says in one line: its first paragraph."""
    return " ".join(text.partition("\n\n")[0].split())


def find(topic: str) -> tuple[str, str]:
    """A topic as the page writes it, and the text of its section.

    Raises:
        ConfigError: there is no such topic; names those that are nearly so.
    """
    known = topics()
    name = re.sub(r"[\s_]+", "-", topic.strip().lower())
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise ConfigError(
            "No error or warning of this version has this topic.",
            expected=" or ".join(near) or None,
            got=topic,
            remedy="fullshard explain lists all topics",
        )
    return name, known[name]


def show(topic: str, text: str, console: Console | None = None) -> None:
    """Print a section, its programs indented: in colours on a terminal, as plain text elsewhere."""
    prose = re.sub(r"(?ms)^```\w*\n(.*?)^```$", lambda block: re.sub("(?m)^(?=.)", "    ", block[1]), text)
    terminal.show(f"{topic}\n\n{prose}", {r"\A.*": "bold red", r"(?m)^    .*$": "cyan"}, console)
