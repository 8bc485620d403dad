"""Gradients that were kept are reduced when a program asks the root to, with no backward: as pipelines do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import batch, layers
from torch import nn

from fullshard import fully_shard
from fullshard.errors import PhaseError


def units() -> Any:
    model = layers()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def test_kept_gradients_are_reduced_once(run_ranks):
    assert all(run_ranks(reduced))


def reduced() -> bool:
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
    return True


def test_only_the_root_reduces_and_only_between_passes(run_ranks):
    assert all(run_ranks(refused))


def refused() -> bool:
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
    return True
