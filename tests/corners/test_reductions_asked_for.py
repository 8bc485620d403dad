"""Gradients that were kept are reduced when a program asks the root to, with no backward: as pipelines do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import batch, layers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import GradientReductionHandle, fully_shard, record_events, share_comm_ctx
from fullshard.errors import PhaseError
from ways import on_ranks


def units(mesh: Any = None) -> Any:
    model = layers()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_kept_gradients_are_reduced_once(run_ranks):
    run_ranks(reduced)


def reduced() -> None:
    model, reference = units(), layers()
    model.set_reshard_after_backward(False)
    for step in range(2):
        model.set_requires_gradient_sync(False)
        for micro in range(3):
            model(batch(3 * step + micro, dist.get_rank())).square().mean().backward()
        assert all(p.grad is None for p in model.parameters()) is (step == 0)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        fully_shard.state(model)._root_post_backward_final_callback()
        for micro in range(3):
            for rank in range(dist.get_world_size()):
                loss = reference(batch(3 * step + micro, rank)).square().mean() / dist.get_world_size()
                loss.backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_only_the_root_reduces_and_only_between_passes(run_ranks):
    run_ranks(refused)


def refused() -> None:
    model = units()
    told: list[str] = []

    def ask(module: nn.Module, _: Any) -> None:
        with pytest.raises(PhaseError) as error:
            fully_shard.state(model)._root_post_backward_final_callback()
        told.append(str(error.value))

    handle = model[0].register_forward_pre_hook(ask)
    model(batch(0, dist.get_rank())).sum().backward()
    handle.remove()
    assert len(told) == 1 and "while the model runs" in told[0]
    with pytest.raises(PhaseError, match="by the root"):
        fully_shard.state(model[0])._root_post_backward_final_callback()
    before = [p.grad.full_tensor().clone() for p in model.parameters()]
    fully_shard.state(model)._root_post_backward_final_callback()  # nothing was kept: nothing changes
    for old, p in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), old)


def check_gradients(model: nn.Module, micros: range) -> None:
    """`.grad` is the sum over micro-batches of the mean over ranks, as one process has it."""
    reference = layers()
    for micro in micros:
        for rank in range(dist.get_world_size()):
            (reference(batch(micro, rank)).square().mean() / dist.get_world_size()).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_finalize_backward_reduces_what_micro_batches_left(run_ranks):
    run_ranks(finalized)


def finalized() -> None:
    model = units()
    assert model.finalize_backward() is None and isinstance(
        model.finalize_backward(async_op=True), GradientReductionHandle
    )
    for asynchronous in (False, True):
        model.set_manual_backward_finalization(True)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        for micro in range(3):
            model(batch(micro, dist.get_rank())).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        with record_events() as events:
            handle = model.finalize_backward(async_op=asynchronous)
            if asynchronous:
                assert handle is not None
                assert any(p.grad is None for p in model.parameters())
                handle.wait()
                handle.wait()
        verbs = [event.verb for event in events if event.unit != "(root)"]
        assert verbs.count("reduce") == 2 and verbs.count("gather") == 0, verbs
        check_gradients(model, range(3))
        model.zero_grad()
        model.set_manual_backward_finalization(False)
    model(batch(0, dist.get_rank())).square().mean().backward()
    check_gradients(model, range(1))


@on_ranks
def test_finalization_with_sync_leaves_whole_gradients() -> None:
    model = units()
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model(batch(0, dist.get_rank())).square().mean().backward()
        model.finalize_backward()
        check_gradients(model, range(1))
        model.zero_grad()


@on_ranks
def test_when_finalization_is_refused() -> None:
    """The calls that PyTorch's refuses with a RuntimeError."""

    def refused(code: str, call: Any) -> None:
        with pytest.raises(RuntimeError) as error:
            call()
        assert code in str(error.value), error.value

    def backward(model: nn.Module) -> None:
        model(batch(0, dist.get_rank())).square().mean().backward()

    model = units()
    model.set_requires_gradient_sync(False)
    backward(model)
    refused("P347", model.finalize_backward)
    refused("P348", model[0].finalize_backward)
    refused("P348", lambda: model[0].set_manual_backward_finalization(True))
    model.set_manual_backward_finalization(True)
    seen: list[int] = []

    def inside(*_: Any) -> None:
        refused("P346", lambda: model.set_manual_backward_finalization(False))
        refused("P042", model.finalize_backward)
        model.set_manual_backward_finalization(True)  # as it is
        seen.append(1)

    hook = model[0].register_full_backward_pre_hook(inside)
    backward(model)
    hook.remove()
    assert seen == [1]
    refused("P346", lambda: model.set_manual_backward_finalization(False))
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    refused("P345", lambda: model(batch(0, 0)))
    refused("P345", lambda: model[0](batch(0, 0)))
    refused("P345", model.finalize_backward)
    refused("P346", lambda: model.set_manual_backward_finalization(False))
    handle.wait()
    summed = [p.grad.full_tensor().clone() for p in model.parameters()]
    model.zero_grad()
    backward(model)
    for twice, p in zip(summed, model.parameters(), strict=True):
        torch.testing.assert_close(twice, 2 * p.grad.full_tensor())
    model.set_requires_gradient_sync(False)
    backward(model)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    refused("P343", handle.wait)
    refused("P343", handle.wait)
    model.zero_grad()
    backward(model)
    model.finalize_backward()
    check_gradients(model, range(1))


