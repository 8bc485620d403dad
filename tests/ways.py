"""Every way to shard a model, whole values of what came out, and comparisons with one process, whatever the way.

rows, flat, blocks, owner   `fully_shard` with that layout
wrapper, originals          `FullyShardedDataParallel` with one FlatParameter per instance, or with the originals
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy
from models import Example, blocks_of
from training import compare_tensors, full_gradients, full_parameters, mesh_of
from wrapped import whole_gradients as wrapped_gradients

WAYS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows"},
    "flat": {"layout": "flat"},
    "blocks": {"layout": fullshard.Blocks("row")},
    "owner": {"layout": "owner"},
    "wrapper": {"use_orig_params": False},
    "originals": {"use_orig_params": True},
}
LAYOUTS = {way: given["layout"] for way, given in WAYS.items() if "layout" in given}
WRAPPERS = {way: given["use_orig_params"] for way, given in WAYS.items() if "use_orig_params" in given}
PER_PARAMETER = [way for way in WAYS if way != "wrapper"]  # whose parameters have a gradient each

every_way = pytest.mark.parametrize("way", WAYS)
every_layout = pytest.mark.parametrize("way", LAYOUTS)
every_wrapper = pytest.mark.parametrize("way", WRAPPERS)
every_parameter = pytest.mark.parametrize("way", PER_PARAMETER)
some_ways = pytest.mark.parametrize("way", SOME_WAYS := ("rows", "flat", "wrapper", "originals"))  # "blocks": as flat

EXACT = 1e-12  # of double precision, relative to a tensor's norm
SINGLE = 1e-5  # of single precision
WIDTH = 5  # rows, biases and columns do not divide by two ranks
WIDE = 6

Units = Callable[[nn.Module], Iterable[Any]]  # the modules that become units besides the root, bottom-up


# Sharding.


def children(model: nn.Module) -> list[nn.Module]:
    """Every child that has parameters is a unit."""
    return [child for child in model.children() if any(True for _ in child.parameters())]


def but_last(model: nn.Module) -> list[nn.Module]:
    """Every child is a unit, but for the last one, which the root holds."""
    return list(model.children())[:-1]


def named(*names: str) -> Units:
    """The modules of these names are units."""
    return lambda model: [model.get_submodule(name) for name in names]


def shard(
    model: nn.Module,
    way: str,
    units: Units = children,
    *,
    keep: bool = False,
    hybrid: bool = False,
    library: types.ModuleType = fullshard,
    **settings: Any,
) -> Any:
    """`model` sharded, with `units` of it units of their own.

    Args:
        keep: leave units gathered after forward (`reshard_after_forward=False`, `SHARD_GRAD_OP`).
        hybrid: on a mesh of 2 replicas.
        settings: further ones of the front-end.
    """
    given = {**WAYS[way], **settings}
    if way in LAYOUTS:
        if library is not fullshard:
            del given["layout"]
        if keep:
            given["reshard_after_forward"] = False
        if hybrid:
            given["mesh"] = mesh_of("hybrid")
        for unit in [*units(model), model]:
            library.fully_shard(unit, **given)
        return model
    if keep:
        given["sharding_strategy"] = library.ShardingStrategy.SHARD_GRAD_OP
    if hybrid:
        given |= {"device_mesh": mesh_of("hybrid"), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    for unit in units(model):
        instance = wrap(unit, library, **given)
        for parent in model.modules():
            for name, child in parent.named_children():
                if child is unit and parent is not instance:
                    parent._modules[name] = instance
    return wrap(model, library, **given)


def wrap(module: nn.Module, library: types.ModuleType = fullshard, **keywords: Any) -> Any:
    """`module` in one instance of the library's wrapper, on the CPU."""
    return library.FullyShardedDataParallel(module, device_id=torch.device("cpu"), **keywords)


def example_of(build: Callable[[], nn.Module], *units: str) -> Example:
    """A model and the modules of it, by their names, that become units besides the root."""
    return Example(build, named(*units), kind="vectors")


