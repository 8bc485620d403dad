"""`Monitor`: reports on a training loop while it runs, from measurements of one step in many."""

from __future__ import annotations

import math
import operator
import os
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import astuple
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...comm import timed_event, values_of_all
from ...errors import check_module, invalid_argument
from ...events import Event, stream
from ...forms import owner_of
from ...mesh import device_of
from ...shard import members_of
from ..memory import MemoryUse, memory_use
from . import messages
from .report import Measurements, Report, report_of
from .report_writer import ReportWriter

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
"""Dense bfloat16 FLOPs/s, from NVIDIA's data sheets, by a part of the device's name. The first match counts."""

now = time.perf_counter


class Monitor:
    """Reports speed, memory, waits and late ranks of a training loop, once every `every` steps.

        with fullshard.Monitor(model, optimizer, tokens_per_step=batch.numel()) as monitor:
            for batch in batches:
                ...
                optimizer.step()
                monitor.step(loss=loss)

    Listening to the engine's events costs host time, so the monitor listens only in the step before a report. In all
    other steps it only counts steps and tokens. A report reads the loss, which synchronizes with the device, and
    exchanges about 20 numbers between the ranks.

    The time between two calls of `step` counts as the step's, including evaluation and saving. `docs/monitor.md`
    explains what each number means, and what it cannot show.

    Args:
        model: sharded by either front-end, or not at all.
        optimizer: its state counts as memory.
        tokens_per_step: this rank's tokens per step, where `step` is called without `tokens`.
        flops_per_token: of forward and backward. None: 6 for each trainable parameter and 2 for each frozen one, an
            estimate that ignores attention (Kaplan et al. 2020, "Scaling Laws for Neural Language Models",
            section 2.1).
        peak_flops: of one rank's device, per second, in the dtype of the matrix products. None: looked up for some
            GPUs if all units compute in 16 bits (`PEAK_FLOPS`); for others no MFU is reported.
        every: steps between reports; step numbers divisible by it are reported.
        start_step: number of the last completed step, after a resume.
        line: whether the first rank prints a line per report: in color if rich is installed and stdout is a terminal.
        jsonl: a file to which the first rank appends one JSON object per report.
        tensorboard: a directory to which the first rank writes scalars; needs `pip install tensorboard`.
        group: the ranks that report together; None: all. Without a process group this process reports alone.

    Raises:
        ConfigError: an argument is invalid, a path cannot be written, or TensorBoard is not installed.
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
        check_module("Monitor", model)
        _check("optimizer", optimizer, "an optimizer or None", isinstance(optimizer, torch.optim.Optimizer | None))
        _check(
            "tokens_per_step",
            tokens_per_step,
            "an int of at least 1",
            tokens_per_step is None or _is_int(tokens_per_step, 1),
        )
        for name, flops in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            _check(name, flops, "a number above 0", flops is None or _is_positive(flops))
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
        self._writer = ReportWriter(line, jsonl, tensorboard, is_first)
        buckets = [bucket for bucket, _, _ in members_of(model)]
        device = buckets[0].axes.device if buckets else torch.device("cpu")
        if peak_flops is None and buckets and all(bucket.compute_dtype.itemsize == 2 for bucket in buckets):
            peak_flops = device_peak_flops(device)
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._model, self._optimizer = model, optimizer
        self._tokens_per_step, self._every = tokens_per_step or 0, every
        self._late_reports: Counter[int] = Counter()
        self._reports = 0
        self._waits = Waits(device)
        weakref.finalize(self, self._waits.end)  # a monitor that is dropped, not closed, stops listening
        self._closed = False
        self._step = start_step
        self._begin()

    def step(
        self,
        tokens: int | torch.Tensor | None = None,
        loss: torch.Tensor | float | None = None,
        grad_norm: torch.Tensor | float | None = None,
    ) -> Report | None:
        """Count a step; call it once after each optimizer step, on every rank.

        A call that raises a `ConfigError` counts nothing.

        Args:
            tokens: this rank's tokens in all micro-batches of the step; None: `tokens_per_step`. An int, or a tensor of
                one integer on the CPU, which takes longer. `mask.sum()` on an accelerator is refused: reading it would
                wait for the device in every step.
            loss, grad_norm: numbers, or tensors of one element; read only in steps with a report. A `DTensor` is
                gathered.

        Returns:
            The report, on every rank, in a step that has one; else None.

        Raises:
            ConfigError: an argument is invalid.
            DivergenceError: ranks called it a different number of times.
            PhaseError: the monitor is closed.
        """
        if self._closed:
            raise messages.closed()
        count = self._tokens_per_step if tokens is None else _as_tokens(tokens)
        reports = self._step == self._next_report - 1
        numbers = (_as_float("loss", loss), _as_float("grad_norm", grad_norm)) if reports else (None, None)
        self._step += 1
        self._tokens += count
        if reports:
            try:
                return self._report(*numbers)
            finally:
                self._waits.end()
                self._begin()
        if self._step == self._next_report - 1:
            self._waits.begin()
        return None

    def _begin(self) -> None:
        """Start counting for the next report."""
        self._start_time, self._reported_step, self._tokens = now(), self._step, 0
        self._next_report = (self._step // self._every + 1) * self._every
        if self._step == self._next_report - 1:
            self._waits.begin()

    def _report(self, loss: float | None, grad_norm: float | None) -> Report:
        waits = self._waits.end()
        steps, seconds = self._step - self._reported_step, now() - self._start_time
        row = Measurements(self._step, steps, seconds, self._tokens, loss is not None, loss or 0.0, *waits)
        gathered = self._gather([*row, *astuple(memory_use(self._model, self._optimizer))])
        rows = [Measurements(*numbers[: len(row)]) for numbers in gathered]
        if len({row.step for row in rows}) > 1:
            raise messages.different_steps(self._ranks, [int(row.step) for row in rows])
        self._reports += 1
        report = report_of(
            rows,
            self._ranks,
            MemoryUse(*(int(max(kind)) for kind in list(zip(*gathered, strict=True))[len(row) :])),
            self._late_reports,
            self._reports,
            grad_norm=grad_norm,
            flops_per_token=self._flops_per_token or estimated_flops_per_token(self._model),
            peak_flops=self._peak_flops,
        )
        self._writer.write(report)
        return report

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers, in rank order."""
        if self._group is None:
            return [numbers]
        local = torch.tensor(numbers, dtype=torch.float64, device=device_of(self._group))
        gathered: list[list[float]] = values_of_all(local, self._group, what="a monitor's report").tolist()
        return gathered

    def close(self) -> None:
        """Stop listening and close files. Steps since the last report are not reported."""
        self._closed = True
        self._waits.end()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Waits:
    """Listens to events, and adds up how long this rank waits for collectives.

    On a CPU the host waits. On an accelerator the device's stream waits, so timed events are recorded on it and read at
    the end. Below, a time is in seconds on a CPU, and such an event on an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._by_host = device, device.type == "cpu"
        self._began: Any = None  # when the wait in progress began
        self._pairs: list[tuple[Any, Any]] = []  # begin and end of each wait
        self._start: Any = None

    def begin(self) -> None:
        """Listen from now on."""
        self._start = self._mark(now())
        stream.listeners.append(self._listen)

    def end(self) -> tuple[float, int, float]:
        """Stop listening. Returns the seconds listened, the number of waits, and their total seconds.

        All by one clock: an accelerator may begin the step long after the host did.
        """
        if self._listen not in stream.listeners:
            return 0.0, 0, 0.0
        stream.listeners.remove(self._listen)
        start, stop = self._start, self._mark(now())
        pairs, self._pairs, self._began = self._pairs, [], None
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
        """`moment`; on an accelerator a timed event on its stream, or None during a graph capture."""
        return moment if self._by_host else timed_event(self._device)

    def _seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two times."""
        return float(end - begin if self._by_host else begin.elapsed_time(end) / 1000)


