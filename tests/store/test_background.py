"""Saves in the background that end badly, or meet ranks of another group: nobody waits for ever, all are told once."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import threads
from torch import nn
from torch.overrides import TorchFunctionMode

import fullshard
from fullshard import CheckpointError
from fullshard.comm import lanes
from fullshard.store import background, writer_process
from fullshard.store.folder import Folder
from raising import raises
from ways import error_of, on_ranks

pytestmark = pytest.mark.gloo("background saves are processes beside each rank")


def model_of(value: float, width: int = 4) -> nn.Module:
    model = nn.Linear(width, width)
    nn.init.constant_(model.weight, value), nn.init.constant_(model.bias, value)
    return model


def saves_of_some_and_of_all(folder: Path) -> list[str]:
    """The first two ranks save; then all do; then the first two ask how theirs ended, after it was settled in another
    group. Then the other way around."""
    few, rank = dist.new_group([0, 1]), dist.get_rank()
    sharded, paths = fullshard.fully_shard(model_of(2.0)), []

    def of_few(step: int) -> Any:
        return fullshard.save(folder / "few", model_of(1.0), step=step, asynchronous=True, process_group=few)

    with threads():
        first = of_few(1) if rank < 2 else None
        second = fullshard.save(folder / "all", sharded, step=2, asynchronous=True)
        if first is not None:
            paths += [first.wait(), of_few(3).wait()]
        paths.append(second.wait())
    return [Path(path).name for path in paths]


def test_a_save_of_some_ranks_then_one_of_all(run_ranks: Any, tmp_path: Path) -> None:
    names = [f"step-{step:09d}" for step in (1, 3, 2)]
    told = run_ranks(saves_of_some_and_of_all, tmp_path, world=3, timeout=40)
    assert told == [names, names, names[2:]]


def no_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def a_disk_that_fails(folder: Path, failing: int) -> tuple[set[str], list[str], list[str]]:
    """Texts of errors and warnings of saves, while a rank's disk fails for good, and after; what is there then."""
    model = fullshard.fully_shard(model_of(1.0))
    with threads(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with contextlib.ExitStack() as faults:
            if dist.get_rank() == failing:
                faults.enter_context(mock.patch.multiple(writer_process, write=no_disk, note_written=no_disk))
                faults.enter_context(mock.patch.object(Path, "touch", no_disk))
            saving = fullshard.save(folder, model, step=1, asynchronous=True)
            errors = {str(error_of(saving.wait)) for _ in range(2)}  # the same each time that it is asked
            unasked = fullshard.save(folder, model, step=2, asynchronous=True)  # nobody waits for it
            while dist.get_rank() == failing and not unasked.done:
                time.sleep(0.01)
        fullshard.save(folder, model, step=3)
        fullshard.save(folder, model, step=4, asynchronous=True).wait()
    return (
        errors,
        [str(one.message) for one in seen if "A background save failed" in str(one.message)],
        Folder(folder).names(),
    )


def test_a_disk_of_one_rank_that_fails_for_good(run_ranks: Any, tmp_path: Path) -> None:
    """All ranks are told, once; the next save saves."""
    for failing in (0, 1):
        folder = tmp_path / str(failing)
        for rank, (errors, texts, names) in enumerate(run_ranks(a_disk_that_fails, folder, failing, timeout=40)):
            (error,) = errors
            assert all(
                word in error for word in ("Input/output error", f"rank:      {failing}", "A background save failed")
            ), error
            assert len(texts) == (rank == 0) and all("Input/output error" in text for text in texts), texts
            assert names == ["step-000000003", "step-000000004"]


def test_what_is_discarded_is_gone_though_another_rank_still_writes_into_it(tmp_path: Path) -> None:
    folder, unlink = Folder(tmp_path), os.unlink
    name = folder.begin(1)
    (folder.at(name) / "rank-0.safetensors").touch()

    def late(*args: Any, **options: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folder.at(name) / "rank-1.safetensors").touch()
        unlink(*args, **options)

    with mock.patch.object(os, "unlink", late):
        folder.discard(name)
    assert os.listdir(tmp_path) == []


def test_no_room_for_another_process(tmp_path: Path) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    writer = background.Writer()
    with (
        mock.patch.object(background, "WRITER", writer),
        mock.patch("fullshard.store.save.WRITER", writer),
        mock.patch.object(subprocess, "Popen", refuse),
        pytest.raises(CheckpointError, match="ulimit"),
    ):
        fullshard.save(tmp_path, model_of(1.0), asynchronous=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_the_first_ranks_process_learns_of_another(tmp_path: Path) -> None:
    """From the folder, from its own rank, or not at all."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with raises("CheckpointError: Another rank's part ... within 0 s"):
            writer_process.wait_for(tmp_path, 1, theirs, patience=0.0)
        background.note_written(tmp_path, 1, "no room", failed=True)
        with raises("CheckpointError: Another rank's part ... no room"):
            writer_process.wait_for(tmp_path, 1, theirs)
        ours.sendall(background.GIVE_UP)
        with raises("CheckpointError: Another rank's part"):
            writer_process.wait_for(tmp_path, 2, theirs)
        with raises("CheckpointError: The folder of the save was removed: not all ranks could start"):
            writer_process.wait_for(tmp_path / "removed", 1, theirs)


# Snapshots from a device: simulated, with copies that come late.


class Late(TorchFunctionMode):
    """A device on the CPU. A queued copy fills its target with rubbish, and with the values when somebody waits for it.

    Attributes:
        locked, unlocked: pages that were locked, how often.
        waits: events that were waited for, by the names of the threads.
        may_go_on: until it is set, nobody's wait ends.
        error: what waiting raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.locked, self.unlocked = [], []
        self.waits: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, values = args
            self.queue.append((target, values.detach().clone()))  # in order: what is written later is not copied
            return target.view(torch.uint8).fill_(0xAB)
        return func(*args, **(kwargs or {}))

    def record_event(self) -> Any:
        queue, self.queue = self.queue, []
        return SimpleNamespace(synchronize=lambda: self.arrive(queue))

    def arrive(self, queue: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        assert self.may_go_on.wait(60)
        self.waits.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        for target, values in queue:
            target.copy_(values)


@contextlib.contextmanager
def late_device() -> Iterator[tuple[Late, Any]]:
    device = Late()
    with (
        mock.patch.object(lanes, "has_streams", lambda of: True),
        mock.patch.object(lanes, "current_stream", lambda of: device),
        mock.patch.object(lanes, "page_lock", lambda *pages: device.locked.append(pages) or True),
        mock.patch.object(lanes, "page_unlock", device.unlocked.append),
        threads() as writer,
        device,
    ):
        yield device, writer


def value_in(folder: Path, step: int) -> float:
    model = model_of(-1.0)
    fullshard.load(folder / f"step-{step:09d}", model, rng=False)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).unique().item()


def test_training_goes_on_while_a_device_copies(tmp_path: Path) -> None:
    """The training thread does not wait; weights may change; the writer gets nothing before it has arrived."""
    with late_device() as (device, _):
        device.may_go_on.clear()
        model = model_of(1.0)
        saving = fullshard.save(tmp_path, model, step=1, asynchronous=True)
        model.load_state_dict(model_of(2.0).state_dict())
        assert not saving.done and not device.waits and not Folder(tmp_path).names()
        with pytest.raises(CheckpointError, match="still running"):
            fullshard.save(tmp_path, model, step=2, asynchronous=True, if_saving="refuse")
        device.may_go_on.set()
        saving.wait()
        assert device.waits == ["fullshard-snapshot"]
    assert value_in(tmp_path, 1) == 1.0


def test_twenty_snapshots_take_the_memory_of_one(tmp_path: Path) -> None:
    """Pages are locked once, and again for a larger model; threads and files do not grow."""
    gc.collect()  # with the files of earlier tests
    with late_device() as (device, writer):
        counts = []
        for step in range(20):
            model = model_of(float(step))
            fullshard.save(tmp_path, model, step=step, asynchronous=True, keep_last=3).wait()
            files = len(os.listdir("/proc/self/fd"))
            counts.append((len(device.locked), len(writer._mapped), threading.active_count(), files))
        assert len(set(counts)) == 1 and not device.unlocked, counts
        assert [value_in(tmp_path, step) for step in (17, 18, 19)] == [17.0, 18.0, 19.0]
        fullshard.save(tmp_path, model_of(20.0, 500), step=20, asynchronous=True).wait()
        assert len(device.locked) == 2 and device.unlocked == [device.locked[0][0]]
        assert not device.queue


@on_ranks
def test_a_device_that_fails_while_it_copies(tmp_path: Path) -> None:
    """On the second rank, once: what is there after the next save."""
    sharded = fullshard.fully_shard(model_of(1.0))
    with late_device() as (device, _):
        device.error = RuntimeError("the device is lost") if dist.get_rank() == 1 else None
        with pytest.raises(CheckpointError, match=r"(?s)rank:      1.*the device is lost|device is lost.*rank:      1"):
            fullshard.save(tmp_path, sharded, step=1, asynchronous=True).wait()
        device.error = None
        fullshard.save(tmp_path, sharded, step=2, asynchronous=True).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "lock", "step-000000002"]


def test_no_memory_is_locked_where_torch_knows_an_accelerator_that_is_not_there(monkeypatch):
    """As PyPI's torch, which is built for CUDA, does on a machine without a GPU."""

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    assert not lanes.page_lock(0, 4096)
