"""Checkpoints of earlier releases load for ever: tiny ones of each kind are kept in data/frozen, as they were written.

`python tests/store/test_frozen.py VERSION` adds those of a release; what they hold follows from names alone.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.state_dict import StateDictOptions, get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).parent.parent))  # where this is a program
from training import full
from ways import differences, shard

DATA = Path(__file__).parent / "data" / "frozen"
KINDS = ("rows", "wrapper", "plain", "whole.pt", "safetensors")
FROZEN = [("0.1.0", kind) for kind in KINDS]


class Small(nn.Module):
    """A tied weight, a frozen one, a buffer, and rows that two ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.embedding(tokens)))


def value(name: str, shape: torch.Size) -> Tensor:
    """What every tensor of a name holds: exact in single precision."""
    start = sum(map(ord, name)) % 97
    return (torch.arange(shape.numel(), dtype=torch.float32) * 0.25 + start).view(shape)


def built(way: str) -> tuple[Any, torch.optim.Optimizer]:
    model = Small()
    if way in ("rows", "wrapper"):
        model = shard(model, way, lambda m: [m.frozen])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.5)
    model(torch.tensor([0, 1, 2, 3, 4])).sum().backward()
    optimizer.step()  # which makes the state that is filled below
    return model, optimizer


def write(way: str, folder: Path) -> None:
    """Save a model whose values follow from their names."""
    model, optimizer = built(way)
    options = StateDictOptions(full_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {n: torch.tensor([3, 4]) if n == "seen" else value(tied(n), t.shape) for n, t in state.items()}
    for name, own in optimizer_state["state"].items():
        own |= {key: value(f"{tied(name)}.{key}", own[key].shape) for key in ("exp_avg", "exp_avg_sq")}
        own["step"] = torch.tensor(7.0)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=options)
    fullshard.save(folder, model, optimizer, step=7, state={"tokens": 123, "plan": {"rate": (0.5, 1)}}, rng=False)


def tied(name: str) -> str:
    return name.replace("head.weight", "embedding.weight")


def read(path: Path, way: str) -> list[str]:
    """What is not as it follows from its name."""
    model, optimizer = built(way)
    if path.name == "safetensors":
        fullshard.load_safetensors(model, path)
    else:
        loaded = fullshard.load(path, model, optimizer)
        assert loaded.state == {"tokens": 123, "plan": {"rate": (0.5, 1)}} and loaded.step == 7
    found, want = {}, {}
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        found[name] = full(tensor)
        want[name] = torch.tensor([3, 4]) if name == "seen" else value(tied(name), tensor.shape)
        for key in ("exp_avg", "exp_avg_sq") if path.name != "safetensors" and tensor.requires_grad else ():
            found[f"{name}.{key}"] = full(optimizer.state[tensor][key])
            want[f"{name}.{key}"] = value(f"{tied(name)}.{key}", tensor.shape)
    return differences("it", found, want, 0.0)


@pytest.mark.parametrize(("version", "kind"), FROZEN)
def test_what_a_release_wrote_loads(run_ranks: Any, tmp_path: Path, version: str, kind: str) -> None:
    path = DATA / version / kind
    assert path.exists(), f"the {kind} of {version} is gone"
    if kind == "whole.pt":
        fullshard.convert(path, tmp_path / "converted")
        path = tmp_path / "converted"
    assert read(path, "plain") == []
    for problems in run_ranks(read, path, "rows", world=3):
        assert problems == []


def test_none_is_left_out() -> None:
    assert {(one.parent.name, one.name) for one in DATA.glob("*/*")} == set(FROZEN)


if __name__ == "__main__":
    from ranks import RankPools

    here = DATA / sys.argv[1]
    here.mkdir(parents=True)
    pools = RankPools(Path(tempfile.mkdtemp()))
    for kind in ("rows", "wrapper"):
        pools.run(importlib.import_module("test_frozen").write, kind, here / kind)
    pools.close()
    write("plain", here / "plain")
    fullshard.convert(here / "plain", here / "whole.pt")
    model, _ = built("plain")
    fullshard.load(here / "plain", model)
    fullshard.save_safetensors(model, here / "safetensors")
    for lock in here.glob("*/lock"):
        lock.unlink()
