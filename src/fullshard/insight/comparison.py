"""Compares the recordings that `fullshard compare` made of a program on PyTorch's FSDP and on Fullshard."""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..text import size

PHASES = ("step", "forward", "backward", "optimizer")
ROUNDING = 1e-6
"""Losses that differ by less, relatively, may differ by rounding in float32 alone."""
Row = tuple[str, str, str, str]
"""A row of the table: title, PyTorch's FSDP, Fullshard, and their ratio (Fullshard over PyTorch)."""


@dataclass(frozen=True)
class SideRecording:
    """The recordings of all ranks on one side.

    Attributes:
        losses: [step][rank][micro-batch]
        phases: phase -> [rank][step], seconds; "step" ends when the device has finished, the others when the host has.
        memory: peak bytes, of the rank with the highest peak.
        units: number of units of all models.
        engines: packages that made modules units, "torch" and "fullshard".
        device: type of the device.
        folder: the folder with the parameters after a step, `1.pt`.
    """

    losses: list[list[list[float]]]
    phases: dict[str, list[list[float]]]
    memory: int
    units: int
    engines: list[str]
    device: str
    folder: Path

    @classmethod
    def read(cls, folder: Path, ranks: int) -> SideRecording:
        """Read the files that the ranks of one side wrote."""
        records: list[Any] = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        return cls(
            losses=[list(step) for step in zip(*(record["losses"] for record in records), strict=False)],
            phases={phase: [record["phases"][phase] for record in records] for phase in PHASES},
            memory=max(record["memory"] for record in records),
            units=records[0]["units"],
            engines=records[0]["engines"],
            device=records[0]["device"],
            folder=folder,
        )

    def times(self, phase: str) -> list[float]:
        """Seconds on the slowest rank, without the first quarter of the steps, at least one if there are two."""
        slowest = [max(step) for step in zip(*self.phases[phase], strict=False)]
        return slowest[max(len(slowest) // 4, min(1, len(slowest) - 1)) :]

    def median(self, phase: str) -> float:
        """The median of `times`."""
        return statistics.median(self.times(phase))

    def quartiles(self) -> str:
        """The first and third quartiles of the step times, in words."""
        times = [1e3 * seconds for seconds in self.times("step")]
        first, _, third = statistics.quantiles(times, method="inclusive") if len(times) > 1 else times * 3
        return f"{first:.1f} to {third:.1f} ms"

    def host(self, phase: str) -> float:
        """Median microseconds of host time per unit."""
        return 1e6 * self.median(phase) / max(self.units, 1)

    def as_json(self) -> dict[str, Any]:
        """The recording as values for JSON."""
        seconds = {phase: self.median(phase) for phase in PHASES}
        facts = {"seconds": seconds, "memory": self.memory, "units": self.units}
        losses = [[[_finite(loss) for loss in rank] for rank in step] for step in self.losses]
        return {"steps": len(self.losses), **facts, "losses": losses}


def _finite(number: float) -> float | None:
    """A number for JSON, which has no infinities and no NaN: None for these."""
    return number if math.isfinite(number) else None


class LossDifference(NamedTuple):
    """The first loss that differs in any bit, in order of step, micro-batch and rank.

    Steps and micro-batches count from 1. A loss is None on the side whose step has fewer micro-batches.
    """

    step: int
    micro_batch: int
    rank: int
    torch: float | None
    fullshard: float | None


class ParameterDifference(NamedTuple):
    """The first parameter or buffer that differs in any bit after a step.

    `by` is the largest difference of an element; infinite if the shape or dtype differs, or if one side lacks the name.
    """

    step: int
    name: str
    by: float


@dataclass(frozen=True)
class Comparison:
    """Both recordings, and their first differences.

    Attributes:
        steps: number of steps that both sides took.
        loss, parameter: the first difference; None if all are equal in every bit.
        compared_after: the steps after which parameters were compared: the first and the last.
    """

    torch: SideRecording
    fullshard: SideRecording
    steps: int
    loss: LossDifference | None
    parameter: ParameterDifference | None
    compared_after: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether both sides took the same number of steps, with equal losses and parameters."""
        return self.loss is None and self.parameter is None and len(self.torch.losses) == len(self.fullshard.losses)

    def rows(self) -> list[Row]:
        """The rows of the table."""
        memory = "peak resident memory" if self.torch.device == "cpu" else "peak device memory"
        return [
            self._row(self._title(), "{:.1f} ms".format, lambda side: 1e3 * side.median("step")),
            ("step, quartiles", self.torch.quartiles(), self.fullshard.quartiles(), ""),
            self._row(memory, lambda nbytes: size(int(nbytes)), lambda side: side.memory),
            *(
                self._row(f"{phase}, host, per unit", "{:,.0f} us".format, partial(SideRecording.host, phase=phase))
                for phase in PHASES[1:]
            ),
        ]

    def _title(self) -> str:
        return "step, median" if self.steps > 1 else "the first step"  # with what is set up in it

    def _row(self, title: str, text: Callable[[float], str], value: Callable[[SideRecording], float]) -> Row:
        pytorch, fullshard = value(self.torch), value(self.fullshard)
        return title, text(pytorch), text(fullshard), f"{fullshard / pytorch:.2f}" if pytorch else ""

    def verdict(self) -> str:
        """Whether losses and parameters are equal, in words."""
        lines = []
        if len(self.torch.losses) != len(self.fullshard.losses):
            counts = f"{len(self.torch.losses)} on PyTorch's FSDP, {len(self.fullshard.losses)} on Fullshard"
            lines.append(f"numbers of steps: DIFFERENT: {counts}")
        if self.loss is not None:
            lines.append(f"losses: DIFFERENT from step {self.loss.step} on, first {self._first_loss(self.loss)}")
        elif any(losses for step in self.torch.losses for losses in step):
            lines.append(f"losses of {self.steps} steps: the same in every bit")
        else:
            lines.append("losses: none recorded, because backward was never called on a scalar")
        if self.parameter is not None:
            after, name, by = self.parameter
            lines.append(f"parameters: DIFFERENT after step {after}, first {name}: by up to {by:.3g}")
        else:
            steps = " and ".join(f"step {step}" for step in self.compared_after)
            lines.append(f"parameters after {steps}: the same in every bit")
        return "\n".join(lines)

    def _first_loss(self, difference: LossDifference) -> str:
        """The position and values of the first loss that differs, in words."""
        step, micro_batch, rank, pytorch, fullshard = difference
        of = max(len(side.losses[step - 1][rank]) for side in (self.torch, self.fullshard))
        place = (f"in micro-batch {micro_batch} of {of} " if of > 1 else "") + f"on rank {rank}"
        if pytorch is None or fullshard is None:
            only = "Fullshard" if pytorch is None else "PyTorch's FSDP"
            return f"{place}, which only {only} has"
        ratio = abs(fullshard - pytorch) / max(abs(pytorch), abs(fullshard), 1e-300)
        rounding = f", {ratio:.1g} of it: as if numbers were added in a different order" if ratio < ROUNDING else ""
        values = f"{pytorch!r} on PyTorch's FSDP, {fullshard!r} on Fullshard"
        return f"{place}: {values} ({fullshard - pytorch:+.3g}{rounding})"

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes, losses and the first differences as values for JSON."""
        outcome = {"same": self.same, "steps": self.steps, "device": self.torch.device}
        loss, parameter = (
            None
            if difference is None
            else {k: _finite(v) if isinstance(v, float) else v for k, v in difference._asdict().items()}
            for difference in (self.loss, self.parameter)
        )
        sides = {"torch": self.torch.as_json(), "fullshard": self.fullshard.as_json()}
        return {**outcome, "loss_that_differs": loss, "parameter_that_differs": parameter, **sides}


def compare(pytorch: SideRecording, fullshard: SideRecording) -> Comparison:
    """Compare two recordings of one program, each of at least one step."""
    steps = min(len(pytorch.losses), len(fullshard.losses))
    after = tuple(
        step for step in sorted({1, steps}) if all((s.folder / f"{step}.pt").exists() for s in (pytorch, fullshard))
    )
    differences = (_parameter_that_differs(pytorch, fullshard, step) for step in after)
    parameter = next((difference for difference in differences if difference is not None), None)
    return Comparison(pytorch, fullshard, steps, _loss_that_differs(pytorch, fullshard, steps), parameter, after)


def _loss_that_differs(pytorch: SideRecording, fullshard: SideRecording, steps: int) -> LossDifference | None:
    for step in range(steps):
        sides = (zip_longest(*side.losses[step]) for side in (pytorch, fullshard))  # [micro-batch][rank]
        ranks = (None,) * len(pytorch.losses[step])
        for micro_batch, pair in enumerate(zip_longest(*sides, fillvalue=ranks)):
            for rank, (first, second) in enumerate(zip(*pair, strict=True)):
                if _bits(first) != _bits(second):
                    return LossDifference(step + 1, micro_batch + 1, rank, first, second)
    return None


def _bits(loss: float | None) -> bytes:
    """A loss as bytes, in which NaN equals itself; none for None."""
    return b"" if loss is None else struct.pack("d", loss)


def _parameter_that_differs(pytorch: SideRecording, fullshard: SideRecording, step: int) -> ParameterDifference | None:
    """The first difference, in the order of the model."""
    states = [torch.load(side.folder / f"{step}.pt", weights_only=True, mmap=True) for side in (pytorch, fullshard)]
    for name in dict.fromkeys([*states[0], *states[1]]):
        first, second = (state.get(name) for state in states)
        if first is None or second is None or (first.shape, first.dtype) != (second.shape, second.dtype):
            return ParameterDifference(step, name, float("inf"))
        if not torch.equal(*(value.contiguous().view(-1).view(torch.uint8) for value in (first, second))):
            return ParameterDifference(step, name, (first.double() - second.double()).abs().max().item())
    return None
