"""Containers and objects that a forward is passed and puts something into: the caller's own, never copies of them.

Losses of experts, caches, hidden states: each kind goes through the root and every block, in both front-ends, and what
was put in takes part in the loss. The reference is one process on the batches of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import MixedPrecision, MixedPrecisionPolicy, fully_shard
from models import blocks_of
from ways import WIDE, Block, differences, gradient_problems, on_ranks, shard, some_ways, wide_batch


@dataclasses.dataclass
class State:
    hidden: Tensor
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    losses: list[Tensor]


class Pair(NamedTuple):
    hidden: Tensor
    losses: list[Tensor]


class Cache:
    """No container: an object with a list in it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.total: Any = 0.0


# What a block puts into each kind; what an earlier block put in leads on.


def into_dict(block: Any, key: Tensor, state: dict[str, Any]) -> None:
    state["key"] = key + state["key"].tanh() if "key" in state else key
    state.setdefault("all", []).append(key)
    state["weights"] = [*state.get("weights", ()), block.down.weight]


def into_fields(block: Any, key: Tensor, state: State) -> None:
    state.losses.append(key)
    state.hidden = block.up(state.hidden).tanh()
    state.steps += 1


def into_object(block: Any, key: Tensor, cache: Cache) -> None:
    cache.keys.append(key)
    cache.total = cache.total + key.square().mean()


def into_nested(block: Any, key: Tensor, state: dict[str, Any]) -> None:
    state["layers"][0]["losses"].append(key)
    state["pair"][1].append(key)
    state["pair"] = (key * 2, state["pair"][1])


def into_list_in(block: Any, key: Tensor, state: Any) -> None:
    state.losses.append(key + block.up(state.hidden))


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor, Any], object]]] = {  # made, and put into
    "list": (lambda x: [], lambda block, key, losses: losses.append(key)),
    "dict": (lambda x: {"x": x, "n": 3}, into_dict),
    "dataclass": (State, into_fields),
    "object": (lambda x: Cache(), into_object),
    "nested": (lambda x: {"layers": [{"losses": []}], "pair": (x, [])}, into_nested),
    "frozen": (lambda x: Frozen(x, []), into_list_in),
    "pair": (lambda x: Pair(x, []), into_list_in),
}


