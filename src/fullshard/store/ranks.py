"""The ranks that save or load together: their communication, and how an error on one of them ends all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..comm import object_from, objects_of_all, objects_to_first, reduce_value
from ..errors import CheckpointError, DamagedCheckpointError, FullshardError
from ..watcher import RANK

_WHAT = "a checkpoint"  # for the watcher's messages
T = TypeVar("T")


class Ranks:
    """All ranks of a process group, or this process alone. Every method is collective.

    The watcher detects and names a rank that does not take part, because it is busy elsewhere or gone.

    Args:
        group: None: the default group, if there is one.

    Attributes:
        rank, size: this process's number in the group, and the size of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        self.rank = dist.get_rank(self._group) if self._group is not None else 0
        self.size = dist.get_world_size(self._group) if self._group is not None else 1
        if self.size == 1:
            self._group = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def together(self, action: str, fn: Callable[[], T], files: bool = True) -> T:
        """Run `fn` on every rank, and return its result; all raise if it raised on any.

        Args:
            action: the work, for error messages: "writing".
            files: whether this rank may read or write files: then the others wait, however slow the disk is.

        Raises:
            FullshardError: the error of the first rank that failed; of any other class, a `CheckpointError` that
                quotes it.
        """
        error: Exception | None = None
        try:
            with RANK.files() if files else nullcontext():
                result = fn()
        except Exception as failure:
            error = failure
        self.meet(error, action)
        return result

    def first(self, action: str, fn: Callable[[], T]) -> T:
        """Run `fn` on the first rank, and return its result on every rank; see `together`."""
        result: T = self.share(self.together(action, lambda: fn() if self.is_first else None))
        return result

    def meet(self, error: Exception | None = None, action: str = "going on") -> None:
        """Wait for all ranks. If any passes an error, raise on all.

        Raises:
            FullshardError: see `together`.
        """
        if self._group is None:
            if error is not None:
                raise error if isinstance(error, FullshardError) else _failed(action, self.rank, error) from error
            return
        failures = torch.tensor([int(error is not None)], device="cpu")
        if not int(reduce_value(failures, dist.ReduceOp.SUM, self._group, _WHAT)):
            return
        own = None if error is None else _to_send(error, action, self.rank)
        failed: list[FullshardError] = [failure for failure in self.all(own) if failure is not None]
        first = next((failure for failure in failed if not _is_damage(failure)), failed[0])
        if isinstance(error, FullshardError) and _is_damage(error) == _is_damage(first):
            raise error
        raise first from error

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. For small values."""
        if self._group is None:
            return [value]
        return objects_of_all(value, self._group, _WHAT)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on the first rank; an empty list on the others."""
        if self._group is None:
            return [value]
        return objects_to_first(value, self._group, _WHAT)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's int64 numbers, on every rank."""
        if self._group is None:
            return values
        return reduce_value(values, dist.ReduceOp.SUM, self._group, _WHAT)

    def share(self, value: Any = None) -> Any:
        """The first rank's value, on every rank."""
        if self._group is None:
            return value
        return object_from(0, value, self._group, _WHAT)


def _to_send(error: Exception, action: str, rank: int) -> FullshardError:
    """The same error for other ranks to raise: it names the rank, and its facts can be pickled."""
    if not isinstance(error, FullshardError):
        return _failed(action, rank, error)
    facts = {name: getattr(error, name) for name in ("what", "parameter", "expected", "got", "remedy", "topic")}
    facts |= {name: str(facts[name]) for name in ("expected", "got") if facts[name] is not None}
    return type(error)(**facts, rank=rank if error.rank is None else error.rank)


def _is_damage(error: FullshardError) -> bool:
    return isinstance(error, DamagedCheckpointError)


_REMEDIES = {
    errno.ENOSPC: "free disk space, or choose a different folder",
    errno.EDQUOT: "free space in the user's quota, or choose a different folder",
    errno.EACCES: "choose a folder that this user can write to",
    errno.EPERM: "choose a folder that this user can write to",
    errno.EROFS: "choose a folder on a writable file system",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close files on this machine: the system-wide limit is reached",
}


def _failed(action: str, rank: int, error: Exception) -> CheckpointError:
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return CheckpointError(
        f"{action} failed on rank {rank}.",
        rank=rank,
        got=f"{type(error).__name__}: {error}",
        remedy=remedy or "fix the error above, and call again on all ranks",
    )
