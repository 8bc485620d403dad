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
FORWARD = "ran the model's forward (program.py:"
ALONE = {
    "saves alone": "rank {last} called fullshard.save (program.py:",
    "loads alone": "rank {last} called fullshard.load (program.py:",
    "reduces alone": "rank {last} called torch.distributed.all_reduce (program.py:",
    "gathers alone": "rank {last} called ",
    "unshards alone": "rank {last} called ",
}
"""What one rank calls; also before any forward ("... at first"), where the others may be in the wrapper's `no_sync`."""
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
    "clips alone": Fault(
        (LAST, "values of all ranks", "called ", "clip_grad_norm_ (program.py:"), its_own=(LAST, "values of all ranks")
    ),
    "raises in forward": Fault((LAST, "ValueError: planted in forward"), its_own=("planted",)),
    "raises in backward": Fault((LAST, "ValueError: planted in backward"), its_own=("planted",)),
    "raises in the loader": Fault((LAST, "ValueError: planted in the loader"), its_own=("planted",)),
    "raises in the optimizer": Fault((LAST, "ValueError: planted in the optimizer"), its_own=("planted",)),
    "before the first forward": Fault((LAST,), its_own=("planted",)),
    "exits": Fault((LAST, "gone"), (7,)),
    "is killed": Fault((LAST, "gone"), (-9,)),
    "is stopped": Fault((LAST, "stopped"), (-9,)),
    "is stopped in an exchange": Fault((LAST, "stopped", "optimizers' state"), (-9,)),
    "catches in forward": Fault((LAST, "after catching ValueError: planted in forward (program.py:", " while rank")),
    "catches in backward": Fault((LAST, "after catching ValueError: planted in backward (program.py:", " while rank")),
    "a batch fewer": Fault((LAST, "gone", "by itself", "while rank", FORWARD), (0,)),
    # These two never come back to the engine: their watchers end them.
    "holds the GIL": Fault((LAST, "elsewhere", "hold_the_gil", "while rank", FORWARD), (-15, -9)),
    "sleeps": Fault((LAST, "elsewhere", "go_wrong", "while rank", FORWARD), (-15, -9)),
    "collective of its own": Fault((LAST, "elsewhere", "torch.distributed.all_reduce (program.py:"), (1, -15, -9)),
}
for _name, _words in ALONE.items():
    theirs = (1, -15, -9) if _name == "reduces alone" else (1,)  # in a call of Fullshard's a rank raises the report
    its_own = () if _name == "reduces alone" else (_words,)
    FAULTS[_name] = Fault((_words, FORWARD), theirs, its_own)
    FAULTS[f"{_name} at first"] = Fault((_words, "while rank"), theirs, its_own)
EXPLAINED = {
    **dict.fromkeys(("raises in forward", "raises in backward", "raises in the loader"), "raised"),
    **dict.fromkeys(("exits", "is killed"), "gone"),
    **dict.fromkeys(("holds the GIL", "sleeps"), "elsewhere"),
    **dict.fromkeys(("collective of its own", "clips alone"), "calls"),
    **{f"{name}{when}": "calls" for name in ALONE for when in ("", " at first")},
    "is stopped": "stopped",
    "a batch fewer": "data",
    "skips a layer": "departed",
}
"""What `fullshard doctor` makes of the report, with the last rank to blame."""
_FURTHER = (
    *("saves alone", "loads alone", "loads alone at first", "reduces alone at first", "gathers alone at first"),
    *("gathers where others reduce", "reduces alone", "unshards alone", "catches in backward"),
)
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
    """Both front-ends on 2 and on 4 ranks. All but one of the four of a scenario are "further" ones (`conftest.py`).

    Scenarios in `_FURTHER`, which differ from others in what is called only, are so as a whole.
    """
    ways, found = list(itertools.product(("fully_shard", "wrapper"), (2, 4))), []
    for index, scenario in enumerate(scenarios):
        for at, (front_end, world) in enumerate(ways):
            runs = at == index % len(ways) and scenario not in _FURTHER
            marks = [] if runs else [pytest.mark.further]
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
        assert found.what in run.error_of(0)[1], "the doctor says something else than the error"
    assert "Exception ignored" not in told and "another exception occurred" not in told, told
    assert "direct cause" not in told, told
    kind, text, _ = run.error_of(last)
    missing = [word for word in fault.its_own if word.format(last=last) not in text]
    assert not missing, (missing, kind, text, told)


