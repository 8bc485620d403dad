"""Random models: a tree of modules that nest, run twice, are skipped in some steps, are checkpointed in either way,
have parameters that nothing uses, share or freeze them; later also use others on other ranks, or change their input.

`wide` ones do that anywhere in the tree, and pass dicts, tuples and dataclasses from module to module (random_wide.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INPUTS = 4


class Around(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class Recomputed(Around):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__(inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Sometimes(Around):
    """Runs what it holds while `number` is odd, on every rank alike."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.number % 2 else x * 2


class OnSomeRanks(Around):
    """Runs what it holds as `number` and `rank` say: on other ranks than its peers, at times on none."""

    number = rank = 0

    def __init__(self, inner: nn.Module, pattern: int) -> None:
        super().__init__(inner)
        self.pattern = pattern

    def forward(self, x: Tensor) -> Tensor:
        runs = random.Random(f"some {self.pattern} {self.rank} {self.number}").random() < 0.6
        return x + self.inner(x) if runs else x * 1.5


class Either(nn.Module):
    """Two weights, of which a rank uses one, the other or both, as `number` and `rank` say: other than its peers.

    No module is in it, so that all ranks run the same units. A rank may use one that is frozen alone.
    """

    number = rank = 0

    def __init__(self, width: int, pattern: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(width, width) / width)
        self.right = nn.Parameter(torch.randn(width, width) / width)
        self.pattern = pattern

    def forward(self, x: Tensor) -> Tensor:
        uses = random.Random(f"{self.pattern} {self.rank} {self.number}").choice([1, 1, 2, 3])
        out = x * 0.9
        if uses & 1:
            out = out + torch.tanh(x @ self.left)
        if uses & 2:
            out = out + torch.sin(x @ self.right)
        return out


class InPlace(Around):
    """Its first operation changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(0.9))


class StartsInPlace(Around):
    """A layer of its own, whose output what it holds changes as the first thing it does."""

    def __init__(self, inner: nn.Module, width: int, way: str) -> None:
        super().__init__(Changes(inner, way))
        self.before = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


class Changes(Around):
    """Changes its input, which no other module needs afterwards; perhaps its output too."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__(inner)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(x, self.way)(*([0.25] if self.way == "add_" else []))
        out = self.inner(x)
        return (out + 0.0).mul_(1.5) if self.way == "tanh_" else out  # `out` may be needed for its own backward


@dataclass
class Batch:
    """What passes between modules, with something beside tensors."""

    x: Tensor
    scale: float
    parts: tuple[Tensor, ...] = ()


