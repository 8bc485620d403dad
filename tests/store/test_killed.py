"""Saves of real processes of which one is killed or stopped; every moment of a save is in `test_faults.py`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from folder_checks import NAME, WORLD, check, model_of

import fullshard
from fullshard.store import background
from fullshard.store.source import Source
from ranks import PRELOADED

LIMIT = 2.0  # seconds that a rank waits for another before it looks for what is wrong
PATIENCE = 200.0  # seconds that a run may take on a busy machine


class Rank:
    """One rank of a run, in its own process. What it was told is in FOLDER/told.RANK."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        store = dist.FileStore(str(folder / "store"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
        fullshard.watch(limit=LIMIT, grace=5.0)
        self.model = model_of(0)
        for part in self.model:
            fullshard.fully_shard(part)
        fullshard.fully_shard(self.model)
        self.model(torch.ones(1, 4)).sum().backward()  # the watcher begins with a step

    def save(self, step: int, asynchronous: bool = False, during: Callable[[], object] = lambda: None) -> None:
        """`during` is called once the save was handed over, or is over."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().fill_(10.0 * step + self.rank)
        try:
            saving = fullshard.save(
                self.folder / "run", self.model, step=step, state={"seen": [step, self.rank]},
                asynchronous=asynchronous, patience=PATIENCE,
            )  # fmt: skip
            during()
            saving.wait()
            self.note(step)
        except fullshard.FullshardError as error:
            self.note(f"{type(error).__name__}: {error}")
            if isinstance(error, fullshard.DivergenceError):
                raise SystemExit(1) from error

    def note(self, told: Any) -> None:
        with (self.folder / f"told.{self.rank}").open("a") as file:
            file.write(json.dumps(told) + "\n")

    def signal_writer(self, number: signal.Signals) -> None:
        process = background.WRITER._process
        assert process is not None
        os.kill(process.pid, number)


def kill(pid: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid or os.getpid(), number)


@contextlib.contextmanager
def before(name: str, act: Callable[[], object]) -> Any:
    """Within, a function of `os` does this first."""
    inner = getattr(os, name)
    with mock.patch.object(os, name, lambda *args, **options: (act(), inner(*args, **options))[1]):
        yield


def killed(rank: Rank) -> None:
    """Rank 1, when its data is written and not on the disk yet."""
    rank.save(1)
    with before("fsync", kill) if rank.rank else contextlib.nullcontext():
        rank.save(2)


def stopped(rank: Rank) -> None:
    """Rank 0, when it is about to put the checkpoint in its place; it goes on when the other one has ended."""
    rank.save(1)
    with before("rename", lambda: kill(number=signal.SIGSTOP)) if not rank.rank else contextlib.nullcontext():
        rank.save(2)


def slow(rank: Rank) -> None:
    """One call takes longer than ranks wait for each other: of a save, and of writing and reading safetensors files."""
    with before("replace", lambda: time.sleep(2.5 * LIMIT)):
        rank.save(1)
    with before("fsync", lambda: time.sleep(3 * LIMIT)):  # several times
        fullshard.save_safetensors(rank.model, rank.folder / "safetensors")
    fill = Source.fill

    def slowly(*args: Any) -> None:
        time.sleep(6 * LIMIT * rank.rank)
        fill(*args)

    with mock.patch.object(Source, "fill", slowly):
        fullshard.load_safetensors(rank.model, rank.folder / "safetensors")


def writers(rank: Rank) -> None:
    """A writer is killed, and the next save has another; then both ranks are, and their writers are not."""
    rank.save(1, asynchronous=True)
    if rank.rank:
        rank.signal_writer(signal.SIGSTOP)  # it cannot have written all before it is killed
    dist.barrier()
    rank.save(2, True, lambda: rank.signal_writer(signal.SIGKILL) if rank.rank else None)
    rank.save(3, asynchronous=True)
    process = background.WRITER._process
    assert process is not None
    (rank.folder / f"writer.{rank.rank}").write_text(str(process.pid))
    rank.signal_writer(signal.SIGSTOP)
    dist.barrier()
    rank.save(4, True, lambda: (dist.barrier(), kill()))


def resumed(rank: Rank) -> None:
    step = fullshard.load(rank.folder / "run", rank.model).step
    assert all((p.to_local() == 10.0 * step + rank.rank).all() for p in rank.model.parameters())
    rank.note(step)
    rank.save(5)


def start(folder: Path, number: int, run: Callable[[Rank], None]) -> None:
    output = os.open(folder / f"output.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    run(Rank(folder, number))
    background.WRITER.at_exit()


def start_ranks(folder: Path, run: Callable[[Rank], None]) -> list[Any]:
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [context.Process(target=start, args=(folder, rank, run)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    return ranks


def exits_of(ranks: list[Any]) -> list[int | None]:
    """How each ended; one that is left and stopped goes on."""
    deadline = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        left = [process for process in ranks if process.is_alive()]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if len(left) == 1 and Path(f"/proc/{left[0].pid}/stat").read_text().rpartition(") ")[2].startswith("T"):
                kill(left[0].pid, signal.SIGCONT)
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def told(folder: Path, rank: int) -> list[Any]:
    path = folder / f"told.{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def output(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("[ot]*.?")))


EXITS: dict[str, tuple[Callable[[Rank], None], list[int], int, str]] = {
    "killed": (killed, [1, -9], 0, "rank 1"),
    "stopped": (stopped, [1, 1], 1, "rank 0 is stopped"),
    "slow": (slow, [0, 0], 0, ""),
}
"""What a run does, how its ranks end, and which of them is told whom of."""


@pytest.mark.parametrize("what", EXITS)
def test_a_rank_that_goes_wrong_is_named_and_a_slow_disk_is_waited_for(tmp_path: Path, what: str) -> None:
    run, wanted, who, named = EXITS[what]
    exits = exits_of(start_ranks(tmp_path, run))
    assert exits == wanted, (exits, output(tmp_path))
    step, *errors = told(tmp_path, who)
    assert step == 1 and len(errors) == bool(named), errors
    assert all(error.startswith("DivergenceError") and named in error for error in errors), errors
    steps = check(tmp_path / "run", 1)
    assert 1 in steps and (what == "stopped" or steps == [1])
    assert what != "killed" or told(tmp_path, 1) == [1]


@pytest.mark.timeout(900)  # three processes import torch, on a machine that may be busy
def test_killed_writers_and_writers_that_go_on(tmp_path: Path) -> None:
    exits = exits_of(start_ranks(tmp_path, writers))
    assert exits == [-9, -9], (exits, output(tmp_path))
    for rank in range(WORLD):
        first, error, third = told(tmp_path, rank)
        assert (first, third) == (1, 3) and error.startswith("CheckpointError") and "exit code -9" in error, error
    assert check(tmp_path / "run", 3) == [1, 3]
    for rank in range(WORLD):
        kill(int((tmp_path / f"writer.{rank}").read_text()), signal.SIGCONT)
    exits = exits_of(start_ranks(tmp_path, resumed))
    assert exits == [0, 0], (exits, output(tmp_path))
    (*_, step, last), (*_, same, _) = (told(tmp_path, rank) for rank in range(WORLD))
    assert step == same and step in (3, 4) and last == 5, output(tmp_path)
    assert check(tmp_path / "run", 5) == [1, 3, 4, 5]
    names = [NAME % step for step in (1, 3, 4, 5)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "lock", *names]
