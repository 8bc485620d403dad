"""The rank's side of the watcher: what it records, how it waits, and what it raises; and `watch`, for users.

All of it belongs to the process, not to a model: a process has a single log and a single watcher. In a step the engine
only records what it issues (`RANK.record`) and waits for collectives (`RANK.wait`).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import DivergenceError, FullshardError, check_switch, invalid_argument
from . import messages
from .issued import AGREEMENT, LENGTH, MOST_ROOTS, ROOT, TURN, word
from .process import frames_of_trace

TALKS = (
    *("texts", "the same model", "the first pass", "shared order", "counts of tokens", "starting states", "batches"),
    *("values of all ranks", "whole values", "a checkpoint", "optimizers' state", "verification"),
    *("a monitor's report", "a trace", "a sharded tensor's value"),
)
"""Exchanges between ranks that belong to no unit."""
SLICE = 0.25
"""Seconds after which a wait for a collective checks for a verdict."""
_SLICE = timedelta(seconds=SLICE)
_GONE_ROOTS = 8
_EXPLAINED = 20.0
"""Seconds that watchers get to find out why a connection broke."""


@dataclass(frozen=True)
class WatchSettings:
    """The settings of `watch`. Frozen; replaced as a whole, possibly while the watcher runs.

    Attributes:
        enabled: whether there is a watcher.
        limit: seconds that a rank waits before ranks are compared; None: a third of the group's timeout, 300 at most.
        grace: seconds that a rank has to raise the verdict before its process is terminated.
        folder: the directory for reports; None: none are written.
    """

    enabled: bool = True
    limit: float | None = None
    grace: float = 15.0
    folder: str | None = None


@dataclass(frozen=True)
class Wait:
    """A wait in progress.

    Attributes:
        word: the awaited event, as an integer of the log.
        since: its start, by `time.monotonic`: the wall clock may jump.
        thread: the waiting thread.
        broken: whether the collective has failed, and the rank only waits for the reason.
    """

    word: int
    since: float
    thread: int
    broken: bool = False


class Rank:
    """This process, as its watcher sees it. See the module's docstring.

    Attributes:
        log: the events issued last, as integers (`issued.py`).
        record: records an event: `log.append`, or after a verdict a function that raises it.
        steps: finished steps (backwards that reduced) of the root that stepped last.
        waits: the waits that have lasted for a slice, oldest first.
        names, nbytes: number of a root -> its units' names, and the bytes that they gather or reduce.
        raised: the last integer of the log before the error that ended the program, and its traceback.
        caught: the last integer of the log before the error of a pass, and that error in a line.
        reading: an entry for each thread that reads or writes files.
        idle: whether the device waits for collectives rather than the host.
        peers: the ranks of the default process group with which this rank shares a mesh.
        verdict: the watchers' report; None if there is none.
        leaves: whether the rank knows that it cannot go on.
        settings: see `WatchSettings`.
        timeout: the process groups' timeout, seconds.
        watcher: the `Watcher`, or None.
        break_off: aborts collectives in flight; set by `comm`.
        records_its_end: whether hooks for the end of the program are installed.
        last_words: what follows the error that ends the program, once it is printed: functions of the error.
    """

    def __init__(self) -> None:
        self.log: deque[int] = deque([0], maxlen=LENGTH)
        self.record: Callable[[int], None] = self.log.append
        self.steps = 0
        self.waits: list[Wait] = []
        self.names: dict[int, list[str]] = {0: list(TALKS)}
        self.nbytes: dict[int, list[int]] = {}
        self.raised: tuple[int, str] | None = None
        self.caught: tuple[int, str] | None = None
        self.reading: list[None] = []
        self.idle = False
        self.peers: set[int] = set()
        self.verdict: str | None = None
        self.leaves = False
        self.settings = WatchSettings()
        self.timeout = 1800.0
        self.watcher: Any = None
        self.break_off: Callable[[], None] = lambda: None
        self.records_its_end = False
        self.last_words: list[Callable[[BaseException], None]] = []
        self._talks = 0
        self._last_root = 0
        self._gone_roots: list[int] = []

    # What the rank does.

    def talks(self, what: str) -> None:
        """Record an exchange between ranks that belongs to no unit; `what` is in `TALKS`."""
        self._talks += TURN
        self.record(word(AGREEMENT, TALKS.index(what)) + self._talks)

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """Context in which the rank reads or writes files, and counts as making progress, however slow the disk is.

        Other ranks give up only after 0.8 of the process group's timeout, or when this process ends or is stopped.
        """
        self.reading.append(None)
        try:
            yield
        finally:
            self.reading.pop()

    def new_root(self, root: object, names: list[str], nbytes: list[int]) -> int:
        """Register a root with the names of its units and the bytes they gather.

        Args:
            root: its number becomes free again once this object is gone.

        Returns:
            The offset to add to a unit's index in records.
        """
        count = MOST_ROOTS - 1  # number 0 means no root
        numbers = ((self._last_root + step) % count + 1 for step in range(count))  # reuses numbers as late as possible
        number = next((number for number in numbers if number not in self.names), count)
        self._last_root = number
        self.names[number], self.nbytes[number] = names, nbytes
        weakref.finalize(root, self._free, number).atexit = False
        return number * ROOT

    def _free(self, number: int) -> None:
        """Free a root's number, but keep its names for reports until more roots are gone."""
        self._gone_roots.append(number)
        if len(self._gone_roots) > _GONE_ROOTS:
            number = self._gone_roots.pop(0)
            del self.names[number], self.nbytes[number]

    def note(self, error: BaseException) -> None:
        """Record the error that ends the program."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-12))
        self.raised = (self.log[-1], text)

    def catches(self, error: BaseException) -> None:
        """Record the error of a pass: if the program goes on, other ranks wait for the rest of the pass."""
        if not isinstance(error, Exception) or isinstance(error, FullshardError):
            return
        frames = frames_of_trace(error.__traceback__)
        at = next((f" ({os.path.basename(frame.path)}:{frame.line})" for frame in frames if frame.is_users), "")
        text = str(error).strip().partition("\n")[0][:200]
        self.caught = (self.log[-1], f"{type(error).__name__}{': ' if text else ''}{text}{at}")

    # Waits.

    def wait(self, work: Any, label: int) -> None:
        """Continue to wait for a collective that did not complete within a slice.

        Args:
            work: the collective.
            label: its integer in the log.

        Raises:
            DivergenceError: the watchers' verdict is that it never will.
            RuntimeError: it failed.
        """
        if not work.is_completed():
            with self._waiting(label) as wait:
                while not work.is_completed():
                    self._look_up(wait)
                    # The error at the end of a slice means nothing: the collective may have completed since.
                    with contextlib.suppress(RuntimeError):
                        work.wait(_SLICE)
        work.wait()  # has completed: raises if it failed

    def explain(self, error: BaseException) -> BaseException:
        """The error for a failed collective: the watchers' verdict if it comes soon, else `error` as the cause."""
        if self.watcher is None:
            return error
        with self._waiting(self.log[-1], broken=True):
            deadline = time.monotonic() + _EXPLAINED
            while time.monotonic() < deadline:
                if self.verdict is not None:
                    return self._divergence()
                time.sleep(0.05)
        self.leave()
        return messages.connection_broke(error)

    @contextlib.contextmanager
    def _waiting(self, label: int, broken: bool = False) -> Iterator[Wait]:
        wait = Wait(label, time.monotonic(), threading.get_ident(), broken)
        self.waits.append(wait)
        try:
            yield wait
        finally:
            self.waits.remove(wait)

    def _look_up(self, wait: Wait) -> None:
        """Raise if there is a verdict, or if there can be none because the store has been silent for too long."""
        if self.verdict is not None:
            raise self._divergence()
        watcher, (limit, hard) = self.watcher, self.limits()
        waited = time.monotonic() - wait.since
        if watcher is not None and waited > (hard if watcher.is_alone else limit) and watcher.hears_nothing_for(limit):
            self.leave()
            raise messages.store_is_silent(waited, watcher.word_on_keeper())

    def leave(self) -> None:
        """Note that the rank cannot go on, and abort collectives in flight."""
        self.leaves = True
        self.break_off()

    # Verdicts.

    def begin(self, timeout: float) -> None:
        """Start over for process groups with this timeout; a verdict on older groups no longer counts."""
        self.timeout, self.verdict, self.leaves, self.record = timeout, None, False, self.log.append
        self.peers = set()

    def condemn(self, report: str) -> None:
        """Accept a verdict. It is raised at the next wait, or when the next event is issued."""
        self.verdict = report
        self.record = self._refuse

    def _refuse(self, word: int) -> None:
        raise self._divergence()

    def _divergence(self) -> DivergenceError:
        self.leave()
        return messages.stuck_ranks(self.verdict or "")

    # Settings.

    def limits(self) -> tuple[float, float]:
        """Seconds of a wait before ranks are compared, and before it counts as stuck in any case."""
        limit = self.settings.limit or min(300.0, self.timeout / 3)
        return limit, max(limit, 0.8 * self.timeout)


