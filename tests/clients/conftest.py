"""Ranks that have adopted, for programs written for client libraries. Run by `make test-clients`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ranks import RankPools


@pytest.fixture(scope="session")
def adopted_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """Pools of gloo ranks apart from those of other tests: adopting is for good."""
    pools = RankPools(tmp_path_factory.mktemp("adopted"))
    yield pools
    pools.close()


@pytest.fixture
def run_adopted(adopted_pools: RankPools) -> Callable[..., list[Any]]:
    """`run_adopted(fn, *args, world=2, timeout=240)`: as `run_ranks`, on ranks that have adopted."""

    def run(fn: Callable[..., Any], *args: Any, timeout: float = 240, world: int = 2, **kwargs: Any) -> list[Any]:
        program = pickle.dumps((fn, args, kwargs))  # unpickling it imports libraries, which adopting comes before
        return adopted_pools.run(adopted, program, timeout=timeout, world=world)

    return run


@pytest.fixture(scope="session")
def client_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """Pools of gloo ranks that import client libraries, and have not adopted."""
    pools = RankPools(tmp_path_factory.mktemp("clients"))
    yield pools
    pools.close()


@pytest.fixture
def run_clients(client_pools: RankPools) -> Callable[..., list[Any]]:
    """`run_clients(fn, *args, world=2, timeout=240)`: as `run_adopted`, without adopting."""

    def run(fn: Callable[..., Any], *args: Any, timeout: float = 240, **kwargs: Any) -> list[Any]:
        return client_pools.run(launched, fn, *args, timeout=timeout, **kwargs)

    return run


def adopted(program: bytes) -> Any:
    """A function as a program under `torchrun` would run it, in a process that may have run others.

    Args:
        program: the function and its arguments, pickled.
    """
    import fullshard

    fullshard.adopt()
    import cpu_ranks

    assert cpu_ranks
    fn, args, kwargs = pickle.loads(program)
    return launched(fn, *args, **kwargs)


def launched(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn` with what `torchrun` tells a process, and libraries as they are when they are imported."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = dict(os.environ)
    os.environ.update(given, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")
    try:
        return fn(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, PartialState, GradientState):
            state._shared_state.clear()
