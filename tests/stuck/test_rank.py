"""A rank and its watcher: what other processes, too many models and a store that fails do to them; and the roll call.

Watchers here are several in one process, over a store in memory, or processes without torch. Whole runs are in
`test_stuck.py`.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fullshard.errors import DivergenceError
from fullshard.watcher import issued, roll_call
from fullshard.watcher.issued import MOST_ROOTS, ROOT, TURN, records_of, step_word, word
from fullshard.watcher.process import DUMPS_ARE_SAFE, frames_at
from fullshard.watcher.rank import Rank, WatchSettings
from fullshard.watcher.roll_call import Watcher, start
from stores import Store

ALONE = f"""
import sys
package = type(sys)("fullshard")  # without torch, which takes seconds
package.__path__ = [{os.path.dirname(os.path.dirname(issued.__file__))!r}]
sys.modules["fullshard"] = package
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from stores import Store
from fullshard.watcher import RANK, start
store = Store()
start(RANK, 0, 2, 60.0, lambda: store)
"""
FORKS = (
    ALONE
    + """
import json, multiprocessing, os, warnings
warnings.simplefilter("ignore")
for how in ("fork", "multiprocessing"):
    if how == "fork":
        child = os.fork()
        if not child:
            assert RANK.watcher is None
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    else:
        worker = multiprocessing.get_context("fork").Process(target=sys.exit)
        worker.start()
        worker.join()
    assert json.loads(store.keys["1/rank/0"])["gone"] is None, how
"""
)
ASKED_OFTEN = (
    ALONE
    + """
import os, threading, time
from fullshard.watcher.process import SIGNAL
stop = time.monotonic() + 3

def starts_threads():
    while time.monotonic() < stop:
        thread = threading.Thread(target=sum, args=([1, 2, 3],))
        thread.start()
        thread.join()

def asks():
    while time.monotonic() < stop:
        os.kill(os.getpid(), SIGNAL)
        time.sleep(0.0005)

threads = [threading.Thread(target=target) for target in (*[starts_threads] * 4, asks)]
for thread in threads:
    thread.start()
while time.monotonic() < stop:
    sum(range(100))
for thread in threads:
    thread.join()
"""
)
WAITED = 30.0  # seconds within which watchers find what they should, on a busy machine


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)


def test_a_forked_childs_end_is_not_the_ranks() -> None:
    ended = run(FORKS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("ends", "gone", "raised"),
    [("sys.exit()", "it ended by itself", False), ("raise ValueError('planted')", "exit code 1", True)],
)
def test_a_rank_that_ends_leaves_a_word(ends: str, gone: str, raised: bool) -> None:
    """By itself or by an exception, and in processes of `multiprocessing`, which run no `atexit`."""
    look = "import atexit, json; atexit.register(lambda: print(store.keys['1/rank/0']))\n"
    ended = run(look + ALONE + ends)
    assert f'"gone": "{gone}"' in ended.stdout and ("ValueError: planted" in ended.stdout) == raised, ended
    child = f"""
import json, multiprocessing
manager = multiprocessing.Manager()
shared = manager.dict()
def child():
    program = {ALONE!r}.replace("store = Store()", "store = Store(); store.keys = shared")
    exec(program, dict(globals(), shared=shared))
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
print(shared["1/rank/0"])
"""
    if not raised:
        ended = run(child)
        assert f'"gone": "{gone}"' in ended.stdout, ended


class Root:
    """In the place of a model's."""


def test_a_number_of_a_root_is_free_again_when_the_root_is_gone() -> None:
    rank = Rank()
    alive, last = Root(), 0
    first = rank.new_root(alive, ["a"], [0])
    for _ in range(2 * MOST_ROOTS):
        before, last = last, rank.new_root(Root(), ["b"], [0])
        assert last not in (first, before) and 0 < last < MOST_ROOTS * ROOT
    assert len(rank.names) < 20, "nothing grows with models that are gone"
    rank.record(word(1, last) + 5 * TURN)
    record = records_of(rank.log, rank.steps)[-1]
    assert (record.unit, record.turn, record.verb) == (last, 5, 1)
    assert record.named(rank.names, rank.nbytes)["unit"] == "b", "what a model was that is gone is still told"


