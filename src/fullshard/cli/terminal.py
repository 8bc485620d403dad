"""How commands read their arguments and print. Of this package only commands import it, as it needs tyro and rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from .main import printable

T = TypeVar("T")


def parsed(kind: type[T], command: str, arguments: list[str]) -> T | int:
    """The arguments of a command, or an exit code where they are wrong (tyro has printed why) or only ask for help."""
    try:
        return tyro.cli(kind, prog=f"fullshard {command}", args=arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def show(text: str, styles: Mapping[str, str], console: Console | None = None) -> None:
    """Print a text, in colours on a terminal: what patterns match in styles; as plain text elsewhere."""
    made = Text("\n".join(map(printable, text.split("\n"))))
    for pattern, style in styles.items():
        made.highlight_regex(pattern, style)
    (console or Console(soft_wrap=True)).print(made)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal's standard error while something runs; elsewhere nothing.

    Gives a function of what is being done, the bytes done and those of all.
    """
    console = Console(stderr=True)
    told = TextColumn("{task.description}", markup=False)
    columns = (told, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def advance(name: str, done: int, total: int) -> None:
            bar.update(task, description=printable(f"{title} {name}".strip()), completed=done, total=total)

        yield advance
