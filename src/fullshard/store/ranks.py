"""The ranks that save or load together: what they tell each other, and how all of them end when one fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..comm import object_from, objects_from_first, objects_of_all, objects_to_first, reduce_value
from ..errors import CheckpointError, DamagedCheckpointError, FullshardError
from ..watcher import RANK

_WHAT = "a checkpoint"


class Ranks:
    """All ranks of a process group, or this process alone. Every method is collective.

    A rank that does not come, because it is elsewhere or gone, is found by the watcher, and named.

    Args:
        group: None: the default group, if there is one.

    Attributes:
        rank, size: this process's number in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        self.rank = dist.get_rank(self._group) if self._group is not None else 0
        self.size = dist.get_world_size(self._group) if self._group is not None else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides for all."""
        return self.rank == 0

    @contextmanager
    def step(self, what: str, files: bool = False) -> Iterator[None]:
        """A part of the work, which every rank does. All of them raise if one did.

        Args:
            files: whether it reads or writes files, for which the others wait however slow the disk is.

        Raises:
            CheckpointError: quotes what the first rank that failed raised.
        """
        error: Exception | None = None
        try:
            with RANK.files() if files else nullcontext():
                yield
        except Exception as found:
            error = found
        self.meet(error, what)

    def meet(self, error: Exception | None = None, what: str = "going on") -> None:
        """Wait for all ranks. If one comes with an error, raise on all.

        Raises:
            CheckpointError: see `step`. On the rank that failed, the error itself if it is Fullshard's.
        """
        if self._group is None or self.size == 1:
            if error is not None:
                raise error if isinstance(error, FullshardError) else _failed(what, self.rank, error) from error
            return
        failures = torch.tensor([int(error is not None)])
        if not int(reduce_value(failures, dist.ReduceOp.SUM, self._group, _WHAT)):
            return
        damaged = isinstance(error, DamagedCheckpointError)
        told = self.all(None if error is None else (damaged, f"{type(error).__name__}: {error}"))
        failed = [(rank, *one) for rank, one in enumerate(told) if one is not None]
        if isinstance(error, FullshardError) and not (damaged and any(not one[1] for one in failed)):
            raise error
        rank, damaged, text = next((one for one in failed if not one[1]), failed[0])
        raise _failed(what, rank, text, damaged) from error

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. For small ones."""
        if self._group is None or self.size == 1:
            return [value]
        return objects_of_all(value, self._group, _WHAT)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on the first rank; the others get an empty list."""
        if self._group is None or self.size == 1:
            return [value]
        return objects_to_first(value, self._group, _WHAT)

    def scatter(self, each: Sequence[Any]) -> Any:
        """For every rank one of the first rank's values."""
        if self._group is None or self.size == 1:
            return each[0]
        return objects_from_first(each, self._group, _WHAT)

    def share(self, value: Any = None) -> Any:
        """The first rank's value, on every rank."""
        if self._group is None or self.size == 1:
            return value
        return object_from(0, value, self._group, _WHAT)


def _failed(what: str, rank: int, error: object, damaged: bool = False) -> CheckpointError:
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    kind = DamagedCheckpointError if damaged else CheckpointError
    return kind(f"{what} failed on rank {rank}.", rank=rank, got=text, code="K136")
