"""A rank's part of a tensor, as rectangles: what it writes to a checkpoint, and the memory it reads one into.

    parameter "blocks.0.weight", shape (5, 4); rank 1 of 2 has elements [10, 20) (layout="flat")

      . . . .
      . . . .
      . . x x     piece: offsets (2, 2), sizes (1, 2)
      x x x x     piece: offsets (3, 0), sizes (2, 4)
      x x x x

Pieces share memory with the shard: creating them copies and gathers nothing. A rank that has no element of a tensor has
an empty piece of it, so that every rank knows every tensor's name, shape and dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..errors import CheckpointError
from ..forms import FlatShard, Member
from ..layout import rectangles
from ..shard import Bucket
from ..torch_private.local_tensor import local_of


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of a tensor.

    Attributes:
        name: of the tensor, in the checkpoint.
        shape: of the whole tensor.
        offsets, sizes: the rectangle: first index and extent on every dim.
        tensor: its values, of shape `sizes`; a view of memory owned by the model or optimizer.
        writes: whether this rank writes it; exactly one of the ranks with the same values does.
        in_unit: whether it belongs to a unit's parameter, or to its optimizer state: between steps it is only read.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor
    writes: bool = True
    in_unit: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


Key = tuple[str, tuple[int, ...]]
"""A piece's name and offsets."""


def whole_piece(name: str, tensor: torch.Tensor, writes: bool) -> Piece:
    """The piece of a tensor that is whole on this rank.

    Raises:
        CheckpointError: see `refuse_unsupported`.
    """
    refuse_unsupported(name, tensor)
    shape = tuple(tensor.shape)
    return Piece(name, shape, (0,) * len(shape), shape, tensor.detach(), writes)