@pytest.mark.parametrize("what", ["threading.Thread.start", "tempfile.TemporaryFile", "connect"])
def test_a_watcher_that_cannot_start_does_not_end_the_job(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread") if what.endswith("start") else OSError(24, "Too many open files")

    monkeypatch.setattr(roll_call.faulthandler, "register", lambda *args, **kwargs: None)
    if what != "connect":
        monkeypatch.setattr(what, fails)
    short = Rank()
    short.record(word(1, 0))
    with pytest.warns(UserWarning, match="no watcher could be started"):
        start(short, 0, 2, 60.0, fails if what == "connect" else Store)
    assert short.watcher is None
    with short.files():
        short.new_root(Root(), ["a"], [0])


def test_a_backends_own_error_is_printed_with_the_report() -> None:
    program = ALONE + (
        "RANK.condemn('Ranks are stuck: rank 0 called full_tensor (train.py:3).')\n"
        "raise RuntimeError('Connection closed by peer')"
    )
    ended = run(program)
    assert "RuntimeError: Connection closed by peer\nfullshard reported earlier: Ranks are stuck" in ended.stderr


def test_stacks_of_other_threads_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPython 3.11 without frame objects: they deadlock, or crash the process."""
    if sys.version_info < (3, 12):
        monkeypatch.delattr(sys, "_current_frames")
    ready, over = threading.Event(), threading.Event()

    def waits_here() -> None:
        ready.set()
        over.wait()

    other = threading.Thread(target=waits_here)
    other.start()
    ready.wait()
    try:
        assert "waits_here" in [frame.function for frame in frames_at(other.ident or 0)]
        assert frames_at(threading.get_ident())[0].path.endswith("process.py")
    finally:
        over.set()
        other.join()
    assert frames_at(other.ident or 0)[0].path.endswith("process.py")  # it has ended: the main thread's


@pytest.mark.skipif(not DUMPS_ARE_SAFE, reason="CPython 3.13 and newer do not answer the signal")
def test_asking_for_a_stack_does_not_end_a_process_whose_threads_come_and_go() -> None:
    """A stack of a thread that ends meanwhile cannot be read: on CPython 3.11 the handler crashed within a second."""
    ended = subprocess.run([sys.executable, "-c", ASKED_OFTEN], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)


# The roll call.


class Never:
    """A collective that does not come."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: object = None) -> None:
        time.sleep(0.05)
        raise RuntimeError("Operation timed out!")


class World:
    """Ranks of one process: each with a thread that does what it is given, and a watcher."""

    def __init__(
        self, size: int, limit: float | None, line: Callable[[Store], Store] = Store, timeout: float | None = None
    ) -> None:
        store = Store()
        self.lines = [line(store) for _ in range(size)]
        self.ranks = [Rank() for _ in range(size)]
        self.raised: dict[int, BaseException | None] = {}
        self.tasks: list[queue.Queue[Callable[[Rank], object] | None]] = [queue.Queue() for _ in range(size)]
        for number, rank in enumerate(self.ranks):
            rank.peers = set(range(size))
            rank.settings = WatchSettings(limit=limit, grace=1000.0)
            rank.timeout = timeout or 100 * (limit or 1.0)
            rank.steps = 3
            threading.Thread(target=self._serve, args=(number, size), daemon=True).start()
        while not all(rank.watcher for rank in self.ranks):
            time.sleep(0.01)

    def _serve(self, number: int, size: int) -> None:
        rank = self.ranks[number]
        rank.watcher = Watcher(rank, number, size, lambda: self.lines[number])
        while (task := self.tasks[number].get()) is not None:
            try:
                task(rank)
            except DivergenceError as error:
                self.raised[number] = error
            else:
                self.raised[number] = None

    def does(self, number: int, what: Callable[[Rank], object]) -> None:
        self.tasks[number].put(what)

    def report_of(self, number: int) -> str:
        until = time.monotonic() + WAITED
        while number not in self.raised:
            assert time.monotonic() < until, "nothing was found"
            time.sleep(0.05)
        error = self.raised[number]
        assert error is not None
        return str(error)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **keywords: Any) -> World:
        made.append(World(*args, **keywords))
        return made[-1]

    yield make
    for each in made:
        for rank, tasks in zip(each.ranks, each.tasks, strict=True):
            rank.watcher.end(announce=False)
            tasks.put(None)


