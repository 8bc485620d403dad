"""What a steady step of a unit costs the host: Python calls and bytecodes of the engine. They may never rise again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard

ROOT = f"{Path(fullshard.__file__).parent}/"
BLOCKS = 16
MOST = {
    "rows": (42, 2_358),
    "flat": (41, 2_341),
    "wrapper": (42, 2_363),
    "one flat parameter": (47, 2_495),
    "kept after forward": (45, 2_299),
    "replicated": (54, 2_759),
    "frozen in part": (55, 2_673),
    "synchronised by a switch": (50, 2_512),
}
"""Calls, and bytecodes of Python 3.11, of a unit of six parameters; other versions compile to others."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sharded(way: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), *[Block() for _ in range(BLOCKS)])
    if way in ("wrapper", "one flat parameter"):
        return FullyShardedDataParallel(model, auto_wrap_policy={Block}, use_orig_params=way == "wrapper")
    how: dict[str, Any] = {"layout": way if way in ("rows", "flat") else "rows"}
    if way == "kept after forward":
        how["reshard_after_forward"] = False
    if way == "replicated":
        how["mesh"] = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "fsdp"))
    for block in model[1:]:
        if way == "frozen in part":
            block.up.weight.requires_grad_(False)
        fully_shard(block, **how)
    return fully_shard(model, **how)


def counted(step: Any) -> Counter[str]:
    """Calls and bytecodes of the engine's own code, by unit."""
    found: Counter[str] = Counter()

    def inside(frame: Any, event: str, arg: Any) -> Any:
        found["bytecodes"] += event == "opcode"
        return inside

    def entered(frame: Any, event: str, arg: Any) -> Any:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return None
        found["calls"] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        step()
    finally:
        sys.settrace(before)
    return Counter({what: count // BLOCKS for what, count in found.items()})


@pytest.mark.parametrize("way", MOST)
def test_a_steady_step_takes_no_more_than_it_did(fake_world, way):
    fake_world(64)
    model, x = sharded(way), torch.randn(5, 16)

    def step() -> None:
        if way == "synchronised by a switch":  # as loops do that accumulate: on at the last micro-batch
            model.set_requires_gradient_sync(True)
        model(x).sum().backward()

    for _ in range(6):
        step()
        model.zero_grad()
    calls, bytecodes = MOST[way]
    found = counted(step)
    assert found["calls"] <= calls, found
    if sys.version_info[:2] == (3, 11):
        assert found["bytecodes"] <= bytecodes, found
