"""The rank pool itself: results by rank, failures by name, no hang, nothing left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, RankPools


def rank_and_sum(value: int) -> tuple[int, int, float]:
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def random_numbers() -> list[float]:
    return torch.rand(3).tolist()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"rank {rank} says no")


def fail_while_others_wait() -> None:
    fail_on(1)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(30)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


@pytest.mark.parametrize("world", [2, 4])
def test_results_by_rank(run_ranks, world):
    expected = sum(10 + rank for rank in range(world))
    assert run_ranks(rank_and_sum, 10, world=world) == [(rank, world, expected) for rank in range(world)]


def test_every_task_starts_from_the_same_seed(run_ranks):
    first, second = run_ranks(random_numbers), run_ranks(random_numbers)
    assert first == second
    assert first[0] == first[1]


def test_processes_are_reused(run_ranks):
    assert run_ranks(os.getpid) == run_ranks(os.getpid)


@pytest.fixture
def own_pools(tmp_path):
    pools = RankPools(tmp_path)
    yield pools
    pools.close()


def test_exception_is_raised_with_rank_and_traceback(own_pools):
    """Also while others wait; and the next task starts anew."""
    for task, given, note in ((fail_on, (1,), "in fail_on"), (fail_while_others_wait, (), "ranks [0] did not answer")):
        with pytest.raises(KeyError, match="rank 1 says no") as caught:
            own_pools.run(task, *given)
        notes = "".join(caught.value.__notes__)
        assert "rank 1 of 2" in notes and "in fail_on" in notes and note in notes
        assert own_pools.run(rank_and_sum, 1)[0] == (0, 2, 3.0)


def test_silent_rank_is_named_with_its_stack(own_pools):
    own_pools.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 2 did not answer within 4 s") as caught:
        own_pools.run(sleep_on, 1, timeout=1)
    assert "in sleep_on" in str(caught.value)
    assert time.monotonic() - start < 25
    assert len(own_pools.run(os.getpid)) == 2


def test_dead_rank_is_named(own_pools):
    with pytest.raises(RankFailure, match="rank 0 of 2 failed") as caught:
        own_pools.run(die_on, 0)
    assert any("exit code 7" in note for note in caught.value.__notes__)


def test_fake_world(fake_world):
    assert not dist.is_initialized()  # left by another
    fake_world(64, rank=5)
    assert (dist.get_rank(), dist.get_world_size()) == (5, 64)
