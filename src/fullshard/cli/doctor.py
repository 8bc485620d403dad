"""`fullshard doctor PATH`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from . import terminal

if TYPE_CHECKING:
    from ..insight.doctor import Diagnosis


@dataclass(frozen=True)
class DoctorArguments:
    """Explain why a run hung or died, from the reports of its watchers (fullshard.watch(folder=...)).

    Also reads dumps of PyTorch's flight recorder (TORCH_NCCL_DUMP_ON_TIMEOUT). Example:
        fullshard doctor runs/stuck

    Exit code: 0 nothing is wrong, 1 a problem was explained, 2 bad input.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """a folder with reports (stuck-*.json), dumps (nccl_trace_rank_*) or both; or one such file"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return terminal.run(DoctorArguments, "doctor", arguments, _explain)


def _explain(options: DoctorArguments) -> int:
    from ..insight.doctor import doctor

    diagnosis = doctor(options.path)
    show(diagnosis)
    return 0 if diagnosis.kind == "nothing" else 1


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print a diagnosis, in color on a terminal."""
    styles = {
        r"\A.*": "bold green" if diagnosis.kind == "nothing" else "bold red",
        r"(?m)^(?!\A)\S.*$": "bold",
        r"(?m)^  \d+\. .*$": "yellow",
    }
    terminal.show(str(diagnosis), styles, console)
