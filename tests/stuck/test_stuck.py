"""Faults planted on one rank of a real run: every rank that lives ends in time, with an error that names what happened.

`program.py` is the run, a process per rank; nothing of ours catches or delays anything in it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fullshard.insight.doctor import doctor

HERE = Path(__file__).parent
LIMIT = 4.0
"""Seconds that a rank may wait for another."""
IN_TIME = 60.0
"""Seconds within which all ranks that live have raised, once one went wrong, on a busy machine."""
PATIENCE = 120.0
"""Seconds within which they have ended, with what starting takes."""


@dataclass(frozen=True)
class Fault:
    """What is planted, and what follows.

    Attributes:
        words: of which each has to be in the errors of all ranks but the last, where the fault is planted.
        theirs: exit codes of the last rank that are right; a rank that raises exits with 1.
        its_own: words in the last rank's error, if it raises.
    """

    words: tuple[str, ...]
    theirs: tuple[int, ...] = (1,)
    its_own: tuple[str, ...] = ()


LAST = "rank {last}"
FAULTS = {
    "skips a layer": Fault((LAST, "blocks.2", "step 3"), its_own=(LAST, "blocks.2")),
    "extra forward": Fault((LAST, "step 3"), its_own=(LAST, "step 3")),
    "extra evaluation": Fault((LAST, "step 3"), its_own=(LAST, "step 3")),
    "accumulation": Fault((LAST, "step 3"), its_own=(LAST, "step 3")),
    "freezes a layer": Fault((LAST, "blocks.2", "step 3"), its_own=(LAST,)),
    "dtype": Fault(("blocks.1", "float32", "float64"), its_own=("blocks.1", "float64")),
    "depth": Fault(("blocks.4",), its_own=("blocks.4",)),
    "weights": Fault(("different weights", "sync_module_states"), its_own=("different weights",)),
    "learning rate": Fault(("lr=0.001", "lr=0.002", LAST), its_own=("lr=0.002",)),
    "betas": Fault(("betas=(0.9, 0.99)", "betas=(0.8, 0.99)", LAST), its_own=("betas",)),
    "step skipped": Fault((LAST, "4 steps", "3 steps"), its_own=("3 steps",)),
    "clips alone": Fault((LAST, "values of all ranks"), its_own=(LAST, "values of all ranks")),
    "raises in forward": Fault((LAST, "ValueError: planted in forward"), its_own=("planted",)),
    "raises in backward": Fault((LAST, "ValueError: planted in backward"), its_own=("planted",)),
    "raises in the loader": Fault((LAST, "ValueError: planted in the loader"), its_own=("planted",)),
    "raises in the optimizer": Fault((LAST, "ValueError: planted in the optimizer"), its_own=("planted",)),
    "before the first forward": Fault((LAST,), its_own=("planted",)),
    "exits": Fault((LAST, "gone"), (7,)),
    "is killed": Fault((LAST, "gone"), (-9,)),
    "is stopped": Fault((LAST, "stopped"), (-9,)),
    "is stopped in an exchange": Fault((LAST, "stopped", "optimizers' state"), (-9,)),
    "a batch fewer": Fault((LAST, "gone", "by itself"), (0,)),
    # These two never come back to the engine: their watchers end them.
    "holds the GIL": Fault((LAST, "elsewhere", "hold_the_gil"), (-15, -9)),
    "sleeps": Fault((LAST, "elsewhere", "go_wrong"), (-15, -9)),
    "collective of its own": Fault((LAST, "elsewhere", "go_wrong"), (1, -15, -9)),
}
EXPLAINED = {
    **dict.fromkeys(("raises in forward", "raises in backward", "raises in the loader"), "raised"),
    **dict.fromkeys(("exits", "is killed"), "gone"),
    **dict.fromkeys(("holds the GIL", "sleeps", "collective of its own"), "elsewhere"),
    "is stopped": "stopped",
    "a batch fewer": "data",
    "skips a layer": "departed",
}
"""What `fullshard doctor` makes of the report, with the last rank to blame."""
FINE = ("none", "input shapes")
"""What ranks may differ in."""


class Zygote:
    """See `zygote.py`."""

    def __init__(self) -> None:
        paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src")]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def run(self, front_end: str, scenario: str, world: int, folder: Path) -> Run:
        order = {"front_end": front_end, "scenario": scenario, "world": world, "folder": str(folder), "limit": LIMIT}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**order, "patience": PATIENCE}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Run(folder, answer["exits"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@dataclass(frozen=True)
class Run:
    """What came of a run: exit codes, and in `folder` what ranks printed and raised."""

    folder: Path
    exits: list[int | None]

    def error_of(self, rank: int) -> tuple[str, str, float]:
        """Type and text of what a rank raised, and how long it took; empty if it raised nothing."""
        path = self.folder / f"rank{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        return found.get("error") or "", found.get("text", ""), found.get("seconds", 0.0)

    def printed(self) -> str:
        """Everything that ranks printed, for a failure's message."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("out.*")))


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def cases(scenarios: tuple[str, ...]) -> list[object]:
    """Both front-ends on 2 and on 4 ranks. All but one of the four of a scenario are "further" ones (`conftest.py`)."""
    ways, found = list(itertools.product(("fully_shard", "wrapper"), (2, 4))), []
    for index, scenario in enumerate(scenarios):
        for at, (front_end, world) in enumerate(ways):
            marks = [] if at == index % len(ways) else [pytest.mark.further]
            found.append(pytest.param(front_end, scenario, world, marks=marks))
    return found


@pytest.mark.parametrize(("front_end", "scenario", "world"), cases(tuple(FAULTS)))
def test_every_rank_ends_with_the_name(zygote, tmp_path, front_end, scenario, world):
    fault, last = FAULTS[scenario], world - 1
    run = zygote.run(front_end, scenario, world, tmp_path)
    told = run.printed()
    assert run.exits[:last] == [1] * last, (run.exits, told)
    assert run.exits[last] in fault.theirs, (run.exits, told)
    assert "terminate called" not in told
    for rank in range(last):
        kind, text, seconds = run.error_of(rank)
        assert kind == "DivergenceError", (rank, kind, told)
        assert seconds < IN_TIME, told
        missing = [word for word in fault.words if word.format(last=last) not in text]
        assert not missing, (rank, missing, text)
    if scenario in EXPLAINED:
        found = doctor(tmp_path / "reports")
        assert (found.kind, found.ranks) == (EXPLAINED[scenario], (last,)), found
    kind, text, _ = run.error_of(last)
    missing = [word for word in fault.its_own if word.format(last=last) not in text]
    assert not missing, (missing, kind, text, told)


@pytest.mark.parametrize(("front_end", "scenario", "world"), cases(FINE))
def test_what_is_right_is_let_alone(zygote, tmp_path, front_end, scenario, world):
    run = zygote.run(front_end, scenario, world, tmp_path)
    assert run.exits == [0] * world, run.printed()
