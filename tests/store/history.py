"""What must be true of a folder of checkpoints after any run of `history_program.py`, whatever was planted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from history_program import model_of, value_at

import fullshard

HERE = Path(__file__).parent
PATIENCE = 100.0
"""Seconds that a run may take on a busy machine."""


class Zygote:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import history_program; history_program.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def run(self, folder: Path, **order: Any) -> list[int | None]:
        """The ranks' exit codes."""
        given = {"asynchronous": False, "steps": 4, "patience": PATIENCE, **order, "folder": str(folder)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        exits: list[int | None] = json.loads(self._process.stdout.readline())["exits"]
        return exits

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def lines(folder: Path, kind: str, rank: int) -> list[Any]:
    """What a rank wrote down; a line that it was killed in does not count."""
    path = folder / f"{kind}.{rank}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def printed(folder: Path) -> str:
    """Everything that ranks printed and raised, for a failure's message."""
    found = [f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("out.*"))]
    found += [f"--- errors.{rank}: {lines(folder, 'errors', rank)}" for rank in range(2)]
    listed = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return "\n".join([*found, *listed])


def check(folder: Path, keep_last: int | None = None) -> list[int]:
    """The steps of the checkpoints that are there, after everything was compared.

    Every acknowledged save that was not to be removed is there; every checkpoint is of one step on all ranks, bit for
    bit; `latest` names one, and none older than any that was acknowledged; what is left of others goes by a save.
    """
    root = fullshard.Folder(folder / "run")
    with root.locked(patience=60.0):  # processes that write may outlive their ranks
        names, latest = root.names(), root.latest()
    steps = [loads_whole(folder / "run" / name) for name in names]
    assert steps == sorted(steps) and [root.step_of(name) for name in names] == steps
    acks = sorted({step for rank in range(2) for step in lines(folder, "acks", rank)})
    if acks:
        assert latest is not None and latest in names, (latest, names)
        assert steps[names.index(latest)] >= acks[-1], (latest, acks)
        kept = [step for step in acks if keep_last is None or sum(other > step for other in steps) < keep_last]
        assert set(kept) <= set(steps), (kept, steps)
        assert keep_last is None or len(steps) <= keep_last + 1, steps
    fullshard.save(folder / "run", model_of(value_at(99)), step=99)
    assert root.latest() == "step-000000099"
    rest = {path.name for path in (folder / "run").iterdir()} - {*names, "latest", "lock", "step-000000099"}
    assert rest <= {"latest.new"}, rest
    return steps


def loads_whole(path: Path) -> int:
    """The step of a checkpoint; every value in it is that of this step."""
    model = model_of()
    found = fullshard.load(path, model, rng=False)
    for name, value in model_of(value_at(found.step)).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), (path, name, model.state_dict()[name], value)
    assert found.of_ranks == {"seen": [[found.step, 0], [found.step, 1]]}, found
    return found.step
