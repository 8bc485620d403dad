"""What `fullshard compare` recorded of one program on PyTorch's FSDP and on Fullshard, side by side."""

from __future__ import annotations

import json
import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..names import size

PHASES = ("step", "forward", "backward", "optimizer")
Row = tuple[str, str, str, str]
"""Of the table: what it is, on PyTorch's FSDP, on Fullshard, and their ratio (Fullshard over PyTorch)."""


@dataclass(frozen=True)
class Recording:
    """One side: what its ranks recorded.

    Attributes:
        losses: by step and rank, the losses of its micro-batches.
        phases: seconds by phase, rank and step; "step" ends when the device is done, the others when the host is.
        memory: bytes, the most of any rank.
        units: modules that were sharded one by one.
        device: the type of the device.
        folder: with the parameters after steps, `1.pt`.
    """

    losses: list[list[list[float]]]
    phases: dict[str, list[list[float]]]
    memory: int
    units: int
    device: str
    folder: Path

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Recording:
        """What the ranks of one side wrote."""
        records: list[Any] = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        return cls(
            losses=[list(step) for step in zip(*(record["losses"] for record in records), strict=False)],
            phases={phase: [record["phases"][phase] for record in records] for phase in PHASES},
            memory=max(record["memory"] for record in records),
            units=records[0]["units"],
            device=records[0]["device"],
            folder=folder,
        )

    def times(self, phase: str) -> list[float]:
        """Seconds of the last three quarters of the steps, on the slowest rank in each."""
        slowest = [max(step) for step in zip(*self.phases[phase], strict=False)]
        return slowest[len(slowest) // 4 :]

    def median(self, phase: str) -> float:
        """Seconds."""
        return statistics.median(self.times(phase))

    def quartiles(self) -> str:
        """Of the steps: the first and the third."""
        times = [1e3 * seconds for seconds in self.times("step")]
        first, _, third = statistics.quantiles(times, method="inclusive") if len(times) > 1 else times * 3
        return f"{first:.1f} to {third:.1f} ms"

    def host(self, phase: str) -> float:
        """Microseconds of the host for each unit."""
        return 1e6 * self.median(phase) / max(self.units, 1)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        seconds = {phase: self.median(phase) for phase in PHASES}
        facts = {"seconds": seconds, "memory": self.memory, "units": self.units}
        return {"steps": len(self.losses), **facts, "losses": self.losses}


class LossDifference(NamedTuple):
    """The first losses that differ in any bit; steps are counted from 1, micro-batches are added up."""

    step: int
    rank: int
    torch: float
    fullshard: float


class ParameterDifference(NamedTuple):
    """The first parameter or buffer that differs in any bit after a step, and the largest difference of two elements.

    `by` is infinite for one that is missing on one side, or has another shape or dtype there.
    """

    step: int
    name: str
    by: float


@dataclass(frozen=True)
class Comparison:
    """Both sides, and where they first differ.

    Attributes:
        steps: compared.
        loss, parameter: None if all are the same in every bit.
        compared_after: the steps after which parameters were compared: the first and the last.
    """

    torch: Recording
    fullshard: Recording
    steps: int
    loss: LossDifference | None
    parameter: ParameterDifference | None
    compared_after: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether both sides did the same number of steps, with equal losses and parameters."""
        return self.loss is None and self.parameter is None and len(self.torch.losses) == len(self.fullshard.losses)

    def rows(self) -> list[Row]:
        """The table."""
        memory = "peak resident memory" if self.torch.device == "cpu" else "peak device memory"
        return [
            self._row(
                "step, median", lambda side: f"{1e3 * side.median('step'):.1f} ms", lambda side: side.median("step")
            ),
            ("step, quartiles", self.torch.quartiles(), self.fullshard.quartiles(), ""),
            self._row(memory, lambda side: size(side.memory), lambda side: side.memory),
            *(self._host_row(phase) for phase in PHASES[1:]),
        ]

    def _host_row(self, phase: str) -> Row:
        host = partial(Recording.host, phase=phase)
        return self._row(f"{phase}, host, per unit", lambda side: f"{host(side):,.0f} us", host)

    def _row(self, title: str, shown: Callable[[Recording], str], value: Callable[[Recording], float]) -> Row:
        theirs, ours = value(self.torch), value(self.fullshard)
        return title, shown(self.torch), shown(self.fullshard), f"{ours / theirs:.2f}" if theirs else ""

    def verdict(self) -> str:
        """Whether losses and parameters are the same, in lines."""
        lines = []
        if len(self.torch.losses) != len(self.fullshard.losses):
            counts = f"{len(self.torch.losses)} on PyTorch's FSDP, {len(self.fullshard.losses)} on Fullshard"
            lines.append(f"numbers of steps: DIFFERENT: {counts}")
        if self.loss is not None:
            step, rank, theirs, ours = self.loss
            values = f"{theirs!r} on PyTorch's FSDP, {ours!r} on Fullshard ({ours - theirs:+.3g})"
            lines.append(f"losses: DIFFERENT from step {step} on, first on rank {rank}: {values}")
        elif any(losses for step in self.torch.losses for losses in step):
            lines.append(f"losses of {self.steps} steps: the same in every bit")
        else:
            lines.append("losses: none seen, as no backward began with a scalar")
        if self.parameter is not None:
            after, name, by = self.parameter
            lines.append(f"parameters: DIFFERENT after step {after}, first {name}: by up to {by:.3g}")
        else:
            steps = " and ".join(f"step {step}" for step in self.compared_after)
            lines.append(f"parameters after {steps}: the same in every bit")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """For programs: seconds, bytes, losses, and the first differences."""
        outcome = {"same": self.same, "steps": self.steps, "device": self.torch.device}
        loss = None if self.loss is None else self.loss._asdict()
        parameter = None if self.parameter is None else self.parameter._asdict()
        sides = {"torch": self.torch.as_json(), "fullshard": self.fullshard.as_json()}
        return {**outcome, "loss_that_differs": loss, "parameter_that_differs": parameter, **sides}


def compare(theirs: Recording, ours: Recording) -> Comparison:
    """Compare two recordings of one program, which have a step each at least."""
    steps = min(len(theirs.losses), len(ours.losses))
    after = tuple(
        step for step in sorted({1, steps}) if all((s.folder / f"{step}.pt").exists() for s in (theirs, ours))
    )
    differences = (_parameter_that_differs(theirs, ours, step) for step in after)
    parameter = next((difference for difference in differences if difference is not None), None)
    return Comparison(theirs, ours, steps, _loss_that_differs(theirs, ours, steps), parameter, after)


def _loss_that_differs(theirs: Recording, ours: Recording, steps: int) -> LossDifference | None:
    for step in range(steps):
        for rank, pair in enumerate(zip(theirs.losses[step], ours.losses[step], strict=True)):
            first, second = (struct.pack(f"{len(losses)}d", *losses) for losses in pair)
            if first != second:
                return LossDifference(step + 1, rank, sum(pair[0]), sum(pair[1]))
    return None


def _parameter_that_differs(theirs: Recording, ours: Recording, step: int) -> ParameterDifference | None:
    """The first one in the model's order."""
    states = [torch.load(side.folder / f"{step}.pt", weights_only=True, mmap=True) for side in (theirs, ours)]
    for name in dict.fromkeys([*states[0], *states[1]]):
        first, second = (state.get(name) for state in states)
        if first is None or second is None or (first.shape, first.dtype) != (second.shape, second.dtype):
            return ParameterDifference(step, name, float("inf"))
        if not torch.equal(*(value.contiguous().view(-1).view(torch.uint8) for value in (first, second))):
            return ParameterDifference(step, name, (first.double() - second.double()).abs().max().item())
    return None