def tensors_in(value: Any) -> list[Tensor]:
    """All of them, in order; a number counts as one."""
    if isinstance(value, (Tensor, int, float)):
        return [torch.as_tensor(value)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return [tensor for each in (vars(value).values() if values is None else values) for tensor in tensors_in(each)]


class Using(Block):
    def forward(self, x: Any, **states: Any) -> Any:
        for name, state in states.items():
            KINDS[name][1](self, self.up(x), state)
        return self.down(torch.tanh(self.up(x))), states.get("dict")


class Passing(nn.Module):
    """Blocks that put something into all states; passes on the states that it is passed."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDE, WIDE), nn.ModuleList(Using() for _ in range(3))
        self.recompute = recompute

    def forward(self, x: Tensor, states: dict[str, Any]) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.recompute else block
            x, returned = run(x, **states)
            assert returned is states.get("dict"), "a copy was returned"
        return x


def loss_of(model: nn.Module, x: Tensor, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the output's and each state's loss, and these by the state's name."""
    states = {name: KINDS[name][0](x) for name in names}
    states["output"] = model(x, states)
    losses = {n: torch.stack([t.float().square().mean() for t in tensors_in(s)]).sum() for n, s in states.items()}
    return torch.stack(list(losses.values())).sum(), {name: loss.detach() for name, loss in losses.items()}


def compared(way: str, names: Sequence[str], tolerance: float, recompute: bool = False, **settings: Any) -> list[str]:
    """Losses and gradients of two steps against one process."""
    model, plain = shard(Passing(recompute), way, blocks_of, **settings), Passing(recompute)
    problems: list[str] = []
    for step in range(2):
        model.zero_grad(), plain.zero_grad()
        loss, losses = loss_of(model, wide_batch(step, dist.get_rank()), names)
        loss.backward()
        of_ranks = [loss_of(plain, wide_batch(step, rank), names) for rank in range(dist.get_world_size())]
        torch.stack([loss for loss, _ in of_ranks]).mean().backward()
        problems += differences(f"{way}, step {step}, loss of", losses, of_ranks[dist.get_rank()][1], tolerance)
        problems += gradient_problems(f"{way}, step {step}", model, plain, tolerance)
    return problems


@some_ways
@on_ranks
def test_what_a_forward_puts_into_what_it_was_passed(way: str) -> list[str]:
    """Put in again by a recomputation, too, which comes after the loss was taken."""
    problems = compared(way, [*KINDS], 1e-4)
    return problems + (compared(way, ("list", "object", "frozen"), 1e-4, True) if way in ("rows", "originals") else [])


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(
    ("way", "settings"),
    [("rows", {"mp_policy": MixedPrecisionPolicy(**LOW)}), ("wrapper", {"mixed_precision": MixedPrecision(**LOW)})],
)
@on_ranks
def test_what_a_forward_in_low_precision_puts_in(way: str, settings: dict[str, Any]) -> list[str]:
    """To bf16's rounding; what is lost, or has no gradient, differs by more."""
    return compared(way, [*KINDS], 0.1, **settings)


class Looking(nn.Module):
    """Notes the dtypes of what it is passed, puts something in at the front, and returns the state or raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.raises = nn.Linear(WIDE, WIDE), False

    def forward(self, state: dict[str, Any], frozen: Frozen) -> dict[str, Any]:
        tensors = [state["x"], *state["pair"][0], state["list"][0], frozen.hidden, frozen.losses[0]]
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        assert state["index"].dtype == torch.int64
        state["list"].insert(0, self.layer(state["x"]))
        if self.raises:
            raise KeyError("as planted")
        return state


@pytest.mark.parametrize(
    ("front_end", "output"), [("fully_shard", None), ("fully_shard", torch.float32), ("wrapper", None)]
)
def test_originals_are_in_their_places_after_a_cast(fake_world, front_end, output):
    """In containers of every kind, in any nesting, with gradients, without, and after an exception."""
    fake_world(2)
    model = Looking()
    if front_end == "wrapper":
        model = fullshard.FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
        )
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output))
    module = model.module if front_end == "wrapper" else model
    for needs_gradient, grad, raises in [(True, True, False), (False, True, True), (True, False, False)]:
        x, index = torch.randn(3, WIDE, requires_grad=needs_gradient), torch.arange(3)
        listed, pair, module.raises = [x], ((x, x), {"deep": x}), raises
        state = {"x": x, "list": listed, "pair": pair, "again": listed, "index": index}
        frozen = Frozen(x, listed)
        with torch.set_grad_enabled(grad):
            if raises:
                with pytest.raises(KeyError, match="as planted"):
                    model(state, frozen=frozen)
            else:
                assert model(state, frozen) is state
        assert state["list"] is state["again"] is listed
        assert frozen.losses is listed
        assert len(listed) == 2
        originals = [state["x"], *state["pair"][0], state["pair"][1]["deep"], listed[1], frozen.hidden]
        if output is None or front_end == "wrapper":
            assert state["pair"] is pair
            assert all(tensor is x for tensor in originals)
        assert {tensor.dtype for tensor in originals} == {torch.float32}
        assert state["index"] is index


def test_containers_that_nothing_can_be_put_into(fake_world):
    """An immutable class of lists or dicts is copied, as ever; a class of its own stays what it is."""
    from torch.fx.immutable_collections import immutable_list

    class Named(dict[str, Any]):
        """Its items are attributes, too."""

        def __setitem__(self, key: str, item: Any) -> None:
            super().__setitem__(key, item)
            setattr(self, key, item)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDE, WIDE)

        def forward(self, fixed: Any, named: Any) -> Tensor:
            assert type(named) is Named
            assert named.x is named["x"]
            return self.layer(fixed[0]) + self.layer(named.x)

    fake_world(2)
    model = fully_shard(Reading(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x, named = torch.randn(3, WIDE, requires_grad=True), Named()
    named["x"] = x
    model(immutable_list([x]), named).sum().backward()
    assert named.x is named["x"] is x
    assert x.grad is not None


class Changing(nn.Module):
    """Changes what is in a container in place, as caches and masks are, and looks at what it was passed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)
        self.dtype, self.raises = torch.float32, False

    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        tensors = (state["cache"], state["pair"][0], state["list"][0])
        assert {tensor.dtype for tensor in tensors} == {self.dtype}
        y = self.layer(x)
        state["cache"][1] = y[0].detach()
        state["pair"][0].mul_(2)
        state["hidden"].add_(1)
        state["sum"].add_(y.sum())
        state["list"][0].unsqueeze_(0)
        state["steps"].add_(1)
        state["frozen"].hidden.add_(1)
        if self.raises:
            raise KeyError("as planted")
        return y