def waits(rank: Rank) -> None:
    """For a gather, which it has issued as the first thing of its root."""
    rank.record(step_word(ROOT, 3))
    rank.record(word(issued.GATHER, ROOT) + TURN)
    rank.wait(Never(), rank.log[-1])


def test_ranks_that_wait_are_told_who_does_not_come(world: Callable[..., World]) -> None:
    ranks = world(3, limit=1.5)
    for number in (0, 1):
        ranks.does(number, waits)
    reports = {ranks.report_of(number) for number in (0, 1)}
    assert len(reports) == 1, "all ranks raise the same"
    assert "rank 2 did not arrive" in reports.pop()
    with pytest.raises(DivergenceError, match="rank 2 did not arrive"):
        until = time.monotonic() + WAITED
        while time.monotonic() < until:
            ranks.ranks[2].record(word(issued.GATHER, ROOT) + TURN)  # which is then told, too
            time.sleep(0.05)


def test_a_rank_that_gets_on_is_waited_for(world: Callable[..., World]) -> None:
    ranks, over = world(2, limit=0.5), threading.Event()

    def works(rank: Rank) -> None:
        for turn in range(1, 1000):
            rank.record(word(issued.GATHER, ROOT) + turn * TURN)
            if over.wait(0.3):
                break

    ranks.does(0, waits)
    ranks.does(1, works)
    time.sleep(6.0)
    over.set()
    assert not ranks.raised.get(0), ranks.raised


