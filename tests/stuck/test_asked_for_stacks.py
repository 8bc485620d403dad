"""That a watcher asks its rank for stacks is no work of the rank's: one that sleeps in its first step is found."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from fullshard.watcher.board import Board
from fullshard.watcher.process import Options, Watcher
from fullshard.watcher.report import stuck

SIGNAL = signal.SIGRTMAX - 3

SLEEPS = """
import faulthandler, sys
faulthandler.register({signal}, file={stacks}, all_threads=True, chain=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def watched() -> Iterator[Watcher]:
    """The watcher of a process that waits, as one does in a collective of its own before its first forward."""
    board = Board()
    with tempfile.TemporaryFile() as stacks:
        command = [sys.executable, "-c", SLEEPS.format(signal=SIGNAL, stacks=stacks.fileno())]
        rank = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[stacks.fileno()], text=True
        )
        assert rank.stdout is not None
        rank.stdout.readline()
        times = {"limit": 1.0, "hard": 100.0, "grace": 1.0}
        descriptors = {"board": board.fd, "stacks": stacks.fileno(), "listener": -1, "signal": SIGNAL}
        yield Watcher(Options(pid=rank.pid, rank=1, secret="", **descriptors, **times))
        rank.communicate()


def test_a_rank_that_sleeps_in_its_first_step_has_not_moved(watched: Watcher) -> None:
    first, second = asyncio.run(watched.status()), asyncio.run(watched.status())
    waits = {**first, "rank": 0, "waited": 5.0}  # for longer than four times the limit
    assert first["stack"], "no stack was written: nothing is tested"
    assert second["io"] == first["io"]
    assert stuck([waits, second], [waits, first], 1.0, 100.0)
