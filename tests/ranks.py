"""Real gloo rank processes, started once per test session and reused by every test.

    test process                         rank processes
    RankPool.run(fn, *args)   -- task ->  fn(*args), on every rank at the same time
                              <- reply -  its result, or its exception and traceback
                              -- settle -> collect garbage, one all-reduce: no collective is left unmatched
                              -- SIGSTOP   until the next task

`fn` is a module-level function and results are picklable. A rank that raises, dies or does not answer ends
the whole pool (its peers may wait in a collective for ever); the next task starts a new one. Processes are
forked from one server that has imported torch already, so a pool of 4 starts in about a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TASK_TIMEOUT = 60.0  # seconds, for one task on all ranks of a quiet machine
LOADED = 4.0  # a machine that does other things too gets so many times as long: a limit is for what hangs
START_TIMEOUT = 120.0  # seconds, for importing torch and the rendezvous
GRACE = 3.0  # seconds that the other ranks get to answer once one has failed
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
]


class RankFailure(RuntimeError):
    """A rank died, did not answer in time, or raised something that cannot be pickled."""


@dataclass
class Rank:
    """One rank process as the test process sees it. The pool starts and ends it."""

    number: int
    process: BaseProcess
    connection: Connection
    stacks: Path  # faulthandler writes every thread's stack here on SIGUSR1
    output: Path  # its stdout and stderr

    def write_stacks(self) -> str:
        """Every thread's stack at this moment, or why there is none."""
        if not self.process.is_alive():
            return f"process ended with exit code {self.process.exitcode}\n{self.last_output()}"
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not self.stacks.read_text().endswith("\n"):
            time.sleep(0.02)
        time.sleep(0.05)
        return self.stacks.read_text() or "no stack: the process does not answer signals"

    def last_output(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return "\n".join(["last output:", *lines[-20:]])


class RankPool:
    """`world` rank processes whose default process group is exactly them. Owned by the session's fixture."""

    def __init__(self, world: int, folder: Path, on_gpu: bool = False) -> None:
        self.world = world
        self.folder = folder
        self.on_gpu = on_gpu
        self.ranks: list[Rank] = []
        self.starts = 0

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TASK_TIMEOUT, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank; the results by rank, or the first failed rank's exception."""
        __tracebackhide__ = True
        if not self.ranks:
            self._start()
        try:
            task = pickle.dumps((list(sys.path), pickle.dumps((fn, args, kwargs))))
            replies = self._exchange(task, timeout, getattr(fn, "__name__", str(fn)))
            self._exchange(b"", timeout, "settling: a collective was left unmatched")
            self._signal(signal.SIGSTOP)  # until the next task: else gloo's threads take a core together
        except BaseException:
            self.close()
            raise
        return replies

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.starts += 1
        folder = self.folder / f"world{self.world}-{self.starts}"
        folder.mkdir(parents=True)
        for number in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(number, self.world, folder, theirs, self.on_gpu), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(Rank(number, process, ours, folder / f"stacks{number}", folder / f"output{number}"))
        self._collect(START_TIMEOUT, "starting the pool")

    def _exchange(self, message: bytes, timeout: float, what: str) -> list[Any]:
        __tracebackhide__ = True
        for rank in self.ranks:
            rank.connection.send_bytes(message)
        self._signal(signal.SIGCONT)
        return self._collect(timeout, what)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, number)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """One reply from every rank, within `timeout * LOADED` seconds of now."""
        __tracebackhide__ = True
        timeout *= LOADED
        replies: dict[int, Any] = {}
        failures: dict[int, tuple[bytes, str]] = {}
        deadline = time.monotonic() + timeout
        waiting = {rank.connection: rank for rank in self.ranks}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, payload = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, OSError):
                    rank.process.join(2)
                    report = f"died with exit code {rank.process.exitcode}\n{rank.last_output()}"
                    ok, payload = False, (b"", report)
                (replies if ok else failures)[rank.number] = payload
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = list(waiting.values())
        if failures:
            raise_first(failures, what, self.world, [rank.number for rank in silent])
        if silent:
            numbers = ", ".join(str(rank.number) for rank in silent)
            stacks = "\n".join(f"--- rank {rank.number}\n{rank.write_stacks()}" for rank in silent)
            raise RankFailure(f"rank {numbers} of {self.world} did not answer within {timeout:g} s ({what}).\n{stacks}")
        return [replies[number] for number in range(self.world)]

    def close(self) -> None:
        """Ends every process. The next `run` starts a new pool."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.connection.close()
        self.ranks = []


def raise_first(failures: dict[int, tuple[bytes, str]], what: str, world: int, silent: list[int]) -> None:
    """Raises the lowest failed rank's exception, with every failed rank's traceback as notes."""
    __tracebackhide__ = True
    first = min(failures)
    try:
        error = pickle.loads(failures[first][0])
    except Exception:  # not picklable, or not unpicklable: its text is what can be had
        error = RankFailure(f"rank {first} of {world} failed ({what})")
    told: set[str] = set()
    for number, (_, report) in sorted(failures.items()):
        summary = report.rstrip().rpartition("\n")[2]
        error.add_note(f"--- rank {number} of {world}\n{summary if summary in told else report}")
        told.add(summary)
    if silent:
        error.add_note(f"--- ranks {silent} did not answer within {GRACE:g} s of that")
    raise error


class RankPools:
    """One pool per world size, each started when first asked for: a test's world is its default group."""

    def __init__(self, folder: Path, on_gpu: bool = False) -> None:
        self.folder = folder
        self.on_gpu = on_gpu
        self.pools: dict[int, RankPool] = {}

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = TASK_TIMEOUT, **kwargs: Any):
        """See RankPool.run."""
        __tracebackhide__ = True
        pool = self.pools.setdefault(world, RankPool(world, self.folder, self.on_gpu))
        return pool.run(fn, *args, timeout=timeout, **kwargs)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def serve(rank: int, world: int, folder: Path, connection: Connection, on_gpu: bool) -> None:
    """A rank process: joins its group, then runs tasks until the test process goes away."""
    if on_gpu:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # hidden from the test process; CUDA reads it when it starts
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (folder / f"stacks{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which ends its ranks

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: one that is stopped sees no end of file

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    backend = "cpu:gloo,cuda:gloo" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    connection.send_bytes(pickle.dumps((True, None)))
    gc.collect()
    torch_caches()
    gc.freeze()  # torch's own objects need not be looked at after every task
    with contextlib.suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            reply = perform(message, rank) if message else settle()
            connection.send_bytes(reply)
    os._exit(0)  # destroying the group would wait for ranks that are gone


def perform(message: bytes, rank: int) -> bytes:
    """Runs one task; its pickled reply."""
    import torch

    try:
        path, task = pickle.loads(message)
        sys.path[:] = path
        fn, args, kwargs = pickle.loads(task)
        random.seed(0)
        torch.manual_seed(0)
        return pickle.dumps((True, fn(*args, **kwargs)))
    except BaseException as error:
        report = traceback.format_exc()
        try:
            pickled = pickle.dumps(error.with_traceback(None))
        except Exception:
            pickled = b""
        return pickle.dumps((False, (pickled, report)))


@functools.cache
def torch_caches() -> list[Any]:
    """The `lru_cache`s of torch's that may hold meshes. Looks at all objects, so call it before `gc.freeze`."""
    found = [one for one in gc.get_objects() if isinstance(one, functools._lru_cache_wrapper)]
    return [one for one in found if str(one.__module__).startswith("torch.distributed.tensor")]


def settle() -> bytes:
    """Leaves nothing behind: garbage and groups gone, defaults restored, all ranks at the same collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world
    from torch.distributed.tensor import _redistribute, debug

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()
    ranks = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ranks)
    if ranks.item() != dist.get_world_size():
        failure = RankFailure(f"an all-reduce of ones gave {ranks.item()}: a collective was left unmatched")
        return pickle.dumps((False, (pickle.dumps(failure), str(failure))))
    custom = sys.modules.get("fullshard.comm.custom")
    separate = [group for known in custom._separate.values() for group in known.values()] if custom else []
    kept = {dist.group.WORLD, *separate}
    if groups := [group for group in _world.pg_map if group not in kept]:
        for group in groups:  # a gloo group's threads wake 100 times a second, used or not
            dist.destroy_process_group(group)
        # torch's caches of meshes, which hold the groups and equal those of later tasks, which have others.
        debug._clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        for cached in torch_caches():
            cached.cache_clear()
        gc.collect()
    return pickle.dumps((True, None))
