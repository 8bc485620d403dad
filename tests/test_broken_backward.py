"""A backward that raises, where autograd runs it on a thread of its own, as it does for accelerators."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard
from fullshard.runtime import noticed, root
from fullshard.torch_private import autograd_task

WIDTH = 6


class Failure(Exception):
    """An out-of-memory error, say."""


def model(sharded: bool = True) -> nn.Sequential:
    torch.manual_seed(2)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    if not sharded:
        return made
    for block in made:
        fully_shard(block)
    return fully_shard(made)


def loss_of(made: nn.Module, step: int) -> Tensor:
    data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
    return made(data).square().mean()


def fail(module: nn.Module, gradients: Any) -> None:
    raise Failure


@contextlib.contextmanager
def device_thread(stays: bool) -> Iterator[list[Any]]:
    """Backwards run on a thread that is not the caller's.

    Args:
        stays: whether that thread still holds a backward when its error has reached the caller.
    """
    real, ran = threading.get_ident, []
    queued = autograd_task._queue_callback

    def queue(callback: Any) -> None:
        if stays:
            ran.append(callback)
        queued(callback)

    def ident() -> int:
        return real() + autograd_task.inside_backward()

    with (
        mock.patch.object(autograd_task, "get_ident", ident),
        mock.patch.object(root, "get_ident", ident),
        mock.patch.object(root, "has_streams", lambda device: True),
        mock.patch.object(autograd_task, "_queue_callback", queue),
    ):
        yield ran


def break_backward(made: nn.Module) -> None:
    handle = made[1][0].register_full_backward_pre_hook(fail)
    with pytest.raises(Failure):
        loss_of(made, 0).backward()
    handle.remove()


def skip(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The batch is skipped."""


def forget(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in made.parameters():
        parameter.grad = None


def zero(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def evaluate(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        loss_of(made, 0)


def free(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    fullshard.free(made)


def losses_of(made: nn.Module, following: Any) -> list[float]:
    """Four steps, with a backward before the third that raises."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        if step == 2:
            break_backward(made)
            following(made, optimizer)
        loss = loss_of(made, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_goes_on_after_a_backward_that_raised(fake_world):
    fake_world(1)
    for stays, unseen, following in itertools.product(
        (False, True), (False, True), (skip, forget, zero, evaluate, free)
    ):
        # The one unit whose backward is over is in reduction when the next one's raises: on every rank that is dropped.
        expected = losses_of(model(False), forget if following in (skip, free, evaluate) else following)
        made = model()
        with (
            device_thread(stays),
            mock.patch.object(noticed, "recover", noticed.recover if not unseen else lambda: None),
        ):
            assert losses_of(made, following) == pytest.approx(expected), (stays, unseen, following.__name__)


def test_what_was_gathered_is_free_when_the_caller_sees_the_error(fake_world):
    fake_world(1)
    for stays in (False, True):
        made = model()
        with device_thread(stays):
            break_backward(made)
            assert fullshard.memory_use(made).gathered == 0


def test_a_backward_that_is_dropped_on_another_thread_leaves_a_forward_alone(fake_world):
    fake_world(1)
    made = model()
    with device_thread(stays=True) as held:
        break_backward(made)

        def drop(module: nn.Module, given: Any) -> None:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()

        handle = made[1].register_forward_pre_hook(drop)
        loss_of(made, 1).backward()
        handle.remove()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_zero_grad_of_another_thread_leaves_a_backward_alone(fake_world):
    """Of another model: two that train side by side in one process."""
    fake_world(1)
    made, other = model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def zero_grad(module: nn.Module, gradients: Any) -> None:
        thread = threading.Thread(target=optimizer.zero_grad)
        thread.start()
        thread.join()

    made[1].register_full_backward_pre_hook(zero_grad)
    loss_of(made, 0).backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
