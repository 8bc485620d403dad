"""Padding of a layout takes memory while a unit is gathered or reduced, and none between steps."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from fullshard import fully_shard, memory_use


def storages() -> dict[int, int]:
    """Bytes of all memory that tensors of this process use, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            parts = [thing] if type(thing) in (torch.Tensor, nn.Parameter) else []
            found |= {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return found


@pytest.mark.parametrize("layout", ["owner", "rows", "flat"])
def test_nothing_of_the_padding_is_kept_between_steps(fake_world, layout):
    """Of two matrices on 8 ranks, layout "owner" pads three times as much as there is."""
    fake_world(8)
    before = storages()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(3)])
    for block in model:
        fully_shard(block, layout=layout)
    fully_shard(model, layout=layout)
    for _ in range(3):
        model(torch.ones(2, 128)).sum().backward()
        model.zero_grad()
    kept = sum(nbytes for address, nbytes in storages().items() if address not in before)
    use = memory_use(model)
    assert kept <= use.parameters + use.gradients + 2**17
