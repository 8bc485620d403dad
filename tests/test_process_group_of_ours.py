"""Sharding where the program has made no process group: torchrun's ranks, or one process alone, as in a notebook."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard


@pytest.fixture
def without_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("torchrun", [False, True], ids=["alone", "torchrun"])
def test_a_group_is_made(without_group, monkeypatch, tmp_path: Path, front_end: str, torchrun: bool) -> None:
    """Who is alone is told so."""
    if torchrun:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if front_end == "wrapper":
            model = fullshard.FullyShardedDataParallel(model, use_orig_params=True)
        else:
            fullshard.fully_shard(model, auto_wrap_policy={nn.Linear})
        fullshard.fully_shard(nn.Linear(2, 2))
    assert sum("sharded over this process alone" in str(one.message) for one in told) == (not torchrun)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    fullshard.save(tmp_path / "run", model, optimizer, step=1)
    fullshard.load(tmp_path / "run", model, optimizer)
    assert dist.get_world_size() == 1
