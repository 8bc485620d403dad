"""The wrapper's constructor: what becomes an instance, what values it starts with, and that it trains as unsharded."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from parity.both_wrappers import LIBRARIES, batch, same, train, whole, wrap

both = pytest.mark.parametrize("originals", [True, False])
CPU = torch.device("cpu")


def mlp(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)))


def trained(model: nn.Module, ranks: list[int] | None = None, **keywords: Any) -> dict[str, Tensor]:
    """The unsharded reference: parameters and buffers after training on all ranks' batches."""
    train(model, ranks=list(range(dist.get_world_size())) if ranks is None else ranks, **keywords)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


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
        "classes": lambda: wrap_module.ModuleWrapPolicy({nn.Linear}),
        "custom": lambda: wrap_module.CustomPolicy(functools.partial(_custom, library)),
        "size": lambda: functools.partial(wrap_module.size_based_auto_wrap_policy, min_num_params=100),
        "transformer": lambda: functools.partial(
            wrap_module.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}
        ),
        "lambda": lambda: functools.partial(
            wrap_module.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear) and m.in_features == 6
        ),
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


@both
@pytest.mark.parametrize("kind", ["classes", "custom", "size", "transformer", "lambda", "always"])
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


@both
def test_wrap_contexts(run_ranks, originals: bool) -> None:
    run_ranks(wrap_contexts, originals)


# What is left alone.


def ignoring(how: str, originals: bool) -> None:
    found = {}
    for label, library in LIBRARIES.items():
        model = mlp()
        keywords: dict[str, Any] = {
            "modules": {"ignored_modules": [model[1], model[2][0]]},
            "states as modules": {"ignored_states": [model[1], model[2][0]]},
            "states as parameters": {"ignored_states": [*model[1].parameters(), *model[2][0].parameters()]},
        }[how]
        ignored = model[2][0].weight
        if how != "states as parameters":
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
@pytest.mark.parametrize("how", ["modules", "states as modules", "states as parameters"])
def test_ignored_parameters_stay_whole(run_ranks, how: str, originals: bool) -> None:
    run_ranks(ignoring, how, originals)


# Shared parameters and modules.


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


def ties(kind: str, originals: bool) -> None:
    model: Any = wrap(
        fullshard,
        Tied(kind),
        auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=originals,
    )
    train(model)
    same(whole(fullshard, model), trained(Tied(kind)))
    state = model.state_dict()
    assert list(state) == list(Tied(kind).state_dict())


@both
@pytest.mark.parametrize("kind", ["none", "within", "siblings", "nested", "module twice", "inner module twice"])
def test_shared_weights_train_as_unsharded(run_ranks, kind: str, originals: bool) -> None:
    run_ranks(ties, kind, originals)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.cell = getattr(nn, kind)(6, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cell(x.view(-1, 2, 6))
        return self.out(hidden)


def recurrent(kind: str, originals: bool, inner: bool) -> None:
    policy = fullshard.wrap.ModuleWrapPolicy({getattr(nn, kind)}) if inner else None
    model = wrap(fullshard, Recurrent(kind), auto_wrap_policy=policy, use_orig_params=originals)
    train(model)
    same(whole(fullshard, model), trained(Recurrent(kind)))


@both
@pytest.mark.parametrize(("kind", "inner"), [("LSTM", True), ("LSTM", False), ("GRU", True)])
def test_recurrent_layers(run_ranks, kind: str, inner: bool, originals: bool) -> None:
    run_ranks(recurrent, kind, originals, inner)


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
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view(tensor.shape) / (i + 1))


def from_meta(given: bool, originals: bool, policy: bool) -> None:
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


@both
@pytest.mark.parametrize(("given", "policy"), [(True, True), (True, False), (False, True)])
def test_models_on_meta_get_values(run_ranks, given: bool, policy: bool, originals: bool) -> None:
    run_ranks(from_meta, given, originals, policy)


