"""Ranks that start from different weights: warned of where each drew them, refused where it would be no model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import DivergenceError, FullyShardedDataParallel, ShardingStrategy, fully_shard
from training import mesh_of
from ways import on_ranks

BATCH = torch.ones(2, 4)


def drawn() -> nn.Sequential:
    """Other values on every rank."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def shard(model: nn.Module, way: str) -> nn.Module:
    if way == "wrapper":
        return FullyShardedDataParallel(model)
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


@on_ranks
def test_what_every_rank_drew_is_trained_with_a_warning() -> None:
    """Each rank keeps its slice of its own draw, as in PyTorch. The first warns, at the line that calls the model."""
    for way in ("functional", "wrapper"):
        model = shard(drawn(), way)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(BATCH).sum().backward()
        assert [warning.filename for warning in caught] == [__file__] * (dist.get_rank() == 0)
        for warning in caught:
            assert re.search(r"(?s)start from different weights.*parameter: +0\.weight", str(warning.message))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(BATCH).sum().backward()
            alike = synced(way)
            alike(BATCH).sum().backward()


@on_ranks
def test_what_was_written_since_it_was_sharded_is_not_compared() -> None:
    """A checkpoint was loaded, on one rank before the other's: what each had drawn is gone."""
    model = shard(drawn(), "functional")  # every rank holds rows of each parameter
    with torch.no_grad():
        for parameter in model.parameters() if dist.get_rank() == 0 else ():
            parameter.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCH)


def synced(way: str) -> nn.Module:
    """Made alike, though it was drawn."""
    if way == "wrapper":
        return FullyShardedDataParallel(drawn(), sync_module_states=True)
    return fully_shard(drawn(), sync_module_states=True, auto_wrap_policy={nn.Linear})


def test_what_would_be_no_model_is_refused(run_ranks):
    run_ranks(loaded)
    run_ranks(replicated, world=4)


def loaded() -> None:
    """By the first rank alone, which keeps a slice of it; in part, and beside a layer that every rank drew."""
    loads: list[Callable[[nn.Sequential], None]] = [
        lambda model: model.load_state_dict(drawn().state_dict()),
        lambda model: model[1].load_state_dict(nn.Linear(4, 4).state_dict()),
        lambda model: model.load_state_dict({k: v.clone() for k, v in drawn().state_dict().items()}, assign=True),
    ]
    for load in loads:
        for way in ("functional", "wrapper"):
            model = drawn()
            if dist.get_rank() == 0:
                load(model)
            model = shard(model, way)
            with pytest.raises(DivergenceError, match="start from different weights"):
                model(BATCH)


def replicated() -> None:
    with pytest.raises(DivergenceError, match="start from different weights"):
        fully_shard(drawn(), mesh=mesh_of("hybrid"))(BATCH)
    with pytest.raises(DivergenceError, match="start from different weights"):
        FullyShardedDataParallel(drawn(), sharding_strategy=ShardingStrategy.NO_SHARD)(BATCH)
