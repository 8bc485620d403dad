"""What examples/pretrain.py shows when it has trained: the loss curve, the memory picture, and one step's timeline.

matplotlib is used where it is installed; without it there are no pictures.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from fullshard.insight.trace import analyse, draw_step, read

PARTS = (  # fields of fullshard.memory_use, what a reader calls them, colour
    ("parameters", "parameters", "#3b6ea8"),
    ("gradients", "gradients", "#e08a3c"),
    ("optimizer", "AdamW state", "#5a9e6f"),
    ("peak_transient", "gathered units and gradients in reduction, at peak", "#b5b5b5"),
)
MOST_BARS = 8  # ranks in the memory picture
UNIFORM = math.log(256)  # nats per byte of a model that knows nothing


def human_bytes(count: float) -> str:
    """1234567 -> '1.2 MB'. Decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def smoothed(losses: Sequence[float], reach: int = 10) -> list[float]:
    """The mean over each step and up to `reach` steps on either side of it."""
    parts = [losses[max(at - reach, 0) : at + reach + 1] for at in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def draw_loss(path: Path, losses: Sequence[float], validation: Sequence[tuple[int, float]], target: float) -> bool:
    """Write the loss curve as a PNG; False if matplotlib is not installed."""
    if not importlib.util.find_spec("matplotlib"):
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#c9d6e6", linewidth=0.8, label="training, each step")
    axes.plot(steps, smoothed(losses), color="#3b6ea8", linewidth=1.8, label="training, mean of 21 steps")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#c0392b", markersize=4, label="held-out files")
        step, loss = validation[-1]
        axes.annotate(f"{loss:.2f}", (step, loss), (0, 9), textcoords="offset points", ha="center", color="#c0392b")
    axes.axhline(target, color="#777777", linestyle=":", linewidth=1)
    axes.annotate(
        f"target {target}", (0.6 * len(losses), target), (0, 3), textcoords="offset points", color="#777777", fontsize=9
    )
    axes.set(
        title="Byte-level GPT on the source of Python's standard library",
        xlabel="optimizer step",
        ylabel="loss (nats per byte)",
        ylim=(0, UNIFORM * 1.05),
        xlim=(0, max(len(losses), 1) * 1.03),
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return True


def draw_memory(path: Path, ranks: Sequence[dict[str, int]]) -> bool:
    """Write what each rank holds, beside what one process would, as a PNG; False if matplotlib is missing.

    Each rank's dict has the fields named in PARTS and, for one process, `single_parameters` and
    `single_process` (parameters, as many bytes of gradients, and optimizer state), all in bytes.
    """
    if not importlib.util.find_spec("matplotlib") or not ranks:
        return False
    from matplotlib.figure import Figure

    unit, scale = ("MB", 10**6) if ranks[0]["single_process"] < 10**10 else ("GB", 10**9)
    parameters, whole = ranks[0]["single_parameters"], ranks[0]["single_process"]
    one = {"parameters": parameters, "gradients": parameters, "optimizer": whole - 2 * parameters}
    bars = [{"label": "one process\n(computed)", **one}]
    bars += [{"label": f"rank {index}", **rank} for index, rank in enumerate(ranks[:MOST_BARS])]
    figure = Figure(figsize=(8, 1.9 + 0.5 * len(bars)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    start = [0.0] * len(bars)
    rows = range(len(bars))
    for part, name, colour in PARTS:
        sizes = [bar.get(part, 0) / scale for bar in bars]
        axes.barh(rows, sizes, left=start, color=colour, label=name, height=0.62)
        for row, size in enumerate(sizes):
            if size > 0.055 * whole / scale:
                axes.text(start[row] + size / 2, row, f"{size:.1f}", ha="center", va="center", color="white")
        start = [left + size for left, size in zip(start, sizes, strict=True)]
    for row, end in enumerate(start):
        axes.text(end, row, f"  {end:.1f} {unit}", va="center", fontweight="bold")
    shown = "" if len(ranks) <= MOST_BARS else f" (the first {MOST_BARS} of them)"
    axes.set_yticks(rows, [bar["label"] for bar in bars])
    axes.invert_yaxis()
    axes.set(
        title=f"Memory for training state, sharded over {len(ranks)} rank{'s' * (len(ranks) > 1)}{shown}",
        xlabel=f"memory ({unit} = {scale:,} bytes; activations not included)",
        xlim=(0, max(start) * 1.16),
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return True


def draw_timeline(path: Path, trace: Path) -> bool:
    """Write one step of all ranks as a PNG; False if nothing was traced, as training was over or was interrupted.

    `fullshard trace` draws the same of any trace (`--picture`).
    """
    if not trace.is_dir():
        return False
    run = read([trace])
    analysis = analyse(run)
    if analysis.steps:
        draw_step(run, analysis, path)
    return bool(analysis.steps)
