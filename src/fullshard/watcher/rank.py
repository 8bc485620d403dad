"""What a rank tells its watcher, how it waits, and what it raises; and `watch`, which users call.

Everything is of the process, not of a model: a process has one log and one watcher, whatever it trains. The engine
records what it issues (`RANK.record`), and waits for collectives by `RANK.wait`; nothing else happens in a step.
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

from ..errors import DivergenceError, FullshardError
from . import messages
from .log import AGREEMENT, LENGTH, MOST_ROOTS, ROOT, TURN, word
from .process import frames_of_trace

TALKS = (
    *("texts", "the same model", "the first pass", "shared order", "counts of tokens", "starting states", "batches"),
    *("values of all ranks", "whole values", "a checkpoint", "optimizers' state", "verification"),
)
"""What ranks may exchange that is no unit's."""
SLICE = 0.25
"""Seconds after which a wait for a collective looks up."""
_SLICE = timedelta(seconds=SLICE)
_GONE_ROOTS = 8
_EXPLAINED = 20.0
"""Seconds within which watchers find out why a connection broke."""


@dataclass(frozen=True)
class WatchSettings:
    """What users set by `watch`; replaced whole, also while the watcher runs.

    Attributes:
        enabled: whether there is a watcher.
        limit: seconds that a rank waits before ranks are compared; None: a third of the group's timeout, 300 at most.
        grace: seconds within which a rank has to raise what was found, before its process is ended.
        folder: where reports are written; None: nowhere.
    """

    enabled: bool = True
    limit: float | None = None
    grace: float = 15.0
    folder: str | None = None


@dataclass(frozen=True)
class Wait:
    """A wait that is under way.

    Attributes:
        word: what is waited for, as it was recorded.
        since: seconds since the epoch.
        thread: that waits.
        broken: whether the collective has failed, and the rank only asks why.
    """

    word: int
    since: float
    thread: int
    broken: bool = False


class Rank:
    """This process, as its watcher sees it. See the module's docstring.

    Attributes:
        log: what was issued last, as numbers (`log.py`).
        record: notes what is issued now: `log.append`, until there is a verdict, which it then raises.
        steps: backwards that reduced, of the root that stepped last.
        waits: those that have lasted for a slice, oldest first.
        names, nbytes: of the units of a root, by its number: their names, and the bytes that they gather or reduce.
        raised: what ended the program, and the last number before it.
        caught: what a pass raised, in a line, and the last number before it.
        reading: something for each thread that reads or writes files.
        idle: whether the device waits for collectives, and not the host.
        peers: ranks with which this one shares a mesh, by their numbers in the default process group.
        verdict: what the watchers found.
        leaves: whether the rank knows that it cannot go on.
        settings: see there.
        timeout: seconds, of the process groups.
        watcher: a `Watcher`; None if there is none.
        tells_its_end: whether the end of the program is noted.
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
        self.break_off: Callable[[], None] = lambda: None  # ends what is in flight; set by `comm`
        self.tells_its_end = False
        self._talks = 0
        self._last_root = 0
        self._gone_roots: list[int] = []

    # What the rank does.

    def talks(self, what: str) -> None:
        """The ranks exchange something that is no unit's; `what` is one of `TALKS`."""
        self._talks += TURN
        self.record(word(AGREEMENT, TALKS.index(what)) + self._talks)

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """Within this the rank reads or writes files, which may take as long as it will: on a slow disk nothing moves.

        Only a wait of 0.8 of the process group's timeout ends it; and what ends or stops this process.
        """
        self.reading.append(None)
        try:
            yield
        finally:
            self.reading.pop()

    def new_root(self, root: object, names: list[str], nbytes: list[int]) -> int:
        """A root, its units' names and the bytes they gather; returns what to add to an index in records.

        Args:
            root: its number is free again when this is gone.
        """
        count = MOST_ROOTS - 1  # 0 is of no root
        numbers = ((self._last_root + each) % count + 1 for each in range(count))  # as late as can be again
        number = next((each for each in numbers if each not in self.names), count)
        self._last_root = number
        self.names[number], self.nbytes[number] = names, nbytes
        weakref.finalize(root, self._free, number).atexit = False
        return number * ROOT

    def _free(self, number: int) -> None:
        """A root is gone. What it was is still told for a while."""
        self._gone_roots.append(number)
        if len(self._gone_roots) > _GONE_ROOTS:
            number = self._gone_roots.pop(0)
            del self.names[number], self.nbytes[number]

    def note(self, error: BaseException) -> None:
        """The rank raises this."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-12))
        self.raised = (self.log[-1], text)

    def catches(self, error: BaseException) -> None:
        """A pass raised this. If the program goes on, other ranks wait for the rest of the pass, and are told why."""
        if not isinstance(error, Exception) or isinstance(error, FullshardError):
            return
        frames = frames_of_trace(error.__traceback__)
        at = next((f" ({os.path.basename(each.path)}:{each.line})" for each in frames if each.is_users), "")
        text = str(error).strip().partition("\n")[0][:200]
        self.caught = (self.log[-1], f"{type(error).__name__}{': ' if text else ''}{text}{at}")

    # Waits.

    def wait(self, work: Any, label: int) -> None:
        """Go on waiting for a collective that did not arrive within a slice.

        Args:
            work: the collective.
            label: the number that it was recorded by.

        Raises:
            DivergenceError: the watchers found that it never will.
            RuntimeError: it failed.
        """
        if not work.is_completed():
            with self._waiting(label) as wait:
                while not work.is_completed():
                    self._look_up(wait)
                    # That the slice is over tells nothing: the collective may have ended since.
                    with contextlib.suppress(RuntimeError):
                        work.wait(_SLICE)
        work.wait()  # has ended: raises if it failed

    def explain(self, error: BaseException) -> BaseException:
        """Why a collective failed: what the watchers say if they say something soon, else `error`."""
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
        wait = Wait(label, time.time(), threading.get_ident(), broken)
        self.waits.append(wait)
        try:
            yield wait
        finally:
            self.waits.remove(wait)

    def _look_up(self, wait: Wait) -> None:
        """Raise if there is a verdict, or if there can be none, as the store has been silent for too long."""
        if self.verdict is not None:
            raise self._divergence()
        watcher, (limit, hard) = self.watcher, self.limits()
        waited = time.time() - wait.since
        if watcher is not None and waited > (hard if watcher.is_alone else limit) and watcher.hears_nothing_for(limit):
            self.leave()
            raise messages.store_is_silent(waited, watcher.word_on_keeper())

    def leave(self) -> None:
        """The rank cannot go on, and knows why."""
        self.leaves = True
        self.break_off()

    # Verdicts.

    def begin(self, timeout: float) -> None:
        """There are process groups with this timeout; what was found by older ones is of no account."""
        self.timeout, self.verdict, self.leaves, self.record = timeout, None, False, self.log.append
        self.peers = set()

    def condemn(self, report: str) -> None:
        """The watchers found this. It is raised at the next wait, or when something is issued."""
        self.verdict = report
        self.record = self._refuse

    def _refuse(self, word: int) -> None:
        raise self._divergence()

    def _divergence(self) -> DivergenceError:
        self.leave()
        return messages.stuck_ranks(self.verdict or "")

    # Settings.

    def limits(self) -> tuple[float, float]:
        """Seconds of a wait before ranks are compared, and before they are told in any case."""
        limit = self.settings.limit or min(300.0, self.timeout / 3)
        return limit, max(limit, 0.8 * self.timeout)


RANK = Rank()
"""This process."""


def _after_fork() -> None:
    """What a process tells and the watcher are the parent's: a forked one begins anew."""
    settings, break_off, watcher = RANK.settings, RANK.break_off, RANK.watcher
    RANK.__init__()  # type: ignore[misc]
    RANK.settings, RANK.break_off = settings, break_off
    _parents.append(watcher)


