"""The implementations that are compared, and how each wraps the same model: one unit per block, and the root.

    plain         the model as it is
    ddp           DistributedDataParallel around the whole
    fsdp2         torch.distributed.fsdp.fully_shard on every block, then on the root
    fsdp1-flat    FullyShardedDataParallel, use_orig_params=False (its default)
    fsdp1-orig    FullyShardedDataParallel, use_orig_params=True
    rows, flat, blocks    fullshard.fully_shard with that layout, on every block, then on the root
    rows+view, flat+view    the same, optimizer over `optimizer_view(model)`
    wrapper-flat, wrapper-orig    fullshard.FullyShardedDataParallel, as fsdp1-flat and fsdp1-orig

PyTorch's own are black boxes here, at their defaults; every peer gets the same fused AdamW.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TORCH_PEERS = ("fsdp2", "fsdp1-flat", "fsdp1-orig")
WRAPPERS = ("wrapper-flat", "wrapper-orig")
OUR_PEERS = ("rows", "flat", "blocks")  # blocks: cut between rows only
VIEW = "+view"


def fullshard_missing() -> str | None:
    """Why Fullshard's peers cannot run, or None if they can."""
    try:
        module = importlib.import_module("fullshard")
        _ = module.fully_shard, module.optimizer_view
    except Exception as error:
        return f"fullshard is not usable here: {type(error).__name__}: {error}"
    return None


def choose(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of `names` that can run here, and those of Fullshard's that cannot."""
    missing = fullshard_missing()
    ours = [name for name in names if missing and name.startswith((*OUR_PEERS, *WRAPPERS))]
    if ours:
        print(f"skipped {', '.join(ours)}: {missing}", flush=True)
    return [name for name in names if name not in ours], ours


def fake_world(size: int, device: str = "cpu") -> DeviceMesh:
    """This process as rank 0 of `size`, with collectives that return at once; results are meaningless."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return init_device_mesh(device, (size,))


def wrap(
    peer: str,
    model: nn.Module,
    block: type[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """`model` sharded by `peer`: every instance of `block` is a unit, and the root is one.

    Args:
        param_dtype: compute and reduce in it (mixed precision); None computes in the parameters' own dtype.
        param_init_fn: FSDP1 only: how it fills a unit that is on meta.
    """
    name = peer.removesuffix(VIEW)
    if name == "plain":
        return model
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if name.startswith(("fsdp1-", "wrapper-")):
        return _wrap_fsdp1(
            "fullshard" if name in WRAPPERS else "torch.distributed.fsdp",
            model,
            block,
            mesh,
            use_orig_params=name.endswith("-orig"),
            param_dtype=param_dtype,
            param_init_fn=param_init_fn,
        )
    fully_shard, policy, options = _functional(name)
    if param_dtype is not None:
        options["mp_policy"] = policy(param_dtype=param_dtype, reduce_dtype=param_dtype)
    for module in list(model.modules()):
        if isinstance(module, block):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _functional(name: str) -> tuple[Callable[..., Any], type, dict[str, Any]]:
    """`fully_shard`, its mixed precision policy and its layout option, from PyTorch or from Fullshard."""
    source = importlib.import_module("torch.distributed.fsdp" if name == "fsdp2" else "fullshard")
    if name == "fsdp2":
        return source.fully_shard, source.MixedPrecisionPolicy, {}
    return source.fully_shard, source.MixedPrecisionPolicy, {"layout": source.Blocks() if name == "blocks" else name}


def _wrap_fsdp1(
    library: str,
    model: nn.Module,
    block: type[nn.Module],
    mesh: DeviceMesh,
    *,
    use_orig_params: bool,
    param_dtype: torch.dtype | None,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> nn.Module:
    """FSDP1's interface at its defaults; PyTorch's takes a CPU only if `device_id` says so."""
    source, policies = importlib.import_module(library), importlib.import_module(f"{library}.wrap")
    device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    precision = None
    if param_dtype is not None:
        precision = source.MixedPrecision(param_dtype=param_dtype, reduce_dtype=param_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return source.FullyShardedDataParallel(
            model,
            process_group=mesh.get_group(),
            auto_wrap_policy=policies.ModuleWrapPolicy({block}),
            use_orig_params=use_orig_params,
            mixed_precision=precision,
            param_init_fn=param_init_fn,
            device_id=device,
        )


def adamw(peer: str, model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Fused AdamW on what `peer` gives its optimizer: `model.parameters()`, or the view's plain tensors."""
    parameters: Any = model.parameters()
    if peer.endswith(VIEW):
        parameters = importlib.import_module("fullshard").optimizer_view(model)
    return torch.optim.AdamW(parameters, lr=1e-3, **{"fused": True, **options})


def interleaved(names: Sequence[str], rounds: int, budget: float = math.inf, least: int = 1) -> Iterator[str]:
    """`names` in a new order each round, so that none always follows the same one; the same on all ranks.

    Args:
        budget: seconds after which no further round is begun, once `least` rounds are done. Clocks differ between
            ranks: only a benchmark of one process may set it.
    """
    order, shuffle, start = list(names), random.Random(0), time.perf_counter()
    for count in range(rounds):
        if count >= least and time.perf_counter() - start > budget:
            return
        shuffle.shuffle(order)
        yield from order


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch's deprecation and CPU warnings, the same at every step, kept out of the report."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
