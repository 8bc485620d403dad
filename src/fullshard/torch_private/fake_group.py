"""A process group whose collectives do nothing: one process as one rank of a world of any size.

Private torch API: `torch._C._distributed_c10d.FakeProcessGroup`, which `torch.testing` registers as the backend "fake";
`torch.distributed.Backend._plugins`.
Public alternative: none; a dry run would need all its ranks. Test: tests/planner/test_dry_run.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]


def is_pretended() -> bool:
    """Whether this process runs as one rank of a world that does not exist."""
    return bool(_worlds)


unwritten: list[str] = []
"""Paths that such a process would have written checkpoints to."""

_worlds: list[int] = []


@contextmanager
def pretended(world: int) -> Iterator[None]:
    """Make this process rank 0 of `world`: every group made within is a fake one, whatever the program asks for."""
    from torch._C._distributed_c10d import FakeProcessGroup, TCPStore

    def fake(common: Any, options: Any) -> Any:
        create: Any = FakeProcessGroup._create_internal  # the stubs lack the last argument
        return create(common.group_rank, common.group_size, options)

    if not hasattr(dist.Backend, "FAKE"):
        dist.Backend.register_backend("fake", fake, extended_api=True, devices=["cpu", "cuda"])
    plugins: Any = dist.Backend._plugins
    plugins.setdefault(
        "FAKE", dist.Backend._BackendPlugin(fake, True)
    )  # torch 2.13 has it built in, for all devices only
    begin, again = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        on_host = str(backend).lower() in ("gloo", "mpi")  # then the group's units are on the CPU, as they would be
        begin("cpu:fake" if on_host else "fake", store=HashStore(), rank=0, world_size=world)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return again(ranks, timeout, None, *args, **kwargs)

    class Store(TCPStore):
        """Waits for nobody."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args[:5], **kwargs | {"wait_for_workers": False})

    replaced = {"init_process_group": init_process_group, "new_group": new_group, "TCPStore": Store}
    replaced["monitored_barrier"] = lambda *args, **kwargs: None  # only gloo's groups have it
    before = {name: getattr(dist, name) for name in replaced}
    for name, value in replaced.items():
        setattr(dist, name, value)
    _worlds.append(world)
    unwritten.clear()
    try:
        yield
    finally:
        _worlds.pop()
        for name, value in before.items():
            setattr(dist, name, value)
        if dist.is_initialized():
            dist.destroy_process_group()
