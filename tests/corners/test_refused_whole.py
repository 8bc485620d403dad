"""A call that is refused changes nothing: not when a policy's later block is what cannot be sharded, either.

Everything that a user can see of a model is compared: its modules and their classes, the parameter objects and their
values, buffers, hooks, what the modules hold besides; and the model, mended, is sharded and trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


def make() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 1))


def seen(model: nn.Module) -> list[tuple[Any, ...]]:
    """Module by module, what it is and holds; tensors by identity, dtype and value."""
    found: list[tuple[Any, ...]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        found.append((name, id(module), type(module)))
        for key, value in sorted(module.__dict__.items()):
            size = len(value) if isinstance(value, (dict, list, set)) else None
            found.append((name, key, size))
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for key, tensor in tensors:
            if tensor is None:
                continue
            found.append((name, key, id(tensor), type(tensor)))
            if type(tensor) in (Tensor, nn.Parameter):
                values = None if tensor.is_meta else tensor.detach().tolist()
                found.append((name, key, tensor.dtype, tensor.requires_grad, values))
    return found


# What makes the last block impossible, and what mends it. Functions of the model.


def scalar(model: nn.Module) -> None:
    model[2].gain = nn.Parameter(torch.tensor(1.0))


def without_scalar(model: nn.Module) -> None:
    del model[2].gain


def shared_memory(model: nn.Module) -> None:
    model[2].norm.bias = nn.Parameter(model[2].linear.bias.detach())


def own_memory(model: nn.Module) -> None:
    model[2].norm.bias = nn.Parameter(torch.zeros(WIDTH))


def shared_with_root(model: nn.Module) -> None:
    model[3].bias = nn.Parameter(model[3].weight.detach()[0, :1])


def own_root(model: nn.Module) -> None:
    model[3].bias = nn.Parameter(make()[3].bias.detach().clone())


def mixed_dtypes(model: nn.Module) -> None:
    model[2].norm.double()


def one_dtype(model: nn.Module) -> None:
    model[2].norm.float()


def mixed_training(model: nn.Module) -> None:
    model[2].norm.requires_grad_(False)


def all_train(model: nn.Module) -> None:
    model[2].norm.requires_grad_(True)


def nothing(model: nn.Module) -> None:
    """What is wrong is in the arguments."""


def bad_placement(parameter: nn.Parameter) -> Any:
    return Shard(0) if parameter.dim() == 2 else "rows"


def raising_placement(parameter: nn.Parameter) -> Any:
    if parameter.shape[0] == 1:  # only the root's
        raise KeyError("of the user")
    return None


class Order:
    """A `CustomPolicy` function that gives the third block it is asked about arguments of its own."""

    def __init__(self, **own: Any) -> None:
        self.own, self.blocks = own, 0

    def __call__(self, module: nn.Module) -> Any:
        if not isinstance(module, Block):
            return False
        self.blocks += 1
        return self.own if self.blocks == 3 else True


FUNCTIONAL: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module], None], dict[str, Any], type]] = {
    "a scalar in rows": (scalar, without_scalar, {}, fullshard.LayoutError),
    "shared memory": (shared_memory, own_memory, {}, fullshard.LayoutError),
    "shared memory, flat": (shared_memory, own_memory, {"layout": "flat"}, fullshard.LayoutError),
    "shared memory in the root": (shared_with_root, own_root, {}, fullshard.LayoutError),
    "a placement that is none": (nothing, nothing, {"shard_placement_fn": bad_placement}, fullshard.ConfigError),
    "a placement function that raises": (nothing, nothing, {"shard_placement_fn": raising_placement}, KeyError),
    "reshard to an int that divides nothing": (
        nothing,
        nothing,
        {"auto_wrap_policy": lambda: CustomPolicy(Order(reshard_after_forward=3))},
        fullshard.ConfigError,
    ),
    "a layout that is none": (
        nothing,
        nothing,
        {"auto_wrap_policy": lambda: CustomPolicy(Order(layout="columns"))},
        fullshard.ConfigError,
    ),
    "a block's placement that is none": (
        nothing,
        nothing,
        {"auto_wrap_policy": lambda: CustomPolicy(Order(shard_placement_fn=bad_placement))},
        fullshard.ConfigError,
    ),
}


def trains(model: nn.Module) -> None:
    """As one process does, from the same start."""
    reference = make()
    for step in range(2):
        for each, ranks in ((model, [dist.get_rank()]), (reference, range(dist.get_world_size()))):
            generator = torch.Generator().manual_seed(step)
            everything = torch.randn(dist.get_world_size(), 3, WIDTH, generator=generator)
            each(everything[list(ranks)].flatten(0, 1)).square().mean().backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    got = model.state_dict()
    for name, value in reference.state_dict().items():
        whole = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
        torch.testing.assert_close(whole, value, rtol=1e-5, atol=1e-6)


def refused(call: Callable[[], object], error: type[BaseException], model: nn.Module) -> None:
    before = seen(model)
    raised = None
    try:
        call()
    except BaseException as caught:
        raised = caught
    assert isinstance(raised, error), f"{error.__name__} is wanted, got {raised!r}"
    after = seen(model)
    changes = [f"{old} -> {new}" for old, new in zip(before, after, strict=False) if old != new]
    assert before == after, f"{len(before)} -> {len(after)} facts; the first that changed: {changes[:1]}"


def functional(case: str) -> None:
    spoil, mend, given, error = FUNCTIONAL[case]
    model = make()
    spoil(model)
    policy = given.get("auto_wrap_policy", lambda: {Block})
    refused(lambda: fullshard.fully_shard(model, **{**given, "auto_wrap_policy": policy()}), error, model)
    mend(model)
    trains(fullshard.fully_shard(model, auto_wrap_policy={Block}))


def a_unit_below_stays(layout: str) -> None:
    """What was sharded by an earlier call is as it was, and its units' parameters too."""
    model = make()
    fullshard.fully_shard(model[0], layout=layout)
    scalar(model)
    before = [id(p) for p in model[0].parameters()]
    with pytest.raises(fullshard.LayoutError):
        fullshard.fully_shard(model, layout="rows", auto_wrap_policy={Block})
    assert type(model[1]) is Block and [id(p) for p in model[0].parameters()] == before
    without_scalar(model)
    trains(fullshard.fully_shard(model, layout=layout, auto_wrap_policy={Block}))


