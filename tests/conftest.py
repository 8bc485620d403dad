"""Fixtures for every test: rank processes, and a fake process group in this process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the rank processes

from collections.abc import Callable, Iterator

import pytest

from ranks import RankPools


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """The session's pools of gloo ranks, one per world size, each started on first use."""
    pools = RankPools(tmp_path_factory.mktemp("ranks"))
    yield pools
    pools.close()


@pytest.fixture
def run_ranks(rank_pools: RankPools) -> Callable:
    """`run_ranks(fn, *args, world=2, timeout=60)`: a module-level function on every rank; results by rank."""
    return rank_pools.run


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """`fake_world(world, rank=0)`: this process as one rank of a group whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    environment = dict(os.environ)

    def start(world: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
