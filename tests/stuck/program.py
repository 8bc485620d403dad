"""One rank of a small training run, in which one rank goes wrong in the way that is asked for.

    program.py FRONT_END SCENARIO RANK WORLD FOLDER LIMIT

Prints `ended NAME: TEXT` with what the rank raised, or `ended well`. Run by `test_stuck.py`, a process per rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.state_dict import get_optimizer_state_dict

STEPS = 6
WRONG = 3
"""The step in which the last rank goes wrong; in scenarios "... at first" it is the first one, before any forward."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Model(nn.Module):
    """Blocks of equal sizes, any of which a rank may skip."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.skipped: set[int] = set()
        self.trouble: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = block(x)
            if index == 1 and self.trouble is not None:
                self.trouble()
        return self.head(x)


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted in backward")


def planted() -> None:
    raise ValueError("planted in forward")


def stop_after(collective: Any) -> Any:
    """A collective after which this process stops: sizes have arrived, and what they are the sizes of has not."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        collective(*args, **kwargs).wait()
        os.kill(os.getpid(), signal.SIGSTOP)

    return stop


def hold_the_gil() -> None:
    """Native code that never gives the interpreter back: it locks a mutex that it has locked."""
    mutex, library = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def shard(front_end: str, model: Model) -> nn.Module:
    if front_end == "wrapper":
        blocks = fullshard.wrap.ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=blocks, use_orig_params=True)
    layout = front_end if front_end in ("flat", "owner") else "rows"
    for block in model.blocks:
        fully_shard(block, layout=layout)
    return fully_shard(model, layout=layout)


def train(front_end: str, scenario: str, rank: int, world: int, clock: list[float]) -> None:
    wrong = rank == world - 1
    torch.manual_seed(0)
    model = Model()
    if scenario == "before the first forward" and wrong:
        raise ValueError("planted before the first forward")
    sharded = shard(front_end, model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    if scenario == "raises on an owner":
        optimizer = fullshard.OwnerOptimizer(sharded.parameters(), torch.optim.Adafactor, lr=1e-3)
    wrong_step = 0 if scenario.endswith(" at first") else WRONG
    for step in range(STEPS):
        here = wrong and step == wrong_step
        if step == wrong_step:
            clock[0] = time.monotonic()
            if not here and scenario.startswith("gathers where others reduce"):
                dist.all_reduce(torch.ones(()))
        if here and scenario == "a batch fewer":
            return
        rows = 3 + rank if scenario == "input shapes" else 4
        batch = torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        if here:
            GO_WRONG.get(scenario, lambda *_: None)(model, sharded, batch)
            call_alone(scenario.removesuffix(" at first"), sharded, optimizer)
        for last in (False, True):
            if front_end == "wrapper":
                with contextlib.nullcontext() if last else sharded.no_sync():
                    loss_of(sharded, batch, scenario, here).backward()
            else:
                sharded.set_requires_gradient_sync(last)
                loss_of(sharded, batch, scenario, here).backward()
        if step == WRONG and scenario == "is stopped in an exchange":
            get_optimizer_state_dict(sharded, optimizer)
        if here and scenario == "clips alone":
            if front_end == "wrapper":
                sharded.clip_grad_norm_(1.0)
            else:
                fullshard.clip_grad_norm_(sharded.parameters(), 1.0)
        if here and scenario == "raises in the optimizer":
            raise ValueError("planted in the optimizer")
        if here and scenario == "raises on an owner":
            optimizer._inner.step = raises_on_an_owner
        if not (here and scenario == "step skipped"):
            optimizer.step()
        optimizer.zero_grad()
    if wrong and scenario == "saves at the end":
        call_alone("saves alone", sharded, optimizer)


def raises_on_an_owner() -> None:
    raise ValueError("planted on an owner")


def call_alone(scenario: str, sharded: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a program does for which somebody wrote `if rank == ...:` around a call that needs all ranks."""
    wrapped = isinstance(sharded, FullyShardedDataParallel)
    if scenario == "saves alone":
        fullshard.save("/nowhere", sharded, optimizer)
    elif scenario in ("gathers alone", "gathers where others reduce"):
        sharded.state_dict() if wrapped else next(sharded.parameters()).full_tensor().norm()
    elif scenario == "unshards alone" and wrapped:
        with FullyShardedDataParallel.summon_full_params(sharded):
            pass
    elif scenario == "unshards alone":
        sharded.unshard()


def loss_of(sharded: nn.Module, batch: torch.Tensor, scenario: str, here: bool) -> torch.Tensor:
    found = sharded(Fails.apply(batch.requires_grad_()) if here and scenario == "raises in backward" else batch)
    return found.square().mean()


def oversleep() -> None:
    time.sleep(600)


def catches(model: Model, sharded: nn.Module, batch: torch.Tensor) -> None:
    model.trouble = planted
    with contextlib.suppress(ValueError):
        sharded(batch)
    model.trouble = None


GO_WRONG: dict[str, Callable[[Model, nn.Module, torch.Tensor], object]] = {
    "skips a layer": lambda model, *_: model.skipped.add(2),
    "freezes a block": lambda model, *_: model.blocks[2].requires_grad_(False),
    "raises in forward": lambda model, *_: setattr(model, "trouble", planted),
    "catches in forward": catches,
    "exits": lambda *_: os._exit(7),
    "is killed": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "is stopped in an exchange": lambda *_: setattr(dist, "all_gather", stop_after(dist.all_gather)),
    "holds the GIL": lambda *_: hold_the_gil(),
    "sleeps": lambda *_: oversleep(),
    "reads a value": lambda _, sharded, *__: next(sharded.parameters()).norm().item(),
    "collective of its own": lambda *_: dist.all_reduce(torch.ones(1000)),
}
"""What the last rank does at the beginning of the step."""


def main() -> None:
    front_end, scenario, rank, world, folder, limit = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", int(world))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120))
    fullshard.watch(float(limit), grace=6, folder=f"{folder}/reports")
    clock = [time.monotonic()]  # when a run began, or the step in which a rank goes wrong
    outcome = {"error": None, "text": ""}
    try:
        train(front_end, scenario, int(rank), int(world), clock)
    except BaseException as error:
        outcome = {"error": type(error).__name__, "text": "\n".join([str(error), *getattr(error, "__notes__", ())])}
        raise
    finally:
        Path(folder, f"rank{rank}.json").write_text(json.dumps({**outcome, "seconds": time.monotonic() - clock[0]}))


if __name__ == "__main__":
    main()