def ties_stay() -> None:
    """A parameter that a unit of an earlier call would give up to the refused one stays there."""
    model = make()
    model[2].linear.weight = model[0].linear.weight
    fullshard.fully_shard(model[0])
    scalar(model)
    refused(lambda: fullshard.fully_shard(model), fullshard.LayoutError, model)
    model[0](torch.ones(1, WIDTH)).sum().backward()  # and its unit works
    assert model[0].linear.weight.grad is not None


WRAPPED: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module], None], dict[str, Any], type]] = {
    "mixed dtypes": (mixed_dtypes, one_dtype, {}, fullshard.ConfigError),
    "mixed requires_grad": (mixed_training, all_train, {}, fullshard.ConfigError),
    "shared memory": (shared_memory, own_memory, {"use_orig_params": True}, fullshard.LayoutError),
    "shared memory, flat": (shared_memory, own_memory, {}, fullshard.LayoutError),
    "shared memory in the root": (shared_with_root, own_root, {"use_orig_params": True}, fullshard.LayoutError),
    "mixed dtypes, states synchronised": (mixed_dtypes, one_dtype, {"sync_module_states": True}, fullshard.ConfigError),
    "a block's strategy without replicas": (
        nothing,
        nothing,
        {"auto_wrap_policy": lambda: CustomPolicy(Order(process_group=(None, None)))},
        fullshard.ConfigError,
    ),
    "a block's argument that is none": (
        nothing,
        nothing,
        {"auto_wrap_policy": lambda: CustomPolicy(Order(sharding_strategy="FULL"))},
        fullshard.ConfigError,
    ),
    "a block's argument that no wrapper has": (
        nothing,
        nothing,
        {"auto_wrap_policy": lambda: CustomPolicy(Order(colour="red"))},
        TypeError,
    ),
}


