"""Gradient clipping of the wrapper."""

from __future__ import annotations

from typing import Any

import torch

from ...forms import owner_of
from ...optim.clip import clip_local_gradients, shard_groups
from ...torch_private.local_tensor import local_part


def clip_gradients(root: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """`FullyShardedDataParallel.clip_grad_norm_` for the root instance."""
    parts: dict[tuple[int, ...], tuple[list[Any], list[torch.Tensor]]] = {(): ([], [])}
    grads: list[torch.Tensor] = []
    seen: set[int] = set()
    for child in root.fsdp_modules(root):
        for bucket in child._runner().unit.buckets:
            axis = bucket.axes.shard
            over = [axis.group] if axis.size > 1 else []
            for member in bucket.members:
                parallel = member.split
                groups = over if parallel is None else [*over, *parallel.groups()]
                entry = parts.setdefault(tuple(map(id, groups)), (groups, []))  # on every rank, whatever it holds
                shown = bucket.flat_parameter.grad if bucket.flat_parameter is not None else member.sharded.grad
                if shown is None:
                    continue
                entry[1].append(bucket.part(shown, member) if bucket.flat_parameter is not None else shown)
                if id(shown) not in seen:
                    seen.add(id(shown))
                    grads.append(shown)
    for parameter in root.parameters():
        if owner_of(parameter) is None:
            groups = shard_groups(parameter)
            entry = parts.setdefault(tuple(map(id, groups)), (groups, []))
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                entry[1].append(local)
                grads.append(local)
    return clip_local_gradients(list(parts.values()), grads, max_norm, norm_type, root.compute_device)
