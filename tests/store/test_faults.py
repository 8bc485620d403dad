"""Saves broken off at every call that changes a file: what was acknowledged is there, `latest` names a whole one.

Two ranks are threads of this process, and so are the processes that write beside them; `disk.py` fails their calls, or
lets one be the last that a process makes. Every fault is planted at every call of a save. Real processes are killed in
`test_killed.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from beside import Thread
from disk import ERRORS, Disk, Fault, Killed, Tree, put
from folder_checks import NAME, WORLD, check, check_rest, loads_whole, model_of
from torch import nn

import fullshard
from fullshard import CheckpointError
from fullshard.store import background, writer_process
from memory_ranks import HERE, ThreadRanks

BEFORE, NEW, AFTER = 1, 2, 3
"""Steps: of the checkpoint that is there, of the save that is broken off, and of the next one."""
WORDS = {"EIO": "Input/output error", "raise": "planted", "kill": "exit code", "torn": "exit code"}
RUN = "runs/run"
MODES = [(False, True), (True, True), (False, False)]
"""In the background or not; whether there is a checkpoint, and what a broken-off save left, or no folder yet."""


class Writers:
    """In the place of a process's writer: that of each rank, which is a thread."""

    def __init__(self) -> None:
        self.of = [background.Writer() for _ in range(WORLD + 1)]  # the last: the test's own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of[getattr(HERE, "rank", WORLD)], name)


class Job:
    """Two ranks that save into a folder, and the processes beside them; some may be killed.

    Attributes:
        told: what came of each rank's last save: where it is, or the error.
        gone: ranks that end as soon as their writers have what they are to write.
    """

    def __init__(self, ranks: ThreadRanks, folder: Path, disk: Disk, asynchronous: bool) -> None:
        self.ranks, self.folder, self.disk, self.asynchronous = ranks, folder, disk, asynchronous
        self.writers, self.gone = Writers(), ()
        self.told: list[Any] = [None] * WORLD
        self.models = ranks.run(self._sharded)

    @staticmethod
    def _sharded(rank: int) -> nn.Module:
        model = model_of(0)
        for part in model:
            fullshard.fully_shard(part)
        return fullshard.fully_shard(model)

    def save(self, step: int) -> None:
        with contextlib.suppress(Killed, SystemExit):  # the second: a rank whose peer is gone
            self.ranks.run(self._save, step)

    def _save(self, rank: int, step: int) -> None:
        with torch.no_grad():
            for parameter in self.models[rank].parameters():
                parameter.to_local().fill_(10.0 * step + rank)
        self.told[rank] = None
        with self.disk.acting(f"rank {rank}"):
            try:
                saving = fullshard.save(
                    self.folder, self.models[rank], step=step, state={"seen": [step, rank]}, rng=False,
                    asynchronous=self.asynchronous, keep_last=1,
                )  # fmt: skip
                if rank in self.gone:
                    self.disk.dead.add(f"rank {rank}")
                    raise Killed
                self.told[rank] = saving.wait()
            except fullshard.FullshardError as error:
                self.told[rank] = error

    def resume(self) -> int:
        """The step that both ranks load, and have every value of."""
        steps = self.ranks.run(self._resume)
        assert len(set(steps)) == 1, steps
        return int(steps[0])

    def _resume(self, rank: int) -> int:
        step = fullshard.load(self.folder, self.models[rank], missing_ok=True).step
        assert not step or all((p.to_local() == 10.0 * step + rank).all() for p in self.models[rank].parameters())
        return step

    def __enter__(self) -> Job:
        def launch(writer: Any) -> None:
            if writer._process is None:
                writer._channel, theirs = socket.socketpair()
                writer._process = Thread(self._serve, HERE.rank, theirs)

        self._closing = contextlib.ExitStack()
        for patch in (
            mock.patch.object(background.Writer, "_launch", launch),
            mock.patch.object(background, "WRITER", self.writers),
            mock.patch("fullshard.store.save.WRITER", self.writers),
            mock.patch.object(writer_process, "_POLL", 0.001),
        ):
            self._closing.enter_context(patch)
        return self

    def _serve(self, rank: int, channel: socket.socket) -> None:
        self.disk.dead.discard(f"writer {rank}")  # the next one
        with self.disk.acting(f"writer {rank}"), channel:
            try:
                writer_process.serve(channel)
            except Killed as killed:
                for frame, _ in traceback.walk_tb(killed.__traceback__):
                    for descriptor in frame.f_locals.get("descriptors", ()):  # the folder's lock is among them
                        os.close(descriptor)

    def __exit__(self, *exc: object) -> None:
        """All processes end: ranks that were not killed wait for what they saved."""
        for rank, writer in enumerate(self.writers.of):
            if writer.part is not None and f"rank {rank}" not in self.disk.dead:
                writer.finish()
            if writer._channel is not None:
                writer._channel.close()
            if writer._process is not None:
                writer._process.wait()
            if writer._memory >= 0:
                os.close(writer._memory)
        self._closing.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[ThreadRanks]:
    with ThreadRanks(WORLD) as made:
        yield made


