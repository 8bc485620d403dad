"""A call that is refused changes nothing: not when a policy's later block is what cannot be sharded, either.

Everything that a user can see of a model is compared: its modules and their classes, the parameter objects and their
values, buffers, hooks, what the modules hold besides; and the model, mended, is sharded and trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard import ConfigError, FullyShardedDataParallel, LayoutError, ShardingStrategy
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy
from ways import batch, differences, on_ranks, whole_state

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
            found.append((name, key, len(value) if isinstance(value, (dict, list, set)) else None))
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            found.append((name, key, id(tensor), type(tensor)))
            if type(tensor) in (Tensor, nn.Parameter):
                values = None if tensor.is_meta else tensor.detach().tolist()
                found.append((name, key, tensor.dtype, tensor.requires_grad, values))
    return found


def refused(call: Callable[[], object], error: type[BaseException], model: nn.Module) -> None:
    before = seen(model)
    with pytest.raises(error):
        call()
    changes = [f"{old} -> {new}" for old, new in zip(before, seen(model), strict=False) if old != new]
    assert before == seen(model), f"the first that changed: {changes[:1]}"


def trains(model: nn.Module) -> None:
    """As one process does, from the same start."""
    reference = make()
    for step in range(2):
        for each, rank in ((model, dist.get_rank()), (reference, None)):
            each(batch(step, rank, WIDTH, dtype=torch.float32)).square().mean().backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    assert not differences("trained", whole_state(model), dict(reference.state_dict()))


# What makes the last block impossible, and what mends it.

Change = Callable[[Any], Any]


def set_bias(layer: nn.Module, value: Tensor) -> None:
    layer.bias = nn.Parameter(value)


class Spoilt(NamedTuple):
    spoil: Change
    mend: Change


NOTHING = Spoilt(lambda model: None, lambda model: None)  # what is wrong is in the arguments
SCALAR = Spoilt(
    lambda model: setattr(model[2], "gain", nn.Parameter(torch.tensor(1.0))), lambda model: delattr(model[2], "gain")
)
SHARED = Spoilt(
    lambda model: set_bias(model[2].norm, model[2].linear.bias.detach()),
    lambda model: set_bias(model[2].norm, torch.zeros(WIDTH)),
)
SHARED_IN_ROOT = Spoilt(
    lambda model: set_bias(model[3], model[3].weight.detach()[0, :1]),
    lambda model: set_bias(model[3], make()[3].bias.detach().clone()),
)
DTYPES = Spoilt(lambda model: model[2].norm.double(), lambda model: model[2].norm.float())
TRAINING = Spoilt(lambda model: model[2].norm.requires_grad_(False), lambda model: model[2].norm.requires_grad_(True))


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


ORIG: dict[str, Any] = {"use_orig_params": True}
SHARD, WRAP = fullshard.fully_shard, FullyShardedDataParallel
CASES: dict[str, tuple[Callable[..., Any], Spoilt, dict[str, Any], type]] = {  # "order": arguments of the third block
    "a scalar in rows": (SHARD, SCALAR, {}, LayoutError),
    "shared memory": (SHARD, SHARED, {}, LayoutError),
    "shared memory, flat": (SHARD, SHARED, {"layout": "flat"}, LayoutError),
    "shared memory in the root": (SHARD, SHARED_IN_ROOT, {}, LayoutError),
    "a placement that is none": (SHARD, NOTHING, {"shard_placement_fn": bad_placement}, ConfigError),
    "a placement function that raises": (SHARD, NOTHING, {"shard_placement_fn": raising_placement}, KeyError),
    "an int that divides nothing": (SHARD, NOTHING, {"order": {"reshard_after_forward": 3}}, ConfigError),
    "a layout that is none": (SHARD, NOTHING, {"order": {"layout": "columns"}}, ConfigError),
    "a block's placement that is none": (SHARD, NOTHING, {"order": {"shard_placement_fn": bad_placement}}, ConfigError),
    "mixed dtypes": (WRAP, DTYPES, {}, ConfigError),
    "mixed requires_grad": (WRAP, TRAINING, {}, ConfigError),
    "wrapped: shared memory": (WRAP, SHARED, ORIG, LayoutError),
    "wrapped: shared memory, flat": (WRAP, SHARED, {}, LayoutError),
    "wrapped: shared memory in the root": (WRAP, SHARED_IN_ROOT, ORIG, LayoutError),
    "mixed dtypes, states synchronised": (WRAP, DTYPES, {"sync_module_states": True}, ConfigError),
    "a block's strategy without replicas": (WRAP, NOTHING, {"order": {"process_group": (None, None)}}, ConfigError),
    "a block's argument that is none": (WRAP, NOTHING, {"order": {"sharding_strategy": "FULL"}}, ConfigError),
    "a block's argument that no wrapper has": (WRAP, NOTHING, {"order": {"colour": "red"}}, TypeError),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks
def test_a_later_block_of_a_policy(case: str) -> None:
    apply, (spoil, mend), given, error = CASES[case]
    given = dict(given)
    order = given.pop("order", None)
    policy = ModuleWrapPolicy({Block}) if order is None else CustomPolicy(Order(**order))
    model = make()
    spoil(model)
    refused(lambda: apply(model, auto_wrap_policy=policy, **given), error, model)
    mend(model)
    trains(apply(model, auto_wrap_policy=ModuleWrapPolicy({Block})))


@on_ranks
def test_units_of_earlier_calls() -> None:
    """What was sharded by an earlier call is as it was; also a parameter that it would give up to the refused unit."""
    model = make()
    fullshard.fully_shard(model[0])
    SCALAR.spoil(model)
    refused(lambda: fullshard.fully_shard(model, auto_wrap_policy={Block}), LayoutError, model)
    SCALAR.mend(model)
    trains(fullshard.fully_shard(model, auto_wrap_policy={Block}))
    model = make()
    model[2].linear.weight = model[0].linear.weight
    fullshard.fully_shard(model[0])
    SCALAR.spoil(model)
    refused(lambda: fullshard.fully_shard(model), LayoutError, model)
    model[0](torch.ones(1, WIDTH)).sum().backward()  # and its unit works
    assert model[0].linear.weight.grad is not None


@on_ranks
def test_values_before_a_refusal() -> None:
    """Without a policy: rank 0's values are not sent before the arguments are known to do."""
    model = make()
    DTYPES.spoil(model), SHARED.spoil(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    for orig in (True, False):
        given = {"use_orig_params": orig, "sync_module_states": True}
        refused(lambda given=given: FullyShardedDataParallel(model, **given), fullshard.FullshardError, model)


class Scale(nn.Module):
    """Nothing gives its parameter a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


@on_ranks
def test_modules_that_cannot_be_initialised() -> None:
    """They are found before the first block has memory, also if it is the root that cannot be."""
    with torch.device("meta"):
        model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), "scale": Scale()})
    call = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})}
    refused(lambda: FullyShardedDataParallel(model, **call), ConfigError, model)
    refused(lambda: FullyShardedDataParallel(model, **call, param_init_fn="zeros"), ConfigError, model)
    del model["scale"]
    assert not any(parameter.is_meta for parameter in FullyShardedDataParallel(model, **call).parameters())


@on_ranks
def test_blocks_that_share_a_weight() -> None:
    """With each other and the root, which gets it in the end, if nothing is refused."""
    model = make()
    model[2].linear.weight = model[1].linear.weight = model[0].linear.weight
    DTYPES.spoil(model), SHARED_IN_ROOT.spoil(model)
    call = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True}
    refused(lambda: FullyShardedDataParallel(model, **call), fullshard.FullshardError, model)
    refused(lambda: fullshard.fully_shard(model, auto_wrap_policy={Block}), LayoutError, model)
    DTYPES.mend(model), SHARED_IN_ROOT.mend(model)
    wrapped = FullyShardedDataParallel(model, **call)
    wrapped(torch.ones(1, WIDTH)).sum().backward()
    assert any(parameter.grad is not None for parameter in wrapped.parameters())


@on_ranks
def test_strategies_are_refused_before_anything() -> None:
    """What the root's own arguments decide is checked first."""
    model = make()
    call = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "process_group": (1, 2)}
    call["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    refused(lambda: FullyShardedDataParallel(model, **call), ConfigError, model)
    trains(FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block})))
