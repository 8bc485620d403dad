"""Which modules become instances and which parameters they take: policies, what is ignored, shared weights."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from wrapped import CPU, LIBRARIES, batch, mlp, same, train, trained, whole, wrap

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


def policy_of(library: types.ModuleType, kind: str) -> Any:
    wrap_module = library.wrap
    return {
        "custom": lambda: wrap_module.CustomPolicy(functools.partial(_custom, library)),
        "size": lambda: functools.partial(wrap_module.size_based_auto_wrap_policy, min_num_params=100),
        "always": lambda: wrap_module.always_wrap_policy,
    }[kind]()


def compare_policy(kind: str, originals: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        model = wrap(library, mlp(), auto_wrap_policy=policy_of(library, kind), use_orig_params=originals)
        losses = train(model)
        found[label] = (instances(library, model), losses, whole(library, model))
    assert found["ours"][0] == found["theirs"][0] and len(found["ours"][0]) > 1
    torch.testing.assert_close(found["ours"][1], found["theirs"][1])
    same(found["ours"][2], found["theirs"][2])
    same(found["ours"][2], trained(mlp()))


@pytest.mark.parametrize(
    ("kind", "originals"), [("custom", True), ("custom", False), ("size", False), ("always", True)]
)
def test_policies_choose_and_train_as_pytorchs(run_ranks, kind: str, originals: bool) -> None:
    run_ranks(compare_policy, kind, originals)


def wrap_contexts(originals: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        keywords = {"device_id": CPU, "use_orig_params": originals}
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


def test_wrap_contexts(run_ranks) -> None:
    run_ranks(wrap_contexts, True)


# What is left alone.


def ignoring(how: str, originals: bool) -> None:
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


@both
@pytest.mark.parametrize("how", ["modules", "states as modules", "states as parameters", "around an instance"])
def test_ignored_parameters_stay_whole(run_ranks, how: str, originals: bool) -> None:
    run_ranks(ignoring, how, originals)


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
def test_shared_weights_train_as_unsharded(run_ranks, kind: str, originals: bool) -> None:
    run_ranks(ties, kind, originals)


def ties(kind: str, originals: bool) -> None:
    model: Any = wrap(fullshard, Tied(kind), auto_wrap_policy={nn.Sequential}, use_orig_params=originals)
    train(model)
    same(whole(fullshard, model), trained(Tied(kind)))
    assert list(model.state_dict()) == list(Tied(kind).state_dict())
