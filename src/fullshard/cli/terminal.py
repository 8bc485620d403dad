"""How commands read their arguments and print. Of this package only commands import it, as it needs tyro and rich."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import TypeVar

import tyro
from rich.console import Console
from rich.text import Text

from .main import refuse

T = TypeVar("T")


def parsed(kind: type[T], command: str, arguments: list[str]) -> T | int:
    """The arguments of a command; an exit code where they are wrong, or only ask for help."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(kind, prog=f"fullshard {command}", args=arguments)
    except SystemExit as stop:
        if not stop.code:
            return 0
        text = re.sub(r"[\u2500-\u257f]+", " ", told.getvalue()).partition("For full helptext")[0]  # without its frame
        return refuse(f"{text} (fullshard {command} --help)")


def show(text: str, styles: Mapping[str, str], console: Console | None = None) -> None:
    """Print a text, in colours on a terminal: what patterns match in styles; as plain text elsewhere."""
    made = Text(text)
    for pattern, style in styles.items():
        made.highlight_regex(pattern, style)
    (console or Console(soft_wrap=True)).print(made)
