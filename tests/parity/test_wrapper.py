"""FullyShardedDataParallel: training, against one process and against PyTorch's wrapper as installed."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from models import EXAMPLES
from training import FP32, FP64, Options, assert_same
from wrapped import Wrapping, wrap_example, wrapped_parity

SHARDED = fullshard.FullyShardedDataParallel
both = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
# Not here: units that are lists of modules, and methods other than forward, which the wrapper does not have.
NAMES = [name for name in EXAMPLES if name not in ("gpt_list_unit", "two_ways")]
NOT_IN_TORCH = ("tied_across", "two_types", "frozen", "tied_within", "shapes", "scalar", "unused")
"""What PyTorch's wrapper refuses, gets wrong, or leaves without gradient on some ranks."""


def refuses_mixture(name: str) -> str:
    """Wrapping with one FlatParameter must refuse parameters of two kinds; what the error says."""
    example = EXAMPLES[name]
    try:
        wrap_example(fullshard, example.make(), example, Wrapping())
    except fullshard.ConfigError as error:
        return str(error)
    return "nothing"


@both
@pytest.mark.parametrize("name", NAMES)
def test_model(run_ranks, name, orig):
    if not orig and name in ("frozen", "two_types"):
        what = "requires_grad" if name == "frozen" else "dtype"
        for said in run_ranks(refuses_mixture, name):
            assert f"uniform {what}" in said and "use_orig_params=True" in said
        return
    check_torch = name not in NOT_IN_TORCH
    assert_same(run_ranks(wrapped_parity, name, Wrapping(orig), FP32, check_torch))


@both
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "repeated"])
def test_strategy(run_ranks, name, strategy, orig):
    assert_same(run_ranks(wrapped_parity, name, Wrapping(orig, strategy), FP32))


@both
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("groups", ["tuple", "mesh"])
def test_hybrid(run_ranks, groups, strategy, orig):
    assert_same(run_ranks(wrapped_parity, "gpt", Wrapping(orig, strategy, groups), FP32, world=4))


def test_hybrid_by_default_shards_inside_the_node(run_ranks):
    def_of = run_ranks(node_local, world=4)
    assert def_of == [(4, 1)] * 4


def node_local() -> tuple[int, int]:
    model = SHARDED(nn.Linear(4, 4), sharding_strategy=fullshard.ShardingStrategy.HYBRID_SHARD)
    axes = model._arguments.axes
    model(torch.ones(1, 4)).sum().backward()
    return axes.shard.size, axes.replicate.size


@both
def test_four_ranks_and_double_precision(run_ranks, orig):
    wrapping = Wrapping(orig, step=Options(dtype=torch.float64, steps=5))
    assert_same(run_ranks(wrapped_parity, "odd_mlp", wrapping, FP64, world=4))


@both
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping(run_ranks, norm_type, orig):
    wrapping = Wrapping(orig, clip=True, norm_type=norm_type)
    assert_same(run_ranks(wrapped_parity, "odd_mlp", wrapping, FP32))


@both
@pytest.mark.parametrize("prefetch", ["BACKWARD_POST", None])
@pytest.mark.parametrize("limit", [True, False])
def test_prefetch_settings_change_no_number(run_ranks, limit, prefetch, orig):
    wrapping = Wrapping(orig, prefetch=prefetch, limit=limit, forward_prefetch=not limit)
    assert_same(run_ranks(wrapped_parity, "gpt", wrapping, FP32, False))


def accumulate(model, example, batch_of):
    """Four batches; the first and third without sync, in a nested context."""
    total = torch.zeros(())
    for index in range(4):
        if index in (0, 2) and hasattr(model, "no_sync"):
            with model.no_sync(), model.no_sync():
                loss = example.loss(model, batch_of(index))
                loss.backward()
        else:
            loss = example.loss(model, batch_of(index))
            loss.backward()
        total = total + loss.detach()
    return total


def two_forwards(model, example, batch_of):
    """Two forwards before one backward."""
    loss = example.loss(model, batch_of(0)) + example.loss(model, batch_of(1))
    loss.backward()
    return loss


def two_backwards(model, example, batch_of):
    """Two forwards, then two backwards in the other order."""
    first, second = example.loss(model, batch_of(0)), example.loss(model, batch_of(1))
    second.backward()
    first.backward()
    return first + second


def eval_between(model, example, batch_of):
    """A forward without gradients, in eval mode, before the one that counts."""
    model.eval()
    with torch.no_grad():
        example.loss(model, batch_of(3))
    model.train()
    loss = example.loss(model, batch_of(0))
    loss.backward()
    return loss


