"""Planned steps are compared with the engine and with what the allocator reports (benchmarks/allocations.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # after tests, whose models.py is another

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


@pytest.fixture
def in_a_process() -> Iterator[Callable[..., Any]]:
    """`in_a_process(function, *arguments)`: what it returns, from a new process: the profiler sees all its memory.

    Each is a fork of one that has imported torch and the engine, and has done nothing else.
    """
    from multiprocessing import get_context

    context = get_context("forkserver")
    context.set_forkserver_preload(["fullshard", "torch.profiler"])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
