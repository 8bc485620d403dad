"""`Monitor`: what a run does while it runs, measured in one step out of many."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...comm import timed_event, values_of_all
from ...events import Event, stream
from ...forms import owner_of
from ...mesh import device_of
from ...shard import members_of
from ..memory import MemoryUse, memory_use
from . import messages
from .outputs import Outputs
from .report import Report, Row, report_of

_WAITS = ("wait_gather", "wait_reduce")
_ENDS = ("gathered", "all_reduce", "reduced")

PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""By a part of the device's name, of which the first counts: dense bfloat16 FLOPs/s, from NVIDIA's data sheets."""

now = time.perf_counter


class Monitor:
    """Reports speed, memory, waits and late ranks of a training loop, once in `every` steps.

        with fullshard.Monitor(model, optimizer, tokens_per_step=batch.numel()) as monitor:
            for batch in batches:
                ...
                optimizer.step()
                monitor.step(loss=loss)

    A step in which the engine's events are listened to costs the host more time, so this is done in one step out of
    `every`: the last one before a report. In all other steps nothing is done but to count steps and tokens. A report
    reads the loss, which waits for the device, and exchanges about 20 numbers between the ranks.

    Time between two calls of `step` counts as the step's, evaluation and saving included. `docs/monitor.md` says what
    each number means, and what cannot be known from it.

    Args:
        model: sharded by either front-end, or not at all.
        optimizer: its state counts as memory.
        tokens_per_step: this rank's tokens in a step for which `step` is given none.
        flops_per_token: of forward and backward. None: 6 for each trainable parameter and 2 for each frozen one, an
            estimate that leaves out attention (Kaplan et al. 2020, "Scaling Laws for Neural Language Models",
            section 2.1).
        peak_flops: of one rank's device, per second, in the dtype of the matrix products. None: known for some GPUs if
            all units compute in 16 bits (`PEAK_FLOPS`), else unknown, and no MFU is reported.
        every: steps from one report to the next; step numbers that it divides are reported.
        start_step: number of the last step done before, after a resume.
        line: print a line per report, on the first rank: in colours if rich is installed and stdout is a terminal.
        jsonl: a file to which the first rank appends one JSON object per report.
        tensorboard: a folder to which the first rank writes scalars; needs `pip install tensorboard`.
        group: the ranks that report together; None: all. Without a process group this process reports alone.

    Raises:
        ConfigError: an invalid argument, a path that cannot be written, or TensorBoard is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tokens_per_step: int | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        every: int = 10,
        start_step: int = 0,
        line: bool = True,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check("model", model, "a module", isinstance(model, nn.Module))
        _check("optimizer", optimizer, "an optimizer or None", isinstance(optimizer, torch.optim.Optimizer | None))
        _check(
            "tokens_per_step",
            tokens_per_step,
            "an int of at least 1",
            tokens_per_step is None or _is_int(tokens_per_step, 1),
        )
        _check(
            "flops_per_token",
            flops_per_token,
            "a number above 0",
            flops_per_token is None or _is_positive(flops_per_token),
        )
        _check("peak_flops", peak_flops, "a number above 0", peak_flops is None or _is_positive(peak_flops))
        _check("every", every, "an int of at least 1", _is_int(every, 1))
        _check("start_step", start_step, "an int of at least 0", _is_int(start_step, 0))
        _check("line", line, "True or False", isinstance(line, bool))
        for name, path in (("jsonl", jsonl), ("tensorboard", tensorboard)):
            _check(
                name, path, "a path", path is None or (isinstance(path, str | os.PathLike) and bool(os.fspath(path)))
            )
        _check("group", group, "a process group or None", isinstance(group, dist.ProcessGroup | None))
        self._group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self._ranks = [0] if self._group is None else dist.get_process_group_ranks(self._group)
        is_first = self._group is None or dist.get_rank(self._group) == 0
        self._outputs = Outputs(line, jsonl, tensorboard, is_first)
        buckets = [bucket for bucket, _, _ in members_of(model)]
        device = buckets[0].axes.device if buckets else torch.device("cpu")
        if peak_flops is None and buckets and all(bucket.compute_dtype.itemsize == 2 for bucket in buckets):
            peak_flops = known_peak_flops(device)
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._model, self._optimizer = model, optimizer
        self._tokens_per_step, self._every = tokens_per_step or 0, every
        self._late_reports: Counter[int] = Counter()
        self._reports = 0
        self._waits = Waits(device)
        self._unlisten = weakref.finalize(self, self._waits.end)  # the engine's stream holds no monitor alive
        self._closed = False
        self._step = start_step
        self._begin()

    def step(
        self,
        tokens: int | None = None,
        loss: torch.Tensor | float | None = None,
        grad_norm: torch.Tensor | float | None = None,
    ) -> Report | None:
        """Count a step; call it once after each optimizer step, on every rank.

        Args:
            tokens: this rank's in the step, in all its micro-batches; None: `tokens_per_step`.
            loss, grad_norm: read in steps that are reported only. A gradient norm that is a `DTensor` is gathered.

        Returns:
            The report if this step has one, on every rank; else None.

        Raises:
            DivergenceError: ranks have called it a different number of times.
            PhaseError: the monitor is closed.
        """
        if self._closed:
            raise messages.closed()
        self._step += 1
        self._tokens += self._tokens_per_step if tokens is None else tokens
        if self._step == self._due:
            return self._report(loss, grad_norm)
        if self._step == self._due - 1:
            self._waits.begin()
        return None

    def _begin(self) -> None:
        """Begin to count for the next report."""
        self._begun, self._last, self._tokens = now(), self._step, 0
        self._due = (self._step // self._every + 1) * self._every
        if self._due == self._step + 1:
            self._waits.begin()

    def _report(self, loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float | None) -> Report:
        norm = None if grad_norm is None else _number(grad_norm)
        value = 0.0 if loss is None else _number(loss)
        listened, waits, waited = self._waits.end()
        steps = self._step - self._last
        row = Row(
            self._step, steps, now() - self._begun, self._tokens, loss is not None, value, listened, waits, waited
        )
        rows = self._of_all([*row, *astuple(memory_use(self._model, self._optimizer))])
        measured = [Row(*numbers[: len(row)]) for numbers in rows]
        if len({other.step for other in measured}) > 1:
            raise messages.different_steps(self._ranks, [int(other.step) for other in measured])
        self._reports += 1
        report = report_of(
            measured,
            self._ranks,
            MemoryUse(*(int(max(kind)) for kind in list(zip(*rows, strict=True))[len(row) :])),
            self._late_reports,
            self._reports,
            grad_norm=norm,
            flops_per_token=self._flops_per_token or estimated_flops_per_token(self._model),
            peak_flops=self._peak_flops,
        )
        self._outputs.write(report)
        self._begin()
        return report

    def _of_all(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers, in rank order."""
        if self._group is None:
            return [numbers]
        local = torch.tensor(numbers, dtype=torch.float64, device=device_of(self._group))
        gathered: list[list[float]] = values_of_all(local, self._group, what="a monitor's report").tolist()
        return gathered

    def close(self) -> None:
        """Stop listening and close files. Nothing is reported about steps since the last report."""
        self._closed = True
        self._waits.end()
        self._outputs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Waits:
    """Listens to events, and adds up how long this rank waits for collectives.

    On a CPU the host waits. On an accelerator the device's stream does, so marks are put into it and read at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._by_host = device, device.type == "cpu"
        self._began: Any = None  # the mark at which the wait in progress began
        self._pairs: list[tuple[Any, Any]] = []
        self._listens = False
        self._start: Any = None
        self._listener: Callable[[Event], None] = self._listen

    def begin(self) -> None:
        """Listen from now on."""
        self._listens, self._start = True, self._mark(now())
        stream.listeners.append(self._listener)

    def end(self) -> tuple[float, int, float]:
        """Stop listening. Returns the seconds listened, the number of waits, and their seconds together.

        All by one clock: an accelerator may begin the step long after the host has.
        """
        if not self._listens:
            return 0.0, 0, 0.0
        stream.listeners.remove(self._listener)
        start, stop = self._start, self._mark(now())
        pairs, self._pairs, self._began = self._pairs, [], None
        self._listens, self._start = False, None
        if start is None or stop is None:  # a graph is being captured
            return 0.0, 0, 0.0
        if not self._by_host:
            stop.synchronize()
        return self._seconds(start, stop), len(pairs), sum(self._seconds(*pair) for pair in pairs)

    def _listen(self, event: Event) -> None:
        began, self._began = self._began, None
        if event.verb in _WAITS:
            self._began = self._mark(event.time)
        elif began is not None and event.verb in _ENDS:
            end = self._mark(event.time)
            if end is not None:
                self._pairs.append((began, end))

    def _mark(self, moment: float) -> Any:
        """The moment; on an accelerator the place that its stream has reached, None in a capture."""
        return moment if self._by_host else timed_event(self._device)

    def _seconds(self, begin: Any, end: Any) -> float:
        """Between two marks."""
        return float(end - begin if self._by_host else begin.elapsed_time(end) / 1000)


def _check(name: str, value: object, expected: str, valid: bool) -> None:
    if not valid:
        raise messages.invalid_argument(name, expected, value)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _number(value: torch.Tensor | float) -> float:
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def estimated_flops_per_token(model: nn.Module) -> float:
    """The estimate that is described in `Monitor`."""
    counts = [(m.slot.numel, m.sharded.requires_grad) for _, _, m in members_of(model)]
    counts += [(p.numel(), p.requires_grad) for p in model.parameters() if owner_of(p) is None]
    return float(sum(numel * (6 if trains else 2) for numel, trains in counts))


def known_peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