def _check(name: str, value: object, expected: str, valid: bool) -> None:
    if not valid:
        raise invalid_argument(f"Monitor: {name}", value, expected)


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _as_tokens(value: Any) -> int:
    """A number of tokens as an int, without waiting for a device."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise messages.tokens_on_device(value.device)
    count = -1
    if not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool:
        with suppress(TypeError):  # not an integer
            count = operator.index(value)
    _check("tokens", value, "an int of at least 0", count >= 0)
    return count


def _as_float(name: str, value: Any) -> float | None:
    """A number or a tensor of one element as a float; waits for its device."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        is_number = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    else:  # NumPy's booleans, complex numbers and arrays have `__float__`, too
        kind, count = getattr(getattr(value, "dtype", None), "kind", ""), getattr(value, "size", 1)
        is_number = (
            hasattr(value, "__float__") and not isinstance(value, bool) and kind not in ("b", "c") and count == 1
        )
    _check(name, value, "a number, or a tensor of one element", is_number)
    return float(value)


def estimated_flops_per_token(model: nn.Module) -> float:
    """6 for each trainable parameter and 2 for each frozen one; see `Monitor`."""
    counts = [(m.slot.numel, m.sharded.requires_grad) for _, _, m in members_of(model)]
    counts += [(p.numel(), p.requires_grad) for p in model.parameters() if owner_of(p) is None]
    return float(sum(numel * (6 if trains else 2) for numel, trains in counts))


def device_peak_flops(device: torch.device) -> float | None:
    """The entry of `PEAK_FLOPS` for a device; None if there is none."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