RANK = Rank()
"""This process."""


def _after_fork() -> None:
    """Reset the state in a forked process: the log and the watcher belong to the parent."""
    settings, break_off, watcher = RANK.settings, RANK.break_off, RANK.watcher
    RANK.__init__()  # type: ignore[misc]
    RANK.settings, RANK.break_off = settings, break_off
    _parents.append(watcher)


_parents: list[Any] = []
"""Watchers of parent processes: keeps their connections from being closed in this process."""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def watch(
    limit: float | None = None,
    *,
    grace: float = 15.0,
    folder: str | os.PathLike[str] | None = None,
    enabled: bool = True,
) -> None:
    """Set how long ranks may wait for each other, and where reports go. Call it before the first forward, on all ranks.

    A watcher is a thread of each rank. While ranks make progress it does next to nothing. When its rank waits for a
    collective of Fullshard's, it calls the roll in the process group's store, and all watchers answer with what their
    ranks are doing, and since when. When a rank has waited for `limit` seconds, or another rank is gone, every waiting
    rank raises a `DivergenceError` with the report: what each rank waits for or does elsewhere, which ranks are gone
    and how they ended, the first difference in the order of units, and the Python stacks.

    Ranks wait for a slow rank while it makes progress. In its first step that is as long as it computes, reads or
    writes, and at least four times the limit; later, as long as its Python stack changes, it or its children compute,
    or it sends, receives, reads or writes. A rank that does none of this in its own code may sleep, or wait for another
    program: if no `limit` is set, that is printed after the default limit, and an error after 0.8 of the process
    group's timeout. On CPUs no wait for a collective of Fullshard's lasts longer. A rank that does not answer counts as
    gone only after the limit, and not while other watchers on its machine see it make progress.

    Args:
        limit: seconds. None: a third of the process group's timeout, 300 at most, and no limit for a rank that sleeps
            in its own code.
        grace: seconds that a rank has to raise the report. A rank that does not, because it waits in code that is not
            Fullshard's, is terminated (SIGTERM, 5 seconds later SIGKILL) after its watcher wrote the report to stderr.
        folder: the directory in which the watcher that called the roll writes the report, with all statuses, for
            `fullshard doctor`. None: no report is written.
        enabled: False: no watcher is started.

    Raises:
        ConfigError: an argument of a wrong type, a time that is not positive, a folder that is a file or below one.
    """
    for name, value in (("limit", limit), ("grace", grace)):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        if not fits and not (name == "limit" and value is None):
            raise invalid_argument(f"watch({name}=)", value, "seconds, a positive number")
    check_switch("watch(enabled=)", enabled)
    path = None
    if folder is not None:
        is_path = isinstance(folder, (str, os.PathLike)) and bool(os.fspath(folder))
        if not is_path or not os.path.isdir(_existing_part(os.path.abspath(folder))):
            expected = "the path of a folder (not of a file, nor below one), which is created when needed, or None"
            raise invalid_argument("watch(folder=)", folder, expected)
        path = os.path.abspath(folder)
    RANK.settings = WatchSettings(enabled, limit, grace, path)


def _existing_part(path: str) -> str:
    """The longest part of an absolute path that exists."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def note_at_the_end(rank: Rank) -> None:
    """Install an exception hook that records the error that ends the program, after its last words.

    Other ranks end soon after the record, and whoever started them then ends this one.
    """
    previous_hook = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if rank.verdict is not None and not isinstance(error, DivergenceError):
            error.add_note(messages.reported_earlier(rank.verdict))  # a backend's own error, after the others left
        try:
            previous_hook(kind, error, trace)
            for say in rank.last_words:
                say(error)
        finally:
            rank.note(error)

    sys.excepthook = hook
