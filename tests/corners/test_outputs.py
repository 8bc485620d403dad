"""What forwards give away besides tensors in containers, and differentiation that is not one backward of a loss.

Each case is right (as one process), or an error of ours that names what is not supported, on every rank; after it the
model takes an ordinary step as ever.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same

WIDE = 6
FRONT_ENDS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows"},
    "flat": {"layout": "flat"},
    "flat parameter": {"use_orig_params": False},
    "original parameters": {"use_orig_params": True},
}
front_ends = pytest.mark.parametrize("front", FRONT_ENDS)
Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model and its batch


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


def sharded(front: str, model: Any) -> nn.Module:
    given = FRONT_ENDS[front]
    if "layout" in given:
        for block in model.blocks:
            fullshard.fully_shard(block, **given)
        return fullshard.fully_shard(model, **given)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, **given)
    return FSDP(model, **given)


def inner(module: nn.Module) -> Any:
    """The module that an instance wraps, or the module itself."""
    return module.module if isinstance(module, FSDP) else module


def batch(step: int, ranks: list[int]) -> Tensor:
    """[4 a rank, WIDE]."""
    parts = [torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
    return torch.cat(parts)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by the unwrapped model's names."""
    if not isinstance(model, FSDP):
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def differences(model: nn.Module, plain: nn.Module, what: str) -> list[str]:
    problems = []
    got = gradients(model)
    for name, p in plain.named_parameters():
        grad, want = got[name], p.grad
        if want is None or grad is None:
            if (want is not None and want.any()) or (grad is not None and grad.any()):
                problems.append(f"{what}: gradient of {name}: {grad} where {want} is wanted")
        elif not torch.allclose(grad, want, rtol=1e-4, atol=1e-6):
            problems.append(f"{what}: gradient of {name} is off by {(grad - want).norm() / want.norm():.1e}")
    return problems


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def right_or_named(
    front: str, build: Callable[[], nn.Module], loss: Loss, names: tuple[str, ...], after: Loss | None = mean_square
) -> list[str]:
    """Gradients of two steps against one process, or an error of ours with every fragment in `names`; then a step.

    Args:
        names: empty: an error is not right.
        after: the ordinary step that must be right afterwards; None: there is none.
    """
    ranks = list(range(dist.get_world_size()))
    model, plain = sharded(front, build()), build()
    problems: list[str] = []
    losses: list[Tensor] = []
    try:
        for step in range(2):
            for each, x in ((model, batch(step, [dist.get_rank()])), (plain, batch(step, ranks))):
                each.zero_grad()
                value = loss(each, x)
                value.backward()
                losses.append(value.detach())
            mine, want = losses[-2:]
            dist.all_reduce(mine)
            if not torch.allclose(mine / len(ranks), want, rtol=1e-4):
                problems.append(f"step {step}: loss {mine / len(ranks)} where {want} is wanted")
            problems += differences(model, plain, f"step {step}")
    except fullshard.FullshardError as error:
        missing = [name for name in names if name not in str(error)]
        if not names or missing:
            problems.append(f"{type(error).__name__} does not say {missing}: {error}")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {str(error)[:300]}")
    if after is not None:
        try:
            for each, x in ((model, batch(5, [dist.get_rank()])), (plain, batch(5, ranks))):
                each.zero_grad()
                after(each, x).backward()
            problems += differences(model, plain, "afterwards")
        except Exception as error:
            problems.append(f"afterwards: {type(error).__name__}: {str(error)[:300]}")
    return problems


# Views of parameters.

GIVEN: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "the weight": (lambda block, y: (y, block.up.weight), lambda out: out[0] @ out[1]),
    "its transpose": (lambda block, y: (y, block.up.weight.t()), lambda out: out[0] @ out[1]),
    "a row": (lambda block, y: {"y": y, "row": block.up.weight[2]}, lambda out: out["y"] * out["row"]),
    "a bias, expanded": (lambda block, y: (y, block.up.bias.expand(4, 1, WIDE)), lambda out: out[0] + out[1][0]),
    "detached": (lambda block, y: (y, block.up.weight.detach()), lambda out: out[0] @ out[1]),
    "the weight alone": (lambda block, y: block.up.weight, lambda out: out * 2.0),
}


def given_view(front: str, what: str) -> list[str]:
    give, join = GIVEN[what]
    build = lambda: Network(lambda: Block(give), join)  # noqa: E731
    name = "bias" if "bias" in what else "weight"
    return right_or_named(front, build, mean_square, (f"blocks.1.up.{name}", "remedy"), after=None)


@pytest.mark.parametrize("what", GIVEN)
@front_ends
def test_a_view_of_a_parameter_among_the_outputs(run_ranks, front, what):
    assert_same(run_ranks(given_view, front, what, timeout=20))