def test_a_clock_that_is_set_ends_no_job(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, over, wall = world(2, limit=10.0), threading.Event(), time.time
    ranks.does(0, waits)
    ranks.does(1, lambda rank: over.wait(60))
    for jump in (5000.0, -5000.0):
        time.sleep(2.5)
        monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
    time.sleep(2.5)
    over.set()
    assert not ranks.raised.get(0), ranks.raised
    assert 7.0 < ranks.ranks[0].watcher.status(False)["waited"] < 60.0


def test_one_that_reads_files_is_waited_for(world: Callable[..., World]) -> None:
    ranks, over = world(2, limit=0.5), threading.Event()

    def reads(rank: Rank) -> None:
        with rank.files():
            over.wait(60)

    ranks.does(0, waits)
    ranks.does(1, reads)
    time.sleep(6.0)
    assert not ranks.raised.get(0), ranks.raised
    over.set()
    assert "rank 1 did not arrive" in ranks.report_of(0)


def test_one_that_sleeps_is_told_of_and_reported_only_at_the_end(
    world: Callable[..., World], capfd: pytest.CaptureFixture[str]
) -> None:
    """By default, after a third of the group's timeout; whoever sets a limit means it."""
    ranks = world(2, limit=None, timeout=15.0)
    began = time.monotonic()
    ranks.does(0, waits)
    printed = ""
    while "neither computes nor moves on" not in printed:
        assert time.monotonic() - began < WAITED
        time.sleep(0.1)
        printed += capfd.readouterr().err
    assert 0 not in ranks.raised and "rank 1" in printed and "After 12 s they raise an error" in printed
    assert "rank 1 did not arrive" in ranks.report_of(0)
    assert time.monotonic() - began > 12.0
    assert "neither computes" not in capfd.readouterr().err, "it is said once"


def test_the_last_word_of_a_rank_is_read_at_once(world: Callable[..., World]) -> None:
    ranks = world(3, limit=300.0)
    ranks.does(2, waits)
    ranks.ranks[1].note(ValueError("planted"))
    ranks.ranks[1].watcher.end()
    assert "rank 1 raised ValueError: planted" in ranks.report_of(2)


def test_the_last_word_of_the_stores_keeper_outlives_the_store(world: Callable[..., World]) -> None:
    ranks = world(2, limit=300.0)
    ranks.ranks[0].note(ValueError("planted"))
    ranks.ranks[0].watcher.end()  # not before the other has read it
    for line in ranks.lines:
        line.has_ended = True
    ranks.does(1, waits)
    assert "rank 0 raised ValueError: planted" in ranks.report_of(1)


def test_one_that_waits_takes_over_from_a_judge_that_went_on(world: Callable[..., World]) -> None:
    ranks = world(2, limit=1.0)
    (roll,) = ranks.lines[0].get(["1/roll"])
    ranks.lines[0].put("1/roll", roll.replace('"by": null', '"by": 1'))  # and it has not even said that there is one
    ranks.does(0, waits)
    assert "rank 1 did not arrive" in ranks.report_of(0)


def test_silence_counts_from_a_wait_on(world: Callable[..., World]) -> None:
    """What was heard in an earlier wait says nothing of this one."""
    ranks, over = world(2, limit=300.0), threading.Event()

    class Slow(Never):
        def is_completed(self) -> bool:
            return over.is_set()

        def wait(self, timeout: object = None) -> None:
            if not over.is_set():
                super().wait()

    watching = ranks.ranks[0].watcher
    ranks.does(0, lambda rank: rank.wait(Slow(), rank.log[-1]))
    until = time.monotonic() + WAITED
    while 1 not in watching._heard and time.monotonic() < until:
        time.sleep(0.05)
    first = watching._heard[1]
    over.set()
    while 0 not in ranks.raised:
        time.sleep(0.05)
    while watching._heard and time.monotonic() < until:
        time.sleep(0.05)
    assert not watching._heard and not watching.before, "the wait is over"
    over.clear()
    ranks.does(0, lambda rank: rank.wait(Slow(), rank.log[-1]))
    while 1 not in watching._heard and time.monotonic() < until:
        time.sleep(0.05)
    assert watching._heard[1] > first
    over.set()


def test_a_store_that_is_gone_ends_no_healthy_rank(world: Callable[..., World]) -> None:
    """Rank 0 lives, and may wait, too: nobody can ask it."""
    ranks = world(2, limit=1.0)
    for line in ranks.lines:
        line.has_ended = True
    ranks.does(1, waits)
    time.sleep(6.0)
    assert ranks.ranks[1].watcher.is_alone and not ranks.raised.get(1), ranks.raised


class Flaky(Store):
    """A store that cannot be reached while it is told so."""

    cut = threading.Event()

    def has(self, key: str) -> bool:
        if self.cut.is_set():
            raise RuntimeError("Connection reset by peer")
        return super().has(key)

    def put(self, key: str, value: str) -> None:
        self.has(key)
        super().put(key, value)


def test_a_store_that_is_reached_again_serves_again(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """However often it could not be reached, of which is told once."""
    monkeypatch.setattr(roll_call, "RETRY", 0.2)
    ranks = world(2, limit=3.0, line=Flaky)
    watchers = [rank.watcher for rank in ranks.ranks]
    for _ in range(2):
        Flaky.cut.set()
        until = time.monotonic() + WAITED
        while not all(each.is_alone for each in watchers) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1.0)
        assert all(each.is_alone for each in watchers), "it is tried again, in vain"
        Flaky.cut.clear()
        while any(each.is_alone for each in watchers) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(each.is_alone for each in watchers)
    ranks.does(0, waits)
    assert "rank 1 did not arrive" in ranks.report_of(0)
    printed = capfd.readouterr().err
    for number in (0, 1):
        assert printed.count(f"rank {number}'s watcher could not reach the process group's store (Connection") == 1


def test_what_was_not_heard_while_the_store_was_not_reached_is_no_silence(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "RETRY", 0.2)
    ranks = world(2, limit=300.0, line=Flaky)
    watching, until = ranks.ranks[0].watcher, time.monotonic() + WAITED
    monkeypatch.setattr(watching, "_pause", lambda waited: 1.0)
    monkeypatch.setattr(watching, "_neighbour_of", lambda rank: None)  # it would ask this process for its stack
    ranks.does(0, waits)
    while 1 not in watching._heard and time.monotonic() < until:
        time.sleep(0.05)
    ranks.ranks[1].watcher.end(announce=False)  # so that it is not heard again
    Flaky.cut.set()
    while not watching.is_alone and time.monotonic() < until:
        time.sleep(0.05)
    over = time.monotonic()
    Flaky.cut.clear()
    while (watching.is_alone or 1 not in watching._heard) and time.monotonic() < until:
        time.sleep(0.05)
    assert watching._heard[1] > over


def test_a_store_that_is_tried_in_vain_does_not_lengthen_a_wait(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "RETRY", 0.2)
    ranks = world(2, limit=1.0)
    ranks.ranks[1].timeout = 4.0
    for line in ranks.lines:
        line.has_ended = True
    ranks.does(1, waits)
    assert "the store of the process group (at rank 0, or at the launcher) does not answer" in ranks.report_of(1)


class Silent(Store):
    """A store that answers no more once it is told to."""

    silent = threading.Event()

    def has(self, key: str) -> bool:
        while self.silent.is_set():
            time.sleep(0.05)
        return super().has(key)


def test_a_store_that_does_not_answer_is_said_after_the_limit(world: Callable[..., World]) -> None:
    ranks = world(2, limit=2.0, line=Silent)
    while 0 not in ranks.ranks[1].watcher.last_statuses:
        time.sleep(0.05)
    Silent.silent.set()
    began = time.monotonic()
    ranks.does(1, waits)
    report = ranks.report_of(1)
    Silent.silent.clear()
    assert "the store of the process group (at rank 0, or at the launcher) does not answer" in report
    got = report.partition("got:")[2]  # of this process, whose main thread may be running or asleep
    assert "rank 0 is elsewhere" in got or "rank 0 computes elsewhere" in got, "the system is asked what rank 0 does"
    assert time.monotonic() - began > 2.0


def test_a_rank_without_neighbours_is_named_by_its_silence_after_the_limit(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(2, limit=4.0)
    ranks.ranks[1].watcher.end(announce=False)  # as one that is stopped, or holds the interpreter
    monkeypatch.setattr(roll_call.Watcher, "_neighbour_of", lambda *_: None)
    began = time.monotonic()
    ranks.does(0, waits)
    assert "no answer from rank 1's watcher" in ranks.report_of(0)
    assert time.monotonic() - began > 4.0


@pytest.mark.parametrize("fault", [KeyError, ValueError, RuntimeError])
def test_a_fault_of_the_judge_is_not_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: type[Exception],
    world: Callable[..., World],
) -> None:  # fmt: skip
    def broken(*args: Any) -> bool:
        raise fault("planted in the judge")

    monkeypatch.setattr(roll_call, "stuck", broken)
    ranks = world(2, limit=0.5)
    ranks.does(0, waits)
    until, printed = time.monotonic() + WAITED, ""
    while "planted in the judge" not in printed and time.monotonic() < until:
        time.sleep(0.1)
        printed += capfd.readouterr().err
    assert "planted in the judge" in printed
    assert not ranks.ranks[0].watcher.is_alone, "nor is it the store's"
    monkeypatch.undo()
    assert "rank 1 did not arrive" in ranks.report_of(0), "and it is watched on"
