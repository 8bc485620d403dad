"""What a benchmark hands back, the arithmetic on it, and how it is shown and kept.

A benchmark measures one or more quantities; of each quantity it keeps one series of samples per peer.
Everything a reader is shown (median, minimum, spread, ratio) is computed here from those samples and from
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FSDP1 = "fsdp1"  # as a reference: whichever of the two `use_orig_params` is the better one


@dataclass(frozen=True)
class Series:
    """One peer's samples of one quantity, all in the quantity's unit.

    `baseline`, where given, is subtracted statistic by statistic: the median of a cost over plain PyTorch
    is the median of the peer less the median of plain, not the median of noisy differences. `differs` says that
    the peer computed something else than it should have: its other figures are then no result. `grows` says that it
    holds more after every step.
    """

    peer: str
    samples: tuple[float, ...]
    baseline: tuple[float, ...] = ()
    note: str = ""
    differs: bool = False
    grows: bool = False

    def value(self, statistic: Callable[[Sequence[float]], float]) -> float:
        """`statistic` of the samples, over the same statistic of the baseline."""
        return statistic(self.samples) - (statistic(self.baseline) if self.baseline else 0.0)

    @property
    def median(self) -> float:
        return self.value(statistics.median)

    @property
    def minimum(self) -> float:
        return self.value(min)

    @property
    def iqr(self) -> float:
        """Interquartile range of the samples (0 for one sample: exact counts are given once)."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low


@dataclass(frozen=True)
class Target:
    """What the plan promises: `peer`'s ratio to `against` is at most (for speed: at least) `bound`."""

    peer: str
    against: str
    bound: float


@dataclass(frozen=True)
class Quantity:
    """One measured quantity: its series, the peers that ratios are given against, and what was promised.

    `speed` turns ratios over: 1.3 then means "1.3 times as fast", for samples that are durations of the
    same work.
    """

    benchmark: str
    name: str
    unit: str
    method: str
    series: tuple[Series, ...]
    against: tuple[str, ...] = ("fsdp2", FSDP1)
    targets: tuple[Target, ...] = ()
    speed: bool = False

    def find(self, peer: str) -> list[Series]:
        """The series meant by `peer`: itself, or both kinds of FSDP1 for the name `fsdp1`."""
        return [s for s in self.series if s.peer == peer or (peer == FSDP1 and s.peer.startswith("fsdp1-"))]

    def ratio(self, peer: str, against: str, statistic: Callable[[Sequence[float]], float]) -> float | None:
        """Ratio of `peer` to `against`, of medians or of minima; None where either was not measured."""
        ours, theirs = self.find(peer), self.find(against)
        if not ours or not theirs:
            return None
        mine, other = ours[0].value(statistic), min(s.value(statistic) for s in theirs)
        above, below = (other, mine) if self.speed else (mine, other)
        return above / below if below > 0 else None

    def verdict(self, target: Target) -> str:
        """One line: what was promised, what was measured, whether it holds (by the median)."""
        middle = self.ratio(target.peer, target.against, statistics.median)
        best = self.ratio(target.peer, target.against, min)
        goal = f"target {'>=' if self.speed else '<='} {target.bound:g}"
        head = f"{self.benchmark}: {self.name}: {target.peer} / {target.against}"
        if middle is None:
            return f"{head}: not measured ({goal})"
        met = middle >= target.bound if self.speed else middle <= target.bound
        minima = "" if best is None else f" (of minima {best:.4g})"
        return f"{head}: {middle:.4g}{minima}, {goal}: {'met' if met else 'MISSED'}"