@pytest.fixture(scope="module")
def trees(ranks: ThreadRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A folder that has a checkpoint, and what a broken-off save and removal left; and one that has none yet."""
    made = {there: tmp_path_factory.mktemp("folder") for there in (True, False)}
    run = made[True] / RUN
    with Disk(made[True]) as disk, Job(ranks, run, disk, False) as job:
        job.save(BEFORE)
    for rest in ("step-000000009.saving-00ff", "step-000000000.deleting-00ff"):
        (run / rest).mkdir()
        (run / rest / "rank-0.safetensors").write_text("half")
    (run / "latest.new").write_text("step-0")
    return made


def saved_with(
    ranks: ThreadRanks, folder: Path, base: Path, asynchronous: bool, fault: Fault | None = None
) -> tuple[list[tuple[str, str]], list[Any], list[int]]:
    """A save with a fault in it, and what has to be true whatever it is.

    Gives the calls, what the ranks were told, and the steps that are there then. Ranks that are alive save once more;
    if one is not, all start again, from one checkpoint.
    """
    shutil.copytree(base, folder)
    run, there = folder / RUN, BEFORE if (base / RUN).exists() else 0
    with Disk(folder) as disk:
        disk.fault = fault
        with Job(ranks, run, disk, asynchronous) as job:
            job.save(NEW)
            told, calls = job.told[:], disk.calls[:]
            acknowledged = NEW if any(isinstance(one, Path) for one in told) else there
            goes_on = not any(f"rank {rank}" in disk.dead for rank in range(WORLD))
            if goes_on:
                steps = check(run, acknowledged)
                if fault is not None and fault.kind not in ("kill", "torn"):  # nothing is left of it
                    assert not list(run.glob(f"{NAME % NEW}.saving-*")), fault
                job.save(AFTER)
                assert all(isinstance(one, Path) for one in job.told), job.told
    if not goes_on:
        steps, newest = check(run, acknowledged), fullshard.Folder(run).newest()
        with Disk(folder) as disk, Job(ranks, run, disk, asynchronous) as job:
            assert job.resume() == (0 if newest is None else fullshard.Folder(run).step_of(newest))
            job.save(AFTER)
    check_rest(run, AFTER)
    assert loads_whole(run) == AFTER
    return calls, told, steps


@pytest.fixture(scope="module")
def calls(ranks: ThreadRanks, trees: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a save without a fault, by mode: actors and their calls, in each actor's order."""
    made: dict[tuple[bool, bool], list[tuple[str, str]]] = {}
    for mode in MODES:
        made[mode], told, steps = saved_with(ranks, tmp_path_factory.mktemp("whole") / "it", trees[mode[1]], mode[0])
        assert steps == [NEW] and all(isinstance(one, Path) for one in told)
    return made


def number_of(own: list[str], begins: str) -> int:
    """Of the first call that begins so; the calls of an actor that does not do it all come before."""
    return next((i for i, call in enumerate(own, 1) if call.startswith(begins)), len(own) + 1)


@pytest.mark.parametrize("kind", ["kill", "torn", "short", "raise", *ERRORS])
@pytest.mark.parametrize("mode", MODES, ids=["now", "in the background", "into a new folder"])
def test_a_fault_in_every_call(
    ranks: ThreadRanks, trees: dict[bool, Path], calls: Any, tmp_path: Path, mode: tuple[bool, bool], kind: str
) -> None:
    for actor in sorted({actor for actor, _ in calls[mode]}):
        own = [call for one, call in calls[mode] if one == actor]
        begun = number_of(own, f"mkdir {RUN}/{NAME % NEW}.saving") if actor == "rank 0" else 0
        renamed = number_of(own, f"rename {RUN}/{NAME % NEW}.saving")
        published = number_of(own, f"replace {RUN}/latest.new")
        for number, call in enumerate(own, 1):
            if kind in ("torn", "short") and not call.startswith("write"):
                continue
            fault = Fault(actor, number, kind)
            _, told, steps = saved_with(ranks, tmp_path / f"{actor} {number}", trees[mode[1]], mode[0], fault)
            what = (actor, number, fault.call, told, steps)
            assert fault.call is not None, what
            removes = number > published + 1 or (number < begun and not call.endswith("lock"))
            if kind == "short" or (kind in ERRORS and removes and mode[1]):  # what is left is removed by the next save
                assert all(isinstance(one, Path) for one in told) and steps[-1] == NEW, what
                continue
            put_there = renamed if kind in ("kill", "torn") else published
            assert (NEW in steps) == (number > put_there) and not any(isinstance(one, Path) for one in told), what
            if actor.startswith("writer") or kind not in ("kill", "torn"):
                assert all(isinstance(one, CheckpointError) and WORDS[kind] in str(one) for one in told), what


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1)])
def test_ranks_that_end_while_their_writers_go_on(
    ranks: ThreadRanks, trees: dict[bool, Path], tmp_path: Path, gone: tuple[int, ...]
) -> None:
    """These finish the checkpoint."""
    shutil.copytree(trees[True], tmp_path / "it")
    run = tmp_path / "it" / RUN
    with Disk(tmp_path / "it") as disk, Job(ranks, run, disk, True) as job:
        job.gone = gone
        job.save(NEW)
    assert job.told == [None, None] and check(run, BEFORE) == [NEW]


