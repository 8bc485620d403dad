"""How commands parse their arguments and print. Only commands import it, because it needs tyro and rich."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from ..errors import CheckpointError, FullshardError
from .main import printable, refuse

T = TypeVar("T")


def run(kind: type[T], command: str, arguments: list[str], answer: Callable[[T], int]) -> int:
    """Parse a command's arguments and call `answer` with them.

    Returns:
        The exit code. tyro itself prints the help, and what is wrong with the arguments.
    """
    try:
        options = tyro.cli(kind, prog=f"fullshard {command}", args=arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        code = answer(options)
        sys.stdout.flush()
    except FullshardError as error:
        return refuse(str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STDOUT:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered must go somewhere at exit
        return 2 if isinstance(error, BrokenPipeError) else refuse(f"cannot write the output: {error.strerror}")
    return code


_OF_STDOUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_exists(path: Path) -> None:
    """Refuse a missing path before a command imports torch, which takes seconds.

    Raises:
        CheckpointError: nothing is there. Other errors are left to the reader.
    """
    with suppress(OSError):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist.")


def show(text: str, styles: Mapping[str, str], console: Console | None = None) -> None:
    """Print a text; on a terminal, matches of the patterns in `styles` (pattern -> style) are in color."""
    styled = Text("\n".join(map(printable, text.split("\n"))))
    for pattern, style in styles.items():
        styled.highlight_regex(pattern, style)
    (console or Console(soft_wrap=True)).print(styled)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on standard error if it is a terminal.

    Yields:
        A function of the current item's name, the bytes done, and the total bytes.
    """
    console = Console(stderr=True)
    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def advance(name: str, done: int, total: int) -> None:
            bar.update(task, description=printable(f"{title} {name}".strip()), completed=done, total=total)

        yield advance
