"""What tests of errors share: the class and the words of an error, and small models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard


def reads(text: str, words: str) -> bool:
    """Whether the last line of a traceback, `Class: message`, is of this class and has these words.

    Args:
        words: "Class: some words of the message ... and others".
    """
    kind, _, rest = words.partition(": ")
    return text.startswith(f"{kind}: ") and all(part in text for part in rest.split(" ... "))


def written(error: BaseException | type[Warning], message: object = None) -> str:
    """`Class: message`, as a traceback ends."""
    return f"{error.__name__}: {message}" if isinstance(error, type) else f"{type(error).__name__}: {error}"


@contextmanager
def raises(words: str) -> Iterator[None]:
    """The block raises an error of exactly this class and with these words, as `reads` has them."""
    with pytest.raises(Exception) as caught:
        yield
    assert reads(written(caught.value), words), written(caught.value)


@contextmanager
def warns(words: str) -> Iterator[None]:
    """The block warns in these words, as `reads` has them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [written(each.category, each.message) for each in caught]
    assert any(reads(text, words) for text in texts), texts


Row = tuple[Any, ...]
"""Of a table of mistakes: what is called, one after another; then what the last call raises, or warns of (`reads`)."""


def words_of(row: Row) -> str:
    """The name of a row's test."""
    return str(row[-1])


def assert_raises(row: Row, *arguments: object) -> None:
    """The last call of a row raises, or warns of, what the row says; those before it prepare it.

    All are called with `arguments`; where there are none, with what the first of them returns.
    """
    *before, call, words = row
    if before and not arguments:
        arguments = (before.pop(0)(),)
    for prepare in before:
        prepare(*arguments)
    with warns(words) if words.partition(": ")[0].endswith("Warning") else raises(words):
        call(*arguments)


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


_NORM, _ORDER = "clip_grad_norm_(max_norm=) is invalid", "clip_grad_norm_(norm_type=) is invalid"
NOT_CLIPPED = [
    (("1",), f"ArgumentTypeError: {_NORM} ... a number of at least 0 ... '1' ... math.inf"),
    ((None,), f"ArgumentTypeError: {_NORM} ... None"),
    ((True,), f"ArgumentTypeError: {_NORM} ... True"),
    ((-1.0,), f"ConfigError: {_NORM} ... -1.0"),
    ((float("nan"),), f"ConfigError: {_NORM} ... nan"),
    ((torch.ones(1),), f"ArgumentTypeError: {_NORM} ... tensor([1.])"),
    ((torch.tensor(-1.0),), f"ConfigError: {_NORM} ... tensor(-1.)"),
    ((torch.tensor(1j),), f"ArgumentTypeError: {_NORM} ... 1.j"),
    ((1.0, 0), f"ConfigError: {_ORDER} ... a positive number, or inf ... 0 ... remedy"),
    ((1.0, "fro"), f"ConfigError: {_ORDER} ... 'fro' ... 2.0 for the Euclidean norm"),
    ((1.0, None), f"ArgumentTypeError: {_ORDER} ... None"),
    ((1.0, float("nan")), f"ConfigError: {_ORDER} ... nan"),
]
"""Invalid arguments of `clip_grad_norm_`, of the function and the wrapper's method; and what they raise."""


def run(model: nn.Module) -> torch.Tensor:
    """A forward."""
    return model(ONE)


def step(model: nn.Module) -> None:
    """A forward and backward."""
    run(model).sum().backward()


Program = Callable[[int, Path], object]


class Programs(dict[str, Program]):
    """Programs of two ranks, by what they read on one of these or on both (`reads`).

    Each is called with its rank and a folder that both see.
    """

    def raise_(self, words: str) -> Callable[[Program], Program]:
        """Decorates such a program."""

        def noted(program: Program) -> Program:
            self[words] = program
            return program

        return noted


def outcome(program: Program, folder: Path) -> list[str]:
    """What this rank reads: an error, or warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(torch.distributed.get_rank(), folder)
        except fullshard.FullshardError as error:
            return [written(error)]
    return [written(each.category, each.message) for each in caught]


def assert_raised(words: str, of_ranks: list[list[str]]) -> None:
    """Some rank read this."""
    texts = [text for of_rank in of_ranks for text in of_rank]
    assert any(reads(text, words) for text in texts), [text[:500] for text in texts]
