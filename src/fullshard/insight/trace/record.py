"""Records one rank's events into a file; with the offset of its clock to that of rank 0.

The file is one JSON object. Times are seconds of the rank's own `time.perf_counter()`; `offset` added to them gives the
time of rank 0's. Events are rows of numbers (`COLUMNS`), whose verbs, units and groups are indices into lists.
"""

from __future__ import annotations

import json
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
from .messages import cannot_write

FORMAT = "fullshard trace 1"
COLUMNS = ("verb", "unit", "group", "bytes", "live", "time", "allocated")
"""Of an event; `allocated`: bytes of the accelerator's allocator, -1 where they were not read."""
ROUNDS = 24  # collectives by which clocks are compared; a few milliseconds together
SAMPLED = ("gathered", "collect")  # verbs at which the allocator is asked: memory peaks at these


class Recording:
    """What a rank has recorded so far. `step()` ends a step of training.

    Without any call of it, `fullshard trace` finds where steps begin: where the first unit is gathered again after all
    reductions are done.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.clock = _DeviceClock(device) if device is not None else None
        self.events: list[Event] = []
        self.marks: list[tuple[float, Any]] = []  # host time and the device's event, of each `step()`
        self.stamps: list[Any] = []  # the device's events, one for each of `events`; None: captured
        self.allocated: list[int] = []

    def step(self) -> None:
        """Mark that a step of training ends here, the optimizer's included."""
        stamp = timed_event(self.clock.device) if self.clock is not None else None
        if self.clock is None or stamp is not None:
            self.marks.append((time.perf_counter(), stamp))

    def listen(self, event: Event) -> None:
        """Keep an event of the accelerator, with the place that the current stream has reached."""
        assert self.clock is not None
        self.stamps.append(timed_event(self.clock.device))
        sampled = event.verb in SAMPLED
        self.allocated.append(torch.accelerator.memory_allocated(self.device) if sampled else -1)

    def as_json(self) -> dict[str, Any]:
        """Rows of events and the ends of steps; waits for the device."""
        events, memory = self.events, [-1] * len(self.events)
        times, marks = [event.time for event in events], [mark for mark, _ in self.marks]
        if self.clock is not None:
            passed = [number for number, stamp in enumerate(self.stamps) if stamp is not None]
            events, memory = [events[number] for number in passed], [self.allocated[number] for number in passed]
            times = self.clock.times([self.stamps[number] for number in passed])
            marks = self.clock.times([stamp for _, stamp in self.marks])
        verbs, units, groups = _Names(), _Names(), _Names()
        rows = []
        for event, when, allocated in zip(events, times, memory, strict=True):
            names = (verbs.index(event.verb), units.index(event.unit), groups.index(event.ranks))
            rows.append((*names, event.nbytes, event.live, round(when, 7), allocated))
        tables = {"verbs": [*verbs], "units": [*units], "groups": [*groups]}
        return {"steps": marks, **tables, "columns": COLUMNS, "events": rows}


class _Names(dict[Any, int]):
    """The index of each value, by its first use."""

    def index(self, value: Any) -> int:
        return self.setdefault(value, len(self))


class _DeviceClock:
    """Times at which the current stream passes; read as times of the host's clock when all is over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.accelerator.synchronize(device)
        self.start, self.host_start = timed_event(device), time.perf_counter()

    def times(self, stamps: list[Any]) -> list[float]:
        """Seconds of the host's clock; waits for the device."""
        assert self.start is not None, "the recording began while a graph was captured"
        torch.accelerator.synchronize(self.device)
        return [self.host_start + self.start.elapsed_time(stamp) / 1e3 for stamp in stamps]


@contextmanager
def trace(path: Path | str) -> Iterator[Recording]:
    """Record the engine's events while the block runs, and write `PATH/rank-R.json` at its end, also if it raises.

    For all models of the process. `fullshard trace PATH` reads the files of all ranks and tells why a step is slow and
    who is late. With several ranks every rank enters the block at the same point: their clocks are compared then.
    Files of an earlier run in the folder are replaced.

        with fullshard.trace("runs/trace") as recording:
            for batch in batches[:5]:
                train_step(batch)
                recording.step()  # optional

    On an accelerator times are those at which its current stream passes; the host waits for it only at the block's
    two ends. Steps that replay a captured graph have no events.

    Args:
        path: a folder, made if needed. Ranks may have separate disks: bring the files together then.

    Raises:
        ConfigError: the folder cannot be written to, on some rank; on all of them, and before the block runs.
        DivergenceError: other ranks do not enter the block.
    """
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
        body = recording.as_json()  # waits for the device, so that the end is after all events
        content = json.dumps({**header, "end": time.perf_counter(), **body}, separators=(",", ":"))
        replace_file(folder / f"rank-{rank}.json", content.encode())


def _meet(folder: Path) -> tuple[int, int, int, float, float]:
    """Rank, world, the run's number, and the clock's offset to rank 0's with its error. Collective.

    Raises:
        ConfigError: a rank cannot write to the folder.
    """
    problem = _problem(folder)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if problem:
            raise cannot_write(folder, {0: problem})
        _remove_ranks_from(1, folder)
        return 0, 1, time.time_ns(), 0.0, 0.0
    group: Any = dist.group.WORLD
    answers = objects_of_all((problem, time.time_ns()), group, "a trace")
    problems = {rank: answer for rank, (answer, _) in enumerate(answers) if answer}
    if problems:
        raise cannot_write(folder, problems)
    _remove_ranks_from(dist.get_world_size(), folder)  # nobody writes before all have been here
    rank, token, spans = dist.get_rank(), torch.zeros(1, device=device_of(group)), []
    for _ in range(ROUNDS):
        enter = time.perf_counter()
        dist.all_reduce(token)
        token.item()  # an accelerator's collective is over only now
        spans.append((enter, time.perf_counter()))
    first = objects_of_all(spans if rank == 0 else None, group, "a trace")[0]
    return rank, dist.get_world_size(), answers[0][1], *clock_offset(spans, first)


def clock_offset(spans: list[tuple[float, float]], first: list[tuple[float, float]]) -> tuple[float, float]:
    """What to add to this rank's clock to get the first rank's, and by how much that may be wrong, in seconds.

    Nobody leaves an all-reduce before everybody has entered it: each one bounds the offset from both sides, and the
    tightest bounds of all count.

    Args:
        spans: when this rank entered and left each all-reduce, by its own clock.
        first: the same of the first rank, by that one's.
    """
    if spans == first:
        return 0.0, 0.0
    pairs = list(zip(spans, first, strict=True))
    low = max(enter - left for (_, left), (enter, _) in pairs)
    high = min(left - enter for (enter, _), (_, left) in pairs)
    return (low + high) / 2, (high - low) / 2


def _remove_ranks_from(world: int, folder: Path) -> None:
    """Remove the files of an earlier, larger world: others are overwritten."""
    for file in folder.glob("rank-*.json"):
        if (number := file.stem.removeprefix("rank-")).isdigit() and int(number) >= world:
            file.unlink(missing_ok=True)


def _problem(folder: Path) -> str:
    """Why nothing can be written into the folder, which is made; empty if something can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{time.time_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return str(error)
    return ""
