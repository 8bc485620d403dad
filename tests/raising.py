"""What the examples share: an error of this code is raised, and a small model on a group that moves no data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import fullshard


@contextmanager
def raises(code: str, quoting: str | None = None) -> Iterator[None]:
    """The block raises Fullshard's error of this code, whose message ends in it; it may quote another error."""
    with pytest.raises(fullshard.FullshardError) as caught:
        yield
    assert caught.value.code == code, f"{caught.value}"
    assert str(caught.value).endswith(f"\n  code:      {code}")
    assert quoting is None or f"\n  code:      {quoting}\n" in str(caught.value), f"{caught.value}"


@contextmanager
def warns(code: str) -> Iterator[None]:
    """The block warns with this code."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    assert any(str(one.message).endswith(f"\n  code:      {code}") for one in told), [str(one.message) for one in told]


def two_layers() -> nn.Sequential:
    """4 features in, 4 out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sharded(**arguments: object) -> nn.Module:
    """Two layers: each of them a unit, and the root one."""
    model = two_layers()
    for layer in model:
        fullshard.fully_shard(layer, **arguments)  # type: ignore[arg-type]
    return fullshard.fully_shard(model, **arguments)  # type: ignore[arg-type]


def wrapped(**arguments: object) -> fullshard.FullyShardedDataParallel:
    """Two layers in one instance."""
    return fullshard.FullyShardedDataParallel(two_layers(), **arguments)  # type: ignore[arg-type]


def nested() -> fullshard.FullyShardedDataParallel:
    """Two layers, each an instance, in another one."""
    return wrapped(auto_wrap_policy={nn.Linear})


Program = Callable[[int, Path], object]


class Programs(dict[str, Program]):
    """Programs of two ranks, by the code that they raise on one of these or on both.

    Each is called with its rank and a folder that both see.
    """

    def raise_(self, code: str) -> Callable[[Program], Program]:
        """Decorates such a program."""

        def noted(program: Program) -> Program:
            self[code] = program
            return program

        return noted


def outcome(program: Program, folder: Path) -> str:
    """What this rank was told: an error's text, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            program(torch.distributed.get_rank(), folder)
        except fullshard.FullshardError as error:
            return str(error)
    return "\n".join(str(one.message) for one in told)


def assert_raised(code: str, told: list[str]) -> None:
    """Some rank was told an error or a warning of this code."""
    assert any(f"code:      {code}" in text for text in told), [text[:500] for text in told]
