"""What programs written for PyTorch's FSDP do and Fullshard refused: settings, wrapping, loading, pickles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import EVERY_LAYOUT, WRAPPERS, layers, losses_of, notices, shard, trains_as
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import fullshard.state_dict
from fullshard import FullyShardedDataParallel, StateDictType, fully_shard
from fullshard.state_dict import StateDictOptions
from ways import wrap

every_layout = pytest.mark.parametrize("layout", EVERY_LAYOUT, ids=str)
both_wrappers = pytest.mark.parametrize("originals", WRAPPERS, ids=["flat parameter", "original parameters"])


# reshard_after_forward as an int that needs no smaller group.


@every_layout
@pytest.mark.parametrize("mesh", ["1d", "hybrid"])
def test_reshard_after_forward_to_one_rank_and_to_all(run_ranks, mesh, layout):
    """1 is False and the shard size is True; 1 is said, as PyTorch says it, since it may be meant as True."""
    assert all(run_ranks(resharding, mesh, layout, world=2 if mesh == "1d" else 4))


def resharding(mesh: str, layout: Any) -> bool:
    size, given = 2, None
    if mesh == "hybrid":
        given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def gathers(value: bool | int) -> tuple[list[str], list[str]]:
        with notices() as said:
            model = shard(layers(), layout=layout, mesh=given, reshard_after_forward=value)
        assert trains_as(model, layers())
        with fullshard.record_events() as events:
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        return [event.unit for event in events if event.verb == "gather"], said

    kept, freed = gathers(False)[0], gathers(True)[0]
    assert len(kept) < len(freed)
    found, said = gathers(1)
    assert found == kept
    assert any("reshard_after_forward=1" in line for line in said), said
    found, said = gathers(size)
    assert found == freed
    return True


@every_layout
@pytest.mark.parametrize("value", [0, 3, -1, 4])
def test_a_reshard_after_forward_that_divides_nothing_is_refused(fake_world, value, layout):
    fake_world(2)
    with pytest.raises(ValueError, match="reshard_after_forward"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=value, layout=layout)


# A module that is wrapped again while a first root of it is alive.


@both_wrappers
@pytest.mark.parametrize("other", ["the same module", "another module of the same parts", "a root around the first"])
@pytest.mark.parametrize("first", ["has run", "runs later"])
def test_parts_of_two_roots(run_ranks, first, other, originals):
    """A model of wrapped parts: one root for training and a second one over the same parts, as PyTorch allows."""
    assert all(run_ranks(two_roots, first, other, originals))


def two_roots(first: str, other: str, originals: bool) -> bool:
    parts = layers()
    parts[0], parts[2] = wrap(parts[0], use_orig_params=originals), wrap(parts[2], use_orig_params=originals)
    one, reference = wrap(parts, use_orig_params=originals), layers()
    if other == "a root around the first":
        if first == "has run":  # PyTorch refuses this one, too: its first root is no root then
            one(torch.ones(1, 4, dtype=torch.float64))
            with pytest.raises((RuntimeError, AssertionError), match="root"):
                wrap(nn.Sequential(one), use_orig_params=originals)(torch.ones(1, 4, dtype=torch.float64))
            return True
        return trains_as(wrap(nn.Sequential(one), use_orig_params=originals), reference)
    if first == "has run":
        assert trains_as(one, reference)
    again = parts if other == "the same module" else nn.Sequential(*parts)
    two = wrap(again, use_orig_params=originals)
    assert trains_as(two, reference)
    return trains_as(one, reference) and trains_as(two, reference)


@both_wrappers
@pytest.mark.parametrize("of", ["outputs", "a part's output"])
def test_backwards_of_two_roots_come_later(run_ranks, of, originals):
    """Both forwards, then both backwards: a unit in both goes back to the root whose forward it was."""
    assert all(run_ranks(backwards_later, of, originals))


def backwards_later(of: str, originals: bool) -> bool:
    parts = layers()
    parts[0], parts[2] = wrap(parts[0], use_orig_params=originals), wrap(parts[2], use_orig_params=originals)
    one, two = wrap(parts, use_orig_params=originals), wrap(nn.Sequential(*parts), use_orig_params=originals)
    whole, kept = layers(), []
    for module in (parts[0], whole[0]):
        module.register_forward_hook(lambda _, args, output: kept.append(output))
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        for models in ((one, two), (whole, whole)):
            kept.clear()
            losses = [model(scale * x).square().sum() for scale, model in zip((1.0, 2.0), models, strict=True)]
            for loss in losses if of == "outputs" else [output.square().sum() for output in kept]:
                loss.backward()
    with FullyShardedDataParallel.summon_full_params(one, with_grads=True, writeback=False):
        for mine, theirs in zip(one.parameters(), whole.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)
    return True


# Ignored modules that differ per rank.


class Experts(nn.Module):
    """A layer, the experts that this rank has, a layer: their number or their names depend on the rank."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        before, after = nn.Linear(4, 5), nn.Linear(5, 3)
        mine: list[nn.Module] = [nn.Linear(5, 5) for _ in range(rank + 1)]
        self.ignored = list(mine)
        if kind == "number":  # the number of experts shifts the name of the layer after them
            self.net = nn.Sequential(before, *mine, after)
        else:
            named = {f"expert{rank}": nn.Sequential(*mine)} if kind == "name" else {"expert": nn.Sequential(*mine)}
            self.net = nn.Sequential(before, nn.ModuleDict(named), after)
        for expert in mine:
            nn.init.eye_(expert.weight)
            nn.init.zeros_(expert.bias)
            expert.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        for expert in self.ignored:
            x = expert(x)
        return self.net[-1](x)