def sharded(example: Example, way: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The example sharded so; `settings` as `shard` takes them."""
    return shard(example.make(dtype), way, example.units, **settings)


def inner(module: nn.Module) -> Any:
    """The module that an instance wraps, or the module itself."""
    return module.module if isinstance(module, FullyShardedDataParallel) else module


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Gradients of the backwards in here are kept on their rank; nothing is to do for an unsharded model."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


# Models that several files use, and a rank's batch.


class Block(nn.Module):
    """Two layers; what it returns besides is up to `give`."""

    def __init__(self, give: Callable[[Block, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        y = self.down(torch.tanh(self.up(x)))
        return y if self.give is None else self.give(self, y)


class Network(nn.Module):
    """Three blocks, of which the one in the middle is `middle`; `join` makes a tensor of what that one returns."""

    def __init__(self, middle: Callable[[], nn.Module], join: Callable[[Any], Tensor] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), middle(), Block()])
        self.gain = nn.Parameter(torch.rand(WIDE))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = self.join(self.blocks[1](x))
        return self.blocks[2](x) * self.gain


def layers(count: int = 2) -> nn.Sequential:
    """`count` units of two layers, and a last layer that the root holds. Double precision, the same numbers always."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).double()


def batch(
    seed: int, rank: int | None = None, width: int = WIDTH, samples: int = 3, dtype: torch.dtype = torch.float64
) -> Tensor:
    """A rank's inputs; of all ranks, in order, where none is named."""
    if rank is None:
        return torch.cat([batch(seed, rank, width, samples, dtype) for rank in range(dist.get_world_size())])
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(samples, width, generator=generator, dtype=dtype)


def mine(seed: int) -> Tensor:
    """This rank's inputs."""
    return batch(seed, dist.get_rank())


wide_batch = partial(batch, width=WIDE, samples=4, dtype=torch.float32)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """A mean over the samples, so that the mean over ranks is the loss of the concatenated batch."""
    return model(inputs).square().sum(1).mean()


def mean_square(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


# Whole values, and comparisons.


def who_has_gradients(model: nn.Module) -> dict[str, bool]:
    """By parameter, whether it has a gradient. Fails where ranks that hold elements of it disagree. Collective.

    Every rank of `fully_shard` counts, also one without elements: PyTorch gives it an empty gradient.
    """
    wrapped = isinstance(model, FullyShardedDataParallel)
    mine = {name: p.grad is not None for name, p in model.named_parameters() if p.numel() or not wrapped}
    everyone: list[dict[str, bool]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    agreed: dict[str, bool] = {}
    for name in sorted({name for found in everyone for name in found}):
        found = {rank: has[name] for rank, has in enumerate(everyone) if name in has}
        assert len(set(found.values())) == 1, f"{name}: has a gradient, by rank: {found}"
        agreed[name] = next(iter(found.values()))
    return agreed


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By the unsharded model's names, once the ranks agree on who has one. Between steps. Collective."""
    who_has_gradients(model)
    return wrapped_gradients(model) if isinstance(model, FullyShardedDataParallel) else full_gradients(model)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """By the unsharded model's names. Between steps. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return full_parameters(model)


def differences(where: str, got: dict[str, Any], want: dict[str, Any], tolerance: float = EXACT) -> list[str]:
    """One line for each name that is missing, None on one side only, or off by more than `tolerance`.

    Relative to the norm of what is wanted, or below that in itself: where nearly all cancels, rounding is what is left.
    """
    close = {
        name
        for name, wanted in want.items()
        if wanted is not None
        and (found := got.get(name)) is not None
        and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        and (found.double() - wanted.double()).norm() <= tolerance
    }
    return compare_tensors(where, got, {name: got[name] if name in close else want[name] for name in want}, tolerance)


def assert_equal(got: dict[str, Any], want: dict[str, Any], what: str, tolerance: float = EXACT) -> None:
    """Fails with all that `differences` finds."""
    __tracebackhide__ = True
    wrong = differences(what, got, want, tolerance)
    assert not wrong, "; ".join(wrong)


def gradient_problems(where: str, model: nn.Module, reference: nn.Module, tolerance: float = EXACT) -> list[str]:
    """How the gradients differ from the unsharded model's; None on one side only counts."""
    got = whole_gradients(model)
    want = {name: None if p.grad is None else p.grad.clone() for name, p in reference.named_parameters()}
    if isinstance(model, FullyShardedDataParallel) and len(list(model.parameters())) < len(want):
        # One FlatParameter has one gradient: what got none beside others that did is zero there.
        got = {name: None if want[name] is None and g is not None and not g.any() else g for name, g in got.items()}
    return differences(f"{where}: gradient of", got, want, tolerance)


def value_problems(where: str, model: nn.Module, reference: nn.Module, tolerance: float = EXACT) -> list[str]:
    """How the parameters differ from the unsharded model's."""
    want = {name: p.detach() for name, p in reference.named_parameters()}
    return differences(f"{where}:", whole_parameters(model), want, tolerance)


# Errors, and what is said.


def error_of(action: Callable[[], object]) -> Exception | None:
    """What `action` raises, whatever it is: the caller says whether that is right. Warnings are not shown."""
    try:
        quietly(action)
    except Exception as error:
        return error
    return None


def quietly(action: Callable[[], Any]) -> Any:
    """Without the warnings that PyTorch's own give on a machine without accelerator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action()


def named_error(
    error: BaseException | None, *fragments: str, kinds: Any = fullshard.FullshardError, where: str = ""
) -> list[str]:
    """Empty if it is one of ours, and of these kinds, that says all of `fragments`; else what it is."""
    start = f"{where}: " if where else ""
    if error is None:
        return [f"{start}nothing was raised"]
    if not isinstance(error, fullshard.FullshardError) or not isinstance(error, kinds):
        return [f"{start}{type(error).__name__}: {str(error)[:300]}"]
    missing = [fragment for fragment in fragments if fragment not in str(error)]
    return [f"{start}{missing} not in: {error}"] if missing else []


# Held to one process.

Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model and its batch


def right_or_named(
    way: str,
    build: Callable[[], nn.Module],
    loss: Loss,
    names: tuple[str, ...],
    after: Loss | None = mean_square,
    units: Units = blocks_of,
) -> list[str]:
    """Gradients of two steps against one process, or an error of ours with every fragment in `names`; then a step.

    Args:
        names: empty: an error is not right.
        after: the ordinary step that must be right afterwards; None: there is none.
    """
    model, plain = shard(build(), way, units), build()
    problems: list[str] = []
    try:
        for step in range(2):
            mine, want = (beside(each, loss, step, each is model) for each in (model, plain))
            dist.all_reduce(mine)
            mine /= dist.get_world_size()
            if not torch.allclose(mine, want, rtol=1e-4):
                problems.append(f"step {step}: loss {mine} where {want} is wanted")
            problems += gradient_problems(f"step {step}", model, plain, SINGLE)
    except Exception as error:
        problems += named_error(error, *names) if names else [f"{type(error).__name__}: {str(error)[:300]}"]
    if after is not None:
        try:
            for each in (model, plain):
                beside(each, after, 5, each is model)
            problems += gradient_problems("afterwards", model, plain, SINGLE)
        except Exception as error:
            problems.append(f"afterwards: {type(error).__name__}: {str(error)[:300]}")
    return problems


def beside(model: nn.Module, loss: Loss, step: int, is_sharded: bool) -> Tensor:
    """Forward and backward of this rank's wide batch, or of all ranks', from no gradients; the loss."""
    model.zero_grad()
    value = loss(model, wide_batch(step, dist.get_rank() if is_sharded else None))
    value.backward()
    return value.detach()