class Packed(Around):
    """Gives what it holds a container of this kind, and takes one of the same kind back."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__(Unpacks(inner))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "dict":
            out = self.inner({"x": x, "more": {"scale": 0.5, "none": None}})
            return out["x"] + out["list"][0]
        if self.kind == "tuple":
            x, [y], scale = self.inner((x, [x * 0.5], 0.5))
            return x + y * scale
        if self.kind == "keywords":
            return self.inner(x=x, scale=0.5)
        found = self.inner(Batch(x, 0.5, (x.detach(),)))
        return found.x + found.parts[0] * found.scale


class Unpacks(Around):
    def forward(self, given: Any = None, *, x: Tensor | None = None, scale: float = 1.0) -> Any:
        if x is not None:
            return self.inner(x) * scale
        if isinstance(given, dict):
            y = self.inner(given["x"])
            return {"x": y, "list": [y * given["more"]["scale"]], "none": given["more"]["none"]}
        if isinstance(given, tuple):
            return self.inner(given[0]), [torch.tanh(given[1][0])], given[2]
        return replace(given, x=self.inner(given.x), parts=(torch.sin(given.parts[0]),))


class Pair(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module, cut: bool) -> None:
        super().__init__()
        self.left, self.right, self.cut = left, right, cut

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * 0.5 + torch.tanh(self.right(x.detach() if self.cut else x))


class WithOwn(Around):
    """With parameters beside the module: one of a single element, one of an odd shape, perhaps one that is not used."""

    def __init__(self, inner: nn.Module, width: int, odd: int, unused: bool) -> None:
        super().__init__(inner)
        self.scale = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.randn(width, odd))
        if unused:
            self.unused = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) + (x @ self.odd).sum(-1, keepdim=True) * 0.1


WIDE = ("packed", "packed", "in place", "either")
PARTS = ("on some ranks",) * 4


def tree(draw: random.Random, width: int, depth: int, more: tuple[str, ...] = ()) -> nn.Module:
    """Modules within modules, [n, width] to [n, width]; `more`: kinds beside the usual ones."""
    if depth == 0:
        kinds = [nn.Linear(width, width, bias=draw.random() < 0.7), nn.LayerNorm(width)]
        return draw.choice([*kinds, nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, width))])
    inner = tree(draw, width, depth - 1, more)
    kinds = ["sequence", "sequence", "residual", "twice", "pair", "recomputed", "sometimes", "own", *more]
    if PARTS[0] in kinds:  # units of some ranks are not recomputed in an order that ranks share: docs/divergence.md
        kinds.remove("recomputed")
    match draw.choice(kinds):
        case "packed":
            return Packed(inner, draw.choice(["dict", "tuple", "dataclass", "keywords"]))
        case "in place":
            return StartsInPlace(inner, width, draw.choice(["add_", "relu_", "tanh_", "sigmoid_"]))
        case "on some ranks":
            return OnSomeRanks(inner, draw.randint(0, 15))
        case "either":
            return nn.Sequential(Either(width, draw.randint(0, 15)), inner)
        case "sequence":
            return nn.Sequential(inner, *(tree(draw, width, depth - 1, more) for _ in range(draw.randint(0, 2))))
        case "residual":
            return Residual(inner)
        case "twice":
            return Twice(inner)
        case "pair":
            return Pair(inner, tree(draw, width, depth - 1, more), cut=draw.random() < 0.3)
        case "recomputed":
            return Recomputed(inner, reentrant=draw.random() < 0.5)
        case "sometimes":
            return Sometimes(inner)
        case _:
            return WithOwn(inner, width, draw.choice([1, 3, 7]), unused=draw.random() < 0.3)


class Model(nn.Module):
    """A random tree between two linear layers, `[n, INPUTS]` to `[n, 1]`; `more`, `wide`: with what was added later.

    `parts`: whether some ranks leave out parts that others run.
    """

    def __init__(self, draw: random.Random, more: bool = False, wide: bool = False, parts: bool = False) -> None:
        super().__init__()
        width = draw.choice([2, 3, 5, 8, 13])
        self.first, self.last = nn.Linear(INPUTS, width), nn.Linear(width, 1)
        self.body = tree(draw, width, draw.randint(1, 3 if wide else 4), (WIDE if wide else ()) + PARTS * parts)
        linears = [module for module in self.body.modules() if isinstance(module, nn.Linear)]
        same = [module for module in linears if module.weight.shape == (width, width)]
        if len(same) > 1 and draw.random() < 0.3:
            same[-1].weight = same[0].weight
        self.either, self.apart = None, False
        if more and draw.random() < 0.5:
            self.either = Either(width, draw.randint(0, 15))
        if more and draw.random() < 0.3:
            self.body, self.apart = InPlace(self.body), True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.either is not None:
            x = self.either(x)
        return self.last(torch.tanh(self.body(x + 0.0 if self.apart else x)))


def say_who(model: nn.Module, number: int, rank: int) -> None:
    """Tell the modules that ask which micro-batch this is, and of which rank."""
    for module in model.modules():
        if isinstance(module, (Sometimes, Either, OnSomeRanks)):
            module.number = number
        if isinstance(module, (Either, OnSomeRanks)):
            module.rank = rank
