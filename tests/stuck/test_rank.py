"""A rank's side of its watcher: what other processes, too many models and a watcher that fails do to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from fullshard.watcher import process, rank
from fullshard.watcher.board import MOST_ROOTS, ROOT, TURN, Board, word
from fullshard.watcher.process import Options, Watcher
from fullshard.watcher.rank import Rank

ALONE = f"""
import sys, types
package = types.ModuleType("fullshard")  # without torch, which takes seconds
package.__path__ = [{os.path.dirname(os.path.dirname(rank.__file__))!r}]
sys.modules["fullshard"] = package
"""
FORKS = (
    ALONE
    + """
import multiprocessing, os, warnings
warnings.simplefilter("ignore")
from fullshard.watcher import RANK
board = RANK.board
assert RANK.start(0, 60.0)
for how in ("fork", "multiprocessing"):
    if how == "fork":
        child = os.fork()
        if not child:
            sys.exit(3)
        os.waitpid(child, 0)
    else:
        worker = multiprocessing.get_context("fork").Process(target=sys.exit)
        worker.start()
        worker.join()
    assert not board.ended, how
"""
)


def test_a_forked_childs_end_is_not_the_ranks() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr


class Root:
    """In the place of a model's."""


def test_a_number_of_a_root_is_free_again_when_the_root_is_gone() -> None:
    rank = Rank()
    alive, last = Root(), 0
    first = rank.new_root(alive, ["a"], [0])
    for _ in range(2 * MOST_ROOTS):
        before, last = last, rank.new_root(Root(), ["b"], [0])
        assert last not in (first, before) and 0 < last < MOST_ROOTS * ROOT
    rank.record(word(1, last + 7) + 5 * TURN)
    told = rank.board.last
    assert told is not None and (told.unit, told.turn, told.verb) == (last + 7, 5, 1)


def test_a_watcher_that_does_not_read_does_not_stop_its_rank() -> None:
    rank = Rank()
    rank._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert rank._process.stdin is not None
    os.set_blocking(rank._process.stdin.fileno(), False)
    os.kill(rank._process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(100):
            rank.new_root(Root(), ["x" * 10_000], [0])
        assert time.monotonic() - began < 20
    finally:
        rank._process.kill()
        rank._process.communicate()


def test_a_long_order_arrives_whole() -> None:
    rank = Rank()
    reads = "import json, sys; print(sum(len(json.loads(line)['names']['1'][0]) for line in sys.stdin))"
    rank._process = child = subprocess.Popen(
        [sys.executable, "-c", reads], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    root = Root()
    rank.new_root(root, ["x" * 3_000_000], [0])
    while rank._unsent:
        rank._write(child.stdin.fileno(), {"names": {"1": [""]}})
    assert int(child.communicate()[0]) == 3_000_000


@pytest.mark.parametrize(
    "what",
    ["rank.socket.create_server", "rank.tempfile.TemporaryFile", "rank.subprocess.Popen", "board._shared_memory"],
)
def test_a_watcher_that_cannot_start_does_not_end_the_job(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(f"fullshard.watcher.{what}", fails)
    monkeypatch.setattr(rank.faulthandler, "register", lambda *args, **kwargs: None)
    short = Rank()
    short.record(word(1, 0))
    with pytest.warns(UserWarning, match="no watcher could be started"):
        assert short.start(0, 60.0) is None
    with short.files():
        short.new_root(Root(), ["a"], [0])


def test_files_are_read_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", fails)
    rank = Rank()
    rank._process = object()  # type: ignore[assignment]
    with rank.files():
        pass


class Answers:
    """A connection to a watcher, from which one question comes."""

    def __init__(self, question: dict[str, Any]) -> None:
        self.line = json.dumps(question).encode()

    async def readline(self) -> bytes:
        return self.line

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fault", [KeyError, ValueError, RuntimeError])
def test_a_fault_of_the_judge_is_not_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: type[Exception]
) -> None:
    def broken(*args: Any) -> bool:
        raise fault("planted in the judge")

    monkeypatch.setattr(process, "stuck", broken)
    watcher = Watcher(Options(Board().fd, -1, -1, int(signal.SIGRTMAX - 3), os.getpid(), 0, "secret", 1.0, 9.0, 1.0))
    watcher.gone = "exit code 1"
    asks: Any = Answers({"secret": "secret", "kind": "judge", "waited": 5.0, "compares": False})
    asyncio.run(watcher._serve(asks, asks))
    assert "planted in the judge" in capfd.readouterr().err
    for foreign in ({"secret": "other"}, {}, {"kind": "judge"}):
        asks = Answers(foreign)
        asyncio.run(watcher._serve(asks, asks))
    assert capfd.readouterr().err == ""


def test_a_backends_own_error_is_printed_with_the_report() -> None:
    program = (
        ALONE
        + """
from fullshard.watcher import RANK
assert RANK.start(0, 60.0)
RANK.board.condemn("Ranks are stuck: rank 0 called full_tensor (train.py:3).")
raise RuntimeError("Connection closed by peer")
"""
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert "RuntimeError: Connection closed by peer\nfullshard had found before: Ranks are stuck" in ended.stderr
