"""Copies rank 0's parameters and buffers to all ranks, so that they start from the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import Comm
from ..forms import owner_of, successor_of
from ..mesh import Axis, MeshAxes
from ..torch_private.local_tensor import local_part
from ..watcher import RANK
from .messages import split_over_these_ranks


def broadcast_states(owners: Iterable[nn.Module], axes: MeshAxes, comm: Comm, ignored: set[int]) -> None:
    """Broadcast rank 0's parameters and buffers of these modules to all ranks, except those already in a unit.

    Of a DTensor (tensor parallelism) the local part is sent. Buffers of ignored modules are sent, too.

    Raises:
        ConfigError: the parts of a DTensor differ between the ranks that would receive them.
    """
    mesh_axes = axes.all
    for owner in owners:
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None or id(tensor) in ignored or owner_of(successor_of(tensor)) is not None:
                continue  # a nested instance's were broadcast when it was wrapped
            if isinstance(tensor, DTensor):
                _check_repeated(name, tensor, mesh_axes)
            local = local_part(tensor.detach())
            if not local.numel():
                continue
            with torch.no_grad():
                sent = local.to(axes.device).contiguous()
                for axis in mesh_axes:
                    RANK.talks("starting states")
                    comm.broadcast(axis, sent, 0).wait()
                if sent.data_ptr() != local.data_ptr():
                    local.copy_(sent)


def _check_repeated(name: str, tensor: DTensor, axes: Sequence[Axis]) -> None:
    """Refuse to send parts of `tensor` to ranks that hold different parts of it."""
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        ranks = set(torch.distributed.get_process_group_ranks(mesh.get_group(dim)))
        if not placement.is_replicate() and any(len(ranks & set(axis.ranks)) > 1 for axis in axes):
            raise split_over_these_ranks(name, tensor.placements, mesh)