def evaluated_view(front: str) -> list[str]:
    """The same without gradients; and a copy of the parameter, which is anyone's."""
    problems = []
    copies = lambda: Network(lambda: Block(lambda b, y: (y, b.up.weight.clone())), lambda o: o[0] @ o[1])  # noqa: E731
    views = lambda: Network(lambda: Block(lambda b, y: (y, b.up.weight.t())), lambda o: o[0] @ o[1])  # noqa: E731
    for build, may_raise in ((copies, False), (views, True)):
        model, plain, x = sharded(front, build()), build(), batch(0, [0])
        with torch.no_grad():
            try:
                if not torch.allclose(model(x), plain(x), atol=1e-6):
                    problems.append("wrong output")
            except fullshard.FullshardError as error:
                if not may_raise or "blocks.1.up.weight" not in str(error):
                    problems.append(f"{error}")
    return problems


@front_ends
def test_a_view_of_a_parameter_in_evaluation(run_ranks, front):
    assert_same(run_ranks(evaluated_view, front, timeout=20))


# Outputs in objects that are no containers.


class Slotted:
    """Without a `__dict__`."""

    __slots__ = ("note", "y")

    def __init__(self, y: Tensor) -> None:
        self.y, self.note = y, "not a tensor"


class Deep:
    """A tensor in a list in a dict in an object in an object."""

    def __init__(self, y: Tensor) -> None:
        self.inside = SimpleNamespace(items={"all": [None, y]})
        self.itself = self  # and a cycle


OBJECTS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "namespace": (lambda block, y: SimpleNamespace(y=y), lambda out: out.y),
    "slots": (lambda block, y: Slotted(y), lambda out: out.y),
    "deep": (lambda block, y: Deep(y), lambda out: out.inside.items["all"][1]),
    "UserDict": (lambda block, y: UserDict(y=y), lambda out: out["y"]),
    "set": (lambda block, y: {y}, lambda out: next(iter(out))),
    "iterator": (lambda block, y: iter([y]), next),
    "closure": (lambda block, y: lambda: y, lambda out: out()),
    "attribute of the module": (lambda block, y: setattr(block, "kept", y) or block, lambda out: out.kept),
}


def in_object(front: str, what: str) -> list[str]:
    give, join = OBJECTS[what]
    build = lambda: Network(lambda: Block(give), join)  # noqa: E731
    return right_or_named(front, build, mean_square, ("blocks.1", "remedy"), after=None)


@pytest.mark.parametrize("what", OBJECTS)
@front_ends
def test_outputs_in_plain_objects(run_ranks, front, what):
    assert_same(run_ranks(in_object, front, what, timeout=20))


# Losses that a module keeps, beside or in place of its output.


class Keeping(Block):
    """Keeps a loss of its own, which needs its parameters in backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = self.up(x).square().mean() + self.down.weight.square().sum()
        return y


class KeepingFirst(Block):
    """As `Keeping`, made before the output is."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.up(x).square().mean() + self.down.weight.square().sum()
        return super().forward(x)


