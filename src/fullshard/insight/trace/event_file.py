"""Records a rank's events in a file, with the offset of its clock from rank 0's.

The file is a JSON object. Times are in seconds of the rank's own `time.perf_counter()`; adding `offset` converts them
to rank 0's clock. Events are rows of numbers (`COLUMNS`); verbs, units and groups are indices into lists, "models" is
parallel to that of the units.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...comm import objects_of_all, timed_event
from ...events import Event, record_events
from ...mesh import device_of
from ...store.in_place import replace_file
from .merge import COLUMNS, FORMAT
from .messages import cannot_write, not_a_path

ROUNDS = 24  # all-reduces that compare the clocks; they take a few milliseconds in total
SAMPLED = ("gathered", "collect")  # verbs at which allocated bytes are sampled: memory peaks there


class Recording:
    """The events that a rank has recorded so far. `step()` marks the end of a training step.

    If a program never calls `step()`, `fullshard trace` detects steps itself: a step begins when the first unit is
    gathered after all reductions of the previous step.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.clock = _DeviceClock(device) if device is not None else None
        self.events: list[Event] = []
        self.marks: list[tuple[float, Any]] = []  # for each `step()`: host time and device event
        self.stamps: list[Any] = []  # for each of `events`: its device event; None during graph capture
        self.allocated: list[int] = []

    def step(self) -> None:
        """Mark the end of a training step; call it after the optimizer step."""
        stamp = timed_event(self.clock.device) if self.clock is not None else None
        if self.clock is None or stamp is not None:
            self.marks.append((time.perf_counter(), stamp))

    def listen(self, event: Event) -> None:
        """Record the current stream's position for an event of the engine; on an accelerator only."""
        assert self.clock is not None
        self.stamps.append(timed_event(self.clock.device))
        sampled = event.verb in SAMPLED
        self.allocated.append(torch.accelerator.memory_allocated(self.device) if sampled else -1)

    def as_json(self) -> dict[str, Any]:
        """Events as rows, and the ends of steps. Waits for the device."""
        events, memory = self.events, [-1] * len(self.events)
        times, marks = [event.time for event in events], [host_time for host_time, _ in self.marks]
        if self.clock is not None:
            stamped = [index for index, stamp in enumerate(self.stamps) if stamp is not None]
            events, memory = [events[index] for index in stamped], [self.allocated[index] for index in stamped]
            times = self.clock.times([self.stamps[index] for index in stamped])
            marks = self.clock.times([stamp for _, stamp in self.marks])
        verbs, units, groups = _Indices(), _Indices(), _Indices()
        rows = []
        for event, time_of_event, allocated in zip(events, times, memory, strict=True):
            indices = (verbs.of(event.verb), units.of((event.unit, event.model)), groups.of(event.ranks))
            rows.append((*indices, event.nbytes, event.live, round(time_of_event, 7), allocated))
        names, models = ([pair[part] for pair in units] for part in (0, 1))
        tables = {"verbs": [*verbs], "units": names, "models": models, "groups": [*groups]}
        return {"steps": marks, **tables, "columns": COLUMNS, "events": rows}


class _Indices(dict[Any, int]):
    """The index of each value in a list of distinct values, in order of first use."""

    def of(self, value: Any) -> int:
        return self.setdefault(value, len(self))


class _DeviceClock:
    """Converts device events to times of the host's clock, after the recording."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.accelerator.synchronize(device)
        self.start, self.host_start = timed_event(device), time.perf_counter()

    def times(self, stamps: list[Any]) -> list[float]:
        """The times at which the stream reached these events, in seconds of the host's clock. Waits for the device."""
        assert self.start is not None, "the recording began during graph capture"
        torch.accelerator.synchronize(self.device)
        return [self.host_start + self.start.elapsed_time(stamp) / 1e3 for stamp in stamps]


