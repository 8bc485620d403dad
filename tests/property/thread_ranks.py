"""Ranks as threads of this process, over torch's in-memory process group: for all that needs no sockets.

A step of two ranks takes a few milliseconds and nothing is started, so that a test can run thousands. Collectives are
counted where they arrive, the small ones too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

PATIENCE = 60.0  # seconds that a task may take; one that hangs is reported after this
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "scatter", "gather", "alltoall")
STOP = object()
HERE = threading.local()
"""`.rank` on a rank's thread."""


class ThreadRanks:
    """`world` threads, each a rank of one default group. One instance at a time; a context that ends the threads.

    Attributes:
        counts: collectives of rank 0 by the name of the process group's method.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self._tasks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world)]
        self._answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> ThreadRanks:
        self._closing.enter_context(_threaded_groups())
        for name in COLLECTIVES:
            self._closing.enter_context(mock.patch.object(threaded.ProcessLocalGroup, name, self._counted(name)))
        store = dist.HashStore()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, store), daemon=True, name=f"rank {rank}")
            for rank in range(self.world)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for tasks in self._tasks:
            tasks.put(STOP)
        for thread in self._threads:
            thread.join(5.0)  # one that hangs was reported
        self._closing.close()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(rank, *args)` on every rank; the results by rank. Raises what the first rank that raised did."""
        __tracebackhide__ = True
        for tasks in self._tasks:
            tasks.put((fn, args))
        results: list[Any] = [None] * self.world
        errors: dict[int, BaseException] = {}
        for _ in range(self.world):
            rank, results_of_rank, error = self._answers.get(timeout=PATIENCE)
            results[rank] = results_of_rank
            if error is not None:
                errors[rank] = error
        threaded.ProcessLocalGroup.reset()
        if errors:  # ranks that an error elsewhere let go end with SystemExit
            own = [rank for rank in sorted(errors) if not isinstance(errors[rank], SystemExit)]
            raise errors[min(own or errors)]
        return results

    def _serve(self, rank: int, store: dist.Store) -> None:
        HERE.rank = rank
        dist.init_process_group("threaded", rank=rank, world_size=self.world, store=store)
        while (task := self._tasks[rank].get()) is not STOP:
            fn, args = task
            try:
                answer = (rank, fn(rank, *args), None)
            except BaseException as error:  # handed to whoever called `run`
                threaded.ProcessLocalGroup.exception_handle(error)
                answer = (rank, None, error)
            self._answers.put(answer)
            del task, fn, args, answer  # while this thread waits it keeps nothing alive
        dist.destroy_process_group()

    def _counted(self, name: str) -> Callable[..., Any]:
        collective = getattr(threaded.ProcessLocalGroup, name)

        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            if HERE.rank == 0:
                self.counts[name] += 1
            return collective(group, *args, **kwargs)

        return counted


@contextlib.contextmanager
def _threaded_groups() -> Iterator[None]:
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