def wrapped(case: str) -> None:
    spoil, mend, given, error = WRAPPED[case]
    model = make()
    spoil(model)
    policy = given.get("auto_wrap_policy", lambda: ModuleWrapPolicy({Block}))
    call = {**given, "auto_wrap_policy": policy()}
    refused(lambda: FullyShardedDataParallel(model, **call), error, model)
    mend(model)
    trains(FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block})))


def values_stay(orig: bool) -> None:
    """Without a policy: rank 0's values are not sent before the arguments are known to do."""
    model = make()
    mixed_dtypes(model)
    shared_memory(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    options = {"use_orig_params": orig, "sync_module_states": True}
    refused(lambda: FullyShardedDataParallel(model, **options), fullshard.FullshardError, model)


class Scale(nn.Module):
    """Nothing gives its parameter a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


def meta_stays(orig: bool) -> None:
    """What cannot be initialised is found before the first block has memory, also if it is the root's."""
    with torch.device("meta"):
        model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), "scale": Scale()})
    call = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), "use_orig_params": orig}
    refused(lambda: FullyShardedDataParallel(model, **call), fullshard.ConfigError, model)
    refused(lambda: FullyShardedDataParallel(model, **call, param_init_fn="zeros"), fullshard.ConfigError, model)
    del model["scale"]
    wrapped = FullyShardedDataParallel(model, **call)
    assert not any(parameter.is_meta for parameter in wrapped.parameters())


def ties_of_blocks_stay(orig: bool) -> None:
    """Blocks that share a weight with each other and the root, which gets it in the end, if nothing is refused."""
    model = make()
    model[2].linear.weight = model[1].linear.weight = model[0].linear.weight
    mixed_dtypes(model)
    shared_with_root(model)
    call = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": orig}
    refused(lambda: FullyShardedDataParallel(model, **call), fullshard.FullshardError, model)
    refused(lambda: fullshard.fully_shard(model, auto_wrap_policy={Block}), fullshard.LayoutError, model)
    one_dtype(model)
    own_root(model)
    wrapped = FullyShardedDataParallel(model, **call)
    wrapped(torch.ones(1, WIDTH)).sum().backward()
    assert any(parameter.grad is not None for parameter in wrapped.parameters())


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_a_later_block_of_fully_shard(run_ranks, case):
    run_ranks(functional, case, timeout=20)


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_units_of_earlier_calls(run_ranks, layout):
    run_ranks(a_unit_below_stays, layout, timeout=20)


def test_ties_with_units_of_earlier_calls(run_ranks):
    run_ranks(ties_stay, timeout=20)


@pytest.mark.parametrize("case", WRAPPED)
def test_a_later_block_of_the_wrapper(run_ranks, case):
    run_ranks(wrapped, case, timeout=20)


@pytest.mark.parametrize("orig", [True, False])
def test_values_before_a_refusal(run_ranks, orig):
    run_ranks(values_stay, orig, timeout=20)


@pytest.mark.parametrize("orig", [True, False])
def test_modules_that_cannot_be_initialised(run_ranks, orig):
    run_ranks(meta_stays, orig, timeout=20)


@pytest.mark.parametrize("orig", [True, False])
def test_blocks_that_share_a_weight(run_ranks, orig):
    run_ranks(ties_of_blocks_stay, orig, timeout=20)


def test_strategies_are_refused_before_anything(run_ranks):
    """Regression: what the root's own arguments decide is checked first."""
    run_ranks(root_strategy, timeout=20)


def root_strategy() -> None:
    model = make()
    call = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "process_group": (1, 2)}
    call["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    refused(lambda: FullyShardedDataParallel(model, **call), fullshard.ConfigError, model)
    trains(FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block})))
