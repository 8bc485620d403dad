"""One example, sharded in every way there is, and what can be seen of it, whichever way that was.

rows, flat, blocks, owner   `fully_shard` with that layout
wrapper, originals          `FullyShardedDataParallel` with one FlatParameter per instance, or with the originals
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel
from models import Example
from training import Options, difference, full_gradients, full_parameters, shard
from wrapped import Wrapping, whole_gradients, wrap_example

KINDS: dict[str, Options | Wrapping] = {
    "rows": Options(),
    "flat": Options(layout="flat"),
    "blocks": Options(layout=fullshard.Blocks("row")),
    "owner": Options(layout="owner"),
    "wrapper": Wrapping(),
    "originals": Wrapping(orig=True),
}
FUNCTIONAL = [kind for kind, how in KINDS.items() if isinstance(how, Options)]
PER_PARAMETER = [kind for kind in KINDS if kind != "wrapper"]  # whose parameters have a gradient each

every_kind = pytest.mark.parametrize("kind", KINDS)
every_layout = pytest.mark.parametrize("kind", FUNCTIONAL)
every_parameter = pytest.mark.parametrize("kind", PER_PARAMETER)


def example_of(build: Callable[[], nn.Module], *units: str) -> Example:
    """A model and the modules of it, by their names, that become units besides the root."""
    return Example(build, lambda model: [model.get_submodule(name) for name in units], kind="vectors")


def sharded(example: Example, kind: str, hybrid: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The example sharded so; on a mesh of 2 replicas if `hybrid`."""
    how, model = KINDS[kind], example.make(dtype)
    if isinstance(how, Options):
        return shard(fullshard, model, example, replace(how, mesh="hybrid") if hybrid else how)
    return wrap_example(
        fullshard, model, example, replace(how, strategy="HYBRID_SHARD", groups="mesh") if hybrid else how
    )


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Gradients of the backwards in here are kept on their rank."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


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


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by the names of the unwrapped model, once the ranks agree on who has one. Collective."""
    who_has_gradients(model)
    return whole_gradients(model) if isinstance(model, FullyShardedDataParallel) else full_gradients(model)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by the names of the unwrapped model. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    return full_parameters(model)


def assert_equal(got: dict[str, Tensor | None], want: dict[str, Tensor | None], what: str, tolerance=1e-12) -> None:
    """Same names, None for None, and the same numbers; every difference is told, with norms."""
    assert got.keys() == want.keys()
    wrong = []
    for name, wanted in want.items():
        found = got[name]
        if found is None or wanted is None:
            if found is not wanted:
                wrong.append(f"{name} is {norm(found)} where {norm(wanted)} is right")
        elif difference(found, wanted) > tolerance and (found - wanted).norm() > tolerance:
            wrong.append(f"{name} has norm {norm(found)} where {norm(wanted)} is right")
    assert not wrong, f"{what}: " + "; ".join(wrong)


def norm(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.norm().item():.6g}"
