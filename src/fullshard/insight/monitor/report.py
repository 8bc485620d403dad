"""What a report says, computed from what each rank measured. Pure: numbers in, a frozen report out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...names import size
from ..memory import MemoryUse

LATE = 0.1
"""A rank counts as late if it waits less than every other rank by more than this part of a step."""


class Row(NamedTuple):
    """What a rank measured since the report before. All numbers are exchanged as float64.

    Attributes:
        step: number of the last step.
        steps, seconds, tokens: since the report before; tokens are this rank's.
        losses, loss: 1 and this rank's loss at the last step, or 0 and 0 if it was given none.
        listened, waits, waited: seconds of the last step, how often it waited for a collective in it, and how long.
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
    """What a run did since the report before; the same on every rank, but for `grad_norm`. None: unknown.

    Attributes:
        step: number of the last step.
        steps: how many steps the report is about.
        seconds_per_step: their mean, on the slowest rank.
        tokens_per_second: of all ranks together.
        mfu: model FLOPs utilization, a fraction: FLOPs per token times tokens per second, over the peak of all ranks.
        loss: at the last step, the mean over the ranks that gave one.
        grad_norm: as given to this rank at the last step.
        exposed_communication: the part of the last step in which a rank waited for gathers and reductions and for
            copies of their results, the mean over ranks.
        late_rank: the rank that waited less than all others in the last step, by more than 10% of the step.
        late_seconds: by how much; 0 if no rank was late.
        late_reports: by rank, in how many reports so far it was the late one.
        reports: how many reports there were so far, this one included.
        memory: the most that any rank holds, kind by kind.
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
        """One line; what is unknown is left out."""
        words = [
            f"step {self.step:>6,}",
            "" if self.loss is None else f"loss {self.loss:.4f}",
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


class Late(NamedTuple):
    """A rank's place among those compared, and the seconds by which it was late."""

    place: int
    seconds: float


def late_rank(rows: Sequence[Row]) -> Late | None:
    """The rank for which the others waited: it waited less than each of them, by more than `LATE` of the step."""
    if len(rows) < 2:
        return None
    order = sorted(range(len(rows)), key=lambda index: rows[index].waited)
    seconds = rows[order[1]].waited - rows[order[0]].waited
    return Late(order[0], seconds) if seconds > LATE * max(row.listened for row in rows) else None


def report_of(
    rows: Sequence[Row],
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
        rows: each rank's measurements, which are about the same step.
        ranks: the global ranks that they are of.
        memory: of all ranks.
        late_reports: by global rank, counted in the reports before; the late rank of this report is added.
        reports: with this one.
        grad_norm: this rank's.
        flops_per_token: of forward and backward.
        peak_flops: of a rank's device, per second; None: unknown.
    """
    seconds, tokens = max(row.seconds for row in rows), sum(row.tokens for row in rows)
    rate = tokens / seconds if tokens and seconds else None
    losses = [row.loss for row in rows if row.losses]
    waits = [row.waited / row.listened for row in rows if row.waits and row.listened]
    late = late_rank(rows)
    if late is not None:
        late_reports[ranks[late.place]] += 1
    return Report(
        step=int(rows[0].step),
        steps=int(rows[0].steps),
        seconds_per_step=seconds / rows[0].steps,
        tokens_per_second=rate,
        mfu=None if rate is None or peak_flops is None else rate * flops_per_token / (peak_flops * len(rows)),
        loss=sum(losses) / len(losses) if losses else None,
        grad_norm=grad_norm,
        exposed_communication=sum(waits) / len(waits) if waits else None,
        late_rank=None if late is None else ranks[late.place],
        late_seconds=0.0 if late is None else late.seconds,
        late_reports=dict(late_reports),
        reports=reports,
        memory=memory,
    )
