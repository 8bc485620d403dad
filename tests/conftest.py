"""Fixtures for every test: rank processes, and a fake process group in this process."""

from __future__ import annotations

import gc
import os
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the rank processes

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import memory_ranks
import on_device
import simulated
from models import TORCH
from ranks import TASK_TIMEOUT, RankPools

# How long an example takes says how loaded the machine is: nothing of ours.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gloo", action="store_true", help="ranks are processes over gloo in all tests")
    parser.addoption("--simulated", action="store_true", help="ranks are threads, and compute on a simulated device")
    parser.addoption(
        "--gpu", choices=("tests", "ranks"), help="run tests/gpu; or let ranks, processes over gloo, share this GPU"
    )
    parser.addoption("--property-seed", type=int, help="draw the examples of this number, and shrink what fails")
    parser.addoption(
        "--property-minutes", type=float, default=0, help="draw the day's examples for so many minutes (tests/property)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Nobody else sees a GPU: programs that name no device are for CPUs here."""
    if config.getoption("gpu") != "tests":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Programs of client libraries need packages of their own: they are run by name, `make test-clients`."""
    return True if collection_path.name == "clients" and not any("clients" in one for one in config.args) else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads which groups there are
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups, of which each stays on one worker, begin first: they take the longest, and mostly wait.

    Tests on rank processes are two groups, so that not every worker starts processes of its own.
    """
    unfit = ("cpu", "gloo") if config.getoption("--simulated") else ()
    if unfit:  # nothing else computes on the device
        config.hook.pytest_deselected(items=[item for item in items if "run_ranks" not in item.fixturenames])
        items[:] = [item for item in items if "run_ranks" in item.fixturenames]
    for item in items:
        for name in unfit:
            if marker := item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"not on a simulated device: {marker.args[0]}"))
        if item.get_closest_marker("gloo") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(f"gloo {zlib.crc32(item.path.name.encode()) % 2}"))
        if group_of(item) and getattr(config.option, "loadgroup", False) and hasattr(item, "_id"):
            # pytest 9.2, whose items xdist 3.8 cannot rename: groups were spread (pytest-xdist, issue 1386).
            item._id = type(item._id).parse(f"{item.nodeid}{group_of(item)}")
    items.sort(key=group_of, reverse=True)


def group_of(item: pytest.Item) -> str:
    """What xdist adds to the name of a test of a group."""
    group = item.get_closest_marker("xdist_group")
    return f"@{group.args[0]}" if group else ""


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is not looked at again whenever garbage is collected, and where tests count objects."""
    grouped = getattr(session.config.option, "loadgroup", False)
    assert not grouped or all(item.nodeid.endswith(group_of(item)) for item in session.items), "xdist reads no groups"
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_pools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """The session's pools of gloo ranks, one per world size, each started on first use."""
    pools = RankPools(tmp_path_factory.mktemp("ranks"), on_gpu=request.config.getoption("--gpu") == "ranks")
    yield pools
    pools.close()


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Callable:
    """`run_ranks(fn, *args, world=2, timeout=60)`: a module-level function on every rank; results by rank.

    Ranks are threads (`memory_ranks.py`); processes over gloo for tests marked `gloo(reason)`, with `--gloo`, and on
    torch 2.11, whose DTensor crashes where a thread that used it has ended. `--simulated`: on a device of
    `simulated.py`. `--gpu=ranks`: see `on_device.py`.
    """
    if request.config.getoption("--simulated"):
        return lambda fn, *args, world=2, timeout=memory_ranks.PATIENCE, **kwargs: memory_ranks.run(
            simulated.call, fn, args, kwargs, world=world, timeout=timeout
        )
    if request.config.getoption("--gpu") == "ranks":
        run = request.getfixturevalue("rank_pools").run
        return lambda fn, *args, world=2, timeout=TASK_TIMEOUT, **kwargs: run(
            on_device.call, "cuda", fn, args, kwargs, world=world, timeout=timeout
        )
    if request.config.getoption("--gloo") or request.node.get_closest_marker("gloo") or TORCH < (2, 13):
        return request.getfixturevalue("rank_pools").run
    return memory_ranks.run


@pytest.fixture
def in_a_process() -> Iterator[Callable[..., Any]]:
    """`in_a_process(function, *arguments)`: what it returns, from a new process, in which nothing else has run.

    Each is a fork of one that has imported torch and the engine, and has done nothing else.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["fullshard", "torch.profiler"])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


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
