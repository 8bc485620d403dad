"""Computes a report from each rank's measurements. Pure: numbers in, a frozen report out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...text import size
from ..memory import MemoryUse

LATE = 0.1
"""A rank is late if it waited less than every other rank, by more than this fraction of a step."""


class Measurements(NamedTuple):
    """One rank's measurements since the previous report. All numbers are exchanged as float64.

    Attributes:
        step: number of the last step.
        steps, seconds, tokens: since the previous report; this rank's tokens.
        losses, loss: 1 and this rank's loss at the last step, or 0 and 0 if the loop passed none.
        listened, waits, waited: of the last step: its seconds, its number of waits for collectives, their seconds.
    """

    step: float
    steps: float
    seconds: float
    tokens: float
    losses: float
    loss: float
    listened: float
    waits: float
    waited: float


@dataclass(frozen=True)
class Report:
    """Speed, memory and waits since the previous report. The same on every rank except `grad_norm`. None: unknown.

    Attributes:
        step: number of the last step.
        steps: number of steps that the report covers.
        seconds_per_step: mean over these steps, on the slowest rank.
        tokens_per_second: of all ranks together.
        mfu: model FLOPs utilization, a fraction: FLOPs per token times tokens per second, over all ranks' peak FLOPs.
        loss: at the last step, the mean over the ranks that passed one.
        grad_norm: at the last step, as passed on this rank.
        exposed_communication: the fraction of the last step that a rank spent waiting for gathers, reductions, and
            copies of their results; mean over ranks.
        late_rank: the rank that waited less than all others in the last step, by more than 10% of the step.
        late_seconds: by how much; 0 if no rank was late.
        late_reports: by rank, the number of reports so far in which it was late.
        reports: number of reports so far, including this one.
        memory: the maximum over ranks, separately for each kind.
    """

    step: int
    steps: int
    seconds_per_step: float
    tokens_per_second: float | None
    mfu: float | None
    loss: float | None
    grad_norm: float | None
    exposed_communication: float | None
    late_rank: int | None
    late_seconds: float
    late_reports: dict[int, int]
    reports: int
    memory: MemoryUse

    def __str__(self) -> str:
        """One line; omits unknown numbers."""
        words = [
            f"step {self.step:>6,}",
            "" if self.loss is None else f"loss {self.loss:{'.4g' if 0 < abs(self.loss) < 0.001 else '.4f'}}",
            "" if self.grad_norm is None else f"gradient norm {self.grad_norm:.3g}",
            f"{1000 * self.seconds_per_step:.4g} ms/step",
            "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s",
            "" if self.mfu is None else f"MFU {self.mfu:.1%}",
            "" if self.exposed_communication is None else f"communication {self.exposed_communication:.1%}",
            f"memory {size(self.memory.total)}",
        ]
        if self.memory.peak_transient:
            words[-1] += f" + {size(self.memory.peak_transient)} within a step"
        if self.late_rank is not None:
            often = f"{self.late_reports[self.late_rank]} of {self.reports} reports"
            words.append(f"late: rank {self.late_rank} by {1000 * self.late_seconds:.3g} ms ({often})")
        return "  ".join(word for word in words if word)


def late_rank(rows: Sequence[Measurements]) -> tuple[int, float] | None:
    """The index of the late rank's row (see `LATE`), and by how many seconds it was late; None: no rank was."""
    if len(rows) < 2:
        return None
    order = sorted(range(len(rows)), key=lambda index: rows[index].waited)
    seconds = rows[order[1]].waited - rows[order[0]].waited
    return (order[0], seconds) if seconds > LATE * max(row.listened for row in rows) else None


def report_of(
    rows: Sequence[Measurements],
    ranks: Sequence[int],
    memory: MemoryUse,
    late_reports: Counter[int],
    reports: int,
    *,
    grad_norm: float | None,
    flops_per_token: float,
    peak_flops: float | None,
) -> Report:
    """Compute a report.

    Args:
        rows: each rank's measurements, all of the same step.
        ranks: the global rank of each row.
        memory: the maximum over ranks.
        late_reports: by global rank, the number of earlier reports in which it was late; this report is added.
        reports: number of reports, including this one.
        grad_norm: on this rank.
        flops_per_token: of forward and backward.
        peak_flops: of a rank's device, per second; None: unknown.
    """
    seconds, tokens = max(row.seconds for row in rows), sum(row.tokens for row in rows)
    rate = tokens / seconds if tokens and seconds else None
    losses = [row.loss for row in rows if row.losses]
    waits = [row.waited / row.listened for row in rows if row.waits and row.listened]
    late, late_seconds = None, 0.0
    if (late_row := late_rank(rows)) is not None:
        late, late_seconds = ranks[late_row[0]], late_row[1]
        late_reports[late] += 1
    return Report(
        step=int(rows[0].step),
        steps=int(rows[0].steps),
        seconds_per_step=seconds / rows[0].steps,
        tokens_per_second=rate,
        mfu=None if rate is None or peak_flops is None else rate * flops_per_token / (peak_flops * len(rows)),
        loss=sum(losses) / len(losses) if losses else None,
        grad_norm=grad_norm,
        exposed_communication=sum(waits) / len(waits) if waits else None,
        late_rank=late,
        late_seconds=late_seconds,
        late_reports=dict(late_reports),
        reports=reports,
        memory=memory,
    )
