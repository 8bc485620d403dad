"""`fullshard doctor PATH`."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from ..errors import ConfigError
from ..insight.doctor import Diagnosis, doctor
from .main import refuse


@dataclass(frozen=True)
class Arguments:
    """Explain why a run hung or died, from what its watchers (fullshard.watch(folder=...)) wrote.

    Dumps of PyTorch's flight recorder are read too (TORCH_NCCL_DUMP_ON_TIMEOUT). Exit code: 0 nothing is wrong,
    1 something is, and was explained, 2 bad input.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """a folder with reports (stuck-*.json), dumps (nccl_trace_rank_*) or both; or one such file"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            given = tyro.cli(Arguments, prog="fullshard doctor", args=arguments)
    except SystemExit as stop:
        if not stop.code:
            return 0
        text = re.sub(r"[\u2500-\u257f]+", " ", told.getvalue()).partition("For full helptext")[0]
        return refuse(f"{' '.join(text.split())} (fullshard doctor --help)")
    try:
        found = doctor(given.path)
    except ConfigError as error:
        return refuse(str(error))
    show(found)
    return 0 if found.kind == "nothing" else 1


def show(found: Diagnosis, console: Console | None = None) -> None:
    """Print it: in colours on a terminal, as plain text elsewhere."""
    text = Text(str(found))
    text.highlight_regex(r"\A.*", "bold green" if found.kind == "nothing" else "bold red")
    text.highlight_regex(r"(?m)^(?!\A)\S.*$", "bold")
    text.highlight_regex(r"(?m)^  \d+\. .*$", "yellow")
    (console or Console(soft_wrap=True)).print(text)
