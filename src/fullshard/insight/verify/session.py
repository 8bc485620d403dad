"""The ranks that take part, how they talk, and what is put back when they are done: generators, too."""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from ...comm import object_from, objects_of_all, objects_to_first
from ...dtypes import as_moved
from ...errors import ConfigError, FullshardError, class_to_catch
from ...mesh import device_type_of


def seed_all(number: int) -> None:
    """Seed every generator."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def generator_states() -> dict[str, torch.Tensor]:
    """Those of torch's generators, by device type."""
    found, device = {"cpu": torch.get_rng_state()}, accelerator()
    if device is not None:
        found[device.type] = torch.get_device_module(device.type).get_rng_state()
    return found


def restore_generators(states: dict[str, torch.Tensor]) -> None:
    """Put back what `generator_states` gave."""
    for kind, state in states.items():
        torch.set_rng_state(state) if kind == "cpu" else torch.get_device_module(kind).set_rng_state(state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts all states back afterwards, on all devices."""
    python, numpy, device = random.getstate(), np.random.get_state(), accelerator()
    devices = range(torch.accelerator.device_count()) if device is not None else ()
    try:
        with torch.random.fork_rng(devices, device_type=device.type if device is not None else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def accelerator() -> torch.device | None:
    """The one of this machine that can be used; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


T = TypeVar("T")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""The folders of PyTorch and of Fullshard."""


class Raised(NamedTuple):
    """An error, in what can be sent: parameter and remedy are those that an error of ours names.

    `where` is the innermost line outside of PyTorch and Fullshard that it passed through, as `train.py:12`.
    """

    name: str
    text: str
    where: str | None = None
    parameter: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Session:
    """All ranks of the default process group.

    Attributes:
        rank, world: of the group.
        device: where ranks talk.
        data_ranks: for each rank, the number of the batch it is given; tensor-parallel ranks share one.
        seed: from which every generator is seeded.
    """

    rank: int
    world: int
    device: torch.device
    data_ranks: tuple[int, ...]
    seed: int

    @property
    def first(self) -> bool:
        """Whether this rank holds the reference."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.data_ranks[self.rank]

    @property
    def data_world(self) -> int:
        return max(self.data_ranks) + 1

    @property
    def sources(self) -> list[int]:
        """For each data rank, the first rank that has it."""
        return [self.data_ranks.index(number) for number in range(self.data_world)]

    def all(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective."""
        return objects_of_all(value, None, "verification")

    def told(self, value: T, source: int = 0) -> T:
        """The value of rank `source`, on every rank. Collective."""
        return object_from(source, value, None, "verification")

    def to_first(self, value: T) -> list[T] | None:
        """Every rank's value on the first rank; None on the others. Collective."""
        return objects_to_first(value, None, "verification") or None

    def sent(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first rank's tensor, which has that shape and dtype, on every rank. Collective."""
        if tensor is None:
            whole = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            whole = tensor.detach().to(self.device).contiguous()
        if whole.numel():
            dist.broadcast(as_moved(whole), src=0)
        return whole

    def attempt(self, fn: Callable[[], T]) -> tuple[T | None, dict[int, Raised]]:
        """`fn()`, and what ranks raised. Collective."""
        result, mine = None, None
        try:
            result = fn()
        except Exception as error:
            facts = (error.parameter, error.remedy) if isinstance(error, FullshardError) else ()
            mine = Raised(class_to_catch(error), str(error), _line_of(error), *facts)
        return result, {rank: told for rank, told in enumerate(self.all(mine)) if told is not None}

    def required(self, what: str, fn: Callable[[], T]) -> T:
        """`fn()`; where it raises on any rank, nothing can be compared, and all raise. Collective.

        Raises:
            ConfigError: names the rank and quotes the error.
        """
        result, failed = self.attempt(fn)
        for rank, error in failed.items():
            raise ConfigError(
                f"verify could not begin: {what} raised {error.name}: {error.text}",
                rank=rank,
                remedy="call it by itself, without verify; loss_fn(model, batch) returns a scalar tensor",
            )
        return result  # type: ignore[return-value]

    def seed_with(self, *words: Any) -> None:
        """Seed every generator from the session's seed and `words`, so that it can be done again."""
        digest = hashlib.blake2b(repr((self.seed, *words)).encode(), digest_size=7).digest()
        seed_all(int.from_bytes(digest, "little"))


@contextmanager
def opened(data_mesh: DeviceMesh | None, seed: int) -> Iterator[Session]:
    """A session over the default process group; where there is none, over one that lasts as long as the context."""
    temporary = not dist.is_initialized()
    if temporary:
        _start_group()
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = rank if data_mesh is None else _place_in(data_mesh)
        numbers = objects_of_all(mine, None, "verification")
        if None in numbers:  # said by all ranks: the others would wait for this one
            raise ConfigError(
                "A rank is not part of the data_mesh that verify was given.",
                rank=numbers.index(None),
                expected="on every rank the data-parallel part of one mesh of all ranks, as mesh['dp']",
            )
        if sorted(set(numbers)) != list(range(len(set(numbers)))):
            raise ConfigError(
                "data_mesh does not number the ranks' batches.",
                expected="on every rank the data-parallel part of one mesh, as mesh['dp']",
                got=f"places {numbers} by rank",
            )
        kind = device_type_of(None)
        with generators_kept():
            yield Session(rank, world, _device(kind), tuple(numbers), seed)
    finally:
        if temporary:
            dist.destroy_process_group()


def _line_of(error: Exception) -> str | None:
    """See `Raised.where`."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_LIBRARIES)
    ]
    return lines[-1] if lines else None


def _device(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _place_in(mesh: DeviceMesh) -> int | None:
    """This rank's place among the ranks of a mesh, in row-major order; None if it has none."""
    coordinate, place = mesh.get_coordinate(), 0
    if coordinate is None:
        return None
    for size, at in zip(mesh.shape, coordinate, strict=True):
        place = place * size + at
    return place


def _start_group() -> None:
    device = accelerator()
    kind = None if device is None else device.type
    backend = "gloo" if kind is None else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
