"""A thread that steps units whose parameters are in host memory, beside the backward."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from ..errors import invalid_argument

MOST_WAITING = 2
"""Steps that wait or run at once: their units' gradients stay in memory."""


@dataclass(frozen=True)
class _Job:
    """A step that was handed over: the unit's name, its outcome, and what follows it on the caller's thread."""

    unit: str
    outcome: Future[None]
    then: Callable[[], object]


class StepWorker:
    """A thread that runs steps in the order in which they are handed over.

    Ownership: the thread starts with the first step, and ends when this object is collected. A step may refer to
    parameters only until it has run.

    Args:
        threads: how many processor threads its operations use; or the processors on which it runs, with a thread each.
    """

    def __init__(self, threads: int | Sequence[int]) -> None:
        self._executor = ThreadPoolExecutor(1, "fullshard-steps")
        self._jobs: deque[_Job] = deque()  # oldest first
        self._failed = False  # whether a step raised, or is running
        self._error: BaseException | None = None  # the error that a step raised
        processors = None if isinstance(threads, int) else set(threads)
        number = threads if isinstance(threads, int) else len(threads)
        self._executor.submit(_begin, number, processors).result()
        # Setting the worker's number also set that of future threads: the caller sets its own again.
        torch.set_num_threads(torch.get_num_threads())

    def submit(self, unit: str, step: Callable[[], None], then: Callable[[], object]) -> None:
        """Hand over a step; wait for the oldest if `MOST_WAITING` are waiting or running. Dropped if one has raised.

        Args:
            unit: the unit's name, for errors.
            step: run on the worker's thread.
            then: called after it, on the thread that waits for it; also if the step raised or was dropped.
        """
        self._wait(MOST_WAITING - 1)
        if self._error is not None:
            then()
            return
        self._jobs.append(_Job(unit, self._executor.submit(self._run, step), then))

    def _run(self, step: Callable[[], None]) -> None:
        """On the worker's thread: run a step unless an earlier one raised, so that the same steps run on all ranks."""
        if not self._failed:
            self._failed = True
            step()
            self._failed = False

    def finish(self) -> None:
        """Wait for all steps.

        Raises:
            Exception: what the first of the steps that raised did, with a note that names the unit; later ones were
                dropped. Only here, at the end of the backward, so that no rank leaves its collectives before others.
        """
        self._wait(0)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self, waiting: int) -> None:
        """Wait until at most `waiting` steps are waiting or running; note an error."""
        while self._jobs and (len(self._jobs) > waiting or self._jobs[0].outcome.done()):
            job = self._jobs.popleft()
            error = job.outcome.exception()
            job.then()
            if error is not None:
                error.add_note(f"raised while the optimizer stepped unit {job.unit!r} beside the backward")
                self.drop()
                self._error = error  # until `finish`, steps are dropped as they come

    def drop(self) -> None:
        """Wait for the step that is running, and drop those that wait: after a backward that raised."""
        jobs, self._jobs = self._jobs, deque()
        wait([job.outcome for job in jobs if not job.outcome.cancel()])
        for job in jobs:
            job.then()
        self._error, self._failed = None, False


def _begin(threads: int, processors: set[int] | None) -> None:
    """Set this thread's processors and number of threads; threads that it starts for operations inherit them."""
    if processors is not None:
        os.sched_setaffinity(0, processors)
    torch.get_num_threads()  # a thread's first query or operation sets it to the process's number
    torch.set_num_threads(threads)


def check_threads(threads: object) -> None:
    """Check the argument of `step_in_backward`.

    Raises:
        ConfigError: neither a positive number nor processors that this process may use.
    """
    if isinstance(threads, int) and not isinstance(threads, bool) and threads > 0:
        return
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if isinstance(threads, Sequence) and not isinstance(threads, str) and threads and usable.issuperset(threads):
        return
    expected = f"a positive number of threads, or a list of processors among {sorted(usable)}"
    raise invalid_argument("step_in_backward(threads=)", threads, expected)
