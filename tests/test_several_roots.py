"""Several roots in one program: pipeline chunks that share a communication context, interleaved in every way."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard, share_comm_ctx
from test_method_effects import NeverSaysDone

CHUNKS, WIDTH = 2, 4


def chunk(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def sharded_chunks(shared: str, **settings: object) -> list[nn.Module]:
    chunks = [chunk(index) for index in range(CHUNKS)]
    for model in chunks:
        for layer in model:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
    if shared == "before":
        share_comm_ctx(chunks)
    return chunks


def inputs(micro: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * micro + rank))


def one_after_the_other(chunks: list[nn.Module], batch) -> Tensor:
    loss = chunks[1](chunks[0](batch(0))).square().mean()
    loss.backward()
    return loss


def two_micro_batches(chunks: list[nn.Module], batch) -> Tensor:
    """Forwards A A B B, backwards B A B A: each chunk is cut from the other's graph, as in a pipeline."""
    between = [chunks[0](batch(micro)) for micro in range(2)]
    cut = [tensor.detach().requires_grad_() for tensor in between]
    losses = [chunks[1](tensor).square().mean() for tensor in cut]
    for tensor, leaf, loss in zip(between, cut, losses, strict=True):
        loss.backward()
        tensor.backward(leaf.grad)
    return losses[0] + losses[1]


def interleaved(chunks: list[nn.Module], batch) -> Tensor:
    """Forward A0 B0 A1, backward B0, forward B1, backward A0 B1 A1."""
    first = chunks[0](batch(0))
    cut = first.detach().requires_grad_()
    loss = chunks[1](cut).square().mean()
    second = chunks[0](batch(1))
    loss.backward()
    other = second.detach().requires_grad_()
    last = chunks[1](other).square().mean()
    first.backward(cut.grad)
    last.backward()
    second.backward(other.grad)
    return loss + last


SCHEDULES = {f.__name__: f for f in (one_after_the_other, two_micro_batches, interleaved)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shared", ["never", "before", "between"])
def test_numbers_of_interleaved_roots(run_ranks, schedule, shared):
    assert all(run_ranks(as_one_process, schedule, shared))


def as_one_process(schedule: str, shared: str) -> bool:
    chunks, whole = sharded_chunks(shared), [chunk(index) for index in range(CHUNKS)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        if step == 1 and shared == "between":
            share_comm_ctx(chunks)
        SCHEDULES[schedule](chunks, lambda micro, step=step: inputs(micro + 5 * step, rank))
        for other in range(world):  # the mean over ranks
            SCHEDULES[schedule](whole, lambda micro, step=step, other=other: inputs(micro + 5 * step, other))
        for mine, theirs in zip(chunks, whole, strict=True):
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad / world, rtol=1e-5, atol=1e-7)
            mine.zero_grad()
            theirs.zero_grad()
            assert fullshard.memory_use(mine).gathered == 0
    return True


class HoldsOn(torch.autograd.Function):
    """Runs the other chunk's backward within this one's: both have reductions in flight."""

    @staticmethod
    def forward(ctx, x, other):
        ctx.other = other
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.other[0].backward()
        return grad, None


@pytest.mark.parametrize(("shared", "most"), [("never", 2), ("before", 1)])
def test_reductions_in_flight_are_bounded_together(fake_world, shared, most):
    fake_world(4)
    chunks = sharded_chunks(shared, comm=NeverSaysDone(fullshard.TorchComm()))
    x = torch.ones(1, WIDTH)

    def nested() -> None:
        other = chunks[1](x).sum()
        first = chunks[0]
        handle = first[0].register_forward_hook(lambda m, a, out: HoldsOn.apply(out, [other]))
        loss = first(x).sum()
        handle.remove()
        loss.backward()

    nested()
    flying, highest = 0, 0
    with fullshard.record_events() as events:
        nested()
    for event in events:
        flying += {"reduce": 1, "reduced": -1}.get(event.verb, 0)
        highest = max(highest, flying)
    assert (flying, highest) == (0, most)


def test_sharing_leaves_the_others_reductions_to_them(fake_world):
    """A root that recovers drops its own reductions in flight, not those of a root it shares with."""
    fake_world(2)
    chunks = sharded_chunks("before")
    for model in chunks:
        model(torch.ones(1, WIDTH)).sum().backward()
    first, second = (model._runner().root for model in chunks)
    assert first.reducer.in_flight is second.reducer.in_flight
    entry = (second.reducer, second.top)
    first.reducer.in_flight.append(entry)
    first.recover()
    assert list(first.reducer.in_flight) == [entry]
    first.reducer.in_flight.clear()


@pytest.mark.parametrize("reshard", [True, 2], ids=["kept storage", "kept slices"])
def test_bytes_that_a_lent_unit_keeps_go_with_it(fake_world, reshard):
    fake_world(4)
    unit = fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=reshard)
    if reshard is True:
        unit.set_keep_unsharded_storage(True)
    models = [fully_shard(nn.Sequential(unit)) for _ in range(2)]
    ledgers = []
    for model in (*models, *models):
        model(torch.ones(1, WIDTH)).sum()  # no backward
        ledgers = [model._runner().root.ledger for model in models if model._runner().root is not None]
        alive = [bucket.kept_bytes + bucket.full.live_bytes for bucket in unit._runner().unit.buckets]
        assert sum(ledger.gathered for ledger in ledgers) == sum(alive) > 0
        assert unit._runner().unit.ledger.gathered == sum(alive)


def test_roots_that_another_thread_makes_meanwhile():
    """What looks at all roots of the process (`zero_grad`, `backward`) goes on beside a thread that makes one."""
    from fullshard.runtime import root

    class Light:
        """Counts as a root."""

    with mock.patch.object(root, "ROOTS", type(root.ROOTS)()):
        before = [Light() for _ in range(1000)]
        for one in before:
            root.ROOTS[id(one)] = one
        over = threading.Event()

        def make() -> None:
            while not over.is_set():
                one = Light()
                root.ROOTS[id(one)] = one

        thread = threading.Thread(target=make)
        thread.start()
        try:
            for _ in range(300):
                assert len(root.all_roots()) >= 1000
        finally:
            over.set()
            thread.join()
