"""Live bytes over time, as PyTorch's own CPU allocator reports them to its profiler.

Every storage is seen: made or resized in Python or C++, by whom does not matter; nothing is sampled. What
is alive before `watch` starts is not counted, so build the model inside it. oneDNN, whose scratch memory depends on the
processor (1 MiB for a bf16 product with AVX-512, nothing with AVX2), is not used meanwhile.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads; the profiler announces each start otherwise

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "watched: "


@dataclass
class Window:
    """Live bytes in one marked stretch of the run."""

    start: int = 0  # bytes alive when it began
    peak: int = 0  # the most alive during it
    end: int = 0  # alive when it ended


@dataclass
class Watched:
    """What `watch` saw: one window per mark, filled in when the context ends."""

    windows: dict[str, Window] = field(default_factory=dict)


def mark(name: str) -> record_function:
    """A context within `watch`: its stretch becomes the window `name`."""
    return record_function(MARK + name)


@contextmanager
def watch() -> Iterator[Watched]:
    """Follow every allocation on the CPU until the context ends."""
    watched = Watched()
    activities = [ProfilerActivity.CPU]
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=activities, profile_memory=True, acc_events=True) as profiler,
    ):
        yield watched
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    times = [time for time, _ in changes]
    levels = list(itertools.accumulate(change for _, change in changes))
    for event in events:
        if event.name().startswith(MARK):
            window = _window(times, levels, event.start_ns(), event.end_ns())
            watched.windows[event.name().removeprefix(MARK)] = window


def _window(times: list[int], levels: list[int], start: int, stop: int) -> Window:
    """The levels in [start, stop), and the one before."""
    before = 0
    inside: list[int] = []
    for time, level in zip(times, levels, strict=True):
        if time < start:
            before = level
        elif time < stop:
            inside.append(level)
    return Window(before, max([before, *inside]), inside[-1] if inside else before)
