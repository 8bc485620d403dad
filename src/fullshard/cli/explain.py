"""`fullshard explain TOPIC`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import ConfigError
from . import terminal

_PAGE = Path(__file__).with_name("errors.md")
"""A link to docs/errors.md; packages have a copy. Each section is a topic; its first paragraph is a summary."""


@dataclass(frozen=True)
class ExplainArguments:
    """Explain the topic that the last line of an error or a warning names: what happened, why, and what to do.

    Without a topic, list all topics. docs/errors.md has the same text. Example:
        fullshard explain optimizer-built-early

    Exit code: 0 explained, 2 unknown topic.
    """

    topic: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TOPIC")] = None
    """as in the message, after `more:      fullshard explain`"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return terminal.run(ExplainArguments, "explain", arguments, _explain)


def _explain(options: ExplainArguments) -> int:
    if options.topic is None:
        width = max(map(len, topics()))
        print("\n".join(f"{name.ljust(width)}  {summary(text)}" for name, text in topics().items()))
        return 0
    topic, text = find(options.topic)
    indented = re.sub(r"(?ms)^```\w*\n(.*?)^```$", lambda block: re.sub("(?m)^(?=.)", "    ", block[1]), text)
    terminal.show(f"{topic}\n\n{indented}", {r"\A.*": "bold red", r"(?m)^    .*$": "cyan"})
    return 0


def topics() -> dict[str, str]:
    """Topic -> the text of its section, in the order of the page."""
    _, *parts = re.split(r"(?m)^## (.+)\n", _PAGE.read_text(encoding="utf-8"))
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def summary(text: str) -> str:
    """The first paragraph of a section, on one line."""
    return " ".join(text.partition("\n\n")[0].split())


def find(topic: str) -> tuple[str, str]:
    """A topic as the page spells it, and the text of its section.

    Raises:
        ConfigError: the topic does not exist; suggests similar ones.
    """
    sections = topics()
    name = re.sub(r"[\s_]+", "-", topic.strip().lower())
    if name not in sections:
        near = difflib.get_close_matches(name, sections, n=3, cutoff=0.4)
        perhaps = f"perhaps {' or '.join(near)}; " if near else ""
        raise ConfigError(
            "No error or warning of this version has this topic.",
            got=topic,
            remedy=f"{perhaps}fullshard explain lists all topics",
        )
    return name, sections[name]
