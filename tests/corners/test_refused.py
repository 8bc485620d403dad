"""What programs written for PyTorch's FSDP do and Fullshard refused: settings, wrapping, loading, pickles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import layers, losses_of, notices, trains_as
from torch import Tensor, nn
from torch.distributed._composable import replicate

import fullshard
import fullshard.state_dict
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.state_dict import StateDictOptions
from ways import WRAPPERS, children, mesh_of, on_ranks, shard, wrap


@pytest.mark.parametrize(("mesh", "world"), [("1d", 2), ("hybrid", 4)])
def test_reshard_after_forward_to_one_rank_and_to_all(run_ranks, mesh, world):
    """1 is False and the shard size is True; 1 is said, as PyTorch says it, since it may be meant as True."""
    run_ranks(resharding, mesh, world=world)


def resharding(mesh: str) -> None:
    def gathers(value: bool | int) -> tuple[list[str], list[str]]:
        with notices() as said:
            model = shard(layers(), "rows", children, mesh=mesh_of(mesh), reshard_after_forward=value)
        assert trains_as(model, layers())
        with fullshard.record_events() as events:
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        return [event.unit for event in events if event.verb == "gather"], said

    kept, freed = gathers(False)[0], gathers(True)[0]
    assert len(kept) < len(freed)
    found, said = gathers(1)
    assert found == kept and any("reshard_after_forward=1" in line for line in said), said
    assert gathers(2)[0] == freed


@pytest.mark.parametrize("value", [0, 3, -1, 4])
def test_a_reshard_after_forward_that_divides_nothing_is_refused(fake_world, value):
    fake_world(2)
    with pytest.raises(ValueError, match="reshard_after_forward"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=value)


def wrapped_parts(originals: bool) -> nn.Sequential:
    parts = layers()
    parts[0], parts[2] = wrap(parts[0], use_orig_params=originals), wrap(parts[2], use_orig_params=originals)
    return parts


@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize("first", ["has run", "runs later"])
@on_ranks
def test_parts_of_two_roots(first: str, originals: bool) -> None:
    """A model of wrapped parts: one root for training and a second one over the same parts, as PyTorch allows."""
    for same in (True, False):
        parts = wrapped_parts(originals)
        one, reference = wrap(parts, use_orig_params=originals), layers()
        if first == "has run":
            trains_as(one, reference)
        two = wrap(parts if same else nn.Sequential(*parts), use_orig_params=originals)
        for root in (two, one, two):
            trains_as(root, reference)
    one = wrap(wrapped_parts(originals), use_orig_params=originals)
    if first == "runs later":
        trains_as(wrap(nn.Sequential(one), use_orig_params=originals), layers())
        return
    one(torch.ones(1, 4, dtype=torch.float64))
    with pytest.raises(
        (RuntimeError, AssertionError), match="was used on its own before the model"
    ):  # PyTorch refuses this one, too
        wrap(nn.Sequential(one), use_orig_params=originals)(torch.ones(1, 4, dtype=torch.float64))


@pytest.mark.parametrize("of", ["outputs", "a part's output"])
@on_ranks
def test_backwards_of_two_roots_come_later(of: str) -> None:
    """Both forwards, then both backwards: a unit in both goes back to the root whose forward it was."""
    parts, whole, kept = wrapped_parts(True), layers(), []
    one, two = wrap(parts, use_orig_params=True), wrap(nn.Sequential(*parts), use_orig_params=True)
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
@pytest.mark.parametrize("way", ["rows", "wrapper", "originals"])
@on_ranks
def test_ranks_that_ignore_different_modules(way: str, kind: str) -> None:
    """What is sharded has the same shapes in the same order on every rank; only its names differ."""
    model, reference = Experts(kind, dist.get_rank()), Experts(kind, dist.get_rank())
    if way == "rows":
        fully_shard(model.net[0])
        fully_shard(model, ignored_params={p for expert in model.ignored for p in expert.parameters()})
    else:
        model = wrap(model, ignored_modules=model.ignored, use_orig_params=WRAPPERS[way])
    trains_as(model, reference)


@pytest.mark.gloo("replicate needs a backend in C++")
@pytest.mark.parametrize("way", ["rows", "wrapper"])
@on_ranks
def test_replicate_around_sharded_modules_that_it_ignores(way: str) -> None:
    """It averages the gradients of the rest. It knows PyTorch's own sharded modules by a private mark, not ours."""
    model = layers()
    model[0] = fully_shard(model[0]) if way == "rows" else wrap(model[0])
    replicate(model, ignored_modules=[model[0]])
    trains_as(model, layers())


# Whole tensors loaded into a part of a unit, and tensor-likes that load themselves.

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_state = fullshard.state_dict.set_model_state_dict
LOADS: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "set_model_state_dict": set_state,
    "of a full state": lambda m, s: set_state(m, s, options=FULL),
    "of rank 0's": lambda m, s: set_state(m, s if dist.get_rank() == 0 else {}, options=FROM_RANK_0),
    "load_state_dict": lambda m, s: m.load_state_dict(s),
}


@pytest.mark.parametrize("way", ["rows", "flat"])
@pytest.mark.parametrize("how", LOADS)
@on_ranks
def test_whole_tensors_into_a_part_of_a_unit(how: str, way: str) -> None:
    model = shard(nn.Sequential(layers(), nn.Linear(3, 3).double()), way)
    for value, part in enumerate((model[0][2], model[0], model)):
        whole = {key: torch.full(v.shape, 1.0 + value, dtype=torch.float64) for key, v in part.state_dict().items()}
        LOADS[how](part, whole)
        for key, parameter in part.named_parameters():
            assert torch.equal(parameter.full_tensor(), whole[key]), key
    with pytest.raises(fullshard.CheckpointError, match="weight"):
        set_state(model[0][2], dict.fromkeys(("weight", "bias"), torch.ones(2, 2)), options=FULL)


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


@pytest.mark.parametrize("way", ["plain", "rows", "flat", "wrapper", "originals"])
@on_ranks
def test_tensor_likes_load(way: str) -> None:
    model, other, read = layers(seed=1), layers(seed=2), []
    model = model if way == "plain" else shard(model, way)
    state = {name: Lazy(tensor, read, name) for name, tensor in other.state_dict().items()}
    model.load_state_dict(state)
    assert set(read) == set(state)
    with pytest.raises((fullshard.CheckpointError, RuntimeError), match=r"0\.weight"):
        model.load_state_dict({**state, "0.weight": Lazy(torch.zeros(1, 2), read, "0.weight")})
    got = losses_of(model, model.parameters(), whole=way == "plain")
    assert got == pytest.approx(losses_of(other, other.parameters(), whole=True), rel=1e-9)
