"""`fullshard compare SCRIPT`."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from . import terminal
from .main import printable, refuse
from .ranks import MOST_RANKS, run_ranks

if TYPE_CHECKING:
    from ..insight.compare import Comparison

SIDES = {"torch": "PyTorch's FSDP", "fullshard": "Fullshard"}
STYLES = {"(?m)^.*DIFFERENT.*$": "bold red", "(?m)^.*the same in every bit$": "green"}


@dataclass(frozen=True)
class Arguments:
    """Run a program for PyTorch's FSDP twice, on PyTorch's FSDP and on Fullshard, and compare the two.

    The program stays as it is: on Fullshard it runs as by `fullshard adopt`. Losses and parameters are compared bit by
    bit; step time, memory and the host's time are shown side by side. Its random numbers begin alike. Example:

        fullshard compare examples/fsdp2.py --steps 40 --ranks 2 -- --width 64

    Exit code: 0 the same losses and parameters, 1 different ones, 2 bad input.
    """

    script: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")]
    """a program as torchrun would start it; its own arguments come after --"""
    steps: int = 40
    """optimizer steps, after which the program is stopped"""
    ranks: int = 2
    """processes to start on this machine"""
    json: bool = False
    """print one JSON object, for programs"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = terminal.parsed(Arguments, "compare", arguments[:cut])
    if isinstance(parsed, int):
        return parsed
    if (refusal := _refusal(parsed)) is not None:
        return refuse(refusal)
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            if (failure := _failure(parsed, side, Path(folder, side), arguments[cut + 1 :])) is not None:
                return refuse(failure)
        from ..insight.compare import Recording, compare

        recordings = {side: Recording.read(Path(folder, side), parsed.ranks) for side in SIDES}
        if empty := [SIDES[side] for side, recording in recordings.items() if not recording.losses]:
            return refuse(f"{parsed.script} ended before its first optimizer step on {' and on '.join(empty)}")
        comparison = compare(recordings["torch"], recordings["fullshard"])
    if parsed.json:
        print(json.dumps(comparison.as_json(), indent=1))
    else:
        show(comparison, f"{parsed.script}: {comparison.steps} steps on {parsed.ranks} ranks")
    return 0 if comparison.same else 1


def _refusal(parsed: Arguments) -> str | None:
    """Why these arguments cannot be; None if they can."""
    if not parsed.script.is_file():
        return f"there is no file {parsed.script}"
    if not 1 <= parsed.ranks <= MOST_RANKS:
        return f"--ranks must be from 1 to {MOST_RANKS}, got {parsed.ranks}"
    if parsed.steps < 1:
        return f"--steps must be at least 1, got {parsed.steps}"
    if "RANK" in os.environ:
        return "compare starts its ranks itself: run it without torchrun"
    return None


def _failure(parsed: Arguments, side: str, folder: Path, arguments: list[str]) -> str | None:
    """Run one side. Returns why it failed; None if it did not."""
    folder.mkdir()
    child = ["-m", f"{__package__}.recorded", side, str(folder), str(parsed.steps), str(parsed.script), *arguments]
    codes = run_ranks(child, parsed.ranks, folder)
    failed = [
        rank for rank in range(parsed.ranks) if codes.get(rank) != 0 or not (folder / f"rank-{rank}.json").exists()
    ]
    if not failed:
        return None
    first = min(failed, key=lambda rank: rank not in codes)  # those that were killed only waited for it
    log = (folder / f"rank-{first}.log").read_text(errors="replace").rstrip()
    ended = f"exit code {codes[first]}" if first in codes else "it was killed, as others had failed"
    return "\n".join([f"{parsed.script} failed on {SIDES[side]}: rank {first}, {ended}", *log.splitlines()[-20:]])


def show(comparison: Comparison, title: str, console: Console | None = None) -> None:
    """Print a table and the verdict: in colours on a terminal, as plain text elsewhere."""
    console = console or Console()
    table = Table("", *SIDES.values(), "ratio", title=printable(title), title_justify="left")
    for row in comparison.rows():
        table.add_row(*row)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    terminal.show(comparison.verdict(), STYLES)
