"""Every way to shard a model, whole values of what came out, and comparisons with one process, whatever the way.

rows, flat, blocks, owner   `fully_shard` with that layout
wrapper, originals          `FullyShardedDataParallel` with one FlatParameter per instance, or with the originals
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
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
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from models import Example, blocks_of
from training import assert_same, compare_tensors, full, full_gradients, full_parameters, mesh_of
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
every_wrapper = pytest.mark.parametrize("way", WRAPPERS)
some_ways = pytest.mark.parametrize("way", SOME_WAYS := ("rows", "flat", "wrapper", "originals"))  # "blocks": as flat

EXACT = 1e-12  # of double precision, relative to a tensor's norm
SINGLE = 1e-5  # of single precision
WIDTH = 5  # rows, biases and columns do not divide by two ranks
WIDE = 6

Units = Callable[[nn.Module], Iterable[Any]]  # the modules that become units besides the root, bottom-up


# Tests.


def on_ranks(body: Callable[..., Any] | None = None, *, by: str = "run_ranks", **how: Any) -> Any:
    """A test that every rank performs, by the fixture `by`, `how` to run it. It may return problems, which fail it."""
    if body is None:
        return partial(on_ranks, by=by, **how)

    def test(**given: Any) -> None:
        __tracebackhide__ = True
        found = given.pop(by)(perform, body.__module__, body.__name__, given, **how)
        assert_same([problems or [] for problems in found])

    names = [by, *inspect.signature(body).parameters]
    test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])  # type: ignore[attr-defined]
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    test.body = body  # type: ignore[attr-defined]
    return test


def perform(module: str, name: str, given: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name).body(**given)


# Sharding.


def children(model: nn.Module) -> list[nn.Module]:
    """Every child that has parameters is a unit."""
    return [child for child in model.children() if any(True for _ in child.parameters())]


def but_last(model: nn.Module) -> list[nn.Module]:
    """Every child is a unit, but for the last one, which the root holds."""
    return list(model.children())[:-1]


def alone(model: nn.Module) -> list[nn.Module]:
    """The whole model is the only unit."""
    return []


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
    """`model` sharded, with `units` of it units of their own; `settings` are further ones of the front-end.

    `keep` leaves units gathered after forward (`reshard_after_forward=False`, `SHARD_GRAD_OP`); `hybrid` is a mesh of
    2 replicas; `library` is for the wrapper.
    """
    given = {**WAYS[way], **settings}
    if way in LAYOUTS:
        given |= {"reshard_after_forward": False} if keep else {}
        given |= {"mesh": mesh_of("hybrid")} if hybrid else {}
        for unit in [*units(model), model]:
            fullshard.fully_shard(unit, **given)
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
    return library.FullyShardedDataParallel(module, device_id=torch.get_default_device(), **keywords)


def example_of(build: Callable[[], nn.Module], *units: str) -> Example:
    """A model and the modules of it, by their names, that become units besides the root."""
    return Example(build, named(*units), kind="vectors")


def sharded(example: Example, way: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The example sharded so; `settings` as `shard` takes them."""
    return shard(example.make(dtype), way, example.units, **settings)


def inner(module: nn.Module) -> Any:
    """The module that an instance wraps, or the module itself."""
    return module.module if isinstance(module, FSDP) else module


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Gradients of the backwards in here are kept on their rank; nothing is to do for an unsharded model."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def synced(model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Whether gradients of the backwards in here are reduced."""
    return contextlib.nullcontext() if wanted else without_sync(model)


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


def layers() -> nn.Sequential:
    """Two units of two layers, and a last layer that the root holds. Double precision, the same numbers always."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).double()


def two_layers() -> nn.Sequential:
    """Without biases, so that equal halves of a whole shard hold one of them each."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Tanh(), nn.Linear(WIDE, WIDE, bias=False))


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


def backward_both(model: nn.Module, plain: nn.Module, seed: int) -> None:
    """Of this rank's inputs, and of one process on those of all."""
    loss_of(model, mine(seed)).backward()
    loss_of(plain, batch(seed)).backward()