def synced(originals: bool) -> None:
    rank = dist.get_rank()
    model = mlp(seed=10 + rank)
    model.register_buffer("noise", torch.full((3,), float(rank)))
    model.register_buffer("count", torch.tensor(rank))
    model = wrap(
        fullshard,
        model,
        auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({nn.Linear}),
        sync_module_states=True,
        use_orig_params=originals,
    )
    found = whole(fullshard, model)
    assert not found["noise"].any() and found["count"] == 0
    for name, tensor in mlp(seed=10).state_dict().items():
        assert torch.equal(found[name], tensor), name


@both
def test_sync_module_states_spreads_rank_0s(run_ranks, originals: bool) -> None:
    run_ranks(synced, originals)


def device_ids() -> None:
    for device in (None, CPU, torch.device("cpu", 0)):
        model = FSDP(nn.Linear(6, 6), device_id=device)
        assert model.compute_device.type == "cpu"
        train(model, steps=1)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="device_id"):
            FSDP(nn.Linear(6, 6), device_id=0)
    with pytest.raises(ValueError, match="device_id"):
        FSDP(nn.Linear(6, 6), device_id="gpu")


def test_device_ids(run_ranks) -> None:
    run_ranks(device_ids)


# Groups and meshes.


def halves() -> Any:
    return [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]


def separate_groups(originals: bool) -> None:
    rank = dist.get_rank()
    mine = rank // 2
    group = halves()[0][mine]
    model = wrap(fullshard, mlp(mine), process_group=group, use_orig_params=originals)
    assert (model.rank, model.world_size) == (rank % 2, 2) and model.process_group is not None
    train(model)
    expected = trained(mlp(mine), ranks=[2 * mine, 2 * mine + 1])
    same(whole(fullshard, model), expected)


@both
def test_groups_of_ranks_train_on_their_own(run_ranks, originals: bool) -> None:
    run_ranks(separate_groups, originals, world=4)


