"""An instance of the wrapper once made: the values it starts with, the ranks it trains on, and that it is a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from ways import on_ranks
from wrapped import LIBRARIES, mlp, same, train, trained, whole, wrap

both = pytest.mark.parametrize("originals", [True, False])


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