def mean_square(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


# Whole values, and comparisons.


def who_has_gradients(model: nn.Module) -> dict[str, bool]:
    """By parameter, whether it has a gradient. Fails where ranks that hold elements of it disagree. Collective.

    Every rank of `fully_shard` counts, also one without elements: PyTorch gives it an empty gradient.
    """
    mine = {
        name: p.grad is not None for name, p in model.named_parameters() if p.numel() or not isinstance(model, FSDP)
    }
    everyone: list[dict[str, bool]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    agreed: dict[str, bool] = {}
    for rank, found in enumerate(everyone):
        for name, has in found.items():
            assert agreed.setdefault(name, has) == has, f"{name}: whether it has a gradient differs on rank {rank}"
    return agreed


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By the unsharded model's names, once the ranks agree on who has one. Between steps. Collective."""
    who_has_gradients(model)
    return wrapped_gradients(model) if isinstance(model, FSDP) else full_gradients(model)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """By the unsharded model's names. Between steps. Collective."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return full_parameters(model)


def whole(value: Any) -> Any:
    """A plain tensor of all elements, in memory of its own; anything but a tensor as it is. Collective."""
    if not hasattr(value, "local_shards"):
        return full(value) if isinstance(value, Tensor) else value
    made = torch.zeros(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
    value.gather(0, made)
    sent = [made]
    dist.broadcast_object_list(sent, 0)
    return sent[0]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as the state dict has them, by the unsharded model's names. Collective."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def differences(where: str, got: dict[str, Any], want: dict[str, Any], tolerance: float | None = None) -> list[str]:
    """One line for each name that is missing, None on one side only, or off by more than `tolerance`.

    Relative to the norm of what is wanted, or below that in itself: where nearly all cancels, rounding is what is left.
    By default `EXACT` of double precision, and `SINGLE` of everything else.
    """
    if got.keys() != want.keys():
        return [f"{where}: names {sorted(got)} where {sorted(want)} are wanted"]
    problems = []
    for name, wanted in want.items():
        found = got[name]
        if wanted is not None and found is not None and not (isinstance(wanted, Tensor) and isinstance(found, Tensor)):
            found, wanted = (torch.as_tensor(value, dtype=torch.float64) for value in (found, wanted))
        exact = isinstance(wanted, Tensor) and wanted.dtype == torch.float64
        allowed = tolerance if tolerance is not None else EXACT if exact else SINGLE
        wrong = compare_tensors(where, {name: found}, {name: wanted}, allowed)
        alike = found is not None and wanted is not None and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        if wrong and not (alike and (found.double() - wanted.double()).norm() <= allowed):
            problems += wrong
    return problems


def assert_equal(got: dict[str, Any], want: dict[str, Any], what: str, tolerance: float = EXACT) -> None:
    """Fails with all that `differences` finds."""
    __tracebackhide__ = True
    wrong = differences(what, got, want, tolerance)
    assert not wrong, "; ".join(wrong)


def gradient_problems(where: str, model: nn.Module, reference: nn.Module, tolerance: float | None = None) -> list[str]:
    """How the gradients differ from the unsharded model's; None on one side only counts."""
    got = whole_gradients(model)
    want = {name: None if p.grad is None else p.grad.clone() for name, p in reference.named_parameters()}
    if isinstance(model, FSDP) and len(list(model.parameters())) < len(want):
        # One FlatParameter has one gradient: what got none beside others that did is zero there.
        got = {name: None if want[name] is None and g is not None and not g.any() else g for name, g in got.items()}
    return differences(f"{where}: gradient of", got, want, tolerance)


def value_problems(where: str, model: nn.Module, reference: nn.Module, tolerance: float | None = None) -> list[str]:
    """How the parameters differ from the unsharded model's."""
    want = {name: p.detach() for name, p in reference.named_parameters()}
    return differences(f"{where}:", whole_parameters(model), want, tolerance)


# Errors, and what is said.


def error_of(action: Callable[[], object]) -> Exception | None:
    """What `action` raises, whatever it is: the caller says whether that is right. Warnings are not shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except Exception as error:
        return error
    return None


def named_error(
    error: BaseException | None, *fragments: str, kinds: Any = fullshard.FullshardError, where: str = ""
) -> list[str]:
    """Empty if it is one of ours, and of these kinds, that says all of `fragments`; else what it is."""
    if error is None:
        return [f"{where}: nothing was raised"]
    if not isinstance(error, fullshard.FullshardError) or not isinstance(error, kinds):
        return [f"{where}: {type(error).__name__}: {str(error)[:300]}"]
    missing = [fragment for fragment in fragments if fragment not in str(error)]
    return [f"{where}: {missing} not in: {error}"] if missing else []


# Held to one process.

Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model and its batch


def backward(model: nn.Module, step: int, ranks: Iterable[int] | None = None, loss: Loss = mean_square) -> Tensor:
    """A forward and backward on this rank's wide batch, or on the concatenation of those of `ranks`; the loss."""
    chosen = [dist.get_rank()] if ranks is None else ranks
    value = loss(model, torch.cat([wide_batch(step, rank) for rank in chosen]))
    value.backward()
    return value.detach()


def backward_of_both(model: nn.Module, plain: nn.Module, step: int, loss: Loss) -> tuple[Tensor, Tensor]:
    """From no gradients: of this rank's batch, and of one process on those of all; the losses."""
    model.zero_grad(), plain.zero_grad()
    return backward(model, step, None, loss), backward(plain, step, range(dist.get_world_size()), loss)


def right_or_named(
    way: str, build: Callable[[], nn.Module], loss: Loss, names: tuple[str, ...], after: Loss | None = mean_square
) -> list[str]:
    """Gradients of two steps against one process, or an error of ours with every fragment in `names`; then a step.

    No `names`: an error is not right. `after` is the ordinary step that must be right afterwards; None: there is none.
    """
    model, plain = shard(build(), way, blocks_of), build()
    problems: list[str] = []
    try:
        for step in range(2):
            mine, want = backward_of_both(model, plain, step, loss)
            dist.all_reduce(mine)
            problems += differences(f"step {step}", {"loss": mine / dist.get_world_size()}, {"loss": want}, 1e-4)
            problems += gradient_problems(f"step {step}", model, plain)
    except Exception as error:
        problems += named_error(error, *names) if names else [f"{type(error).__name__}: {str(error)[:300]}"]
    if after is not None:
        error = error_of(lambda: backward_of_both(model, plain, 5, after))
        problems += gradient_problems("afterwards", model, plain) if error is None else [f"afterwards: {error!r}"[:300]]
    return problems


def train(model: nn.Module, optimizer: Any, steps: range, ranks: Iterable[int] | None = None) -> None:
    for step in steps:
        model.zero_grad()
        backward(model, step, ranks)
        optimizer.step()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, eps=1e-3)


def one_process(
    steps: int, make: Callable[[], nn.Module] = two_layers, optimizer: Callable[[Any], Any] = adam
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unsharded model, trained on the batches of all ranks."""
    model = make()
    made = optimizer(model.parameters())
    train(model, made, range(steps), range(dist.get_world_size()))
    return model, made