@on_ranks
def test_a_reset_drops_the_iteration_that_was_not_finalized() -> None:
    """As torch 2.15: what is repeated after it counts once. Sync was on, so that `.grad` was there already."""
    model = units()
    model.set_manual_backward_finalization(True)

    def backward(micro: int = 0) -> None:
        model(batch(micro, dist.get_rank())).square().mean().backward()

    def whole() -> list[torch.Tensor]:
        return [p.grad.full_tensor().clone() for p in model.parameters()]

    backward()
    model.finalize_backward()
    expected = whole()
    for way in ("after a backward", "with a handle", "after an exception"):
        model.zero_grad()
        backward()
        if way == "with a handle":
            model.finalize_backward(async_op=True)
        if way == "after an exception":
            output = model(batch(0, dist.get_rank()))
            output.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
        model.reset_iter_state()
        assert all(p.grad is None for p in model.parameters()), way
        backward()
        model.finalize_backward()
        for one, other in zip(whole(), expected, strict=True):
            torch.testing.assert_close(one, other)
    backward()  # added to what was finalized
    with pytest.raises(PhaseError, match="P417"):
        model.reset_iter_state()
    model.zero_grad()
    handle = model[0].register_forward_hook(lambda *_: model.reset_iter_state())
    with pytest.raises(PhaseError, match="P416"):
        backward()
    handle.remove()
    backward()
    model.finalize_backward()
    for one, other in zip(whole(), expected, strict=True):
        torch.testing.assert_close(one, other)


@on_ranks
def test_roots_that_share_a_context_wait_for_each_other() -> None:
    one, two = units(), units()
    share_comm_ctx([one, two])
    states = [fully_shard.state(model) for model in (one, two, units())]
    assert states[0]._comm_ctx is states[1]._comm_ctx is not states[2]._comm_ctx
    for model in (one, two):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        model(batch(0, dist.get_rank())).square().mean().backward()
        model.set_requires_gradient_sync(True)
    handle = one.finalize_backward(async_op=True)
    for call in (two.finalize_backward, lambda: two(batch(0, 0))):
        with pytest.raises(PhaseError, match="P345"):
            call()
    handle.wait()
    two.finalize_backward()
    for model in (one, two):
        check_gradients(model, range(1))


@on_ranks(world=4)
def test_replicas_are_not_left_apart() -> None:
    model = units(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    model(batch(0, dist.get_rank())).square().mean().backward()
    with pytest.raises(PhaseError, match="P344"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    check_gradients(model, range(1))


@on_ranks
def test_kept_storage_has_one_address() -> None:
    model = units()
    model.set_keep_unsharded_storage(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = layers()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    seen: list[list[int]] = []
    handle = model[0].register_forward_pre_hook(lambda m, _: seen.append([p.data_ptr() for p in m.parameters()]))
    for step in range(3):
        model(batch(step, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (reference(batch(step, rank)).square().mean() / dist.get_world_size()).backward()
        filler = torch.empty(2**16)  # takes what was given back
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
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
