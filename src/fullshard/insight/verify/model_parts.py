"""This rank's part of a model's parameters, gradients and buffers, by their names in the unsharded model."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...checkpoint.table import Named, Table, settle
from ...forms import full_of
from ...text import plain_name, plain_path
from ...torch_private.local_tensor import local_part, read_grad


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by plain name; of a wrapper and the module inside, the latter."""
    return {plain_path(path): module for path, module in model.named_modules()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers by plain name, persistent or not; shared ones under each of their names."""
    return {plain_name(name): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}


class ModelParts:
    """The parameters and buffers of a model as they are now, sharded or not.

    A new one is needed whenever the model may have changed: units take over replaced storage here.

    Attributes:
        rows: one per parameter, by its first name.
        comparable: those whose parts are plain numbers; not of tensor subclasses that gather in their own way.
        ties: the names of every parameter that has several.
        buffers: all of them, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        settle(model)
        for unit, _ in Table(model, plain_name).units:
            unit.refresh()
        self.table = Table(model, plain_name)
        self.rows: dict[str, Named] = {row.name: row for row in self.table.parameters}
        self.comparable = {name: row for name, row in self.rows.items() if row.bucket is None or row.bucket.form.plain}
        self.ties = {tuple(sorted(set(row.names))) for row in self.table.parameters if len(set(row.names)) > 1}
        self.buffers = buffers_of(model)

    def dtypes(self) -> set[torch.dtype]:
        """The dtypes in which parameters are stored, computed with and reduced."""
        dtypes = {self.dtype(row) for row in self.rows.values()}
        for unit, _ in self.table.units:
            for gradients in unit.gradients:
                if gradients.bucket.storage_dtype.is_floating_point:
                    dtypes |= {gradients.bucket.compute_dtype, gradients.reduce_dtype}
        return dtypes

    def packed_dtypes(self) -> set[torch.dtype]:
        """The 8-bit dtypes in which parameters and gradients are sent."""
        buckets = [bucket for unit, _ in self.table.units for bucket in unit.buckets]
        dtypes = [(bucket.gather_dtype, bucket.scatter_dtype, bucket.all_reduce_dtype) for bucket in buckets]
        return {dtype for dtype in chain.from_iterable(dtypes) if dtype}

    @staticmethod
    def dtype(row: Named) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        return row.parameter.dtype if row.bucket is None else row.bucket.storage_dtype

    @staticmethod
    def value(row: Named) -> torch.Tensor:
        """This rank's part of a parameter, sharing memory."""
        if row.bucket is None or row.member is None:
            return local_part(row.parameter.detach())
        return row.bucket.part(row.bucket.shard, row.member).detach()

    @staticmethod
    def gradient(row: Named) -> torch.Tensor | None:
        """This rank's part of the gradient as an optimizer sees it now, sharing memory; None if there is none."""
        bucket, member = row.bucket, row.member
        if bucket is None or member is None:
            grad: Any = row.parameter.grad
            return None if grad is None else local_part(grad.detach())
        if (flat := bucket.flat_parameter) is not None:
            flat_grad: torch.Tensor | None = flat.grad
            if flat_grad is None or flat_grad.numel() != bucket.layout.shard_numel:
                return None
            return bucket.part(flat_grad, member).detach()
        grad = read_grad(member.sharded)
        return None if grad is None else bucket.local(grad, member).detach()

    @staticmethod
    def cut(row: Named, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value. No communication."""
        if row.bucket is not None and row.member is not None:
            return row.bucket.cut(whole.to(row.bucket.axes.device), row.member)
        if isinstance(row.parameter, DTensor):
            mesh, placements = row.parameter.device_mesh, row.parameter.placements
            return local_part(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        return whole

    @staticmethod
    def whole(row: Named, local: torch.Tensor) -> torch.Tensor:
        """The whole value from every rank's part. Collective."""
        if row.bucket is not None and row.member is not None:
            return row.bucket.form.whole(row.member, local).detach()
        shown: Any = row.parameter
        if isinstance(shown, DTensor):
            sharded = DTensor.from_local(
                local, shown.device_mesh, shown.placements, run_check=False, shape=shown.shape, stride=shown.stride()
            )
            return full_of(sharded).detach()
        return local

    @staticmethod
    def numbers(row: Named) -> torch.Tensor:
        """This rank's part of the numbers 0, 1, 2, ... of a parameter's elements, in the shape of the part."""
        return ModelParts.cut(row, torch.arange(math.prod(row.shape), device=row.parameter.device).view(row.shape))

    def names_by_tensor(self) -> dict[int, set[str]]:
        """Names of parameters, by the id of each tensor through which an optimizer may update them."""
        names = {key: {row.name} for key, row in self.table.by_tensor.items()}
        for unit, _ in self.table.units:
            tensors = [(tensor, members) for tensor, _, members in unit.optimizer_views()]
            tensors += [(b.flat_parameter, b.members) for b in unit.buckets if b.flat_parameter is not None]
            for tensor, members in tensors:
                rows = [row for member in members if (row := self.table.of(member)) is not None]
                names.setdefault(id(tensor), set()).update(row.name for row in rows)
        return names
