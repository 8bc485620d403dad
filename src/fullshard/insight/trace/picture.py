"""A picture of one step of some ranks, for a report (PNG, SVG or PDF), drawn by matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...text import size
from .analyse import OUTSIDE, Analysis
from .merge import RunTrace
from .messages import no_matplotlib, nothing_to_draw, unknown_picture
from .timeline import spans_of_transfer, spans_of_work

KINDS = (".png", ".svg", ".pdf")
MOST_RANKS = 8
COMPUTE, OUTER = ("#3b6ea8", "#7ba3d0"), "#c9c9c9"  # units, in alternating colours; outside of units
GATHER, REDUCE, TRANSFER, LATE = "#5a9e6f", "#8a6bb1", "#e0a03c", "#c0392b"
LANES = ("compute", "gather", "reduce")
HEIGHT = 0.8  # of a bar; lanes are 1 apart


def draw_step(run: RunTrace, analysis: Analysis, path: Path) -> None:
    """Draw the step of median length: compute, waits and transfers of each rank, and the first rank's memory.

    Args:
        path: the file to write; its suffix determines the format.

    Raises:
        ConfigError: no complete step was recorded, an unsupported suffix, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in KINDS:
        raise unknown_picture(path, KINDS)
    if not analysis.steps:
        raise nothing_to_draw()
    if not find_spec("matplotlib"):
        raise no_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    by_time = sorted(range(len(analysis.steps)), key=lambda number: analysis.steps[number].time)
    number = by_time[len(by_time) // 2]
    ranks = [trace.rank for trace in run.ranks[:MOST_RANKS]]
    begin = min(analysis.bounds[rank][number] for rank in ranks)
    end = max(analysis.bounds[rank][number + 1] for rank in ranks)
    figure = Figure(figsize=(11, 1.8 + 0.75 * len(ranks) + 1.2), dpi=130, layout="constrained")
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(len(ranks) + 0.5, 1))

    def bar(rank: int, lane: str, span: tuple[float, float], colour: str) -> None:
        left, right = max(span[0], begin), min(span[1], end)
        if right > left:
            row = ranks.index(rank) * (len(LANES) + 1) + LANES.index(lane)
            lanes.barh(row, 1e3 * (right - left), left=1e3 * (left - begin), height=HEIGHT, color=colour, linewidth=0)

    units: dict[str, str] = {}
    for rank in ranks:
        for start, stop, unit in spans_of_work(analysis, rank):
            colour = OUTER if unit == OUTSIDE else units.setdefault(unit, COMPUTE[len(units) % 2])
            bar(rank, "compute", (start, stop), colour)
        for wait in analysis.waits:
            if wait.rank == rank:
                bar(rank, "compute", (wait.begin, wait.begin + wait.late), LATE)
                bar(rank, "compute", (wait.begin + wait.late, wait.end), TRANSFER)
        for lane, colour in (("gather", GATHER), ("reduce", REDUCE)):
            for start, stop, _ in spans_of_transfer(run, analysis, rank, lane):
                bar(rank, lane, (start, stop), colour)
    rows = [(index * (len(LANES) + 1) + at, f"rank {rank}  {lane}" if not at else lane)
            for index, rank in enumerate(ranks) for at, lane in enumerate(LANES)]  # fmt: skip
    lanes.set_yticks([row for row, _ in rows], [name for _, name in rows], fontsize=8)
    lanes.invert_yaxis()
    step = analysis.steps[number]
    shown = f", ranks {ranks[0]} to {ranks[-1]}" if len(run.ranks) > MOST_RANKS else ""
    waits = f"{(step.late + step.transfer) / step.time:.0%} waiting"
    lanes.set_title(f"Step {number + 1} of {len(analysis.steps)}: {step.time * 1e3:.4g} ms, {waits}{shown}")
    _draw_memory(memory, run, begin, end)
    legend = [("computes in a unit", COMPUTE[0]), ("outside of units", OUTER), ("waits for a transfer", TRANSFER)]
    legend += [("waits for a late rank", LATE), ("gathers", GATHER), ("reduces", REDUCE)]
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in legend],
        loc="outside lower center",
        ncols=len(legend),
        frameon=False,
        fontsize=8,
    )
    for axes in (lanes, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_memory(axes: Any, run: RunTrace, begin: float, end: float) -> None:
    """Draw the first rank's bytes of gathered units and reductions over time."""
    first = run.ranks[0]
    within = [(row.time, row.live) for row in first.events if begin <= row.time <= end]
    most = max((live for _, live in within), default=0)
    scale, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    times = [1e3 * (time - begin) for time, _ in within]
    axes.fill_between(times, [live / scale for _, live in within], step="post", color="#b5b5b5", linewidth=0)
    axes.set(xlabel="milliseconds", ylabel=unit, xlim=(0, 1e3 * (end - begin)), ylim=(0, None))
    axes.set_title(f"gathered and in reduction on rank {first.rank}: at most {size(most)}", fontsize=9)
