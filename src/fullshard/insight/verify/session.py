"""The ranks that take part in `verify`: how they exchange values, and how their random number generators are set."""

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
from ...generators import restored_generators
from ...mesh import device_of

T = TypeVar("T")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""The folders of PyTorch and of Fullshard."""


class Raised(NamedTuple):
    """An error in a form that ranks can exchange.

    Attributes:
        name: its class.
        text: its message.
        where: the innermost line outside of PyTorch and Fullshard that it passed through, as `train.py:12`.
        parameter, remedy: those of a `FullshardError`.
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
        device: the one on which ranks exchange tensors.
        data_ranks: by rank, the number of the batch that it gets; tensor-parallel ranks share one.
        seed: every generator is seeded from it.
    """

    rank: int
    world: int
    device: torch.device
    data_ranks: tuple[int, ...]
    seed: int

    @property
    def is_first(self) -> bool:
        """Whether this rank has the reference."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.data_ranks[self.rank]

    @property
    def data_world(self) -> int:
        return max(self.data_ranks) + 1

    @property
    def sources(self) -> list[int]:
        """The first rank of each data rank."""
        return [self.data_ranks.index(number) for number in range(self.data_world)]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective."""
        return objects_of_all(value, None, "verification")

    def gather_to_first(self, value: T) -> list[T]:
        """Every rank's value on the first rank; an empty list on the others. Collective."""
        return objects_to_first(value, None, "verification")

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of rank `source`, on every rank. Collective."""
        return object_from(source, value, None, "verification")

    def broadcast_tensor(self, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first rank's tensor, which has that shape, cast to that dtype, on every rank. Collective."""
        if tensor is None:
            whole = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            whole = tensor.detach().to(self.device, dtype).contiguous()
        if whole.numel():
            dist.broadcast(as_moved(whole), src=0)
        return whole

    def attempt(self, fn: Callable[[], T]) -> tuple[T | None, dict[int, Raised]]:
        """`fn()`, and the errors that it raised, by rank. Collective."""
        result, raised = None, None
        try:
            result = fn()
        except Exception as error:
            facts = (error.parameter, error.remedy) if isinstance(error, FullshardError) else ()
            raised = Raised(class_to_catch(error), str(error), _line_of(error), *facts)
        return result, {rank: error for rank, error in enumerate(self.gather(raised)) if error is not None}

    def require(self, what: str, fn: Callable[[], T]) -> T:
        """`fn()`, without which nothing can be compared: if it raises on any rank, all ranks raise. Collective.

        Raises:
            ConfigError: names the rank and quotes the error.
        """
        result, errors = self.attempt(fn)
        for rank, error in errors.items():
            raise ConfigError(
                f"verify could not begin: {what} raised {error.name}: {error.text}",
                rank=rank,
                remedy="call it by itself, without verify, which calls model_fn(), batch_fn(index, rank, world) and "
                "loss_fn(model, batch); the last must return a scalar tensor",
            )
        return result  # type: ignore[return-value]

    def check(self, fn: Callable[[], T]) -> T:
        """`fn()`, a check of what the user passed: if it refuses that on any rank, all ranks raise. Collective.

        Raises:
            ConfigError: with the same words.
        """
        result, errors = self.attempt(fn)
        for error in errors.values():
            raise ConfigError(error.text)
        return result  # type: ignore[return-value]

    def seed_with(self, *words: Any) -> None:
        """Seed every generator from the session's seed and `words`: the same words give the same numbers."""
        digest = hashlib.blake2b(repr((self.seed, *words)).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.manual_seed(number)


@contextmanager
def opened(data_mesh: DeviceMesh | None, seed: int) -> Iterator[Session]:
    """A session over the default process group; if there is none, over one that lasts as long as the context."""
    temporary = not dist.is_initialized()
    if temporary:
        _start_group()
    try:
        data_rank = dist.get_rank() if data_mesh is None else _data_rank_in(data_mesh)
        data_ranks = objects_of_all(data_rank, None, "verification")
        if set(data_ranks) != set(range(len(set(data_ranks)))):  # on every rank: otherwise the others would wait
            raise ConfigError(
                "data_mesh does not number the ranks' batches.",
                rank=data_ranks.index(None) if None in data_ranks else None,
                expected="on every rank the data-parallel part of one mesh of all ranks, as mesh['dp']",
                got=f"places {data_ranks} by rank (None: not in the mesh)",
            )
        group = dist.group.WORLD
        assert group is not None
        with restored_generators():
            yield Session(dist.get_rank(), dist.get_world_size(), device_of(group), tuple(data_ranks), seed)
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


def _data_rank_in(mesh: DeviceMesh) -> int | None:
    """This rank's number among the ranks of a mesh, in row-major order; None if it is not among them."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else int(np.ravel_multi_index(tuple(coordinate), mesh.shape))


def _start_group() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = None if device is None else device.type
    backend = "gloo" if kind is None else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
