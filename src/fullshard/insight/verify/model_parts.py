"""What this rank holds of a model: its part of every parameter and gradient, by the names of the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...checkpoint.names import Named, Table, settle
from ...checkpoint.values import views_of
from ...forms import full_of
from ...names import plain_name, plain_path
from ...torch_private.local_tensor import local_part, read_grad


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """By plain name; of what wraps a module and the module itself, the latter."""
    return {plain_path(path): module for path, module in model.named_modules()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """By plain name, persistent or not, also those that have several."""
    return {plain_name(name): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}


class ModelParts:
    """The parameters and buffers of a model as they are now, sharded or not.

    Made anew whenever the model may have been changed: replaced storage is taken over by its unit first.

    Attributes:
        rows: one per parameter, by its first name.
        ties: the names of every parameter that has several.
        buffers: all of them, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        settle(model)
        for unit, _ in Table(model, plain_name).units:
            unit.refresh()
        self.table = Table(model, plain_name)
        self.rows: dict[str, Named] = {row.name: row for row in self.table.parameters}
        self.ties = {tuple(sorted(set(row.names))) for row in self.table.parameters if len(set(row.names)) > 1}
        self.buffers = buffers_of(model)

    def dtypes(self) -> set[torch.dtype]:
        """Those in which parameters are stored, computed with and reduced."""
        found = {self.dtype(row) for row in self.rows.values()}
        for unit, _ in self.table.units:
            for gradients in unit.gradients:
                if gradients.bucket.storage_dtype.is_floating_point:
                    found |= {gradients.bucket.compute_dtype, gradients.reduce_dtype}
        return found

    @staticmethod
    def dtype(row: Named) -> torch.dtype:
        return row.parameter.dtype if row.bucket is None else row.bucket.storage_dtype

    @staticmethod
    def comparable(row: Named) -> bool:
        """Whether its parts are plain numbers; not of tensor subclasses with a gather of their own."""
        return row.bucket is None or row.bucket.form.plain

    @staticmethod
    def value(row: Named) -> torch.Tensor:
        """This rank's part, sharing memory."""
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
            whole: torch.Tensor | None = flat.grad
            fits = whole is not None and whole.numel() == bucket.layout.shard_numel
            return bucket.part(whole, member).detach() if whole is not None and fits else None
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
        """The whole of which every rank has a part. Collective."""
        if row.bucket is not None and row.member is not None:
            return row.bucket.form.whole(row.member, local).detach()
        shown: Any = row.parameter
        if isinstance(shown, DTensor):
            made = DTensor.from_local(
                local, shown.device_mesh, shown.placements, run_check=False, shape=shown.shape, stride=shown.stride()
            )
            return full_of(made).detach()
        return local

    @staticmethod
    def numbers(row: Named, device: torch.device) -> torch.Tensor:
        """[numel] of this rank's part: the number of each of its elements in the whole."""
        return ModelParts.cut(row, torch.arange(math.prod(row.shape), device=device).view(row.shape)).reshape(-1)

    def tensors(self) -> dict[int, set[str]]:
        """By the id of a tensor through which an optimizer may update parameters: their names."""
        found = {key: {row.name} for key, row in self.table.by_tensor.items()}
        for unit, _ in self.table.units:
            shown = [(tensor, members) for tensor, _, _, members in views_of(unit)]
            shown += [(b.flat_parameter, b.members) for b in unit.buckets if b.flat_parameter is not None]
            for tensor, members in shown:
                rows = [row for member in members if (row := self.table.of(member)) is not None]
                found.setdefault(id(tensor), set()).update(row.name for row in rows)
        return found