@pytest.mark.parametrize("mode", MODES, ids=["now", "in the background", "into a new folder"])
def test_every_moment(ranks: ThreadRanks, trees: dict[bool, Path], tmp_path: Path, mode: tuple[bool, bool]) -> None:
    """All processes end, or the machine is switched off and what was not synced is lost: at every moment of a save."""
    asynchronous, there = mode
    folder, run = tmp_path / "it", tmp_path / "it" / RUN
    shutil.copytree(trees[there], folder)
    acknowledged = BEFORE if there else 0
    seen: dict[Any, tuple[int, str, Tree]] = {}

    def look(disk: Disk) -> None:
        last = disk.calls[-1][1] if disk.calls else "the beginning"
        for tree in disk.remains():
            read = frozenset(item for item in tree.items() if not re.search(r"\.(saving|deleting)-\w+/", item[0]))
            seen.setdefault((read, acknowledged), (acknowledged, last, tree))

    with Disk(folder, look) as disk:
        with Job(ranks, run, disk, asynchronous) as job:
            job.save(NEW)
        assert all(isinstance(one, Path) for one in job.told)
        acknowledged = NEW
    for number, (least, last, tree) in enumerate(seen.values()):
        put(tree, tmp_path / str(number))
        try:
            check(tmp_path / str(number) / RUN, least)
            fullshard.save(tmp_path / str(number) / RUN, model_of(AFTER), step=AFTER, keep_last=1)
            check_rest(tmp_path / str(number) / RUN, AFTER)
        except (AssertionError, fullshard.FullshardError) as error:
            error.add_note(f"after {last!r}: {sorted(tree)}")
            raise
        shutil.rmtree(tmp_path / str(number))
    assert len(seen) > 15