@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("scenario", [accumulate, two_forwards, two_backwards, eval_between])
def test_scenario(run_ranks, scenario, strategy, orig):
    wrapping = Wrapping(orig, strategy, step=Options(scenario=scenario, dtype=torch.float64))
    # PyTorch's own differs from one process where synchronised and other backwards mix, or forwards come first.
    assert_same(run_ranks(wrapped_parity, "odd_mlp", wrapping, FP64, False))


@both
def test_accumulation_without_sync_on_a_hybrid_mesh(run_ranks, orig):
    wrapping = Wrapping(orig, "HYBRID_SHARD", "mesh", step=Options(scenario=accumulate, dtype=torch.float64))
    assert_same(run_ranks(wrapped_parity, "odd_mlp", wrapping, FP64, False, world=4))


# Mixed strategies, and parameters that no instance manages.


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c, self.d = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


def clip_mixture(orig: bool, norm_type: float) -> list[str]:
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
        if not torch.allclose(mine[name], parameter.grad, rtol=1e-5, atol=1e-7):
            problems.append(f"gradient of {name}")
    return problems


@both
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_of_mixed_strategies_and_unmanaged_parameters(run_ranks, norm_type, orig):
    assert_same(run_ranks(clip_mixture, orig, norm_type))


# Communication hooks.


def hooked(orig: bool, strategy: str, hook_name: str, library: str = "fullshard.comm_hooks") -> list[str]:
    """One step with a hook; compare with one process, and count the calls."""
    hooks_of = importlib.import_module(library)
    example = EXAMPLES["odd_mlp"]
    model = wrap_example(fullshard, example.make(), example, Wrapping(orig, strategy))
    seen = []
    world, group = dist.get_world_size(), dist.group.WORLD
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}
    sharded = strategy != "NO_SHARD"
    if hook_name == "default":
        state = hooks_of.DefaultState(group)
        hook = hooks_of.reduce_scatter_hook if sharded else hooks_of.allreduce_hook
    elif hook_name in low:
        state = hooks_of.LowPrecisionState(group, parameter_type=torch.float32)
        hook = getattr(hooks_of, f"{hook_name}_compress_hook")
    else:
        state, hook = {"error": {}}, top_k

    def counted(state, grad, *rest):
        seen.append((grad.dim(), grad.numel(), [r.numel() for r in rest]))
        return hook(state, grad, *rest)

    model.register_comm_hook(state, counted)
    loss = example.loss(model, example.batch(0, dist.get_rank()))
    loss.backward()
    tolerance = {"default": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "top_k": 1e-6}[hook_name]
    plain = example.make()
    batches = [example.batch(0, rank) for rank in range(world)]
    (sum(example.loss(plain, batch) for batch in batches) / world).backward()
    problems = []
    with SHARDED.summon_full_params(model, with_grads=True, writeback=False):
        mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        error = (mine[name] - parameter.grad).norm() / parameter.grad.norm()
        if not error <= tolerance:
            problems.append(f"{name}: {error:.1e}")
    units = len(example.units(plain)) + 1
    with_parameters = len([u for u in model.fsdp_modules(model) if u._runner().unit.buckets])
    if len(seen) != with_parameters or with_parameters > units:
        problems.append(f"{len(seen)} calls of the hook for {with_parameters} instances")
    for dims, numel, rest in seen:
        if dims != 1 or (sharded and (len(rest) != 1 or rest[0] * world != numel)) or (not sharded and rest):
            problems.append(f"hook got {dims} dims of {numel} and {rest}")
    return problems


def top_k(state, grad, out=None):
    """A user's hook with state: all entries that are not among the k largest wait for the next step. Here k is all."""
    key = grad.numel()
    grad = grad + state["error"].get(key, 0)
    kept = torch.zeros_like(grad)
    index = grad.abs().topk(grad.numel()).indices
    kept[index] = grad[index]
    state["error"][key] = grad - kept
    dist.all_reduce(kept)
    kept /= dist.get_world_size()
    if out is None:
        raise AssertionError("this hook is for sharded gradients")
    out.copy_(kept.view(dist.get_world_size(), -1)[dist.get_rank()])


@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("hook", ["default", "fp16", "bf16"])
def test_communication_hook(run_ranks, hook, strategy, orig):
    assert_same(run_ranks(hooked, orig, strategy, hook))


@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_pytorchs_default_hooks(run_ranks, strategy, orig):
    """Its compressing ones run on CUDA only."""
    library = "torch.distributed.algorithms._comm_hooks.default_hooks"
    assert_same(run_ranks(hooked, orig, strategy, "default", library))


@both
def test_users_hook_with_state(run_ranks, orig):
    assert_same(run_ranks(hooked, orig, "FULL_SHARD", "top_k"))
