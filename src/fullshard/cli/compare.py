"""`fullshard compare SCRIPT`."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from ..text import counted
from . import terminal
from .local_ranks import MOST_RANKS, run_ranks
from .main import printable

if TYPE_CHECKING:
    from ..insight.comparison import Comparison

SIDES = {"torch": "PyTorch's FSDP", "fullshard": "Fullshard"}
PATIENCE = 60.0  # seconds without a step until a warning is printed; the next comes after twice as long, and so on
STYLES = {"(?m)^.*DIFFERENT.*$": "bold red", "(?m)^.*the same in every bit$": "green"}


@dataclass(frozen=True)
class CompareArguments:
    """Run a program for PyTorch's FSDP twice, on PyTorch's FSDP and on Fullshard, and compare the two.

    The program needs no changes: `fullshard adopt` runs it on Fullshard. Both runs start with the same random seeds and
    take turns, step by step (on an accelerator one follows the other).
    Compares losses and parameters bit by bit; shows step time, memory and host time side by side. Example:
        fullshard compare examples/fsdp2.py --steps 40 --ranks 2 -- --width 64

    Exit code: 0 equal losses and parameters, 1 different ones, 2 bad input.
    """

    script: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")]
    """a program as torchrun would start it; put its own arguments after --"""
    steps: int = 40
    """optimizer steps after which the program is stopped"""
    ranks: int = 2
    """processes to start on this machine"""
    json: bool = False
    """print one JSON object, for programs"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return terminal.run(CompareArguments, "compare", arguments[:cut], partial(_compare, arguments[cut + 1 :]))


def _compare(arguments: list[str], options: CompareArguments) -> int:
    """Run the script with these arguments on both sides; the exit code of the command."""
    if not options.script.is_file():
        raise ConfigError(f"there is no file {options.script}")
    if not 1 <= options.ranks <= MOST_RANKS:
        raise ConfigError(f"--ranks must be from 1 to {MOST_RANKS}, got {options.ranks}")
    if options.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {options.steps}")
    if "RANK" in os.environ:
        raise ConfigError("compare starts its ranks itself: run it without torchrun")
    with tempfile.TemporaryDirectory() as folder:
        _run_sides(options, arguments, Path(folder))
        from ..insight.comparison import SideRecording, compare

        recordings = {side: SideRecording.read(Path(folder, side), options.ranks) for side in SIDES}
        if empty := [SIDES[side] for side, recording in recordings.items() if not recording.losses]:
            raise ConfigError(f"{options.script} ended before its first optimizer step on {' and on '.join(empty)}")
        for side, recording in recordings.items():
            if recording.engines != [side]:
                raise _other_engines(options.script, side, recording.engines)
        comparison = compare(recordings["torch"], recordings["fullshard"])
    if options.json:
        print(json.dumps(comparison.as_json(), indent=1))
    else:
        show(comparison, f"{options.script}: {counted(comparison.steps, 'step')} on {counted(options.ranks, 'rank')}")
    return 0 if comparison.same else 1


def _other_engines(script: Path, side: str, engines: Sequence[str]) -> ConfigError:
    """The error for a side on which the program does not use the engine to be compared."""
    other = "a model that Fullshard shards" if "fullshard" in engines else "a model that PyTorch's FSDP shards"
    return ConfigError(
        f"{script}: there is nothing to compare.",
        expected=f"modules that are units of {SIDES[side]}, on that side",
        got=other if engines else "no module that is an FSDP unit (a model that is not sharded, or is under DDP)",
        remedy="import fully_shard or FullyShardedDataParallel from torch.distributed.fsdp. Accelerate decides for DDP "
        "on CPU ranks, whatever its FSDP plugin says",
    )


def _run_sides(options: CompareArguments, arguments: list[str], folder: Path) -> None:
    """Run the script on both sides at once, and record each in a new folder. On a CPU they take turns, step by step.

    Raises:
        ConfigError: it failed on one of them; the other is stopped.
    """
    pairs = [socket.socketpair() for _ in range(options.ranks)]  # for each rank, between its two sides
    cancelled = threading.Event()

    def run(side: str, sockets: Sequence[socket.socket]) -> list[str]:
        """Run one side; returns a description of the failure, if any."""
        place = folder / side
        place.mkdir()
        child = ["-m", f"{__package__}.recorded", side, str(place), str(options.steps), str(options.script)]
        codes = run_ranks([*child, *arguments], options.ranks, place, sockets, cancelled)
        if cancelled.is_set():
            return []
        failed = [r for r in range(options.ranks) if codes.get(r) != 0 or not (place / f"rank-{r}.json").exists()]
        if not failed:
            return []
        cancelled.set()
        first = failed[0]
        if any(codes.get(rank) != 0 for rank in failed):  # the first that ended; the others failed because it had
            first = next((rank for rank in codes if rank in failed), first)
        log = (place / f"rank-{first}.log").read_text(errors="replace").rstrip()
        end = f"exit code {codes[first]}" if first in codes else "killed because other ranks had failed"
        order = [*codes]
        before = [rank for rank in order[: order.index(first)] if rank not in failed] if first in codes else []
        left = f"; rank {', '.join(map(str, before))} had ended before, with exit code 0" if before else ""
        shared = "; both sides run at once, and write to the same paths" if "FileExistsError" in log else ""
        headline = f"{options.script} failed on {SIDES[side]}: rank {first}, {end}{left}{shared}"
        return [headline, *log.splitlines()[-20:]]

    with ThreadPoolExecutor(len(SIDES)) as threads:
        try:
            runs = [
                threads.submit(run, side, sockets)
                for side, sockets in zip(SIDES, zip(*pairs, strict=True), strict=True)
            ]
            patience = PATIENCE
            while wait(runs, timeout=1.0).not_done:
                if (waited := _seconds_since_a_step(folder)) < PATIENCE:
                    patience = PATIENCE
                elif waited > patience:
                    patience *= 2
                    print(printable(_no_step(folder, options.ranks, waited)), file=sys.stderr, flush=True)
            problems = [each.result() for each in runs]
        except BaseException:  # an interrupt
            cancelled.set()
            raise
    for problem in filter(None, problems):
        raise ConfigError("\n".join(problem))


def _seconds_since_a_step(folder: Path) -> float:
    """Seconds since a rank of either side ended a step, or the sides began."""
    times = [path.stat().st_mtime for path in (folder, *folder.glob("*/*.steps"))]
    return time.time() - max(times)


def _no_step(folder: Path, ranks: int, seconds: float) -> str:
    """The warning that no rank has ended a step for some time, with the number of steps that each has taken."""
    sides = []
    for side, name in SIDES.items():
        taken = [folder / side / f"rank-{rank}.steps" for rank in range(ranks)]
        steps = [path.read_text() or "0" if path.exists() else "0" for path in taken]
        sides.append(f"{name}: {', '.join(f'rank {rank} after {step}' for rank, step in enumerate(steps))}")
    text = f"fullshard: no rank has ended a step for {seconds:.0f} s. {'; '.join(sides)} steps."
    return f"{text} Ctrl-C ends both sides; the program may hang on one of them."


def show(comparison: Comparison, title: str) -> None:
    """Print the table and the verdict, in color on a terminal."""
    table = Table("", *SIDES.values(), "ratio", title=printable(title), title_justify="left")
    for row in comparison.rows():
        table.add_row(*row)
    for column in table.columns[1:]:
        column.justify = "right"
    Console().print(table)
    terminal.show(comparison.verdict(), STYLES)