def hybrid(how: str, originals: bool) -> None:
    rank = dist.get_rank()
    keywords: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    if how == "zero2":
        keywords = {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}
    if how in ("pair", "zero2"):
        shard, replicate = halves()
        keywords["process_group"] = (shard[rank // 2], replicate[rank % 2])
    elif how == "mesh":
        keywords["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = fullshard.wrap.ModuleWrapPolicy({nn.Linear})
    model = wrap(fullshard, mlp(), auto_wrap_policy=policy, use_orig_params=originals, **keywords)
    assert model.world_size == (4 if how == "node" else 2)
    train(model)
    same(whole(fullshard, model), trained(mlp()))


@both
@pytest.mark.parametrize("how", ["pair", "zero2", "mesh", "node"])
def test_hybrid_strategies(run_ranks, how: str, originals: bool) -> None:
    run_ranks(hybrid, how, originals, world=4)


# Being a module.


class Named(nn.Sequential):
    label = "a class attribute"

    def helper(self) -> int:
        return len(self)


def forwarding(originals: bool) -> None:
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


@torch.no_grad()
def doubled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.mul_(2)
        module.bias.fill_(0.5)


@both
def test_attributes_names_and_methods_reach_the_module(run_ranks, originals: bool) -> None:
    run_ranks(forwarding, originals)


def early_optimizer(originals: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = wrap(fullshard, model, use_orig_params=originals)
    if originals:
        train(model, optimizer=optimizer)
        same(whole(fullshard, model), trained(mlp()))
        return
    model(batch(0, 0)).sum().backward()
    with pytest.raises(fullshard.ConfigError, match=r"(?s)remedy.*use_orig_params=True"):
        optimizer.step()


@both
def test_an_optimizer_made_before_wrapping_works_or_says_why_not(run_ranks, originals: bool) -> None:
    run_ranks(early_optimizer, originals)


# Arguments that cannot work.


def bad_arguments() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    kinds = {name: type(child) for name, child in model.named_modules()}
    mesh = init_device_mesh("cpu", (2,))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"sharding_strategy": "FULL"}, ValueError, "sharding_strategy"),
        ({"process_group": dist.group.WORLD, "device_mesh": mesh}, ValueError, "device_mesh"),
        ({"process_group": (dist.group.WORLD, dist.group.WORLD)}, ValueError, "hybrid"),
        (
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": dist.group.WORLD},
            ValueError,
            "replicates over",
        ),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}, ValueError, "2-D"),
        ({"ignored_modules": [model[0]], "ignored_states": [model[1]]}, ValueError, "ignored_states"),
        ({"ignored_states": [model[0], model[1][0].weight]}, ValueError, "not both"),
        ({"ignored_modules": [3]}, ValueError, "ignored"),
        ({"ignored_modules": 3}, TypeError, "ignored"),
        ({"mixed_precision": torch.bfloat16}, ValueError, "mixed_precision"),
        ({"backward_prefetch": "pre"}, ValueError, "backward_prefetch"),
        ({"cpu_offload": True}, ValueError, "cpu_offload"),
        ({"auto_wrap_policy": 3}, TypeError, "auto_wrap_policy"),
        ({"param_init_fn": 3}, ValueError, "param_init_fn"),
        ({"param_init_fn": 3, "auto_wrap_policy": {nn.Linear}}, ValueError, "param_init_fn"),
        ({"device_id": "gpu"}, ValueError, "device_id"),
        ({"process_group": 3}, ValueError, "process_group"),
        ({"device_mesh": 3}, ValueError, "mesh"),
        ({"comm": "fast"}, ValueError, "comm"),
    ]
    for arguments, kind, said in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(kind, match=said) as caught:
                FSDP(model, **arguments)
        assert isinstance(caught.value, fullshard.FullshardError), arguments
        assert {name: type(child) for name, child in model.named_modules()} == kinds, arguments
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), arguments
        same(dict(model.state_dict()), before)
    with pytest.raises(ValueError, match="takes an nn"):
        FSDP(3)
    mixed = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).double())
    with pytest.raises(ValueError, match=r"uniform dtype.*(?s:.*)use_orig_params"):
        FSDP(mixed)
    frozen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False))
    with pytest.raises(ValueError, match=r"uniform.*requires_grad.*(?s:.*)use_orig_params"):
        FSDP(frozen)
    assert type(mixed[0]) is nn.Linear and mixed[0].weight.shape == (6, 6)
    twice = FSDP(mlp())
    with pytest.raises(ValueError, match="already"):
        FSDP(twice, auto_wrap_policy={nn.Linear})
    partly = mlp()
    partly[0] = FSDP(partly[0])
    with pytest.raises(ValueError, match="already"):
        FSDP(partly, auto_wrap_policy={nn.Linear})
    assert type(partly[1][0]) is nn.Linear
    FSDP(mixed, use_orig_params=True), FSDP(frozen, use_orig_params=True)


def test_bad_arguments_have_one_clear_error_and_change_nothing(run_ranks) -> None:
    run_ranks(bad_arguments)


def test_signatures_are_pytorchs() -> None:
    theirs = torch_fsdp.FullyShardedDataParallel
    checked = 0
    for name in dir(theirs):
        if name != "__init__" and (name.startswith("_") or (hasattr(nn.Module, name) and name not in vars(theirs))):
            continue
        expected = getattr(theirs, name)
        ours = getattr(FSDP, name)
        if not callable(expected):
            continue
        mine, other = inspect.signature(ours).parameters, inspect.signature(expected).parameters
        assert list(mine)[: len(other)] == list(other), name
        assert [p.kind for p in mine.values()][: len(other)] == [p.kind for p in other.values()], name
        for key, value in other.items():
            given = mine[key].default
            assert given == value.default or getattr(given, "name", 0) == getattr(value.default, "name", 1), (name, key)
        assert all(p.kind is p.KEYWORD_ONLY for p in list(mine.values())[len(other) :]), name
        checked += 1
    assert checked > 15
