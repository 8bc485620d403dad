"""What the examples share: an error of this code is raised, and a small model on a group that moves no data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard


@contextmanager
def raises(code: str, quoting: str | None = None, words: Sequence[str] = ()) -> Iterator[None]:
    """The block raises Fullshard's error of this code, whose message ends in it; it may quote another error."""
    with pytest.raises(fullshard.FullshardError) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], f"{caught.value}"
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


def assert_raises(code: str, row: Any, *given: object) -> None:
    """The last call of a table's row raises, or warns with, this code; those before it do what it takes.

    All are called with what is given; where nothing is, with what the first of them makes. Texts in the row are words
    of the error.
    """
    parts = row if isinstance(row, tuple) else (row,)
    *before, call = [part for part in parts if not isinstance(part, str)]
    if before and not given:
        given = (before.pop(0)(),)
    for one in before:
        one(*given)
    words = [part for part in parts if isinstance(part, str)]
    with warns(code) if code.startswith("W") else raises(code, words=words):
        call(*given)


def put(name: str, content: str | bytes = b"") -> Callable[[Path], object]:
    """Writes a file into the folder that it is called with."""

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


ONE = torch.ones(1, 4)


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


def unit(**arguments: object) -> Any:
    """One layer, a unit."""
    return fullshard.fully_shard(nn.Linear(4, 4), **arguments)  # type: ignore[arg-type]


def wrapped(**arguments: object) -> fullshard.FullyShardedDataParallel:
    """Two layers in one instance."""
    return fullshard.FullyShardedDataParallel(two_layers(), **arguments)  # type: ignore[arg-type]


def nested() -> fullshard.FullyShardedDataParallel:
    """Two layers, each an instance, in another one."""
    return wrapped(auto_wrap_policy={nn.Linear})


def run(model: nn.Module) -> torch.Tensor:
    """A forward."""
    return model(ONE)


def step(model: nn.Module) -> None:
    """A forward and backward."""
    run(model).sum().backward()


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
