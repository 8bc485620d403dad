"""Instances: which modules become some and what they take; the values and the ranks they start with; being a module."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import fullshard
from ways import on_ranks
from wrapped import CPU, LIBRARIES, Block, batch, blocks, mlp, same, sharded, train, trained, whole, wrap

both = pytest.mark.parametrize("originals", [True, False])


def instances(library: types.ModuleType, model: nn.Module) -> list[tuple[str, str]]:
    return [
        (name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", ""), child.sharding_strategy.name)
        for name, child in model.named_modules()
        if isinstance(child, library.FullyShardedDataParallel)
    ]


# Policies.


def _custom(library: types.ModuleType, module: nn.Module) -> Any:
    if isinstance(module, nn.Linear) and module.out_features == 9:
        strategy = library.ShardingStrategy
        mixed = library.MixedPrecision(reduce_dtype=torch.float64)
        return {"sharding_strategy": strategy.SHARD_GRAD_OP, "mixed_precision": mixed}
    return isinstance(module, nn.Sequential)


@both
@on_ranks
def test_a_policys_arguments_train_as_pytorchs(originals: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        policy = library.wrap.CustomPolicy(functools.partial(_custom, library))
        model = wrap(library, mlp(), auto_wrap_policy=policy, use_orig_params=originals)
        found[label] = (train(model), instances(library, model), whole(library, model))
    torch.testing.assert_close(found["ours"][0], found["theirs"][0])
    assert found["ours"][1] == found["theirs"][1] and len(found["ours"][1]) > 1
    same(found["ours"][2], found["theirs"][2])


def layer_used_twice() -> nn.Sequential:
    model = mlp()
    model[2] = model[0]
    return model


@pytest.mark.parametrize("wrapped", [0, 2])
@both
@on_ranks
def test_a_layer_used_twice_of_which_one_use_is_an_instance(originals: bool, wrapped: int) -> None:
    """The instance around both uses has it; the other use kept the plain layer, with what the first left in it."""
    model = layer_used_twice()
    model[wrapped] = wrap(fullshard, model[wrapped], use_orig_params=originals)
    model = wrap(fullshard, model, use_orig_params=originals)
    train(model)
    for _ in range(2):  # a state dict puts placeholders where parameters are, and these back
        assert model.state_dict().keys() == layer_used_twice().state_dict().keys()
    same(whole(fullshard, model), trained(layer_used_twice()))


@on_ranks
def test_wrap_contexts() -> None:
    found = {}
    for label, library in LIBRARIES.items():
        keywords = {"device_id": CPU, "use_orig_params": True}
        with library.wrap.enable_wrap(wrapper_cls=library.FullyShardedDataParallel, **keywords):
            model = mlp()
            model[0][0] = library.wrap.wrap(model[0][0], sharding_strategy=library.ShardingStrategy.NO_SHARD)
            model[1] = library.wrap.wrap(model[1])
            model = library.wrap.wrap(model)
        assert not isinstance(library.wrap.wrap(nn.Linear(2, 2)), library.FullyShardedDataParallel)
        train(model)
        found[label] = (instances(library, model), whole(library, model))
    assert found["ours"][0] == found["theirs"][0]
    same(found["ours"][1], found["theirs"][1])


# What is left alone.


@pytest.mark.parametrize(
    ("how", "originals"),
    [("modules", False), ("states as modules", True), ("states as parameters", False), ("around an instance", True)],
)
@on_ranks
def test_ignored_parameters_stay_whole(how: str, originals: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        model = mlp()
        if how == "around an instance":
            model[1][0] = wrap(library, model[1][0], use_orig_params=originals)
        keywords: dict[str, Any] = {
            "modules": {"ignored_modules": [model[1], model[2][0]]},
            "around an instance": {"ignored_modules": [model[1], model[2][0]]},
            "states as modules": {"ignored_states": [model[1], model[2][0]]},
            "states as parameters": {"ignored_states": [*model[1].parameters(), *model[2][0].parameters()]},
        }[how]
        ignored = model[2][0].weight
        if how not in ("states as parameters", "around an instance"):
            keywords["auto_wrap_policy"] = library.wrap.ModuleWrapPolicy({nn.Linear})
        model = wrap(library, model, use_orig_params=originals, **keywords)
        assert any(parameter is ignored for parameter in model.parameters())
        assert ignored.shape == (9, 6)
        model(batch(0, 0)).square().mean().backward()
        assert ignored.grad is not None and ignored.grad.shape == (9, 6)
        train(model, steps=1)
        found[label] = (instances(library, model), whole(library, model))
    assert found["ours"][0] == found["theirs"][0]
    same(found["ours"][1], found["theirs"][1])


class Tied(nn.Module):
    """Weights shared within a block, between siblings, between a block and the root, and a block used twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)
        if kind == "within":
            self.first[2].weight = self.first[0].weight
        elif kind == "siblings":
            self.second[0].weight = self.first[0].weight
        elif kind == "nested":
            self.last.weight = self.first[0].weight
        elif kind == "module twice":
            self.second = self.first
        elif kind == "inner module twice":
            self.second[0] = self.first[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


@pytest.mark.parametrize(
    ("kind", "originals"),
    [("within", True), ("siblings", False), ("nested", True), ("module twice", False), ("inner module twice", True)],
)
@on_ranks
def test_shared_weights_train_as_unsharded(kind: str, originals: bool) -> None:
    model: Any = wrap(fullshard, Tied(kind), auto_wrap_policy={nn.Sequential}, use_orig_params=originals)
    train(model)
    same(whole(fullshard, model), trained(Tied(kind)))
    assert list(model.state_dict()) == list(Tied(kind).state_dict())


# Activation checkpointing around and inside of instances, and copies.


@pytest.mark.parametrize(("where", "originals"), [("outside", True), ("applied", False)])
@on_ranks
def test_activation_checkpointing(where: str, originals: bool) -> None:
    recomputed = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if where == "outside":
        model = blocks()
        for i, block in enumerate(model):
            model[i] = recomputed(wrap(fullshard, block, use_orig_params=originals))
        model = wrap(fullshard, model, use_orig_params=originals)
    else:
        model = sharded(originals)
        apply_activation_checkpointing(model, recomputed, check_fn=lambda m: isinstance(m, Block))
    train(model, ranks=None)
    names = [name.replace("_checkpoint_wrapped_module.", "") for name in whole(fullshard, model)]
    same(dict(zip(names, whole(fullshard, model).values(), strict=True)), trained(blocks()))
    assert list(model.state_dict()) == list(blocks().state_dict())


@both
@on_ranks
def test_copies(originals: bool) -> None:
    """A copy trains as the one it was copied from would, and knows the dtypes that buffers had."""
    plain = blocks()
    plain[0].register_buffer("noise", torch.ones(2))
    model = sharded(originals, plain, mixed_precision=fullshard.MixedPrecision(buffer_dtype=torch.float64))
    train(model, steps=1)
    twin, before = copy.deepcopy(model), whole(fullshard, model)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    assert twin.state_dict()["0.noise"].dtype == torch.float32 and before["0.noise"].dtype == torch.float64
    train(model)
    same(whole(fullshard, twin), before, 0, 0)
    train(twin)
    same(whole(fullshard, twin), whole(fullshard, model), 0, 0)


# What an instance starts with, and the ranks it trains on.


# Values: from meta, from rank 0.


class Filled(nn.Module):
    """Parameters and a buffer that `reset_parameters` fills."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6, device=device))
        self.register_buffer("offset", torch.empty(6, device=device))
        self.inner = nn.Linear(6, 6, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(36.0).view(6, 6) / 36)
            self.offset.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.weight) + self.offset


def fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for i, tensor in enumerate([*module.parameters(recurse=False), *module.buffers(recurse=False)]):
        with torch.no_grad():
            tensor.copy_(torch.linspace(-0.3, 0.3, tensor.numel()).view(tensor.shape) / (i + 1))


@pytest.mark.parametrize(
    ("given", "policy", "originals"), [(True, True, False), (True, False, True), (False, True, True)]
)
@on_ranks
def test_models_on_meta_get_values(given: bool, originals: bool, policy: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        torch.manual_seed(6)
        model = nn.Sequential(Filled("meta"), nn.Linear(6, 6, device="meta"), Filled("meta"))
        chosen = library.wrap.ModuleWrapPolicy({Filled}) if policy else None
        keywords: dict[str, Any] = {"param_init_fn": fill} if given else {}
        model = wrap(library, model, auto_wrap_policy=chosen, use_orig_params=originals, **keywords)
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
        start = whole(library, model)
        train(model)
        found[label] = (start, whole(library, model))
    if given or policy:  # without, the modules are visited in an order of their own, so random values differ
        same(found["ours"][0], found["theirs"][0])
        same(found["ours"][1], found["theirs"][1])
    reference = nn.Sequential(Filled(), nn.Linear(6, 6), Filled())
    reference.load_state_dict(found["ours"][0])
    same(found["ours"][1], trained(reference))


@on_ranks
def test_sync_module_states_spreads_rank_0s() -> None:
    rank = dist.get_rank()
    model = mlp(seed=10 + rank)
    model.register_buffer("noise", torch.full((3,), float(rank)))
    model.register_buffer("count", torch.tensor(rank))
    model = wrap(
        fullshard,
        model,
        auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({nn.Linear}),
        sync_module_states=True,
        use_orig_params=False,
    )
    found = whole(fullshard, model)
    assert not found["noise"].any() and found["count"] == 0
    for name, tensor in mlp(seed=10).state_dict().items():
        assert torch.equal(found[name], tensor), name


# Groups and meshes.


def halves() -> Any:
    return [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]


@on_ranks(world=4)
def test_groups_of_ranks_train_on_their_own() -> None:
    rank = dist.get_rank()
    mine = rank // 2
    group = halves()[0][mine]
    model = wrap(fullshard, mlp(mine), process_group=group, use_orig_params=True)
    assert (model.rank, model.world_size) == (rank % 2, 2) and model.process_group is not None
    train(model)
    expected = trained(mlp(mine), ranks=[2 * mine, 2 * mine + 1])
    same(whole(fullshard, model), expected)


# Being a module.


class Named(nn.Sequential):
    label = "a class attribute"

    def helper(self) -> int:
        return len(self)


@torch.no_grad()
def doubled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.mul_(2)
        module.bias.fill_(0.5)


@both
@on_ranks
def test_attributes_names_and_methods_reach_the_module(originals: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        inner = Named(*mlp(), nn.BatchNorm1d(6))
        model = wrap(
            library, inner, auto_wrap_policy=library.wrap.ModuleWrapPolicy({nn.Linear}), use_orig_params=originals
        )
        assert model.module is inner and model.label == inner.label and model.helper() == 4
        assert model[0] is inner[0]
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            _ = model.nothing_of_this_name
        kind = library.FullyShardedDataParallel
        roots = kind.fsdp_modules(model, root_only=True)
        assert len(roots) == 1 and roots[0] is model and len(kind.fsdp_modules(model)) == 7
        assert model.check_is_root() and not model[0][0].check_is_root()
        names = {
            "parameters": [(name, tuple(p.shape)) for name, p in model.named_parameters()],
            "buffers": [name for name, _ in model.named_buffers()],
            "modules": [name for name, _ in model.named_modules()],
            "state": list(model.state_dict()),
        }
        with kind.summon_full_params(model):
            names["whole"] = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
            names["whole buffers"] = [name for name, _ in model.named_buffers()]
        model.apply(doubled)
        found[label] = (names, whole(library, model))
    for key, names in found["ours"][0].items():
        expected = found["theirs"][0][key]
        if key == "parameters":  # where this rank holds nothing, or how a flat parameter is padded, may differ
            names, expected = [n for n, _ in names], [n for n, _ in expected]
        assert names == expected, key
    same(found["ours"][1], found["theirs"][1])
