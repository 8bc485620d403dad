"""Ranks that save in a loop until a fault is planted on one of them, and the process that they are forked from.

`serve` reads a line of JSON for each run from stdin, and prints one when it is over; several may go on at once. A rank
writes down what it was told: `FOLDER/acks.RANK` (a step a line), `FOLDER/errors.RANK` (a line of JSON for each error).

A fault is what happens at the n-th call of a phase, in the rank's own process or in the one that writes beside it. That
one is forked here, too, since it would take longer to start than the whole run: `real_writer` has it started as it is.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.store import background, hashed, planning, writer_process
from fullshard.store.folder import Folder

LIMIT = 2.0
"""Seconds that a rank may wait for another."""
ROWS = 5


def model_of(value: Callable[[int], float] | None = None) -> nn.Sequential:
    """Two linear maps; `value` gives what to fill the rows of each of 2 ranks with."""
    model = nn.Sequential(nn.Linear(4, ROWS), nn.Linear(ROWS, 4))
    if value is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                for rank, rows in enumerate(parameter.chunk(2)):
                    rows.fill_(value(rank))
    return model


def value_at(step: int) -> Callable[[int], float]:
    """What rank `rank` has everywhere after so many steps."""
    return lambda rank: 10.0 * step + rank


class Plan:
    """A fault, and when it comes.

    Attributes:
        order: "phase" it is in, "fault", "at" which call, on which "rank", in "rank" or "writer" ("where").
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.calls = order, 0

    def call(self, phase: str) -> str | None:
        """A call in a phase: does the fault, or says which it is for the caller to do."""
        if phase != self.order.get("phase"):
            return None
        self.calls += 1
        if self.order["fault"] == "count":
            print(phase, self.calls, flush=True)
            return None
        fault = self.order["fault"]
        if fault == "slow":
            time.sleep(self.order["seconds"])
        elif self.calls == self.order["at"]:
            if fault in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            elif fault == "kill the rank":
                os.kill(os.getppid(), signal.SIGKILL)
            elif fault == "raise":
                raise ValueError("planted")
            elif fault in ("EIO", "ENOSPC"):
                number = getattr(errno, fault)
                raise OSError(number, os.strerror(number))
            return str(fault)
        return None

    def before(self, owner: Any, name: str, phase: str) -> None:
        """Let calls of a function count as calls of a phase."""
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self.call(phase)
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    def install(self) -> None:
        """In this process."""
        self.before(planning, "contents_of", "set-up")
        self.before(planning, "settle_plan", "plan")
        self.before(Folder, "begin", "begin")
        self.before(os, "fsync", "sync")
        self.before(os, "rename", "rename")
        self.before(os, "replace", "replace")
        self.before(importlib.import_module("fullshard.store.save"), "end", "end")
        self.before(writer_process, "end", "end")
        self.before(Folder, "prune", "finish")
        self.before(writer_process, "note_written", "note")
        plan, begin = self, hashed.Hashed.__init__

        def wrapped(this: Any, below: Any, *rest: Any) -> None:
            begin(this, Stream(below, plan), *rest)

        hashed.Hashed.__init__ = wrapped  # type: ignore[method-assign]


