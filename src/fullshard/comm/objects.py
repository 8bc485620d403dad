"""Objects that ranks exchange outside of passes, pickled: as `torch.distributed`'s own, but with waits that end.

Those wait for another rank in native code until the group's timeout, whatever became of it. These are two collectives
each, sizes and bytes, whose waits the watcher sees (`watched.py`); over gloo by the engine's own connections.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import FullshardError
from ..mesh import device_of
from ..watcher import RANK
from .meeting import own_lines
from .watched import Watched

Group = dist.ProcessGroup | None
"""None: the default group."""


def objects_of_all(value: Any, group: Group, what: str) -> list[Any]:
    """Every rank's value, on every rank. Collective. For small ones.

    Args:
        value: anything that can be pickled.
        group: of the ranks.
        what: it is for, one of the watcher's `TALKS`.

    Raises:
        DivergenceError: other ranks do not come, or are gone.
    """
    talk = _Talk(group, what)
    mine = _pickled(value)
    sizes = talk.sizes_of_all(mine.numel())
    found = [talk.empty(max(sizes)) for _ in sizes]
    talk.run(lambda group: dist.all_gather(found, talk.padded(mine, max(sizes)), group=group, async_op=True))
    return [_unpickled(data, size) for data, size in zip(found, sizes, strict=True)]


def objects_to_first(value: Any, group: Group, what: str) -> list[Any]:
    """Every rank's value, on the group's first rank; an empty list on the others. See `objects_of_all`."""
    talk = _Talk(group, what)
    mine = _pickled(value)
    sizes = talk.sizes_of_all(mine.numel())
    found = [talk.empty(max(sizes)) for _ in sizes] if talk.is_first else None
    sent = talk.padded(mine, max(sizes))
    talk.run(lambda group: dist.gather(sent, found, group=group, async_op=True, group_dst=0))
    return [_unpickled(data, size) for data, size in zip(found or [], sizes if found else [], strict=True)]


def object_from(source: int, value: Any, group: Group, what: str) -> Any:
    """The value of the group's rank `source`, on every rank. See `objects_of_all`."""
    talk = _Talk(group, what)
    data = _pickled(value if talk.rank == source else None)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=talk.device)
    talk.run(lambda group: dist.broadcast(size, group=group, async_op=True, group_src=source))
    found = talk.padded(data, int(size)) if talk.rank == source else talk.empty(int(size))
    talk.run(lambda group: dist.broadcast(found, group=group, async_op=True, group_src=source))
    return value if talk.rank == source else _unpickled(found, int(size))


class _Talk:
    """One exchange over a group.

    Attributes:
        rank, world: this process's number in the group, and how many there are.
        device: where the group's tensors lie.
    """

    def __init__(self, group: Group, what: str) -> None:
        self._group = group or dist.group.WORLD
        assert self._group is not None
        self._what = what
        self._lines = own_lines(self._group)
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.device = device_of(self._group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def padded(self, data: torch.Tensor, size: int) -> torch.Tensor:
        """These bytes, and any beyond them up to `size`, where the group's tensors lie."""
        room = self.empty(size)
        room[: data.numel()].copy_(data)
        return room

    def sizes_of_all(self, size: int) -> list[int]:
        """Every rank's number."""
        mine = torch.tensor([size], dtype=torch.int64, device=self.device)
        found = [torch.zeros_like(mine) for _ in range(self.world)]
        self.run(lambda group: dist.all_gather(found, mine, group=group, async_op=True))
        return [int(one) for one in torch.cat(found).tolist()]

    def run(self, issue: Callable[[Any], Any]) -> None:
        """Issue a collective and wait for its end."""
        RANK.talks(self._what)
        try:
            work = issue(self._lines.apart)
            if work is not None:
                (Watched(work) if self.device.type == "cpu" else work).wait()
        except FullshardError:
            raise
        except (RuntimeError, ValueError) as error:
            # torch logs an error of a collective by its group's name, and raises a ValueError where it knows none.
            failed = error.__context__ or error
        else:
            return
        raise RANK.explain(failed) from None


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor, size: int) -> Any:
    return pickle.loads(data[:size].cpu().numpy().tobytes())