def kept_alone(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    return inner(model.blocks[1]).loss


def kept_and_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + inner(model.blocks[1]).loss


def kept_then_output(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    inner(model.blocks[1]).loss.backward(retain_graph=True)
    return loss


def kept_from_first(model: nn.Module, x: Tensor) -> Tensor:
    """Of the block that runs first, whose inputs need no gradient."""
    model(x)
    return inner(model.blocks[0]).loss


KEPT: dict[str, tuple[type[Block], Loss]] = {
    "alone": (Keeping, kept_alone),
    "alone, made first": (KeepingFirst, kept_alone),
    "added to the output's": (Keeping, kept_and_output),
    "added to the output's, made first": (KeepingFirst, kept_and_output),
    "before the output's": (Keeping, kept_then_output),
}


def kept(front: str, what: str) -> list[str]:
    kind, loss = KEPT[what]
    return right_or_named(front, lambda: Network(kind), loss, ("blocks.1", "remedy"))


@pytest.mark.parametrize("what", KEPT)
@front_ends
def test_a_loss_kept_on_a_module(run_ranks, front, what):
    assert_same(run_ranks(kept, front, what, timeout=20))


def kept_by_first(front: str) -> list[str]:
    def build() -> nn.Module:
        model = Network(Block)
        torch.manual_seed(1)
        model.blocks[0] = Keeping()
        return model

    return right_or_named(front, build, kept_from_first, ("blocks.0", "remedy"))


@front_ends
def test_a_loss_kept_on_the_first_module(run_ranks, front):
    assert_same(run_ranks(kept_by_first, front, timeout=20))


# Gradients taken inside a forward.


class ForceField(nn.Module):
    """An energy, and its gradient with respect to the positions, taken inside the forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.before = nn.Parameter(torch.rand(WIDE))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.after = nn.Parameter(torch.rand(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_() if not x.requires_grad else x
            energy = x * self.before
            for block in self.blocks:
                energy = energy + torch.tanh(block(energy))
            energy = energy.sum(1, keepdim=True)  # of each sample
            keeps = self.how == "penalised"
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=keeps, retain_graph=True)
        return forces * self.after + energy * self.before.sum()


class Around(nn.Module):
    """A force field below a root that uses parameters of its own afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ForceField(how)])
        self.gain = nn.Parameter(torch.rand(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) * self.gain


def force_field(front: str, how: str, nested: bool) -> list[str]:
    build = (lambda: Around(how)) if nested else (lambda: ForceField(how))
    problems = right_or_named(front, build, lambda model, x: model(x).square().sum() / len(x), ())
    model, plain, x = sharded(front, build()), build(), batch(0, [0])
    try:
        with torch.no_grad():
            if not torch.allclose(model(x), plain(x), rtol=1e-4, atol=1e-5):
                problems.append("evaluation")
    except Exception as error:
        problems.append(f"evaluation: {type(error).__name__}: {str(error)[:200]}")
    return problems


@pytest.mark.parametrize("nested", [False, True], ids=["in the root", "below the root"])
@pytest.mark.parametrize("how", ["penalised", "plain"])
@front_ends
def test_gradients_taken_inside_forward(run_ranks, front, how, nested):
    assert_same(run_ranks(force_field, front, how, nested, timeout=20))


# Functional calls and transforms.


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Plain parameters by the model's own names, doubled, as a user of `functional_call` would pass."""
    pairs = zip(model.named_parameters(), Network(Block).parameters(), strict=True)
    return {name: (2 * p.detach()).requires_grad_() for (name, _), p in pairs}


def its_own(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def functional(given: Callable[[nn.Module], dict[str, Tensor]]) -> Loss:
    return lambda model, x: torch.func.functional_call(model, given(model), (x,)).square().mean()


def transformed(transform: Callable[[nn.Module, Tensor], Tensor]) -> Loss:
    return lambda model, x: transform(model, x).square().sum() / len(x)


FUNCTIONAL: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "functional_call, whole tensors": (functional(whole), ("functional_call",)),
    "functional_call, own parameters": (functional(its_own), ("functional_call",)),
    "vmap": (transformed(lambda m, x: torch.vmap(m)(x)), ("torch.func",)),
    "grad": (transformed(lambda m, x: torch.func.grad(lambda v: m(v).sum())(x)), ("torch.func",)),
    "jacrev": (transformed(lambda m, x: torch.stack([torch.func.jacrev(m)(row) for row in x[::4]])), ("torch.func",)),
    "jvp": (transformed(lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1]), ("torch.func",)),
    "jacobian": (
        transformed(
            lambda m, x: torch.stack(
                [torch.autograd.functional.jacobian(m, row, create_graph=True) for row in x[::4]],
            )
        ),
        (),
    ),
}


def functionally(front: str, what: str) -> list[str]:
    """Where a functional call is given whole tensors, gradients are of those: the model itself gets none."""
    loss, names = FUNCTIONAL[what]
    return right_or_named(front, lambda: Network(Block), loss, (*names, "remedy") if names else ())


@pytest.mark.parametrize(
    ("front", "what"),
    # A flat parameter has none of the model's names, so that `functional_call` itself says what it was not given.
    [(f, w) for w in FUNCTIONAL for f in FRONT_ENDS if f != "flat parameter" or "functional_call" not in w],
)
def test_functional_calls_and_transforms(run_ranks, front, what):
    assert_same(run_ranks(functionally, front, what, timeout=20))


# Sparse gradients.


class Sparse(nn.Module):
    """An embedding whose gradient is sparse, in a unit of its own or with another parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Embedding(10, WIDE, sparse=True), Block()])

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] * 3).long() % 10
        return self.blocks[1](self.blocks[0](rows))


def sparse(front: str) -> list[str]:
    """An error of ours, in the first backward at the latest, that says which parameter and that it is sparse."""
    model = sharded(front, Sparse())
    try:
        mean_square(model, batch(0, [dist.get_rank()])).backward()
    except fullshard.FullshardError as error:
        said = str(error)
        return [] if "sparse" in said and "weight" in said and "remedy" in said else [f"does not say what: {said}"]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]
    plain = Sparse()
    mean_square(plain, batch(0, list(range(dist.get_world_size())))).backward()
    got = gradients(model)
    return [
        f"gradient of {name}"
        for name, p in plain.named_parameters()
        if p.grad is not None and not torch.allclose(got[name].to_dense(), p.grad.to_dense(), rtol=1e-4, atol=1e-6)
    ]


@front_ends
def test_sparse_gradients_are_named(run_ranks, front):
    assert_same(run_ranks(sparse, front, timeout=20))
