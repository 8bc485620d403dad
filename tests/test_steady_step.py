"""What a steady step of a unit costs the host: Python calls and bytecodes of the engine. They may never rise again."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard

ROOT = f"{Path(fullshard.__file__).parent}/"
BLOCKS = 16
MOST = {
    "rows": (29, 2_038),
    "flat": (29, 2_027),
    "wrapper": (29, 2_041),
    "one flat parameter": (34, 2_163),
    "kept after forward": (32, 2_053),
    "replicated": (41, 2_444),
    "frozen in part": (35, 2_224),
    "synchronised by a switch": (37, 2_193),
    "trained": (66, 2_815),
    "evaluated": (10, 697),
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


def depth(frame: Any) -> int:
    """Frames of the engine from here outwards."""
    return 0 if frame is None else frame.f_code.co_filename.startswith(ROOT) + depth(frame.f_back)


def counted(step: Any) -> Counter[str]:
    """What the engine's own code takes.

    Returns:
        Calls and bytecodes by unit; files of functions called for each unit; frames of the deepest of its collectives.
    """
    found, functions, frames = Counter[str](), Counter[Any](), Counter[int]()

    def inside(frame: Any, event: str, arg: Any) -> Any:
        found["bytecodes"] += event == "opcode"
        return inside

    def entered(frame: Any, event: str, arg: Any) -> Any:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return None
        found["calls"] += 1
        functions[frame.f_code] += 1
        if frame.f_code.co_filename.endswith("torch_private/collectives.py"):
            frames[depth(frame)] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    sys.settrace(entered)
    try:
        step()
    finally:
        sys.settrace(None)
    files = {code.co_filename for code, count in functions.items() if count >= BLOCKS}
    by_unit = {what: count // BLOCKS for what, count in found.items()}
    of_units = [deep for deep, count in frames.items() if count >= BLOCKS]  # others are those of the ends of a pass
    return Counter(by_unit, files=len(files), frames=max(of_units, default=0))


def steady_step(way: str) -> Counter[str]:
    """What a steady step takes by unit, in a process of its own: hooks that others register for all optimizers cost."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    model, x = sharded(way), torch.randn(5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        if way == "evaluated":
            with torch.no_grad():
                model(x)
            return
        if way == "synchronised by a switch":  # as loops do that accumulate: on at the last micro-batch
            model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        if way == "trained":  # a whole step: the norm, the optimizer, and clearing gradients
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(6):
        step()
        model.zero_grad()
    gc.disable()
    return counted(step)


@pytest.mark.parametrize("way", MOST)
def test_a_steady_step_takes_no_more_than_it_did(in_a_process, way):
    found = in_a_process(steady_step, way)
    calls, bytecodes = MOST[way]
    assert found["calls"] <= calls, found
    if way in ("rows", "flat", "wrapper"):
        assert found["files"] <= 6, found
        assert found["frames"] <= 5, found
    if sys.version_info[:2] == (3, 11):
        assert found["bytecodes"] <= bytecodes, found
