"""Which submodules become instances, against PyTorch's wrapper with the same policy; `enable_wrap` and `wrap`."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import wrap as theirs

import fullshard
from fullshard import wrap as ours
from models import GPT, Block


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)))
        self.own = nn.Parameter(torch.ones(7))
        self.attention = nn.MultiheadAttention(4, 2)
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.LayerNorm(2)})])


class Shared(nn.Module):
    """`again.0` is `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = nn.Sequential(self.first, nn.Linear(3, 4))


MODELS = {"gpt": GPT, "nested": Nested}
POLICIES = {
    "always": lambda p: p.always_wrap_policy,
    "classes": lambda p: p.ModuleWrapPolicy({Block, nn.Linear}),
    "classes called": lambda p: partial(p._or_policy, policies=[p.ModuleWrapPolicy({nn.Sequential})]),
    "custom": lambda p: p.CustomPolicy(
        lambda m: {"forward_prefetch": True} if isinstance(m, nn.Linear) else isinstance(m, (Block, nn.Sequential))
    ),
    "transformer": lambda p: partial(p.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.LayerNorm}),
    "lambda": lambda p: partial(p.lambda_auto_wrap_policy, lambda_fn=lambda m: len(list(m.children())) == 2),
    "either": lambda p: partial(
        p._or_policy,
        policies=[
            partial(p.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)),
            partial(p.size_based_auto_wrap_policy, min_num_params=30),
        ],
    ),
    **{f"size {n}": lambda p, n=n: partial(p.size_based_auto_wrap_policy, min_num_params=n) for n in (1, 12, 40, 1000)},
    "size leaves": lambda p: partial(
        p.size_based_auto_wrap_policy, min_num_params=4, force_leaf_modules={nn.Sequential}, exclude_wrap_modules=set()
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytorch_wraps(model: nn.Module, policy, **kwargs) -> set[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **kwargs)
    names = (n for n, m in wrapped.named_modules() if isinstance(m, FullyShardedDataParallel))
    return {".".join(p for p in name.split(".") if p != "_fsdp_wrapped_module") for name in names} - {""}


def names(plan) -> list[str]:
    return [name for name, _, _ in plan]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_modules_as_pytorch(model: str, policy: str) -> None:
    plan = ours.plan_wrapping(MODELS[model](), POLICIES[policy](ours))
    assert len(names(plan)) == len(set(names(plan)))
    assert set(names(plan)) == pytorch_wraps(MODELS[model](), POLICIES[policy](theirs))
    same = ours.plan_wrapping(MODELS[model](), POLICIES[policy](theirs))
    assert names(same) == names(plan), "PyTorch's own policy objects are taken too"


@pytest.mark.parametrize("policy", ["always", "classes", "size 1", "size 12", "custom"])
def test_ignored_modules_are_left_alone_as_pytorch_does(policy: str) -> None:
    first, second = Nested(), Nested()
    plan = ours.plan_wrapping(first, POLICIES[policy](ours), [first.inner])
    assert set(names(plan)) == pytorch_wraps(second, POLICIES[policy](theirs), ignored_modules=[second.inner])
    assert not any(name.startswith("inner") for name in names(plan))


def test_the_policies_are_asked_what_pytorch_asks() -> None:
    def recorder(calls: list):
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            calls.append((type(module).__name__, recurse, nonwrapped_numel))
            return not isinstance(module, (nn.MultiheadAttention, nn.GELU))

        return policy

    mine: list = []
    expected: list = []
    ours.plan_wrapping(Nested(), recorder(mine))
    pytorch_wraps(Nested(), recorder(expected))
    assert mine == expected


def test_ignored_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    policy = partial(ours.size_based_auto_wrap_policy, min_num_params=10)
    assert names(ours.plan_wrapping(model, policy)) == ["0", "1"]
    assert names(ours.plan_wrapping(model, policy, (), [model[0].weight])) == ["1"]


def test_shared_modules_are_there_once_and_innermost_come_first() -> None:
    for policy in (ours.always_wrap_policy, {nn.Linear, nn.Sequential}):
        assert names(ours.plan_wrapping(Shared(), policy)) == ["first", "again.1", "again"]
    assert set(names(ours.plan_wrapping(Shared(), {nn.Linear}))) == pytorch_wraps(
        Shared(), theirs.ModuleWrapPolicy({nn.Linear})
    )
    order = names(ours.plan_wrapping(GPT(), ours.always_wrap_policy))
    assert all(order.index(name) < order.index(name.rpartition(".")[0]) for name in order if "." in name)


def test_custom_policies_give_arguments_and_must_answer() -> None:
    plan = ours.plan_wrapping(Nested(), POLICIES["custom"](ours))
    assert {name: kwargs for name, _, kwargs in plan}["heads.0"] == {"forward_prefetch": True}
    assert {name: kwargs for name, _, kwargs in plan}["inner"] == {}
    with pytest.raises(fullshard.ConfigError, match="returned an invalid value"):
        ours.plan_wrapping(Nested(), ours.CustomPolicy(lambda m: 3))
    model, mesh = GPT(), dist.init_device_mesh("cpu", (1,))
    policy = ours.CustomPolicy(lambda m: {"layout": "columns"} if m is model.blocks[1] else isinstance(m, Block))
    with pytest.raises(fullshard.ConfigError, match="layout"):
        fullshard.fully_shard(model, mesh=mesh, auto_wrap_policy=policy)
    assert units_of(model) == set(), "nothing is changed"


def test_signatures_and_attributes_are_pytorchs() -> None:
    for name in [n for n in theirs.__all__ if n.islower()] + ["_or_policy"]:
        mine, expected = (inspect.signature(getattr(m, name)).parameters for m in (ours, theirs))
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ]
    assert set(theirs.__all__) <= set(ours.__all__)
    for name in ("EXCLUDE_WRAP_MODULES", "FORCE_LEAF_MODULES"):
        assert getattr(ours.size_based_auto_wrap_policy, name) == getattr(theirs.size_based_auto_wrap_policy, name)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs


def test_wrap_follows_the_innermost_context_and_nothing_is_left_after_it() -> None:
    layer = nn.Linear(1, 1)
    assert ours.wrap(layer, a=3) is layer
    with ours.enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        wrapped = ours.wrap(layer, a=3, c=4)
        assert isinstance(wrapped, Wrapper) and wrapped.module is layer
        assert wrapped.kwargs == {"a": 3, "b": 2, "c": 4}
        with pytest.raises(KeyError), ours.enable_wrap(wrapper_cls=nn.Sequential):
            assert type(ours.wrap(layer)) is nn.Sequential
            raise KeyError
        assert ours.wrap(layer).kwargs == {"a": 1, "b": 2}
        assert ours.wrap(wrapped).module is wrapped
    assert ours.wrap(layer) is layer
    with pytest.raises(fullshard.ConfigError, match="wrapper_cls"), ours.enable_wrap(wrapper_cls=3):
        raise AssertionError("entered")


def units_of(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, fullshard.FSDPModule)}


@pytest.mark.parametrize("policy", ["always", "classes", "custom", "size 1000", "transformer"])
def test_fully_shard_takes_every_policy(policy: str) -> None:
    model, mesh = GPT(), dist.init_device_mesh("cpu", (1,))
    given = POLICIES[policy](theirs) if policy == "transformer" else POLICIES[policy](ours)
    if policy == "custom":
        given = ours.CustomPolicy(
            lambda m: {"reshard_after_forward": False, "layout": "flat"} if type(m) is Block else False
        )
    expected = {n for n, m, _ in ours.plan_wrapping(model, given) if not isinstance(m, nn.ModuleList)} | {""}
    fullshard.fully_shard(model, mesh=mesh, auto_wrap_policy=given)
    assert units_of(model) == expected
    assert isinstance(model.blocks[0].mlp[0].weight, fullshard.FlatShard) == (policy == "custom")
    assert not isinstance(model.head.weight, fullshard.FlatShard)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
