"""The wrapper together with activation checkpointing, and copies of one that has cast buffers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fullshard
from wrapped import Block, batch, blocks, same, sharded, trained, whole, wrap

WRAPPINGS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for part in WRAPPINGS:
        tensors = {name.replace(part, ""): tensor for name, tensor in tensors.items()}
    return tensors


class Recomputing(nn.Module):
    """Calls its block through `torch.utils.checkpoint`."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


def checkpointed(where: str, reentrant: bool, originals: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    if where == "inside":
        model = sharded(originals, nn.Sequential(*(checkpoint_wrapper(b, checkpoint_impl=kind) for b in blocks())))
    elif where == "outside":
        model = blocks()
        for i, block in enumerate(model):
            inner = wrap(fullshard, block, use_orig_params=originals)
            model[i] = checkpoint_wrapper(inner, checkpoint_impl=kind)
        model = wrap(fullshard, model, use_orig_params=originals)
    elif where == "applied":
        model = sharded(originals)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=kind),
            check_fn=lambda m: isinstance(m, Block),
        )
    else:
        model = blocks()
        for i, block in enumerate(model):
            model[i] = Recomputing(wrap(fullshard, block, use_orig_params=originals), reentrant)
        model = wrap(fullshard, model, use_orig_params=originals)
    train_first_leaf(model)
    found = {name.replace(".inner.", "."): t for name, t in clean(whole(fullshard, model)).items()}
    same(found, trained(blocks()))
    keys = [name.replace(".inner.", ".") for name in model.state_dict()]
    assert keys == list(blocks().state_dict())


def train_first_leaf(model: nn.Module) -> None:
    """As `train`, with inputs that need a gradient: reentrant checkpointing asks for that."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank()).requires_grad_()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("where", "reentrant", "originals"),
    [("inside", True, False), ("outside", False, True), ("applied", True, True), ("by function", True, False)],
)
def test_activation_checkpointing(run_ranks, where: str, reentrant: bool, originals: bool) -> None:
    run_ranks(checkpointed, where, reentrant, originals)


def copied_with_cast_buffers(originals: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    mixed = fullshard.MixedPrecision(buffer_dtype=torch.float64)
    model = wrap(fullshard, model, mixed_precision=mixed, use_orig_params=originals)
    assert model.check_is_root()  # settles the root, which casts buffers
    twin = copy.deepcopy(model)
    assert twin.module[1].running_mean.dtype == torch.float64
    assert twin.state_dict()["1.running_mean"].dtype == torch.float32


def test_copies_know_the_dtypes_that_buffers_had(run_ranks) -> None:
    run_ranks(copied_with_cast_buffers, True)
