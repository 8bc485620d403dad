"""What `memory_ranks.py` punishes, so that tests on it notice: reads too early, writes too late, hangs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from memory_ranks import Disagreement, ThreadRanks, run


def gather_begun() -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
    given, out = torch.full((2,), dist.get_rank() + 1.0), torch.zeros(4)
    return given, out, dist.all_gather_into_tensor(out, given, async_op=True)


def read_too_early() -> list[list[float]]:
    _, out, work = gather_begun()
    early = out.isnan().all().item()
    work.wait()
    return [early, out.tolist()]


def test_results_appear_at_the_wait():
    assert run(read_too_early) == [[True, [1.0, 1.0, 2.0, 2.0]]] * 2


def write_its_input(given: torch.Tensor, out: torch.Tensor) -> None:
    given.add_(1)


def write_its_output(given: torch.Tensor, out: torch.Tensor) -> None:
    out[0] = 0


def give_its_input_back(given: torch.Tensor, out: torch.Tensor) -> None:
    given.untyped_storage().resize_(0)


def give_its_output_back(given: torch.Tensor, out: torch.Tensor) -> None:
    out.untyped_storage().resize_(0)


def touched(touch: Callable) -> None:
    given, out, work = gather_begun()
    touch(given, out)
    work.wait()


@pytest.mark.parametrize("touch", [write_its_input, write_its_output, give_its_input_back, give_its_output_back])
def test_buffers_in_flight_are_left_alone(touch):
    role = "input" if "input" in touch.__name__ else "output"
    with pytest.raises(Disagreement, match=f"its {role} was written|memory of its {role} was given back"):
        run(touched, touch)


def freed_and_had_again() -> bool:
    memory = torch.ones(4)
    memory.untyped_storage().resize_(0)
    memory.untyped_storage().resize_(16)
    return bool(memory.isnan().all())


def test_memory_that_comes_back_is_poison():
    assert run(freed_and_had_again, world=1) == [True]


def one_gathers_more() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def other_collectives() -> None:
    dist.barrier() if dist.get_rank() else dist.all_gather_into_tensor(torch.zeros(2), torch.zeros(1))


def other_operations() -> None:
    dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def other_roots() -> None:
    dist.broadcast(torch.ones(1), dist.get_rank())


def other_dtypes() -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32 if dist.get_rank() else torch.float32))


def one_not_waited_for() -> None:
    if dist.get_rank() == 0:
        gather_begun()


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (one_gathers_more, r"all ranks wait: rank 0: all_reduce .*, rank 1: ended"),
        (other_collectives, r"meet in 0: all_gather .*, 1: all_reduce"),
        (other_operations, r"meet in 0: all_reduce .*SUM.*, 1: all_reduce .*MAX"),
        (other_roots, r"meet in 0: broadcast 0.*, 1: broadcast 1"),
        (other_dtypes, r"meet in 0: .*float32, 1: .*int32"),
        (one_not_waited_for, "a collective is left unmatched"),
    ],
)
def test_ranks_that_do_not_meet_are_reported(fn, words):
    with pytest.raises(Disagreement, match=words):
        run(fn)


def raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.barrier()


def test_the_error_of_a_rank_is_raised_and_the_others_are_let_go():
    with pytest.raises(KeyError, match="mine"):
        run(raises_on_one)


def everything_of_a_process(number: int) -> tuple[list[float], list[str], bool]:
    rank, model = dist.get_rank(), nn.Linear(2, 2)
    torch.manual_seed(rank), random.seed(rank)
    with warnings.catch_warnings(record=True) as heard, fullshard.record_events() as events:
        warnings.simplefilter("always")
        dist.barrier()
        drawn = [torch.rand(()).item(), random.random()]
        warnings.warn(f"of rank {rank}", stacklevel=1)
        fullshard.fully_shard(model)(torch.ones(1, 2))
        dist.barrier()
    return drawn, [str(each.message) for each in heard], {event.rank for event in events} == {rank}


def alone(rank: int) -> list[float]:
    torch.manual_seed(rank), random.seed(rank)
    return [torch.rand(()).item(), random.random()]


def test_what_is_a_processs_is_a_ranks():
    state = torch.get_rng_state()
    for rank, (drawn, heard, own) in enumerate(run(everything_of_a_process, 3)):
        assert (drawn, heard, own) == (alone(rank), [f"of rank {rank}"], True)
    torch.set_rng_state(state)


def test_collectives_are_counted_the_small_ones_too():
    with ThreadRanks(2) as ranks:
        ranks.run(lambda rank: gather_begun()[2].wait() and dist.barrier())
        assert ranks.counts == {"all_gather": 1, "all_reduce": 1}
