"""Names, argument names, order and defaults are PyTorch's: one import line moves a program over."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

import fullshard

METHODS = sorted(name for name in dir(torch_fsdp.FSDPModule) if not name.startswith("_"))
FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"]


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Name, kind and default of each parameter; a default that is an object of the library is told by its class."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        plain = default is inspect.Parameter.empty or isinstance(default, (bool, int, str, type(None), torch.dtype))
        found.append((parameter.name, parameter.kind, default if plain else type(default).__name__))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_pytorchs_signatures(name):
    """Methods that torch.nn.Module has anyway are not ours to define."""
    ours = getattr(fullshard.FSDPModule, name)
    assert parameters(ours) == parameters(getattr(torch_fsdp.FSDPModule, name))
    assert inspect.getdoc(ours)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_begin_with_pytorchs_parameters(name):
    ours, theirs = parameters(getattr(fullshard, name)), parameters(getattr(torch_fsdp, name))
    assert ours[: len(theirs)] == theirs
    for parameter, kind, _ in ours[len(theirs) :]:
        assert kind is inspect.Parameter.KEYWORD_ONLY, parameter


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from {library} import (
    FSDPModule, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle, fully_shard, register_fsdp_forward_method,
)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))
    def residual(self, x):
        return self.forward(x) - x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 17)
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.blocks[0].residual(x)
        return self.head(self.norm(x))

mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
with torch.device("meta"):
    model = Model()
settings = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=None), offload_policy=OffloadPolicy())
for block in model.blocks:
    fully_shard(block, reshard_after_forward=True, **settings)
fully_shard([model.norm, model.head], reshard_after_forward=False, **settings)
fully_shard(model, **settings)
assert isinstance(model, FSDPModule) and isinstance(model.blocks[0], FSDPModule)
register_fsdp_forward_method(model.blocks[0], "residual")
model.to_empty(device="cpu")
generator = torch.Generator().manual_seed(0)
for name, p in model.named_parameters():
    whole = torch.randn(p.shape, generator=generator) * 0.3
    p.data.copy_(torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements))
for before, after in zip(model.blocks, list(model.blocks)[1:]):
    before.set_modules_to_forward_prefetch([after])
    after.set_modules_to_backward_prefetch([before])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
result = []
for step in range(3):
    for micro in range(2):
        last = micro == 1
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        handle = model.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        tokens = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(10 * step + micro + dist.get_rank()))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        handle.wait()
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    result.append((loss.item(), norm.full_tensor().item()))
result.append({{name: value.full_tensor() for name, value in model.state_dict().items()}})
"""


def run_program(library: str) -> list:
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(PROGRAM.format(library=library), library, "exec"), names)
    return names["result"]


def both() -> tuple[list, list]:
    dist.barrier()
    return run_program("fullshard"), run_program("torch.distributed.fsdp")


def test_a_program_runs_with_its_import_changed(run_ranks):
    for ours, theirs in run_ranks(both):
        torch.testing.assert_close(torch.tensor(ours[:-1]), torch.tensor(theirs[:-1]), rtol=1e-5, atol=1e-6)
        assert ours[-1].keys() == theirs[-1].keys()
        for name, value in theirs[-1].items():
            torch.testing.assert_close(ours[-1][name], value, rtol=1e-5, atol=1e-6, msg=name)
