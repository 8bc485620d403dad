"""Faults planted on one rank of a real run: every rank that lives ends in time, with an error that names what happened.

`program.py` is the run, a process per rank; nothing of ours catches or delays anything in it. What ranks compare
(orders, weights, settings of optimizers) is tested with ranks that are threads; here is one such difference, and all
that only processes do. The runs that a session needs are started together, some at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fullshard.insight.doctor import doctor

pytestmark = pytest.mark.xdist_group("stuck")
HERE = Path(__file__).parent
LIMIT = 4.0
"""Seconds that a rank may wait for another."""
IN_TIME = 60.0
"""Seconds within which all ranks that live have raised, once one went wrong, on a busy machine."""
PATIENCE = 240.0
"""Seconds within which they have ended, with what starting takes."""
RAISES = (1,)
KILLED = (-15, -9)  # by its watcher, where it never comes back to the engine


@dataclass(frozen=True)
class Fault:
    """What is planted on the last rank of a run, and what follows. {last}, {others}: those ranks, in words.

    Attributes:
        words: of which each has to be in the errors of all other ranks, or else in the doctor's report.
        kind: what `fullshard doctor` makes of the report, with the last rank to blame; empty: there is no report.
        theirs: exit codes of the last rank that are right.
        its_own: words in the last rank's error, if it raises.
        front_end, world: of the run.
        others: exit codes of the others that are right; where they raise nothing of ours, only the report is read.
    """

    words: tuple[str, ...]
    kind: str = ""
    theirs: tuple[int, ...] = RAISES
    its_own: tuple[str, ...] = ()
    front_end: str = "fully_shard"
    world: int = 2
    others: tuple[int, ...] = RAISES


FORWARD = "{others} ran the model's forward (program.py:"
CALLED = "{last} called "
FAULTS = {
    "skips a layer": Fault(("{last}", "blocks.2", "step 3"), "departed", its_own=("{last}", "blocks.2"), world=4),
    "freezes a block": Fault(
        ("{last}", "left the order", "ran a backward (program.py:"),
        "departed",
        its_own=("{last}", "stopped to compare", "requires_grad"),
        front_end="wrapper",
    ),
    "step skipped": Fault(("{last}", "4 steps", "3 steps"), its_own=("3 steps",)),
    "clips alone": Fault(
        ("{last}", "values of all ranks", "called ", "clip_grad_norm_ (program.py:"), "calls", front_end="wrapper"
    ),
    "raises in forward": Fault(("{last}", "ValueError: planted in forward"), "raised", its_own=("planted",)),
    "raises in backward": Fault(
        ("{last}", "ValueError: planted in backward"), "raised", its_own=("planted",), front_end="wrapper"
    ),
    "raises in the optimizer": Fault(("{last}", "ValueError: planted in the optimizer"), its_own=("planted",)),
    "raises on an owner": Fault(
        ("{last}", "ValueError: planted on an owner", "optimizers' state"), its_own=("planted",)
    ),
    "before the first forward": Fault(("{last}",), its_own=("planted",)),
    "catches in forward": Fault(
        ("{last}", "after catching ValueError: planted in forward (program.py:", " while rank")
    ),
    "exits": Fault(("{last}", "gone"), "gone", (7,)),
    "is killed": Fault(("{last}", "gone"), "gone", (-9,), front_end="wrapper"),
    "is stopped": Fault(("{last}", "stopped"), "stopped", (-9,)),
    "is stopped in an exchange": Fault(("{last}", "stopped", "optimizers' state"), "", (-9,)),
    "a batch fewer": Fault(("{last}", "gone", "by itself", "while", FORWARD), "data", (0,)),
    "holds the GIL": Fault(("{last}", "elsewhere", "hold_the_gil", "while", FORWARD), "elsewhere", KILLED),
    "sleeps": Fault(("{last}", "elsewhere", "oversleep", "while", FORWARD), "elsewhere", KILLED, front_end="wrapper"),
    "reads a value": Fault(("{last}", "a sharded tensor's value", "<lambda> (program.py:", FORWARD), "calls"),
    "collective of its own": Fault(
        ("{last}", "elsewhere", "torch.distributed.all_reduce (program.py:"), "calls", (1, *KILLED)
    ),
    # A call that needs all ranks. "... at first": before any forward, the others may be in the wrapper's `no_sync`.
    "saves alone": Fault((CALLED + "fullshard.save (program.py:", FORWARD), "calls", its_own=(CALLED,)),
    "gathers alone": Fault((CALLED + "full_tensor (program.py:", FORWARD), "calls", front_end="flat"),
    "unshards alone at first": Fault((CALLED, "while"), "calls", its_own=(CALLED,), front_end="wrapper"),
    "gathers where others reduce at first": Fault(
        (CALLED, "{others} called torch.distributed.all_reduce (program.py:"),
        "calls",
        (1, *KILLED),
        others=(1, *KILLED),  # all wait in native code: their watchers end them
    ),
    "saves at the end": Fault(
        (CALLED + "fullshard.save (program.py:", "after the end of {others} ("), "calls", its_own=(CALLED,), others=(0,)
    ),
    "input shapes": Fault((), "", (0,), others=(0,)),  # what ranks may differ in
}


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


class Runs:
    """The runs of these scenarios, all begun by one process (`zygote.py`); each can be waited for."""

    def __init__(self, scenarios: list[str], folder: Path) -> None:
        paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src")]
        self._over: dict[str, Run] = {}
        self._folders = {scenario: folder / scenario.replace(" ", "_") for scenario in scenarios}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        orders = []
        for scenario, own in self._folders.items():
            own.mkdir()
            fault = FAULTS[scenario]
            order = {"front_end": fault.front_end, "scenario": scenario, "world": fault.world, "folder": str(own)}
            orders.append({**order, "limit": LIMIT, "patience": PATIENCE})
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()

    def wait(self, scenario: str) -> Run:
        assert self._process.stdout is not None
        folder = str(self._folders[scenario])
        while folder not in self._over:
            answer = json.loads(self._process.stdout.readline())
            self._over[answer["folder"]] = Run(Path(answer["folder"]), answer["exits"])
        return self._over[folder]

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    asked = [item.callspec.params["scenario"] for item in request.session.items if item.path == Path(__file__)]
    made = Runs(asked, tmp_path_factory.mktemp("stuck"))
    yield made
    made.close()


@pytest.mark.parametrize("scenario", FAULTS)
def test_every_rank_ends_with_the_name(runs, scenario):
    fault = FAULTS[scenario]
    last, run = fault.world - 1, runs.wait(scenario)
    printed, names = run.printed(), {"last": f"rank {last}", "others": "rank 0" if last == 1 else f"ranks 0-{last - 1}"}
    words, its_own = ([word.format(**names) for word in each] for each in (fault.words, fault.its_own))
    assert all(code in fault.others for code in run.exits[:last]), (run.exits, printed)
    assert run.exits[last] in fault.theirs, (run.exits, printed)
    assert "terminate called" not in printed
    if fault.others == RAISES:
        for rank in range(last):
            kind, text, seconds = run.error_of(rank)
            assert kind == "DivergenceError" and seconds < IN_TIME, (rank, kind, printed)
            assert not [word for word in words if word not in text], (rank, text)
        for trouble in ("Exception ignored", "another exception occurred", "direct cause"):
            assert trouble not in printed, printed
    if fault.kind:
        found = doctor(run.folder / "reports")
        blamed = ((last,), ()) if fault.others == (1, *KILLED) else ((last,),)
        assert found.kind == fault.kind and found.ranks in blamed, found
        assert found.summary in printed, "the doctor says something else than the error"
        assert fault.others == RAISES or not [word for word in words if word not in found.summary], found
    assert not [word for word in its_own if word not in run.error_of(last)[1]], (run.error_of(last), printed)
