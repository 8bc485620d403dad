"""One small model, every way to shard it, and whole values of what came out, whatever the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import Blocks, FullyShardedDataParallel, ShardingStrategy, fully_shard
from training import compare_tensors, full

LAYOUTS = {"rows": "rows", "flat": "flat", "blocks": Blocks("row"), "owner": "owner"}
WRAPPERS = {"flat_parameter": False, "originals": True}  # use_orig_params
WAYS = (*LAYOUTS, *WRAPPERS)
every_way = pytest.mark.parametrize("way", WAYS)
WIDTH = 5  # rows, biases and columns do not divide by two ranks
EXACT = 1e-12  # of double precision, relative to a tensor's norm


def layers(count: int = 2) -> nn.Sequential:
    """`count` units of two layers, and a last layer that the root holds. Double precision, the same numbers always."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).double()


def batch(seed: int, rank: int | None = None, samples: int = 3) -> Tensor:
    """A rank's inputs; of all ranks, in order, where none is named."""
    if rank is None:
        return torch.cat([batch(seed, rank, samples) for rank in range(dist.get_world_size())])
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)


def mine(seed: int) -> Tensor:
    """This rank's inputs."""
    return batch(seed, dist.get_rank())


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """A mean over the samples, so that the mean over ranks is the loss of the concatenated batch."""
    return model(inputs).square().sum(1).mean()


def shard(model: nn.Sequential, way: str, *, keep: bool = False, **settings: object) -> nn.Module:
    """`model` with each child but the last a unit, and itself one.

    Args:
        keep: leave units gathered after forward (`reshard_after_forward=False`, `SHARD_GRAD_OP`).
        settings: further ones of the front-end.
    """
    units = list(model)[:-1]
    if way in LAYOUTS:
        if keep:
            settings["reshard_after_forward"] = False
        for unit in [*units, model]:
            fully_shard(unit, layout=LAYOUTS[way], **settings)
        return model
    strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
    given = {"use_orig_params": WRAPPERS[way], "sharding_strategy": strategy, **settings}
    for index, unit in enumerate(units):
        model[index] = FullyShardedDataParallel(unit, **given)
    return FullyShardedDataParallel(model, **given)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """By the unsharded model's names."""
    if isinstance(model, FullyShardedDataParallel):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return {name: full(p) for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By the unsharded model's names. Between steps: the wrapper gathers for it."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def gradient_problems(where: str, model: nn.Module, reference: nn.Module, tolerance: float = EXACT) -> list[str]:
    """How the gradients differ from the unsharded model's; None on one side only counts."""
    got = whole_gradients(model)
    want = {name: None if p.grad is None else p.grad.clone() for name, p in reference.named_parameters()}
    if isinstance(model, FullyShardedDataParallel) and len(list(model.parameters())) < len(want):
        # One FlatParameter has one gradient: what got none beside others that did is zero there.
        got = {name: None if want[name] is None and g is not None and not g.any() else g for name, g in got.items()}
    return compare_tensors(f"{where}: gradient of", got, want, tolerance)


def value_problems(where: str, model: nn.Module, reference: nn.Module, tolerance: float = EXACT) -> list[str]:
    """How the parameters differ from the unsharded model's."""
    want = {name: p.detach() for name, p in reference.named_parameters()}
    return compare_tensors(f"{where}:", whole_parameters(model), want, tolerance)


def error_of(action: Callable[[], object]) -> BaseException | None:
    """What `action` raises, whatever it is: the caller says whether that is right."""
    try:
        action()
    except Exception as error:
        return error
    return None


def quietly(action: Callable[[], object]) -> object:
    """Without the warnings that PyTorch's own give on a machine without accelerator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action()


def named_error(error: BaseException | None, *fragments: str) -> str:
    """'' if it is one of ours that says all of `fragments`, else what it is."""
    if not isinstance(error, fullshard.FullshardError):
        return f"no error of ours: {error!r}"
    missing = [fragment for fragment in fragments if fragment not in str(error)]
    return f"{missing} not in: {error}" if missing else ""