@pytest.mark.parametrize("kind", ["number", "name", "number inside"])
@pytest.mark.parametrize("front_end", ["flat parameter", "original parameters", "rows", "flat", "owner"])
def test_ranks_that_ignore_different_modules(run_ranks, front_end, kind):
    """What is sharded has the same shapes in the same order on every rank; only its names differ."""
    assert all(run_ranks(different_ignored, front_end, kind))


def different_ignored(front_end: str, kind: str) -> bool:
    model, reference = Experts(kind, dist.get_rank()), Experts(kind, dist.get_rank())
    if front_end in ("rows", "flat", "owner"):
        ignored = {p for expert in model.ignored for p in expert.parameters()}
        fully_shard(model.net[0], layout=front_end)
        fully_shard(model, layout=front_end, ignored_params=ignored)
    else:
        model = wrap(model, ignored_modules=model.ignored, use_orig_params=front_end == "original parameters")
    return trains_as(model, reference)


# DDP composed around sharded modules.


@pytest.mark.gloo("replicate needs a backend in C++")
@every_layout
def test_replicate_around_sharded_modules_that_it_ignores(run_ranks, layout):
    """It averages the gradients of the rest. It knows PyTorch's own sharded modules by a private mark, not ours."""
    assert all(run_ranks(replicated, layout))


def replicated(layout: Any) -> bool:
    model = layers()
    fully_shard(model[0], layout=layout)
    replicate(model, ignored_modules=[model[0]])
    return trains_as(model, layers())


@pytest.mark.gloo("replicate needs a backend in C++")
@both_wrappers
def test_replicate_around_wrapped_modules_that_it_ignores(run_ranks, originals):
    assert all(run_ranks(replicated_wrapper, originals))


def replicated_wrapper(originals: bool) -> bool:
    model = layers()
    model[0] = wrap(model[0], use_orig_params=originals)
    replicate(model, ignored_modules=[model[0]])
    return trains_as(model, layers())


# Whole tensors loaded into a part of a unit, and tensor-likes that load themselves.


LOADS: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "set_model_state_dict": fullshard.state_dict.set_model_state_dict,
    "of a full state": lambda m, s: fullshard.state_dict.set_model_state_dict(
        m, s, options=StateDictOptions(full_state_dict=True)
    ),
    "of rank 0's": lambda m, s: fullshard.state_dict.set_model_state_dict(
        m,
        s if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    "load_state_dict": lambda m, s: m.load_state_dict(s),
}


@every_layout
@pytest.mark.parametrize("how", LOADS)
def test_whole_tensors_into_a_part_of_a_unit(run_ranks, how, layout):
    assert all(run_ranks(part_loaded, how, layout))


def part_loaded(how: str, layout: Any) -> bool:
    model = nn.Sequential(layers(), nn.Linear(3, 3).double())
    shard(model, layout=layout)
    for name, part in (("0.2.", model[0][2]), ("0.", model[0]), ("", model)):
        whole = {key: torch.full(value.shape, 1.0 + len(name), dtype=torch.float64) for key, value in
                 part.state_dict().items()}  # fmt: skip
        LOADS[how](part, whole)
        for key, parameter in part.named_parameters():
            assert torch.equal(parameter.full_tensor(), whole[key]), name + key
    return True


