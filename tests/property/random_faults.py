"""What goes wrong in a program: modules that raise, memory that is not there; and how programs change weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memory_ranks import HERE, MemoryGroup


class Planted(Exception):
    """What a program's module raises."""


@contextlib.contextmanager
def raising(module: nn.Module, in_backward: bool = False) -> Iterator[None]:
    """`module` raises in its forward, or when its output's gradient comes."""

    def fail(*_: object) -> None:
        raise Planted

    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if not in_backward:
            fail()
        if output.requires_grad:
            output.register_hook(fail)

    handle = module.register_forward_hook(hook)
    try:
        with contextlib.suppress(Planted):
            yield
    finally:
        handle.remove()


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    """On a rank's thread whose `HERE.pieces_left` is n, there is no memory for the nth collective from here on.

    Not for the nth piece of memory: ranks that hold less ask for fewer, and one that fails alone keeps others waiting.
    """
    issue = MemoryGroup._issue

    def issued(*args: Any, **keywords: Any) -> Any:
        left = getattr(HERE, "pieces_left", 0)
        HERE.pieces_left = left - 1
        if left == 1:
            raise torch.OutOfMemoryError("planted")
        return issue(*args, **keywords)

    with mock.patch.object(MemoryGroup, "_issue", issued):
        yield


CHANGES = ["mul_", "detach", "foreach", "local", "copy_", "data", "load"]


def scale(model: nn.Module, way: str, factor: float) -> None:
    """All weights, in one of the ways in which programs change them."""
    parameters = list(model.parameters())
    with torch.no_grad():
        if way == "load":
            model.load_state_dict(
                {
                    name: value.detach().clone() * (factor if value.is_floating_point() and "scales" not in name else 1)
                    for name, value in model.state_dict().items()
                }
            )
        elif way == "foreach":
            torch._foreach_mul_(parameters, factor)
        for parameter in parameters if way not in ("load", "foreach") else ():
            if way == "mul_":
                parameter.mul_(factor)
            elif way == "detach":
                parameter.detach().mul_(factor)
            elif way == "local":
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(factor)
            elif way == "copy_":
                parameter.copy_(parameter.detach().clone() * factor)
            else:
                parameter.data = parameter.detach().clone() * factor