class Stream:
    """What is written to, as the fault has it."""

    def __init__(self, below: Any, plan: Plan) -> None:
        self.below, self.plan = below, plan

    def write(self, data: memoryview) -> int:
        if self.plan.call("write") == "short":
            data = data[: max(1, len(data) // 2)]
        return int(self.below.write(data))

    def flush(self) -> None:
        self.below.flush()

    def fileno(self) -> int:
        return int(self.below.fileno())


class Child:
    """A forked process, as far as `Writer` asks one of `subprocess`."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code = pid, None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.code is not None
        return self.code


def forked_writers(plan: Plan) -> None:
    """The processes beside the rank are forked from it. The fault is of the first."""
    launched: list[int] = []

    def launch(self: Any) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            os.setsid()
            sys.argv = ["writer", str(theirs.fileno())]
            kept = theirs.detach()
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd != kept:  # as for a program that is started: the folder's lock is among them
                    with contextlib.suppress(OSError):
                        os.close(fd)
            if plan.order.get("where") == "writer" and not launched:
                plan.install()
            try:
                writer_process.main()
            finally:
                os._exit(0)
        theirs.close()
        launched.append(pid)
        self._process, self._channel = Child(pid), ours

    background.Writer._launch = launch  # type: ignore[method-assign]


class Rank:
    """One rank of a run, in its own process."""

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self.order, self.rank, self.folder = order, rank, Path(order["folder"])
        self.began = time.monotonic()

    def note(self, kind: str, told: Any) -> None:
        with (self.folder / f"{kind}.{self.rank}").open("a") as file:
            file.write(json.dumps(told) + "\n")

    def run(self) -> None:
        """Trains a step, since the watcher begins with it, and saves in a loop."""
        order, rank = self.order, self.rank
        plan = Plan(order if rank == order.get("rank") else {})
        if not order.get("real_writer"):
            forked_writers(plan)
        store = dist.FileStore(str(self.folder / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
        fullshard.watch(limit=LIMIT, grace=5.0)
        model = model_of(value_at(0))
        for part in model:
            fullshard.fully_shard(part)
        fullshard.fully_shard(model)
        model(torch.ones(1, 4)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step()
        optimizer.zero_grad()
        first = self.resumed(model, optimizer) + 1 if order.get("resume") else 1
        if plan.order.get("where") == "rank":
            plan.install()
        if "delay" in plan.order:
            timer = threading.Timer(order["delay"], os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        for step in range(first, first + order["steps"]):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().fill_(value_at(step)(rank))
            self.save(model, optimizer, step)

    def resumed(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Loads the newest, and writes down which; its step."""
        step = fullshard.load(self.folder / "run", model, optimizer, missing_ok=True).step
        values = [bool((p.to_local() == value_at(step)(self.rank)).all()) for p in model.parameters()]
        self.note("resumed", [step, all(values) or step == 0])
        return step

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Saves once; what raises is written down, and the run goes on unless another rank is gone."""
        try:
            saving = fullshard.save(
                self.folder / "run", model, optimizer, step=step, state={"seen": [step, self.rank]},
                asynchronous=self.order["asynchronous"], keep_last=self.order.get("keep_last"),
            )  # fmt: skip
            if self.order["asynchronous"]:
                model(torch.ones(1, 4))  # training goes on meanwhile
            saving.wait()
            self.note("acks", step)
        except fullshard.FullshardError as error:
            seconds = time.monotonic() - self.began
            self.note("errors", {"step": step, "kind": type(error).__name__, "text": str(error), "seconds": seconds})
            if isinstance(error, fullshard.DivergenceError):
                raise SystemExit(1) from error


# The process that ranks are forked from.


def start(order: dict[str, Any], rank: int) -> int:
    """Fork a rank; its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    opened = os.open(f"{order['folder']}/out.{rank}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(opened, fd)
    code = 1
    try:
        random.seed(0)
        torch.set_num_threads(1)
        Rank(order, rank).run()
        background.WRITER.at_exit()
        code = 0
    except SystemExit:
        pass
    except BaseException as error:  # told in out.RANK
        traceback.print_exception(error)
        code = 3
    finally:
        sys.stderr.flush()
        os._exit(code)


def is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2] == "T"


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Run both ranks to their ends; their exit codes, None for one that had to be killed.

    One that is stopped goes on when the other has ended.
    """
    began = time.monotonic()
    ranks = {rank: start(order, rank) for rank in range(2)}
    exits: dict[int, int | None] = {}
    while len(exits) < 2:
        time.sleep(0.02)
        for rank, pid in ranks.items():
            if rank not in exits:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    exits[rank] = os.waitstatus_to_exitcode(status)
        left = [rank for rank in ranks if rank not in exits]
        for rank in left:
            if len(left) == 1 and is_stopped(ranks[rank]):
                os.kill(ranks[rank], signal.SIGCONT)
            if time.monotonic() - began > order["patience"]:
                os.kill(ranks[rank], signal.SIGKILL)
                os.waitpid(ranks[rank], 0)
                exits[rank] = None
    return {"exits": [exits[rank] for rank in range(2)]}


def serve() -> None:
    """Runs, one after the other; see the module's docstring."""
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