class Lazy:
    """A tensor on disk, as loaders of large checkpoints make them: any function of torch reads it."""

    def __init__(self, tensor: Tensor, read: list[str], name: str) -> None:
        self.tensor, self.read, self.name = tensor, read, name
        self.shape, self.dtype = tensor.shape, tensor.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def load(value: Any) -> Any:
            if isinstance(value, Lazy):
                value.read.append(value.name)
                return value.tensor
            return [load(v) for v in value] if isinstance(value, (list, tuple)) else value

        return func(*load(list(args)), **{key: load(value) for key, value in (kwargs or {}).items()})


@pytest.mark.parametrize("front_end", ["plain", *EVERY_LAYOUT, *WRAPPERS], ids=str)
def test_tensor_likes_load(run_ranks, front_end):
    assert all(run_ranks(lazily, front_end))


def lazily(front_end: Any) -> bool:
    model, other, read = layers(seed=1), layers(seed=2), []
    if isinstance(front_end, bool):
        model = wrap(model, use_orig_params=front_end)
    elif front_end != "plain":
        shard(model, layout=front_end)
    state = {name: Lazy(tensor, read, name) for name, tensor in other.state_dict().items()}
    model.load_state_dict(state)
    assert set(read) == set(state)
    got = losses_of(model, model.parameters(), whole=front_end == "plain")
    assert got == pytest.approx(losses_of(other, other.parameters(), whole=True), rel=1e-9)
    return True


# Sharded parameters, pickled and copied.


def saved(value: Any, safe: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=safe)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: saved(value, safe=False),
    "torch.save, weights only": lambda value: saved(value, safe=True),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize(
    ("how", "layout"), [*((how, "rows") for how in COPIES), *(("deepcopy", layout) for layout in EVERY_LAYOUT[1:])]
)
@pytest.mark.parametrize("when", ["new", "stepped"])
def test_a_sharded_parameter_is_copied(run_ranks, when, how, layout):
    """Values, shape and `requires_grad` come back, alone and in a list; training goes on afterwards."""
    assert all(run_ranks(parameter_copied, when, how, layout))


def parameter_copied(when: str, how: str, layout: Any) -> bool:
    model, reference = shard(layers(), layout=layout), layers()
    if when == "stepped":
        assert trains_as(model, reference)
    model[0].bias.requires_grad_(False)
    for parameter in model.parameters():
        alone, (listed,) = COPIES[how](parameter), COPIES[how]([parameter])
        for found in (alone, listed):
            assert found.shape == parameter.shape
            assert found.requires_grad == parameter.requires_grad
            assert torch.equal(found.full_tensor(), parameter.full_tensor())
    with torch.no_grad():
        alone.zero_()  # memory of its own
    assert parameter.full_tensor().any()
    model[0].bias.requires_grad_(True)
    return trains_as(model, reference)


@pytest.mark.parametrize("layout", EVERY_LAYOUT[1:], ids=str)
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_run_of_elements_is_pickled_or_refused_by_name(run_ranks, how, layout):
    """PyTorch has no such layout. It names the parameter, and the model is as before."""
    assert all(run_ranks(run_pickled, how, layout))


def run_pickled(how: str, layout: Any) -> bool:
    model, reference = shard(layers(), layout=layout), layers()
    assert trains_as(model, reference)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()
        try:
            assert torch.equal(COPIES[how](parameter).full_tensor(), whole)
        except fullshard.FullshardError as error:
            assert name in str(error)
    return trains_as(model, reference)


@both_wrappers
@pytest.mark.parametrize("how", COPIES)
def test_a_wrapped_models_parameter_is_copied(run_ranks, how, originals):
    assert all(run_ranks(wrapped_copied, how, originals))


def wrapped_copied(how: str, originals: bool) -> bool:
    model, reference = wrap(layers(), use_orig_params=originals), layers()
    assert trains_as(model, reference)
    for parameter in model.parameters():
        assert torch.equal(COPIES[how](parameter), parameter)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        assert COPIES[how](model.state_dict()).keys() == reference.state_dict().keys()
    return trains_as(model, reference)
