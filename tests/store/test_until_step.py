"""Saves that are copied beside training: they hold what was there at the call, or fail and say why."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from awkward import differences, whole
from beside import threads
from torch import Tensor, nn

import fullshard
from fullshard.readers import READERS
from fullshard.store import background
from raising import raises
from ways import on_ranks, shard

pytestmark = pytest.mark.gloo("copies from a device are queued before its later work: nothing has to wait for them")

WIDTH = 256  # a rank's part of a weight is larger than what is copied at once
COPY = np.copyto


@contextmanager
def late_copies(seconds: float = 0.02) -> Iterator[None]:
    """Each copy beside training comes late, so that a change that does not wait for it comes first."""

    def late(*args: Any) -> None:
        time.sleep(seconds)
        COPY(*args)

    with threads(), mock.patch.object(background.np, "copyto", late):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1  # a buffer is written in a forward: it is copied at once
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def make(way: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shard(Net(), way, lambda net: [*net.blocks])
    # Its step first changes state alone: no sharded parameter or gradient takes part, which would wait by itself.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: Any) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def step_in_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    backward(model)  # of an optimizer that was prepared before the save


def step_of_lists(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01
    optimizer.step()


@torch.no_grad()
def in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.mul_(2.0)


def data(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


@torch.no_grad()
def out(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        torch.add(parameter, torch.ones_like(parameter), out=parameter)


@torch.no_grad()
def lists(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_zero_(list(model.parameters()))


def replaced(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    backward(model)


def state_dicts(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())


def whole_state_dicts(model: Any, optimizer: torch.optim.Optimizer) -> None:
    options = fullshard.state_dict.StateDictOptions(full_state_dict=True)
    values = {name: torch.zeros_like(value) for name, value in whole_model(model).items()}
    fullshard.state_dict.set_model_state_dict(model, values, options=options)


def whole_model(model: Any) -> dict[str, Tensor]:
    options = fullshard.state_dict.StateDictOptions(full_state_dict=True)
    return fullshard.state_dict.get_model_state_dict(model, options=options)


def summoned(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with fullshard.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def parked(model: Any, optimizer: torch.optim.Optimizer) -> None:
    fullshard.park(model, optimizer)
    fullshard.resume(model, optimizer)
    step(model, optimizer)


@torch.no_grad()
def after_copied(model: Any, optimizer: torch.optim.Optimizer, saving: Any) -> None:
    saving.copied()
    for parameter in model.parameters():
        getattr(parameter, "_local_tensor", parameter).detach().numpy().fill(0.0)


EVERYWHERE = (step, step_in_backward, replaced, after_copied, parked)
CHANGES: dict[str, tuple[Callable[..., None], ...]] = {
    "rows": (*EVERYWHERE, step_of_lists, in_place, out, data, lists, state_dicts, whole_state_dicts),
    "flat": (*EVERYWHERE, step_of_lists, in_place, out, data, lists, state_dicts, whole_state_dicts),
    "originals": (step, step_of_lists, whole_state_dicts, summoned, parked, after_copied),
    "wrapper": (step, step_of_lists, summoned, after_copied),
}


@pytest.mark.parametrize("way", CHANGES)
def test_changes_wait(run_ranks: Any, tmp_path: Path, way: str) -> None:
    assert run_ranks(problems_of_changes, way, tmp_path, timeout=60) == [[], []]


def problems_of_changes(way: str, folder: Path) -> list[str]:
    """Saves, then changes what was saved in every way; what was saved that differs from what was there at the call."""
    problems = []
    for number, change in enumerate(CHANGES[way]):
        model, optimizer = make(way)
        want = whole(model, optimizer)
        if change is step_in_backward:
            fullshard.step_in_backward(optimizer)
        with late_copies():
            saving = fullshard.save(folder, model, optimizer, step=number, rng=False, asynchronous="until_step")
            if not READERS:
                problems.append(f"{change.__name__}: nothing was copied beside training")
            change(model, optimizer, *([saving] if change is after_copied else []))
            saving.wait()
        changed = whole(model, optimizer)
        if change is not parked and not differences(want, changed):
            problems.append(f"{change.__name__}: nothing was changed")
        fullshard.load(folder, model, optimizer, step=number)
        problems += [f"{change.__name__}: {problem}" for problem in differences(want, whole(model, optimizer))]
    return problems


def behind_the_back(model: Any, optimizer: Any, how: str) -> None:
    """A change that nothing can wait for: of tensors over the same memory, taken before."""
    parameter = model.blocks[0].weight
    state = optimizer.state[parameter]["momentum_buffer"]
    with torch.no_grad():
        if how == "in place":
            parameter.to_local()[-1, -1] = 1.0
        elif how == "by numpy":
            parameter.to_local().numpy().fill(1.0)
        else:
            torch._foreach_zero_([state])


@on_ranks
def test_changes_that_cannot_wait_make_the_save_fail(tmp_path: Path) -> None:
    """On all ranks, with the tensor's name, and the next save saves."""
    names = {"in place": "model.blocks.0.weight", "by numpy": "model.blocks.0.weight", "of state": "momentum_buffer"}
    for number, (how, name) in enumerate(names.items()):
        model, optimizer = make("rows")
        with late_copies(0.1):
            saving = fullshard.save(tmp_path, model, optimizer, step=number, asynchronous="until_step")
            if torch.distributed.get_rank() == 0:
                behind_the_back(model, optimizer, how)
            with raises(f"CheckpointError: A background save failed ... was changed while ... {name} ... copied()"):
                saving.wait()
            step(model, optimizer)
            fullshard.save(tmp_path, model, optimizer, step=10 + number, asynchronous="until_step").wait()
    names = fullshard.Folder(tmp_path).names()
    assert names == [f"step-{number:09d}" for number in (10, 11, 12)], names


@on_ranks(world=1)
def test_a_hundred_saves_leave_nothing_behind(tmp_path: Path) -> None:
    model = fullshard.fully_shard(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = set()
    with threads():
        for number in range(100):
            fullshard.save(tmp_path, model, optimizer, step=number, keep_last=1, asynchronous="until_step").wait()
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            if number > 2:
                counts.add((len(READERS), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert len(counts) == 1 and not READERS, counts


def test_an_invalid_value_is_refused(tmp_path: Path) -> None:
    with raises("ConfigError: save(asynchronous=) is invalid ... 'until_step' ... 'later'"):
        fullshard.save(tmp_path, nn.Linear(1, 1), asynchronous="later")  # type: ignore[arg-type]


@on_ranks(world=1)
def test_without_another_thread_everything_is_copied_at_once(tmp_path: Path) -> None:
    model = fullshard.fully_shard(nn.Linear(WIDTH, WIDTH))
    refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with threads():
        fullshard.save(tmp_path, model, step=1, asynchronous=True).wait()  # its writer is a thread, too
        with refused:
            saving = fullshard.save(tmp_path, model, step=2, asynchronous="until_step")
        assert not READERS
        saving.wait()
    assert fullshard.Folder(tmp_path).names() == ["step-000000001", "step-000000002"]
