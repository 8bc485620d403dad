"""Which modules become instances and which parameters they take: policies, what is ignored, shared weights."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
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
