"""Fixtures for every test: rank processes, and a fake process group in this process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the rank processes

import zlib
from collections.abc import Callable, Iterator

import pytest

from ranks import RankPools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-ways", action="store_true", help="all cases, of every layout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of corner cases with a layout or wrapper among their parameters a part is run; every way of them somewhere.

    `rows`: every second; `flat`, `wrapper` and `originals`: every third; `blocks` and `owner`, which differ from `flat`
    in the plan alone: every sixth. Of runs on four ranks in tests/stuck every second. Which ones follows from names, so
    that each run takes the same; `--all-ways` takes all.
    """
    if config.getoption("--all-ways"):
        return
    left_out = [item for item in items if _is_extra(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_extra(item)]


def _is_extra(item: pytest.Item) -> bool:
    call, place = getattr(item, "callspec", None), str(item.path)
    given = set(map(str, call.params.values())) if call is not None else set()
    chance = zlib.crc32(item.name.encode())
    if "/stuck/" in place:
        return "4" in given and chance % 2 != 0
    if "/corners/" not in place:
        return False
    part = max([every for way, every in _PARTS.items() if way in given], default=1)
    return chance % part != 0


_PARTS = {"rows": 2, "flat": 3, "wrapper": 3, "originals": 3, "blocks": 6, "owner": 6}


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
