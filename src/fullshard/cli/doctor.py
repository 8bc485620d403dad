"""`fullshard doctor PATH`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from ..errors import ConfigError
from . import terminal
from .main import refuse

if TYPE_CHECKING:
    from ..insight.doctor import Diagnosis


@dataclass(frozen=True)
class Arguments:
    """Explain why a run hung or died, from what its watchers (fullshard.watch(folder=...)) wrote.

    Dumps of PyTorch's flight recorder are read too (TORCH_NCCL_DUMP_ON_TIMEOUT). Example:

        fullshard doctor runs/stuck

    Exit code: 0 nothing is wrong, 1 something is, and was explained, 2 bad input.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """a folder with reports (stuck-*.json), dumps (nccl_trace_rank_*) or both; or one such file"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    given = terminal.parsed(Arguments, "doctor", arguments)
    if isinstance(given, int):
        return given
    from ..insight.doctor import doctor

    try:
        found = doctor(given.path)
    except ConfigError as error:
        return refuse(str(error))
    show(found)
    return 0 if found.kind == "nothing" else 1


def show(found: Diagnosis, console: Console | None = None) -> None:
    """Print it: in colours on a terminal, as plain text elsewhere."""
    styles = {
        r"\A.*": "bold green" if found.kind == "nothing" else "bold red",
        r"(?m)^(?!\A)\S.*$": "bold",
        r"(?m)^  \d+\. .*$": "yellow",
    }
    terminal.show(str(found), styles, console)
