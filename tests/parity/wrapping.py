"""What tests of the wrapper's state dicts share: models, wrapping by either library, and values made whole."""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.checkpoint.values import whole_of

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Odd sizes, a buffer of integers and one of floats, and a parameter beside its submodules."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x * self.gain))) * self.scale


class Net(nn.Module):
    """Embedding, layers, and a head that may share the embedding's weight. [n] tokens to [n, 11]."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(Layer(7, hidden) for hidden in (5, 13, 3))
        self.side = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.shift = nn.Parameter(torch.randn(3, 7))
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.shift[0]
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(self.side(x)))


def make(seed: int = 3, **options: bool) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def layers_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Layer)


def wrap(module: nn.Module, library: types.ModuleType = fullshard, mesh: bool = False, **options: Any) -> Any:
    """`module` wrapped by `library`, layer by layer unless said otherwise; HYBRID over a 2-D mesh."""
    strategy = options.pop("strategy", "FULL_SHARD")
    options.setdefault("auto_wrap_policy", layers_policy)
    world = dist.get_world_size()
    if "HYBRID" in strategy:
        options["device_mesh"] = mesh_of((2, world // 2))
    elif mesh:
        options["device_mesh"] = mesh_of((world,))
    if library is not fullshard:
        options["device_id"] = CPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.FullyShardedDataParallel(module, sharding_strategy=library.ShardingStrategy[strategy], **options)


def whole(state: Any) -> dict[str, Any]:
    """Values whole and detached, on every rank."""
    return OrderedDict(
        (key, whole_of(value, CPU).clone() if hasattr(value, "detach") or hasattr(value, "local_shards") else value)
        for key, value in state.items()
    )


def typed(kind: str, model: nn.Module, config: Any = None, optim: Any = None, library: Any = fullshard) -> Any:
    return library.FullyShardedDataParallel.state_dict_type(
        model, library.StateDictType[f"{kind}_STATE_DICT"], config, optim
    )


def differences(where: str, got: Any, want: Any, tolerance: float = 0.0) -> list[str]:
    """Lines that say how two dicts of tensors differ, in names, order, dtypes, shapes or values."""
    if list(got) != list(want):
        return [f"{where}: names {list(got)} where {list(want)} are wanted"]
    found = []
    for key, value in want.items():
        mine = got[key]
        if not isinstance(value, Tensor):
            if mine != value:
                found.append(f"{where} {key}: {mine!r} where {value!r} is wanted")
        elif mine.shape != value.shape or mine.dtype != value.dtype:
            found.append(f"{where} {key}: {tuple(mine.shape)} {mine.dtype} where {tuple(value.shape)} {value.dtype}")
        elif not torch.allclose(mine.double(), value.double(), rtol=tolerance, atol=tolerance):
            found.append(f"{where} {key}: off by {(mine.double() - value.double()).abs().max():.2e}")
    return found


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (6,), generator=generator), torch.randint(11, (6,), generator=generator)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: list[int] | None = None
) -> list[float]:
    """Steps on every rank's own batch (or, of one process, on those of `ranks`); the mean losses."""
    losses = []
    for step in steps:
        mine = [dist.get_rank()] if ranks is None else ranks
        inputs, targets = (torch.cat(parts) for parts in zip(*[batch(step, r) for r in mine], strict=True))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        if ranks is None:
            mean = mean / dist.get_world_size()
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
