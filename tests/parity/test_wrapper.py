"""FullyShardedDataParallel: training, against one process and against PyTorch's wrapper as installed."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from models import EXAMPLES
from training import FP32, Options, assert_same
from ways import on_ranks
from wrapped import Wrapping, wrap_example, wrapped_parity

SHARDED = fullshard.FullyShardedDataParallel
both = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
# Not here: units that are lists of modules, and methods other than forward, which the wrapper does not have.


INF = float("inf")
# The example, the world, and how it is wrapped. Gradients are compared with those of one process.
WRAPPED = {
    "flat": ("odd_mlp", 2, Wrapping(clip=True, norm_type=1.0)),
    "originals": ("gpt", 2, Wrapping(True, clip=True, norm_type=INF)),
    "checkpointed": ("checkpoint_inside_reentrant", 2, Wrapping(False, "SHARD_GRAD_OP", prefetch=None, limit=False)),
    "nested": ("nested", 2, Wrapping(True, prefetch="BACKWARD_POST", forward_prefetch=True)),
    "dataclass": ("dataclass", 2, Wrapping(True, "NO_SHARD", clip=True)),
    "batch norm": ("batch_norm", 2, Wrapping()),
    "groups": ("odd_mlp", 4, Wrapping(False, "HYBRID_SHARD", "tuple", clip=True)),
    "mesh": ("odd_mlp", 4, Wrapping(True, "_HYBRID_SHARD_ZERO2", "mesh")),
}
# What PyTorch's wrapper refuses, gets wrong, or leaves without gradient on some ranks.
BEYOND_PYTORCH = {
    "tied across": ("tied_across", 2, Wrapping()),
    "frozen": ("frozen", 2, Wrapping(True)),
    "two types": ("two_types", 2, Wrapping(True)),
    "unused": ("unused", 2, Wrapping(True)),
    "shapes": ("scalar", 2, Wrapping()),
}


@pytest.mark.parametrize("what", [*WRAPPED, *BEYOND_PYTORCH])
def test_training(run_ranks, what):
    name, world, wrapping = {**WRAPPED, **BEYOND_PYTORCH}[what]
    wrapping = replace(wrapping, step=Options(steps=2))
    assert_same(run_ranks(wrapped_parity, name, wrapping, FP32, what in WRAPPED, world=world))


@pytest.mark.parametrize(("name", "what"), [("frozen", "requires_grad"), ("two_types", "dtype")])
def test_one_flat_parameter_refuses_parameters_of_two_kinds(fake_world, name, what):
    fake_world(2)
    example = EXAMPLES[name]
    with pytest.raises(fullshard.ConfigError, match=f"(?s)uniform {what}.*use_orig_params=True") as raised:
        wrap_example(fullshard, example.make(), example, Wrapping())
    assert raised.value.topic == ("mixed-dtypes" if what == "dtype" else None)


def test_hybrid_by_default_shards_inside_the_node(run_ranks):
    def_of = run_ranks(node_local, world=4)
    assert def_of == [(4, 1)] * 4


def node_local() -> tuple[int, int]:
    model = SHARDED(nn.Linear(4, 4), sharding_strategy=fullshard.ShardingStrategy.HYBRID_SHARD)
    axes = model._arguments.axes
    model(torch.ones(1, 4)).sum().backward()
    return axes.shard.size, axes.replicate.size


# Mixed strategies, and parameters that no instance manages.


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c, self.d = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


@both
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks
def test_clipping_of_mixed_strategies_and_unmanaged_parameters(orig: bool, norm_type: float) -> list[str]:
    """Clip a model of three strategies and an ignored part; compare with the unsharded norm and gradients."""
    strategies = fullshard.ShardingStrategy
    plain, model = Mixture(), Mixture()
    model.a = SHARDED(model.a, sharding_strategy=strategies.NO_SHARD, use_orig_params=orig)
    model.b = SHARDED(model.b, sharding_strategy=strategies.SHARD_GRAD_OP, use_orig_params=orig)
    root = SHARDED(model, ignored_modules=[model.d], use_orig_params=orig)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))  # the same on every rank, so d's are too
    for one in (plain, root):
        one(x).square().sum().backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type)
    got = root.clip_grad_norm_(0.3, norm_type)
    problems = [] if abs(got - want) <= 1e-6 * want else [f"norm {got.item()!r}, wanted {want.item()!r}"]
    with SHARDED.summon_full_params(root, with_grads=True, writeback=False):
        mine = {name: p.grad for name, p in root.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert torch.allclose(mine[name], parameter.grad, rtol=1e-5, atol=1e-7), f"gradient of {name}"
    return problems


# Communication hooks.


OURS, TORCHS = "fullshard.comm_hooks", "torch.distributed.algorithms._comm_hooks.default_hooks"


@pytest.mark.parametrize(
    ("orig", "strategy", "library", "hook_name"),
    [
        (False, "FULL_SHARD", OURS, "default"),
        (True, "FULL_SHARD", OURS, "fp16"),
        (False, "NO_SHARD", OURS, "bf16"),
        (True, "SHARD_GRAD_OP", TORCHS, "default"),  # its compressing ones run on CUDA only
        (True, "NO_SHARD", TORCHS, "default"),
    ],
)
@on_ranks
def test_communication_hook(orig: bool, strategy: str, library: str, hook_name: str) -> None:
    """One step with a hook; compare with one process, and count the calls."""
    hooks_of = importlib.import_module(library)
    example = EXAMPLES["odd_mlp"]
    model = wrap_example(fullshard, example.make(), example, Wrapping(orig, strategy))
    seen = []
    world, group = dist.get_world_size(), dist.group.WORLD
    sharded = strategy != "NO_SHARD"
    if hook_name == "default":
        state = hooks_of.DefaultState(group)
        hook = hooks_of.reduce_scatter_hook if sharded else hooks_of.allreduce_hook
    else:
        state = hooks_of.LowPrecisionState(group, parameter_type=torch.float32)
        hook = getattr(hooks_of, f"{hook_name}_compress_hook")

    def counted(state, grad, *rest):
        seen.append((grad.dim(), grad.numel(), [r.numel() for r in rest]))
        return hook(state, grad, *rest)

    model.register_comm_hook(state, counted)
    loss = example.loss(model, example.batch(0, dist.get_rank()))
    loss.backward()
    tolerance = {"default": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[hook_name]
    plain = example.make()
    batches = [example.batch(0, rank) for rank in range(world)]
    (sum(example.loss(plain, batch) for batch in batches) / world).backward()
    with SHARDED.summon_full_params(model, with_grads=True, writeback=False):
        mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        error = (mine[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error <= tolerance, f"{name}: {error:.1e}"
    units = len(example.units(plain)) + 1
    with_parameters = len([u for u in model.fsdp_modules(model) if u._runner().unit.buckets])
    assert len(seen) == with_parameters and with_parameters <= units
    for dims, numel, rest in seen:
        assert dims == 1 and (not sharded or (len(rest) == 1 and rest[0] * world == numel)) and (sharded or not rest)


@pytest.mark.parametrize("hook_name", ["default", "bf16"])
@on_ranks
def test_communication_hook_of_fully_shard(hook_name: str) -> None:
    """It is called with gradients only, also in later steps, in which ranks compare with an all-reduce of their own."""
    group, seen = dist.group.WORLD, set()
    hooks = importlib.import_module(OURS)
    state = hooks.LowPrecisionState(group) if hook_name == "bf16" else hooks.DefaultState(group)
    hook = hooks.bf16_compress_hook if hook_name == "bf16" else hooks.reduce_scatter_hook

    def noted(state: object, gradient: torch.Tensor, part: torch.Tensor) -> None:
        seen.add((gradient.dtype, gradient.numel() // part.numel()))
        hook(state, gradient, part)

    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    fullshard.fully_shard(model[0])
    fullshard.fully_shard(model)
    model.register_comm_hook(state, noted)
    world = dist.get_world_size()
    for step in range(3):
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        model(batches[dist.get_rank()]).square().sum().backward()
        (sum(plain(batch).square().sum() for batch in batches) / world).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            error = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
            assert error <= (2e-2 if hook_name == "bf16" else 1e-6)
        model.zero_grad()
        plain.zero_grad()
    assert seen == {(torch.float32, world)}
