"""What `memory_ranks.py` punishes, so that tests on it notice: reads too early, writes too late, hangs."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from unittest import mock

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


def add_to_its_output(given: torch.Tensor, out: torch.Tensor) -> None:
    out[-1:].add_(1)


def give_its_input_back(given: torch.Tensor, out: torch.Tensor) -> None:
    given.untyped_storage().resize_(0)


def give_its_output_back(given: torch.Tensor, out: torch.Tensor) -> None:
    out.untyped_storage().resize_(0)


def touched(touch: Callable) -> None:
    given, out, work = gather_begun()
    touch(given, out)
    work.wait()


@pytest.mark.parametrize(
    "touch", [write_its_input, write_its_output, add_to_its_output, give_its_input_back, give_its_output_back]
)
def test_buffers_in_flight_are_left_alone(touch):
    role = "input" if "input" in touch.__name__ else "output"
    with pytest.raises(Disagreement, match=f"its {role} was written|memory of its {role} was given back"):
        run(touched, touch)


def added_to_in_flight(dtype: torch.dtype, step: int) -> None:
    out = torch.zeros(8, dtype=dtype)[::step]
    work = dist.all_reduce(out, async_op=True)
    out.add_(1)
    work.wait()


# Of a float of one byte no NaN changes when something is added.
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.uint8]
)
def test_arithmetic_on_a_result_in_flight_is_seen(dtype, step):
    with pytest.raises(Disagreement, match=r"all_reduce of group .*: its output was written"):
        run(added_to_in_flight, dtype, step)


def broadcast_begun(x: torch.Tensor) -> dist.Work:
    return dist.broadcast(x, 0, async_op=True)


def gathered_in_place(x: torch.Tensor) -> dist.Work:
    return dist.all_gather_into_tensor(x, x.chunk(2)[dist.get_rank()], async_op=True)


def exchanged_in_place(x: torch.Tensor) -> dist.Work:
    return dist.all_to_all_single(x, x, async_op=True)


def written_in_place(begin: Callable, touches: bool) -> list[float]:
    x = torch.arange(4.0) + 10 * dist.get_rank()
    work = begin(x)
    if touches and dist.get_rank() == 0:
        x[:1].add_(1)
    work.wait()
    return x.tolist()


IN_PLACE = [
    (broadcast_begun, [[0, 1, 2, 3]] * 2),
    (gathered_in_place, [[0, 1, 12, 13]] * 2),
    (exchanged_in_place, [[0, 1, 10, 11], [2, 3, 12, 13]]),
]


@pytest.mark.parametrize(("begin", "expected"), IN_PLACE)
def test_an_input_that_is_also_output_is_left_alone(begin, expected):
    assert run(written_in_place, begin, False) == expected
    with pytest.raises(Disagreement, match=r"its (input|output) was written"):
        run(written_in_place, begin, True)


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


def none_waits() -> None:
    gather_begun()


def a_barrier_and_a_sum() -> None:
    dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(1))


def other_sizes() -> None:
    dist.all_reduce(torch.ones(1 + dist.get_rank()))


def less_room() -> None:
    dist.all_gather([torch.zeros(2) for _ in range(2)], torch.zeros(3))


def other_dtype_of_the_result() -> None:
    dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(2, dtype=torch.float64))


def asks_without_end() -> None:
    if dist.get_rank() == 0:
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass


def other_tags() -> None:
    dist.recv(torch.zeros(1), 0, tag=1) if dist.get_rank() else dist.send(torch.zeros(1), 1, tag=2)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (one_gathers_more, r"all ranks wait: rank 0: barrier .*, rank 1: ended"),
        (other_collectives, r"meet in 0: all_gather .*, 1: barrier"),
        (other_operations, r"meet in 0: all_reduce .*SUM.*, 1: all_reduce .*MAX"),
        (other_roots, r"meet in 0: broadcast 0.*, 1: broadcast 1"),
        (other_dtypes, r"meet in 0: .*float32, 1: .*int32"),
        (one_not_waited_for, "a collective is left unmatched"),
        (none_waits, r"never waited for: all_gather of group 0 of ranks \[0, 1\], no. 1"),
        (a_barrier_and_a_sum, r"meet in 0: all_reduce .*, 1: barrier"),
        (other_sizes, r"all_reduce of group 0 of ranks \[0, 1\], no. 1: different sizes, 0: \[\[1\]\], 1: \[\[2\]\]"),
        (less_room, r"all_gather of group 0 .*: rank . gets .*\(3, torch.float32\).* and has room for \[\(2,"),
        (other_dtype_of_the_result, r"rank . gets .*float64.* and has room for .*float32"),
        (asks_without_end, "all others wait: rank 0: runs, rank 1: ended; this one asks for barrier of group 0"),
        (other_tags, "all ranks wait: rank 0: p2p of group 0.*, rank 1: p2p of group 0"),
    ],
)
def test_ranks_that_do_not_meet_are_reported(fn, words):
    with pytest.raises(Disagreement, match=words):
        run(fn)


def rank_0_asks_first() -> None:
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        pass
    work.wait()


def test_a_loop_until_completed_lets_other_ranks_run():
    run(rank_0_asks_first, timeout=5)


def to_the_next_rank() -> list[float]:
    x, got, rank = torch.full((2,), 1.0 + dist.get_rank()), torch.zeros(2), dist.get_rank()
    works = [dist.isend(x, (rank + 1) % 3), dist.irecv(got, (rank - 1) % 3)]
    early = got.isnan().all().item()
    for work in works:
        work.wait()
    dist.reduce(x, 1)
    return [early, got[0].item(), x[0].item()]


def test_sends_and_reductions_at_one_rank():
    assert run(to_the_next_rank, world=3) == [[True, 3, 1], [True, 1, 6], [True, 2, 3]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.recv(torch.zeros(1)), "have no recv_anysource"),
        (lambda: dist.all_gather_coalesced([[torch.zeros(1)] * 2], [torch.zeros(1)]), "have no allgather_coalesced"),
        (lambda: dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0)), "do not reduce by .*PREMUL_SUM"),
    ],
)
def test_what_is_not_here_says_so(call, words):
    with ThreadRanks(2) as ranks, pytest.raises(NotImplementedError, match=words):
        ranks.run(lambda _: call())


def raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.barrier()


def test_the_error_of_a_rank_is_raised_and_the_others_are_let_go():
    with pytest.raises(KeyError, match="mine"):
        run(raises_on_one)


def one_raises_and_the_other_on_its_way_out() -> None:
    try:
        raises_on_one()
    except SystemExit:
        raise ValueError("of a rank that was let go") from None


def test_what_is_raised_later_does_not_hide_it():
    with pytest.raises(KeyError, match="mine"):
        run(one_raises_and_the_other_on_its_way_out)


class Patched:
    word = "of all"
    table = {"word": "of all"}  # noqa: RUF012 -- patched


def patched_for_a_while() -> list[str]:
    rank, words = dist.get_rank(), []
    for _ in range(rank):
        dist.barrier()  # rank 0 enters first, and leaves first
    with mock.patch.object(Patched, "word", f"of {rank}"), mock.patch.dict(Patched.table, word=f"of {rank}"):
        for _ in range(2):
            dist.barrier()
            words += [Patched.word, Patched.table["word"]]
    for _ in range(1 - rank):
        dist.barrier()
        words += [Patched.word, Patched.table["word"]]
    return words


def test_a_patch_is_its_ranks():
    assert run(patched_for_a_while) == [["of 0"] * 4 + ["of all"] * 2, ["of 1"] * 4]
    assert (Patched.word, Patched.table) == ("of all", {"word": "of all"})


def raises_with_a_patch() -> None:
    with mock.patch.object(Patched, "word", f"of {dist.get_rank()}"), mock.patch.dict(os.environ, WORD="1"):
        raises_on_one()


def test_a_patch_of_a_rank_that_is_let_go_ends():
    with pytest.raises(KeyError, match="mine"):
        run(raises_with_a_patch)
    assert Patched.word == "of all" and "WORD" not in os.environ


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
        assert ranks.counts == {"all_gather": 1, "barrier": 1}