class Changed(NamedTuple):
    """A state whose tensors a forward changes, and the same tensors as somebody outside holds them."""

    state: dict[str, Any]
    cache: Tensor
    pair: tuple[Tensor, str]
    hidden: Tensor
    total: Tensor

    @classmethod
    def new(cls, x: Tensor) -> Changed:
        cache, pair, hidden, total = torch.full((3, WIDE), 1 / 3), (torch.ones(2), "a"), x * 2, torch.zeros(())
        listed, frozen = [torch.ones(2)], Frozen(torch.zeros(2), [])
        state = {"cache": cache, "pair": pair, "hidden": hidden, "sum": total, "list": listed, "frozen": frozen}
        return cls(state | {"steps": torch.zeros((), dtype=torch.int64)}, cache, pair, hidden, total)

    def check(self, grad: bool) -> None:
        state = self.state
        assert state["cache"] is self.cache and state["pair"] is self.pair
        assert {t.dtype for t in (self.cache, self.pair[0], state["hidden"], state["sum"])} == {torch.float32}
        assert torch.equal(self.cache[::2], torch.full((2, WIDE), 1 / 3)), "what did not change was rounded"
        assert not torch.equal(self.cache[1], torch.full((WIDE,), 1 / 3))
        assert self.pair[0].tolist() == [2, 2] and state["steps"] == 1
        assert state["sum"] is self.total and self.total != 0 and self.total.requires_grad is grad
        assert state["list"][0].shape == (1, 2) and state["frozen"].hidden.tolist() == [1, 1]
        if not grad:
            assert state["hidden"] is self.hidden
        assert (state["hidden"].detach() - (2 * ramp() + 1)).abs().max() < 0.1


def ramp() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDE).view(2, WIDE)


def test_changes_in_place_of_what_was_cast(fake_world):
    """Arrive in the caller's own tensors, in its dtype, also where the forward raises; and carry gradients."""
    fake_world(2)
    model = fully_shard(Changing(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.dtype = torch.bfloat16
    check_changes(model, model)


def test_changes_in_place_of_what_was_moved(fake_world, monkeypatch):
    """The wrapper's root moves inputs to its device: here to copies on the same one, of another dtype for once."""
    fake_world(2)
    model = fullshard.FullyShardedDataParallel(Changing(), device_id=torch.device("cpu"))
    plain_to = Tensor.to
    monkeypatch.setattr(
        "fullshard.api.wrapper.fsdp._on_device",
        lambda device, t: plain_to(t, torch.float64) if t.is_floating_point() else plain_to(t, torch.int32),
    )
    monkeypatch.setattr("fullshard.api.wrapper.fsdp._moves_inputs", lambda device: True)
    model.module.dtype = torch.float64
    model.module.layer.register_forward_pre_hook(lambda layer, args: (args[0].float(),))
    check_changes(model, model.module)


def check_changes(model: nn.Module, module: Changing) -> None:
    for grad, raises in [(True, False), (False, False), (True, True)]:
        leaf = ramp().requires_grad_()
        module.raises = raises
        with torch.set_grad_enabled(grad):
            changed = Changed.new(leaf)
            if raises:
                with pytest.raises(KeyError, match="as planted"):
                    model(leaf, changed.state)
            else:
                model(leaf, changed.state)
        changed.check(grad)
        if grad and not raises:
            (changed.state["hidden"].sum() + changed.total).backward()
            assert leaf.grad is not None and leaf.grad.abs().min() > 0
    module.raises = False
    with torch.inference_mode():
        changed = Changed.new(ramp())
        model(torch.ones(2, WIDE), changed.state)
        changed.check(False)
