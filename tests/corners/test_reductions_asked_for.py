"""Gradients that were kept are reduced when a program asks the root to, with no backward: as pipelines do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import batch, layers, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import GradientReductionHandle, fully_shard, record_events, share_comm_ctx
from fullshard.errors import PhaseError
from ways import on_ranks


def backward(model: nn.Module, micro: int = 0) -> None:
    model(batch(micro, dist.get_rank())).square().mean().backward()


def backward_of_all(reference: nn.Module, micro: int = 0) -> None:
    for rank in range(dist.get_world_size()):
        (reference(batch(micro, rank)).square().mean() / dist.get_world_size()).backward()


def check_gradients(model: nn.Module, micros: Iterable[int], reference: nn.Module | None = None) -> None:
    """`.grad` is the sum over micro-batches of the mean over ranks, as one process has it."""
    reference = layers() if reference is None else reference
    for micro in micros:
        backward_of_all(reference, micro)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def refused(words: str, call: Callable[[], object]) -> None:
    """With a RuntimeError, as PyTorch's does."""
    with pytest.raises(RuntimeError, match=words) as error:
        call()
    assert isinstance(error.value, PhaseError)


def no_sync(model: Any, *micros: int) -> None:
    """Backwards that keep gradients, and units."""
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for micro in micros:
        backward(model, micro)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)


@on_ranks
def test_kept_gradients_are_reduced_once() -> None:
    """By the callback that pipelines call, two rounds without `zero_grad`; by `finalize_backward`, at once or not."""
    model, reference = shard(layers()), layers()
    callback = fully_shard.state(model)._root_post_backward_final_callback
    for round_ in range(2):
        no_sync(model, *(micros := range(3 * round_, 3 * round_ + 3)))
        assert all(p.grad is None for p in model.parameters()) is (round_ == 0)
        callback()
        check_gradients(model, micros, reference)
    callback()  # nothing was kept: nothing changes
    check_gradients(model, (), reference)
    model = shard(layers())
    assert model.finalize_backward() is None
    assert isinstance(model.finalize_backward(async_op=True), GradientReductionHandle)
    for asynchronous in (False, True):
        model.set_manual_backward_finalization(True)
        no_sync(model, *range(3))
        assert all(p.grad is None for p in model.parameters())
        with record_events() as events:
            handle = model.finalize_backward(async_op=asynchronous)
            if asynchronous:
                assert any(p.grad is None for p in model.parameters())
                handle.wait(), handle.wait()
        verbs = [event.verb for event in events if event.unit != "(root)"]
        assert verbs.count("reduce") == 2 and verbs.count("gather") == 0, verbs
        check_gradients(model, range(3))
        model.zero_grad()
        model.set_manual_backward_finalization(False)
    backward(model)
    check_gradients(model, [0])
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    for _ in range(2):  # with sync
        backward(model)
        model.finalize_backward()
        check_gradients(model, [0])
        model.zero_grad()


@on_ranks
def test_when_a_reduction_is_refused() -> None:
    """Below the root, within a pass, while another one is under way, or where nothing says that it comes."""
    model = shard(layers())
    told: list[str] = []

    def ask(*_: Any) -> None:
        refused("while the model runs", fully_shard.state(model)._root_post_backward_final_callback)
        told.append("forward")

    def ask_in_backward(*_: Any) -> None:
        refused("within an iteration whose backward has begun", lambda: model.set_manual_backward_finalization(False))
        refused("cannot be reduced while the model runs", model.finalize_backward)
        model.set_manual_backward_finalization(True)  # as it is
        told.append("backward")

    handle = model[0].register_forward_pre_hook(ask)
    backward(model)
    handle.remove()
    refused("is for the root", fully_shard.state(model[0])._root_post_backward_final_callback)
    check_gradients(model, [0])
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    backward(model)
    refused("needs manual finalization", model.finalize_backward)
    refused("is for the root; unit", model[0].finalize_backward)
    refused("is for the root; unit", lambda: model[0].set_manual_backward_finalization(True))
    model.set_manual_backward_finalization(True)
    handle = model[0].register_full_backward_pre_hook(ask_in_backward)
    backward(model)
    handle.remove()
    assert told == ["forward", "backward"]
    refused("within an iteration whose backward has begun", lambda: model.set_manual_backward_finalization(False))
    model.set_requires_gradient_sync(True)
    later = model(batch(0, dist.get_rank())).square().mean()
    handle = model.finalize_backward(async_op=True)
    refused("was not waited for", later.backward)  # its forward was before
    refused("was not waited for", lambda: model(batch(0, 0)))
    refused("was not waited for", lambda: model[0](batch(0, 0)))
    refused("was not waited for", model.finalize_backward)
    refused("within an iteration whose backward has begun", lambda: model.set_manual_backward_finalization(False))
    handle.wait()
    check_gradients(model, [0, 0])
    model.zero_grad()
    no_sync(model, 0)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    refused("dropped before it was waited for", handle.wait)
    refused("dropped before it was waited for", handle.wait)
    model.zero_grad()
    backward(model)
    model.finalize_backward()
    check_gradients(model, [0])


