"""A small model under either front-end, stepped beside one process that sees the batches of all ranks."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard

LAYOUTS: dict[str, str | fullshard.Blocks] = {
    "rows": "rows",
    "flat": "flat",
    "blocks": fullshard.Blocks("row"),
    "owner": "owner",
}
WRAPPERS = ("wrapper", "wrapper_orig")  # with use_orig_params False and True
FRONTS = (*LAYOUTS, *WRAPPERS)
LIBRARIES = {"ours": fullshard, "pytorch": torch_fsdp}


def plain() -> nn.Sequential:
    """Two layers without biases, so that equal halves of a whole shard hold one of them each."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))


def wrap(module: nn.Module, library: types.ModuleType = fullshard, **keywords: Any) -> Any:
    """`module` in one instance of the library's wrapper, on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.FullyShardedDataParallel(module, device_id=torch.device("cpu"), **keywords)


def shard(
    front: str, model: nn.Module, units: bool = True, library: types.ModuleType = fullshard, **keywords: Any
) -> Any:
    """`model` sharded: with `units` every `Linear` among its children a unit of its own, then the model."""
    if front in WRAPPERS:
        keywords["use_orig_params"] = front == "wrapper_orig"
        for name, child in list(model.named_children()) if units else ():
            if isinstance(child, nn.Linear):
                setattr(model, name, wrap(child, library, **keywords))
        return wrap(model, library, **keywords)
    if library is fullshard:
        keywords["layout"] = LAYOUTS[front]
    for child in model.children() if units else ():
        if isinstance(child, nn.Linear):
            library.fully_shard(child, **keywords)
    return library.fully_shard(model, **keywords)


def whole(value: Any) -> Any:
    """A plain tensor of all elements, in memory of its own; anything but a tensor as it is. Collective."""
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "local_shards"):  # a ShardedTensor
        made = torch.zeros(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, made)
        sent = [made]
        dist.broadcast_object_list(sent, 0)
        return sent[0]
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by the unwrapped model's names. Collective."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def batch(step: int, rank: int, width: int = 6) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, step: int, ranks: list[int] | None = None) -> None:
    """A forward and backward on this rank's batch, or on the concatenation of those of `ranks`."""
    chosen = [dist.get_rank()] if ranks is None else ranks
    model(torch.cat([batch(step, rank) for rank in chosen])).float().square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: range, ranks: list[int] | None = None) -> None:
    for step in steps:
        model.zero_grad()
        backward(model, step, ranks)
        optimizer.step()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, eps=1e-3)


def one_process(
    steps: int, make: Callable[[], nn.Module] = plain, optimizer: Callable[[Any], Any] = adam
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unsharded model, trained on the batches of all ranks."""
    model = make()
    made = optimizer(model.parameters())
    train(model, made, range(steps), list(range(dist.get_world_size())))
    return model, made


def differences(where: str, got: dict[str, Any], want: dict[str, Any], tolerance: float = 1e-5) -> list[str]:
    """One line for each name that is on one side only, or whose values differ."""
    if got.keys() != want.keys():
        return [f"{where}: names {sorted(got)} where {sorted(want)} are wanted"]
    problems = []
    for name, expected in want.items():
        mine = torch.as_tensor(got[name], dtype=torch.float64)
        expected = torch.as_tensor(expected, dtype=torch.float64)
        if mine.shape != expected.shape:
            problems.append(f"{where}: {name} has shape {tuple(mine.shape)}, wanted {tuple(expected.shape)}")
        elif not torch.allclose(mine, expected, rtol=tolerance, atol=tolerance):
            problems.append(f"{where}: {name} differs by {(mine - expected).abs().max():.2g}")
    return problems


def raised(call: Callable[[], Any]) -> BaseException | None:
    """The exception that `call` ends with; None if it returns."""
    try:
        call()
    except Exception as error:
        return error
    return None


def not_refused(where: str, error: BaseException | None, kinds: Any, fragment: str) -> list[str]:
    """Empty if `error` is one of Fullshard's, of these kinds too, and its text names what `fragment` says."""
    if isinstance(error, fullshard.FullshardError) and isinstance(error, kinds) and fragment in str(error):
        return []
    if error is None:
        return [f"{where}: nothing was raised"]
    return [f"{where}: {type(error).__name__}: {str(error)[:300]}"]