def hardware() -> dict[str, Any]:
    """What the figures were measured on: they mean nothing without it."""
    import torch

    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    facts: dict[str, Any] = {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return ()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cells(quantity: Quantity, series: Series) -> list[str]:
    """One peer's row: median, spread, minimum, and its ratios (of medians / of minima) to each reference."""
    row = [series.peer, _number(series.median), _number(series.iqr), _number(series.minimum)]
    for reference in (*quantity.against, "", "")[:2]:
        middle = quantity.ratio(series.peer, reference, statistics.median) if reference else None
        best = quantity.ratio(series.peer, reference, min) if reference else None
        row.append("" if middle is None else f"{middle:.2f} / {'-' if best is None else format(best, '.2f')}")
    for target in quantity.targets:
        if target.peer == series.peer:
            verdict = quantity.verdict(target).rsplit(": ", 1)[1]
            row.append(f"{'>=' if quantity.speed else '<='}{target.bound:g} {target.against}: {verdict}")
    faults = ["DIFFERS"] * series.differs + ["GROWS"] * series.grows
    row[6:] = ["; ".join([*row[6:], *([series.note] if series.note else []), *faults])]
    return row


def _heading(quantity: Quantity) -> str:
    sense = "times as fast as" if quantity.speed else "ratio to"
    return f"{quantity.benchmark}: {quantity.name} [{quantity.unit}]  {sense} {', '.join(quantity.against)}"


COLUMNS = ("peer", "median", "IQR", "min", "1st: med / min", "2nd: med / min", "target, note")


def print_table(quantities: Sequence[Quantity]) -> None:
    """Print every quantity in one side-by-side table: with rich if it is there, plain otherwise."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for quantity in quantities:
            print(_heading(quantity))
            for series in quantity.series:
                print("  " + "  ".join(f"{cell:<16}" for cell in _cells(quantity, series)))
        return
    table = Table(title="Fullshard beside plain PyTorch, DDP, FSDP2 and FSDP1", title_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 0 < index < 6 else "left", overflow="fold")
    console = Console(width=max(Console().width, 120))
    for quantity in quantities:
        table.add_section()
        table.add_row(f"[bold]{quantity.name}[/] \\[{quantity.unit}]", "", "", "", *_references(quantity), "")
        for series in quantity.series:
            ours = series.peer.startswith(("rows", "flat"))
            table.add_row(*_cells(quantity, series), style="green" if ours else "")
    console.print(table)


def _references(quantity: Quantity) -> list[str]:
    sense = "speed vs" if quantity.speed else "ratio to"
    return [f"{sense} {name}" if name else "" for name in (*quantity.against, "", "")[:2]]


def print_verdicts(quantities: Sequence[Quantity]) -> None:
    """Print each method once, then one line per promise."""
    print()
    for quantity in quantities:
        print(f"{quantity.benchmark}: {quantity.name}: {quantity.method}")
    print()
    for quantity in quantities:
        for target in quantity.targets:
            print(quantity.verdict(target))


def markdown(quantities: Sequence[Quantity], facts: dict[str, Any], date: str) -> str:
    """The same table as Markdown, headed by date and hardware."""
    lines = [f"# Measured {date}", "", ", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    for quantity in quantities:
        first, second = (*_references(quantity), "", "")[:2]
        heads = ["peer", "median", "IQR", "min", f"{first} (med / min)" if first else "", "", "target, note"]
        heads[5] = f"{second} (med / min)" if second else ""
        lines += [f"## {quantity.benchmark}: {quantity.name} [{quantity.unit}]", "", quantity.method, ""]
        lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        lines += ["| " + " | ".join(_cells(quantity, series)) + " |" for series in quantity.series]
        lines += ["", *(f"- {quantity.verdict(target)}" for target in quantity.targets), ""]
    return "\n".join(lines)


def faults(quantities: Iterable[Quantity]) -> list[str]:
    """A line for each peer and quantity where what was computed is not what it should be, or memory grows."""
    found = []
    for quantity in quantities:
        for series in quantity.series:
            where = f"{quantity.benchmark}: {quantity.name}: {series.peer}"
            found += [f"differs: {where}"] * series.differs + [f"grows: {where} ({series.note})"] * series.grows
    return found


def dump(quantities: Sequence[Quantity]) -> list[dict[str, Any]]:
    """Quantities as plain data for JSON, every sample included."""
    return [asdict(quantity) for quantity in quantities]


def load(data: Iterable[dict[str, Any]]) -> list[Quantity]:
    """The inverse of `dump`."""
    return [
        Quantity(
            **{
                **entry,
                "series": tuple(
                    Series(**{**s, "samples": tuple(s["samples"]), "baseline": tuple(s["baseline"])})
                    for s in entry["series"]
                ),
                "against": tuple(entry["against"]),
                "targets": tuple(Target(**target) for target in entry["targets"]),
            }
        )
        for entry in data
    ]


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The flags every benchmark takes when it is run by itself: `--quick`, and `--json PATH` for run.py."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: a check that it runs, not a measurement")
    parser.add_argument("--json", type=Path, help="also write the samples there")
    return parser.parse_args()


def hand_back(quantities: Sequence[Quantity], path: Path | None) -> None:
    """What a benchmark does with its quantities: write them for run.py, or print them where nobody asked.

    Raises:
        SystemExit: they were printed, and a peer computed something else than it should have, or grows. (run.py says
            so itself.)
    """
    if path is not None:
        path.write_text(json.dumps(dump(quantities)))
        return
    print_table(quantities)
    print_verdicts(quantities)
    if wrong := faults(quantities):
        raise SystemExit("\n".join(wrong))