@contextmanager
def trace(path: Path | str) -> Iterator[Recording]:
    """Record the engine's events inside the context, and write `PATH/rank-R.json` at its end, also on an exception.

    Records all models of the process. `fullshard trace PATH` reads the files of all ranks and reports why a step is
    slow and which rank is late. Every rank enters the context at the same point, where the ranks compare their clocks.
    Files of an earlier run in the folder are replaced.

        with fullshard.trace("runs/trace") as recording:
            for batch in batches[:5]:
                train_step(batch)
                recording.step()  # optional

    On an accelerator, times are those at which the current stream reaches each event; the host waits for the device
    only at the start and end of the context. Steps that replay a captured graph have no events.

    Args:
        path: a folder, created if needed. If ranks have separate disks, copy the files into one folder afterwards.

    Raises:
        ConfigError: `path` is not a path; or a rank cannot write to the folder: all ranks raise, before the body of the
            context runs.
        DivergenceError: other ranks do not enter the context.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise not_a_path(path)
    folder = Path(path)
    rank, world, run, offset, error = _meet(folder)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    used = accelerator is not None and torch.get_device_module(accelerator.type).is_initialized()
    device = torch.device(accelerator.type, torch.accelerator.current_device_index()) if used and accelerator else None
    recording = Recording(device)
    header = {"format": FORMAT, "run": run, "rank": rank, "world": world, "offset": offset, "offset_error": error}
    header |= {"clock": "host" if device is None else device.type, "begin": time.perf_counter(), "raised": None}
    try:
        with record_events(recording.listen if device is not None else None) as recording.events:
            yield recording
    except BaseException as raised:
        header["raised"] = f"{type(raised).__name__}: {raised}"[:500]
        raise
    finally:
        body = recording.as_json()  # waits for the device, so that "end" is later than all events
        content = json.dumps({**header, "end": time.perf_counter(), **body}, separators=(",", ":"))
        replace_file(folder / f"rank-{rank}.json", content.encode())


def _meet(folder: Path) -> tuple[int, int, int, float, float]:
    """Compare with the other ranks before recording: rank, world, the run's id, and the clock's offset with its error.

    Collective.

    Raises:
        ConfigError: a rank cannot write to the folder.
    """
    problem = _problem(folder)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if problem:
            raise cannot_write({0: problem})
        _remove_ranks_from(1, folder)
        return 0, 1, time.time_ns(), 0.0, 0.0
    group: Any = dist.group.WORLD
    answers = objects_of_all((problem, time.time_ns()), group, "a trace")
    problems = {rank: answer for rank, (answer, _) in enumerate(answers) if answer}
    if problems:
        raise cannot_write(problems)
    _remove_ranks_from(dist.get_world_size(), folder)  # no rank writes before all ranks have got here
    rank, token, spans = dist.get_rank(), torch.zeros(1, device=device_of(group)), []
    for _ in range(ROUNDS):
        enter = time.perf_counter()
        dist.all_reduce(token)
        token.item()  # waits for the collective on an accelerator
        spans.append((enter, time.perf_counter()))
    first = objects_of_all(spans if rank == 0 else None, group, "a trace")[0]
    return rank, dist.get_world_size(), answers[0][1], *clock_offset(spans, first)


def clock_offset(spans: list[tuple[float, float]], first: list[tuple[float, float]]) -> tuple[float, float]:
    """The offset to add to this rank's clock to get the first rank's, and its largest error, in seconds.

    No rank leaves an all-reduce before all have entered it, so each all-reduce gives a lower and an upper bound of the
    offset; the tightest bounds count.

    Args:
        spans: the times at which this rank entered and left each all-reduce, by its own clock.
        first: those of the first rank, by the first rank's clock.
    """
    if spans == first:
        return 0.0, 0.0
    pairs = list(zip(spans, first, strict=True))
    low = max(enter - left for (_, left), (enter, _) in pairs)
    high = min(left - enter for (enter, _), (_, left) in pairs)
    return (low + high) / 2, (high - low) / 2


def _remove_ranks_from(world: int, folder: Path) -> None:
    """Remove files that an earlier run with more ranks left; all others are overwritten."""
    for file in folder.glob("rank-*.json"):
        if (number := file.stem.removeprefix("rank-")).isdigit() and int(number) >= world:
            file.unlink(missing_ok=True)


def _problem(folder: Path) -> str:
    """Create the folder; returns the reason if no file can be written into it, else an empty string."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{time.time_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return str(error)
    return ""
