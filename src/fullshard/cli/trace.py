"""`fullshard trace PATH...`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import terminal
from .main import printable, refuse

if TYPE_CHECKING:
    from ..insight.trace import Analysis, RunTrace

ROWS = 12
"""Rows of the table of waits; --json has all of them."""


@dataclass(frozen=True)
class TraceArguments:
    """Explain why a step is slow and which rank is late, from what `with fullshard.trace(PATH):` wrote on all ranks.

    Splits each wait: the time until the last rank issued the collective (late), and the rest (transfer). Example:
        fullshard trace runs/trace --html trace.html

    Exit code: 0 printed (with a note on ranks that have no file), 2 bad input.
    """

    path: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders with traces, or their files"""
    html: Path | None = None
    """write a self-contained page with the timeline"""
    chrome: Path | None = None
    """write the timeline for Perfetto (ui.perfetto.dev) and chrome://tracing"""
    picture: Path | None = None
    """draw one step as a .png, .svg or .pdf (needs matplotlib)"""
    json: bool = False
    """print one JSON object, for programs"""


_SHOWN = 8  # ranks in a message


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return terminal.run(TraceArguments, "trace", arguments, _analyze)


def _analyze(options: TraceArguments) -> int:
    from ..insight.trace import analyse, chrome_trace, draw_step, html_page, read, report
    from ..watcher.judge import ranks_of

    if not options.path:
        return refuse("trace needs a folder: fullshard trace PATH")
    trace = read(list(options.path))
    if trace.missing:
        missing = ranks_of(trace.missing[:_SHOWN]) + (", ..." if len(trace.missing) > _SHOWN else "")
        print(f"fullshard: no file of {missing}; what these did is unknown", file=sys.stderr)
    analysis = analyse(trace)
    outputs = {
        option: path for option in ("chrome", "html", "picture") if (path := getattr(options, option)) is not None
    }
    inputs = {file.resolve() for path in options.path for file in (path.glob("*") if path.is_dir() else [path])}
    for option, path in outputs.items():
        if path.resolve() in inputs and path.name.startswith("rank-"):
            return refuse(f"--{option} {path} would replace a recording")
    try:
        if options.chrome is not None:
            options.chrome.write_text(json.dumps(chrome_trace(trace, analysis)))
        if options.html is not None:
            options.html.write_text(html_page(trace, analysis), encoding="utf-8")
        if options.picture is not None:
            draw_step(trace, analysis, options.picture)
    except OSError as error:
        return refuse(f"cannot write {error.filename or ' or '.join(map(str, outputs.values()))}: {error.strerror}")
    if options.json:
        print(json.dumps(report(trace, analysis), indent=1))
    else:
        show(trace, analysis)
    return 0


def show(trace: RunTrace, analysis: Analysis) -> None:
    """Print who is late, and tables of steps, waits and late ranks."""
    console = Console()
    lines, steps = analysis.in_words(trace), len(analysis.steps)
    console.print(Text("\n".join(map(printable, lines)), style="bold"))
    if not steps:
        return
    table = Table(
        "step", "time", "compute", "waits", "late", "transfer", "waited for (share of the step)", title="Steps"
    )
    for number, step in enumerate(analysis.steps):
        waits = step.late + step.transfer
        longest = [(unit, time, rank) for unit, time, rank in step.units if time > 0.01 * step.time]
        units = ", ".join(f"{unit} {_share(time, step.time)}{_late(rank)}" for unit, time, rank in longest)
        shares = [_share(part, step.time) for part in (step.compute, waits, step.late, step.transfer)]
        table.add_row(str(number), duration(step.time), *shares, Text(printable(units)))
    console.print(table)
    table = Table("rank", "unit", "of", "late", "transfer", "late rank", title="Waits by rank and unit, per step")
    for row in analysis.unit_waits[:ROWS]:
        late_rank = "" if row.late_rank is None else str(row.late_rank)
        times = duration(row.late), duration(row.transfer)
        table.add_row(str(row.rank), Text(printable(row.unit)), row.kind, *times, late_rank)
    console.print(table)
    if len(analysis.unit_waits) > ROWS:
        console.print(f"{len(analysis.unit_waits) - ROWS} shorter ones: --json")
    if analysis.late_ranks:
        names = ("rank", "times last", "median", "worst", "a rank waits", "all together", "loses time in")
        table = Table(*names, title="Who is late, and the waits of others for it per step")
        for late in analysis.late_ranks:
            seconds = [duration(time) for time in (late.typical, late.worst, late.longest, late.cost)]
            table.add_row(str(late.rank), str(late.times), *seconds, Text(printable(late.place)))
        console.print(table)


def duration(seconds: float) -> str:
    """A time in words: `1.2 ms`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _late(rank: int | None) -> str:
    return "" if rank is None else f" (rank {rank} late)"
