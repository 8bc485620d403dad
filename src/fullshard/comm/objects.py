"""Exchange pickled objects between ranks outside of passes, as `torch.distributed` does, but with waits that end.

PyTorch's functions wait for another rank in native code until the group's timeout, whatever happened to it. These
functions are two collectives each (sizes, bytes), whose waits the watcher ends (`watched.py`); over gloo they use the
engine's own connections.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import FullshardError
from ..mesh import device_of
from ..torch_private.mesh_without_group import AbsentGroup
from ..watcher import RANK
from .meeting import own_lines
from .watched import Watched

Group = dist.ProcessGroup | None
"""None: the default group."""


def objects_of_all(value: Any, group: Group, what: str) -> list[Any]:
    """Gather every rank's value, on every rank. For small values. Collective.

    Args:
        value: any object that can be pickled.
        group: of the ranks.
        what: the purpose, one of the watcher's `TALKS`.

    Raises:
        DivergenceError: other ranks do not make this call, or are gone.
    """
    if isinstance(group, AbsentGroup):  # a planned step: all ranks do the same
        return [value] * group.size()
    talk = _Talk(group, what)
    local = _pickled(value)
    sizes = talk.sizes_of_all(local.numel())
    received = [talk.empty(max(sizes)) for _ in sizes]
    talk.run(lambda group: dist.all_gather(received, talk.padded(local, max(sizes)), group=group, async_op=True))
    return [_unpickled(data, size) for data, size in zip(received, sizes, strict=True)]


def objects_to_first(value: Any, group: Group, what: str) -> list[Any]:
    """Gather every rank's value on the group's first rank; an empty list on the others. See `objects_of_all`."""
    talk = _Talk(group, what)
    local = _pickled(value)
    sizes = talk.sizes_of_all(local.numel())
    received = [talk.empty(max(sizes)) for _ in sizes] if talk.is_first else None
    sent = talk.padded(local, max(sizes))
    talk.run(lambda group: dist.gather(sent, received, group=group, async_op=True, group_dst=0))
    return [_unpickled(data, size) for data, size in zip(received or [], sizes if received else [], strict=True)]


def object_from(source: int, value: Any, group: Group, what: str) -> Any:
    """Broadcast the value of the group's rank `source`. See `objects_of_all`."""
    talk = _Talk(group, what)
    data = _pickled(value if talk.rank == source else None)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=talk.device)
    talk.run(lambda group: dist.broadcast(size, group=group, async_op=True, group_src=source))
    received = talk.padded(data, int(size)) if talk.rank == source else talk.empty(int(size))
    talk.run(lambda group: dist.broadcast(received, group=group, async_op=True, group_src=source))
    return value if talk.rank == source else _unpickled(received, int(size))


class _Talk:
    """An exchange over a group.

    Attributes:
        rank, world: this process's rank in the group, and the group's size.
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
        """Copy bytes to the group's device, with room up to `size`, uninitialized."""
        buffer = self.empty(size)
        buffer[: data.numel()].copy_(data)
        return buffer

    def sizes_of_all(self, size: int) -> list[int]:
        """Gather every rank's size."""
        local = torch.tensor([size], dtype=torch.int64, device=self.device)
        received = [torch.zeros_like(local) for _ in range(self.world)]
        self.run(lambda group: dist.all_gather(received, local, group=group, async_op=True))
        return [int(size) for size in torch.cat(received).tolist()]

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
            # torch logs a collective's error with its group's name, and raises a ValueError if the group has none.
            failed = error.__context__ or error
        else:
            return
        raise RANK.explain(failed) from None


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor, size: int) -> Any:
    return pickle.loads(data[:size].cpu().numpy().tobytes())