@pytest.mark.parametrize(
    "scenario", ["gathers alone", pytest.param("gathers alone at first", marks=pytest.mark.further)]
)
@pytest.mark.parametrize("layout", ["flat", pytest.param("owner", marks=pytest.mark.further)])
def test_whole_values_asked_for_alone_of_every_layout(zygote, tmp_path, layout, scenario):
    """They do not go by the connections of gathers in forward, where a rank that is asleep to it would be aborted."""
    run = zygote.run(layout, scenario, 2, tmp_path)
    told = run.printed()
    assert run.exits == [1, 1] and "terminate called" not in told, (run.exits, told)
    for rank in range(2):
        kind, text, _ = run.error_of(rank)
        assert kind == "DivergenceError" and "rank 1 called full_tensor (program.py:" in text, text


@pytest.mark.parametrize(
    ("front_end", "world"), [("fully_shard", 2), pytest.param("wrapper", 4, marks=pytest.mark.further)]
)
def test_a_call_on_one_rank_at_the_end_is_named(zygote, tmp_path, front_end, world):
    """The others have come to the end of the program: the call is what they did not make, not a lack of data."""
    run, last = zygote.run(front_end, "saves at the end", world, tmp_path), world - 1
    found = doctor(tmp_path / "reports")
    assert run.exits == [0] * last + [1], run.printed()
    who = "rank 0" if world == 2 else f"ranks 0-{last - 1}"
    assert (found.kind, found.ranks) == ("calls", (last,)) and f"after the end of {who} (" in found.what, found
    assert f"rank {last} called fullshard.save (program.py:" in found.what and found.what in run.error_of(last)[1]


@pytest.mark.parametrize(
    ("front_end", "scenario", "world"),
    cases(("gathers where others reduce at first", "gathers where others reduce")),
)
def test_ranks_in_different_calls_that_are_not_the_engines(zygote, tmp_path, front_end, scenario, world):
    """All of them wait in native code, so that their watchers report it, and end them."""
    run, last = zygote.run(front_end, scenario, world, tmp_path), world - 1
    told, found = run.printed(), doctor(tmp_path / "reports")
    assert all(code in (1, -15, -9) for code in run.exits), (run.exits, told)
    assert found.kind == "calls" and found.ranks in ((), (last,)), found
    who = "rank 0" if world == 2 else f"ranks 0-{last - 1}"
    assert (
        f"rank {last} called " in found.what and f"{who} called torch.distributed.all_reduce (program.py:" in found.what
    )
    assert told.count(found.what) >= world, told


@pytest.mark.parametrize(("front_end", "scenario", "world"), cases(FINE))
def test_what_is_right_is_let_alone(zygote, tmp_path, front_end, scenario, world):
    run = zygote.run(front_end, scenario, world, tmp_path)
    assert run.exits == [0] * world, run.printed()


def test_a_call_on_one_rank_before_any_forward_is_named(zygote, tmp_path):
    """The commonest mistakes: a rank waits in the engine, or both wait outside of it. Run in any case."""
    for scenario in ("saves alone at first", "gathers where others reduce at first"):
        folder = tmp_path / scenario.replace(" ", "_")
        folder.mkdir()
        run = zygote.run("fully_shard", scenario, 2, folder)
        found = doctor(folder / "reports")
        assert found.kind == "calls" and found.what.count("(program.py:") == 2, (found, run.printed())
        assert found.what in run.printed() and None not in run.exits, run.printed()
