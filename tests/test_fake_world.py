"""One rank of a large world in this process: shapes, chunks and a whole step, on a group that moves no data."""

from __future__ import annotations

import pytest
import torch

import fullshard
from models import EXAMPLES
from training import LAYOUTS, OPTIMIZER, Options, shard


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "rank"), [("odd_mlp", 0), ("tied_within", 17), ("frozen", 63)])
def test_a_step_at_world_64(fake_world, name, rank, layout):
    """Sizes of 7, 13, 1023 and 1 over 64 ranks: most ranks hold nothing of most parameters."""
    fake_world(64, rank)
    example = EXAMPLES[name]
    plain = dict(example.make().named_parameters())
    model = shard(fullshard, example.make(), example, Options(layout=layout))
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for step in range(2):
        example.loss(model, example.batch(step, rank)).backward()
        optimizer.step()
    for parameter, sharded in model.named_parameters():
        assert sharded.shape == plain[parameter].shape, parameter
        assert (sharded.grad is None) == (not sharded.requires_grad), parameter
        if layout == "rows":
            chunks = plain[parameter].chunk(64)
            wanted = chunks[rank].shape if rank < len(chunks) else (0, *plain[parameter].shape[1:])
            assert sharded.to_local().shape == wanted, parameter
            if sharded.grad is not None:
                assert sharded.grad.to_local().shape == wanted, parameter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_at_world_64(fake_world, layout):
    """Flat pads 16 bytes a rank at most. Rows pad each dim 0 to the world, no more."""
    fake_world(64)
    example = EXAMPLES["odd_mlp_one_unit"]
    model = shard(fullshard, example.make(), example, Options(layout=layout))
    with fullshard.record_events() as events:
        example.loss(model, example.batch(0, 0)).backward()
    shapes = [p.shape for p in example.make().parameters()]
    if layout == "flat":
        wanted = sum(4 * shape.numel() for shape in shapes) + 64 * 16
    else:
        wanted = sum(64 * (-(-4 * -(-shape[0] // 64) * shape[1:].numel() // 16) * 16) for shape in shapes)
    for verb in ("gather", "reduce"):
        sent = [event.nbytes for event in events if event.verb == verb]
        assert len(sent) == 1
        assert sent[0] <= wanted, f"{verb} of {sent[0]} bytes where {wanted} are enough"
