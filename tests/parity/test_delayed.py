"""The parity recipes with communication and memory that are late and poisoned (tests/poison.py), and the poison itself.

A read before a wait, or of memory that was given back, is NaN in a loss; a write into a buffer in flight raises.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from models import EXAMPLES
from poison import POISON, DelayedComm, Poisoned, as_bytes, delayed, poisoned_memory
from training import FP32, LAYOUTS, PACKED, Options, assert_same, parity
from wrapped import Wrapping, wrapped_parity

BF16 = 0.1  # of norms, per tensor: what gradients of these models differ by when computed in bfloat16

SETTINGS = {  # beside the defaults, which every example runs with
    "no prefetch": Options(prefetch=0),
    "two units ahead": Options(prefetch=2),
    "kept after forward": Options(reshard=False),
    "micro-batches": Options(micro_batches=3),
    "micro-batches without sync": Options(micro_batches=3, sync=False),
    "clipped": Options(clip="fullshard"),
    "bf16": Options(precision="bf16"),
    "fp16 reductions": Options(precision="fp16_reduce"),
}
LOOSE = {"bf16": BF16, "fp16 reductions": 1e-2}
WRAPPINGS = {
    "full shard": Wrapping(),
    "shard gradients": Wrapping(strategy="SHARD_GRAD_OP"),
    "no shard": Wrapping(strategy="NO_SHARD"),
    "prefetch after": Wrapping(prefetch="BACKWARD_POST", limit=False),
    "no prefetch": Wrapping(prefetch=None),
    "clipped": Wrapping(clip=True),
    "micro-batches without sync": Wrapping(step=Options(micro_batches=3, sync=False)),
}


def examples(names: list[str], options: Options, seed: int, tolerance: float = FP32) -> list[str]:
    """Parity of each example under delay; the differences found, each with its example and seed."""
    problems = []
    for name in names:
        with delayed(seed) as comm:
            found = parity(name, options, tolerance, check_torch=False)
        assert comm.issued > 0
        problems += [f"{name}, seed {seed}, {options}: {problem}" for problem in found]
    return problems


def wrapped_examples(names: list[str], wrapping: Wrapping, seed: int) -> list[str]:
    problems = []
    for name in names:
        with delayed(seed) as comm:
            found = wrapped_parity(name, wrapping, FP32, check_torch=False)
        assert comm.issued > 0
        problems += [f"{name}, seed {seed}, {wrapping}: {problem}" for problem in found]
    return problems


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, example in EXAMPLES.items() for layout in example.layouts]
)
def test_example(run_ranks, name, layout):
    assert_same(run_ranks(examples, [name], Options(layout=layout), sorted(EXAMPLES).index(name)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(run_ranks, setting, layout):
    options = replace(SETTINGS[setting], layout=layout)
    assert_same(run_ranks(examples, ["nested"], options, 2, LOOSE.get(setting, FP32)))


@pytest.mark.parametrize("layout", PACKED, ids=str)
def test_packed(run_ranks, layout):
    options = Options(layout=layout, micro_batches=2, sync=False, prefetch=2)
    assert_same(run_ranks(examples, ["nested", "tied_across"], options, 5))


@pytest.mark.parametrize(("setting", "mesh"), [("prefetch=1", "hybrid"), ("reshard=2", "default")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks(run_ranks, setting, mesh, layout):
    """Replicas, which are reduced over in a second collective; and units kept on two of four ranks."""
    name, _, value = setting.partition("=")
    options = Options(layout=layout, mesh=mesh, **{name: int(value)})
    assert_same(run_ranks(examples, ["gpt", "frozen"], options, 3, world=4))


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrapper(run_ranks, wrapping, orig):
    chosen = replace(WRAPPINGS[wrapping], orig=orig)
    assert_same(run_ranks(wrapped_examples, ["nested", "repeated"], chosen, 4))


# The poison itself: each rule seen to bite.


class Axis:
    """One rank; all that a local copy needs."""

    size, rank = 1, 0


def alone(seed: int = 0) -> DelayedComm:
    """In a process without a group: a collective of one rank is a copy, late and poisoned like any other."""
    return DelayedComm(fullshard.TorchComm(), seed)


def test_results_arrive_at_the_wait():
    comm, shard, out = alone(), torch.arange(3.0), torch.zeros(3)
    pending = comm.gather(Axis(), out, shard)
    assert out.isnan().all()
    with pytest.raises(Poisoned, match="never waited for: gather 1"):
        comm.check_settled()
    pending.wait()
    assert out.equal(shard)
    comm.check_settled()
    pending.wait()  # once more changes nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int8], ids=str)
def test_poison_of_every_dtype(dtype):
    comm, out = alone(), torch.ones(2, dtype=dtype)
    pending = comm.gather(Axis(), out, torch.zeros(2, dtype=dtype))
    assert out.isnan().all() if dtype is not torch.int8 else out.eq(-1).all()
    pending.wait()
    assert out.eq(0).all()


def test_an_input_is_not_written_in_flight():
    buffer, out = torch.ones(3), torch.zeros(3)
    pending = alone().reduce(Axis(), out, buffer, True)
    buffer[1] = 2.0
    with pytest.raises(Poisoned, match=r"reduce 1 .* input was written"):
        pending.wait()


def test_an_output_is_not_written_in_flight():
    tensor = torch.ones(3)
    pending = alone().all_reduce(Axis(), tensor, True)
    tensor.zero_()
    with pytest.raises(Poisoned, match=r"all_reduce 1 .* output was written"):
        pending.wait()


@pytest.mark.parametrize("role", ["input", "output"])
def test_memory_is_not_given_back_in_flight(role):
    buffers = {"input": torch.ones(3), "output": torch.zeros(3)}
    pending = alone().gather(Axis(), buffers["output"], buffers["input"])
    buffers[role].untyped_storage().resize_(0)
    with pytest.raises(Poisoned, match=f"{role} was given back"):
        pending.wait()


def test_polls_differ_between_ranks_and_repeat_by_seed(run_ranks):
    first, second, third = run_ranks(polls, 5), run_ranks(polls, 5), run_ranks(polls, 6)
    assert first == second != third
    assert first[0] != first[1]
    assert {True, False} <= set(first[0])


def polls(seed: int) -> list[bool]:
    comm = alone(seed)
    for _ in range(8):
        pending = comm.gather(Axis(), torch.zeros(1), torch.zeros(1))
        for _ in range(4):
            pending.is_completed()
        pending.wait()
        assert pending.is_completed()
    return comm.polls


def test_polls_are_asked_in_training(run_ranks):
    """Else nothing is known of what a rank does that sees a reduction done earlier than others do."""
    run_ranks(polled)


def polled() -> None:
    with delayed(0) as comm:
        model = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        assert comm.kind == "delayed(torch)" and comm.issued > dist.get_world_size()


def test_freed_memory_is_poison():
    tensor = torch.ones(4)
    with poisoned_memory():
        storage = tensor.untyped_storage()
        kept = torch.ones(4)
        kept.untyped_storage().resize_(8)
        assert kept[:2].eq(1).all()  # what stays is kept
        kept.untyped_storage().resize_(16)
        assert kept[:2].eq(1).all() and kept[2:].isnan().all()  # what comes is poison
        storage.resize_(0)
        storage.resize_(16)
        assert as_bytes(tensor).eq(POISON).all()
        assert torch.empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    storage.resize_(0)
    assert not storage.nbytes()