@on_ranks
def test_a_reset_drops_the_iteration_that_was_not_finalized() -> None:
    """As torch 2.15: what is repeated after it counts once. Sync was on, so that `.grad` was there already."""
    model = shard(layers())
    model.set_manual_backward_finalization(True)
    for way in ("after a backward", "with a handle", "after an exception"):
        model.zero_grad()
        backward(model)
        if way == "with a handle":
            model.finalize_backward(async_op=True)
        if way == "after an exception":
            output = model(batch(0, dist.get_rank()))
            output.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
        model.reset_iter_state()
        assert all(p.grad is None for p in model.parameters()), way
        backward(model)
        model.finalize_backward()
        check_gradients(model, [0])
    backward(model)  # added to what was finalized
    refused("added to older ones", model.reset_iter_state)
    model.zero_grad()
    handle = model[0].register_forward_hook(lambda *_: model.reset_iter_state())
    refused("called while the model runs", lambda: backward(model))
    handle.remove()
    backward(model)
    model.finalize_backward()
    check_gradients(model, [0])


@on_ranks
def test_roots_that_share_a_context_wait_for_each_other() -> None:
    one, two, other = (shard(layers()) for _ in range(3))
    share_comm_ctx([one, two])
    states = [fully_shard.state(model) for model in (one, two, other)]
    assert states[0]._comm_ctx is states[1]._comm_ctx is not states[2]._comm_ctx
    for model in (one, two):
        model.set_manual_backward_finalization(True)
        no_sync(model, 0)
    handle = one.finalize_backward(async_op=True)
    refused("was not waited for", two.finalize_backward)
    refused("was not waited for", lambda: two(batch(0, 0)))
    handle.wait()
    two.finalize_backward()
    check_gradients(one, [0]), check_gradients(two, [0])


@on_ranks(world=4)
def test_replicas_are_not_left_apart() -> None:
    model = shard(layers(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    backward(model)
    refused("cannot leave gradients that differ between replicas", model.finalize_backward)
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    check_gradients(model, [0])


@on_ranks
def test_kept_storage_has_one_address() -> None:
    model, reference = shard(layers()), layers()
    model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    seen: list[list[int]] = []
    handle = model[0].register_forward_pre_hook(lambda m, _: seen.append([p.data_ptr() for p in m.parameters()]))
    for step in range(3):
        backward(model, step), backward_of_all(reference, step)
        filler: Tensor = torch.empty(2**16)  # takes what was given back
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        del filler
    handle.remove()
    assert seen[0] == seen[1] == seen[2], seen
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other.detach())
    unit = fully_shard.state(model[0])._runner.unit
    assert all(bucket.full.live_bytes == bucket.full_bytes for bucket in unit.buckets)
    gathered = unit.ledger.gathered
    assert gathered >= unit.full_bytes
    model[0].set_keep_unsharded_storage(False)
    assert all(bucket.full.live_bytes == 0 for bucket in unit.buckets)
    assert unit.ledger.gathered == gathered - unit.full_bytes
    model.set_keep_unsharded_storage(False)
    assert unit.ledger.gathered == 0