_parents: list[Any] = []
"""Watchers of the process that this one was forked from: their connections are not to be closed here."""

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def watch(
    limit: float | None = None,
    *,
    grace: float = 15.0,
    folder: str | os.PathLike[str] | None = None,
    enabled: bool = True,
) -> None:
    """Say how long ranks may wait for each other, and where reports go. Call it before the first forward, on all ranks.

    A watcher is a thread of each rank. While ranks get on it does next to nothing. When a rank has waited for a
    collective of Fullshard's, its watcher calls the roll in the process group's store, and all watchers answer: what
    their ranks do, and since when. When a rank has waited for `limit` seconds, or another rank is gone, every rank that
    waits raises a `DivergenceError` with the report: who waits for what, who is elsewhere, who is gone and how, the
    first difference in the order of units, and the Python stacks. A rank that is slow but gets on is waited for: in its
    first step for four times the limit, and as long as it computes, reads or writes; later as long as its Python stack
    moves, it or its children compute, or it sends, receives, reads or writes. On CPUs no wait for a collective of
    Fullshard's is longer than 0.8 of the process group's timeout. No answer is no proof that a rank is gone: it counts
    only once it has lasted for the limit, and not while the rank's neighbours on its machine see that it gets on.

    Args:
        limit: seconds. None: a third of the process group's timeout, 300 at most.
        grace: seconds within which a rank has to raise the report. One that does not, because it waits in code that is
            not Fullshard's, is ended (SIGTERM, 5 seconds later SIGKILL) after its watcher wrote the report to stderr.
        folder: where the watcher that called the roll writes the report, with all that was known, for
            `fullshard doctor`. None: nowhere.
        enabled: False: no watcher is started.

    Raises:
        ConfigError: an argument of another type, a time that is not positive, a folder that is a file.
    """
    for name, value in (("limit", limit), ("grace", grace)):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        if not fits and not (name == "limit" and value is None):
            raise messages.not_a_time(name, value)
    if not isinstance(enabled, bool):
        raise messages.not_a_bool(enabled)
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder)):
        raise messages.not_a_path(folder)
    path = None if folder is None else os.path.abspath(folder)
    if path is not None and os.path.exists(path) and not os.path.isdir(path):
        raise messages.is_a_file(path)
    RANK.settings = WatchSettings(enabled, limit, grace, path)


def note_at_the_end(rank: Rank) -> None:
    """Let what ends the program be known to the watcher."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        rank.note(error)
        if rank.verdict is not None and not isinstance(error, DivergenceError):
            error.add_note(messages.found_before(rank.verdict))  # to a backend's own error, after the others left
        before(kind, error, trace)

    sys.excepthook = hook