def refuse_unsupported(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not one array of elements, or whose scales would be lost.

    Raises:
        CheckpointError: the tensor is sparse, or of one of torch's quantized dtypes.
    """
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"A tensor of layout {tensor.layout} cannot be saved in a checkpoint.",
            parameter=name,
            expected="a dense tensor",
            got=f"layout {tensor.layout}",
            remedy="save tensor.to_dense(), or its indices and values as dense tensors",
        )
    if tensor.is_quantized:
        raise CheckpointError(
            "A tensor of one of torch's quantized dtypes cannot be saved in a checkpoint.",
            parameter=name,
            got=tensor.dtype,
            remedy="save tensor.int_repr() with its scale and zero point, or a dequantized tensor",
        )


def empty_piece(name: str, shape: tuple[int, ...], local: torch.Tensor, writes: bool = False) -> Piece:
    """An empty piece, for a rank without elements of a tensor. A 0-d tensor cannot be empty; it gets a new tensor."""
    sizes = (0,) * len(shape)
    return Piece(name, shape, sizes, sizes, local.new_empty(sizes), writes)


def member_pieces(name: str, bucket: Bucket, member: Member, local: torch.Tensor, turn: int) -> Iterator[Piece]:
    """The pieces of a parameter, or of optimizer state like it.

    Args:
        local: this rank's part, as `bucket.part` returns it.
        turn: the parameter's number, the same on every rank; ranks with the same values take turns to write.
    """
    axes, split = bucket.axes, member.split
    writes = axes.replicate is None or axes.replicate.rank == turn % axes.replicate.size
    base, shape = (0,) * len(member.slot.shape), member.shape
    if split is not None:
        base, writes = _local_offsets(name, split.mesh, split.placements, split.data_dims, shape, writes, turn)
    slot, part = member.slot, member.part
    if type(local) is not torch.Tensor:
        yield from _subclass_pieces(name, local, bucket, member, writes and (part.numel > 0))
    elif not part.numel:  # an empty tensor is written by the first rank
        empty = not torch.Size(shape).numel()
        yield empty_piece(name, shape, local, empty and writes and axes.shard.rank == 0)
    elif bucket.layout.holds_runs:
        for piece in run_pieces(name, slot.shape, slot.spec.order, part.start, part.start + part.numel, local):
            offsets = tuple(a + b for a, b in zip(base, piece.offsets, strict=True))
            yield replace(piece, shape=shape, offsets=offsets, writes=writes, in_unit=True)
    else:
        offsets = tuple(at + (part.start if dim == slot.spec.dim else 0) for dim, at in enumerate(base))
        yield Piece(name, shape, offsets, part.shape, local.detach(), writes, in_unit=True)


def run_pieces(
    name: str, shape: tuple[int, ...], order: Sequence[int], start: int, stop: int, local: torch.Tensor
) -> Iterator[Piece]:
    """The rectangles of elements [start, stop), in memory order, of a tensor of `shape`.

    Args:
        local: those elements, 1-D.
    """
    permuted = tuple(shape[dim] for dim in order)
    inverse = [list(order).index(dim) for dim in range(len(order))]
    for block in rectangles(permuted, start, stop):
        view = local.detach()[block.start :][: torch.Size(block.sizes).numel()].view(block.sizes).permute(inverse)
        offsets = tuple(block.offsets[i] for i in inverse)
        yield Piece(name, shape, offsets, tuple(view.shape), view)


def value_pieces(name: str, value: Any, turn: int, first: bool) -> Iterator[Piece]:
    """The pieces of a tensor outside all units, or of optimizer state that is not shaped like its parameter.

    Args:
        turn: see `member_pieces`.
        first: whether this is the first rank, which writes plain tensors.

    Raises:
        CheckpointError: a placement is neither Shard nor Replicate.
    """
    if isinstance(value, FlatShard):
        run = value._run
        writes = run.replicas is None or run.replicas.rank == turn % run.replicas.size
        start, stop = run.bounds(run.axis.rank)
        for piece in run_pieces(name, run.shape, run.order, start, stop, value._local_tensor):
            yield replace(piece, writes=writes)
        if start == stop:
            empty = not torch.Size(run.shape).numel()
            yield empty_piece(name, run.shape, value._local_tensor, empty and writes and run.axis.rank == 0)
    elif isinstance(value, DTensor):
        local, shape = local_of(value).detach(), tuple(value.shape)
        offsets, writes = _local_offsets(name, value.device_mesh, value.placements, (), shape, True, turn)
        if local.numel() or not torch.Size(shape).numel():
            yield Piece(name, shape, offsets, tuple(local.shape), local, writes)
        else:
            yield empty_piece(name, shape, local)
    elif type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "__tensor_flatten__"):
        for key in value.__tensor_flatten__()[0]:
            yield from value_pieces(f"{name}.{key}", getattr(value, key), turn, first)
    else:
        yield whole_piece(name, value, first)


def _local_offsets(
    name: str,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    skipped: Sequence[int],
    shape: tuple[int, ...],
    writes: bool,
    turn: int,
) -> tuple[tuple[int, ...], bool]:
    """The offsets of this rank's part of a DTensor, and whether this rank writes it.

    A DTensor is split like `torch.chunk`, mesh dim by mesh dim (`torch.distributed.tensor`, "Placements").
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for index, placement in enumerate(placements):
        if index in skipped:
            continue
        size, rank = mesh.size(index), mesh.get_local_rank(index)
        if placement.is_replicate():
            writes, turn = writes and rank == turn % size, turn // size
        elif type(placement) is Shard:
            rows = -(-sizes[placement.dim] // size)
            start = min(rank * rows, sizes[placement.dim])
            offsets[placement.dim] += start
            sizes[placement.dim] = min(rows, sizes[placement.dim] - start)
        else:
            raise CheckpointError(
                "The placements of a tensor do not determine which rank has which part of it.",
                parameter=name,
                expected="Shard or Replicate on every mesh dim",
                got=f"placements {tuple(placements)}",
                remedy="redistribute it before it is saved or loaded",
            )
    return tuple(offsets), writes


def _subclass_pieces(name: str, local: Any, bucket: Bucket, member: Member, writes: bool) -> Iterator[Piece]:
    """The pieces of the tensors inside a tensor subclass, such as a quantised weight's values and scales.

    An inner tensor with as many rows as this rank's part is split like the rows; any other is the same on every rank.

    Raises:
        CheckpointError: the class does not implement `__tensor_flatten__`.
    """
    if not hasattr(local, "__tensor_flatten__"):
        raise CheckpointError(
            f"A parameter of class {type(local).__name__} does not implement __tensor_flatten__.",
            parameter=member.name,
            expected="__tensor_flatten__, as PyTorch's guide to wrapper subclasses describes it",
            remedy="give the class that method",
        )
    rows, part = member.slot.shape[0], member.part
    for key in local.__tensor_flatten__()[0]:
        inner, inner_name = getattr(local, key), f"{name}.{key}"
        if type(inner) is not torch.Tensor and hasattr(inner, "__tensor_flatten__"):
            yield from _subclass_pieces(inner_name, inner, bucket, member, writes)
        elif inner.dim() and inner.shape[0] == part.shape[0]:
            if part.numel:
                shape, rest = (rows, *inner.shape[1:]), (0,) * (inner.dim() - 1)
                yield Piece(inner_name, shape, (part.start, *rest), tuple(inner.shape), inner.detach(), writes)
        else:
            yield whole_piece(inner_name, inner, writes and bucket.axes.shard.rank == 0)
