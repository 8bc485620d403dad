"""What a rank holds of a tensor, as rectangles: what it writes to a checkpoint, and where it reads one into.

    parameter "blocks.0.weight", shape (5, 4); rank 1 of 2 holds elements [10, 20) (layout="flat")

      . . . .
      . . . .
      . . x x     piece: offsets (2, 2), sizes (1, 2)
      x x x x     piece: offsets (3, 0), sizes (2, 4)
      x x x x

Pieces share memory with the shard: making them copies and gathers nothing. A rank that holds no element of a tensor has
an empty piece of it: every rank knows every tensor's name, shape and dtype.
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
    """One rectangle of one tensor.

    Attributes:
        name: of the tensor, in the checkpoint.
        shape: of the whole tensor.
        offsets, sizes: the rectangle: first index and extent on every dim.
        tensor: its values, of shape `sizes`; a view of memory that somebody else owns.
        writes: whether this rank is the one that writes it, of those that hold the same values.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor
    writes: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass
class Scalar:
    """One value for a whole parameter, such as its step count.

    Attributes:
        value: a 0-d tensor or a Python value.
        owns: whether this rank holds any of the parameter: what ranks say that hold none does not count.
    """

    value: Any
    owns: bool


Key = tuple[str, tuple[int, ...]]
"""Of a piece: name and offsets."""


def whole_piece(name: str, tensor: torch.Tensor, writes: bool) -> Piece:
    """A tensor that every rank has whole.

    Raises:
        CheckpointError: a quantized tensor, whose scales would be lost.
    """
    if tensor.is_quantized:
        raise CheckpointError(
            "A tensor of torch's own quantized dtypes cannot be kept in a checkpoint.",
            parameter=name,
            got=tensor.dtype,
            remedy="save tensor.int_repr(), and its scale and zero point, or a tensor that was dequantized",
        )
    shape = tuple(tensor.shape)
    return Piece(name, shape, (0,) * len(shape), shape, tensor.detach(), writes)


def empty_piece(name: str, shape: tuple[int, ...], local: torch.Tensor, writes: bool = False) -> Piece:
    """The piece of a rank that holds nothing of a tensor; of one without dims, whose pieces have an element, a copy."""
    sizes = (0,) * len(shape)
    return Piece(name, shape, sizes, sizes, local.new_empty(sizes), writes)


def member_pieces(name: str, bucket: Bucket, member: Member, local: torch.Tensor, turn: int) -> Iterator[Piece]:
    """The pieces of a parameter, or of optimizer state like it.

    Args:
        local: this rank's part, as `bucket.part` gives it.
        turn: which of the ranks that hold the same values writes: a number that every rank gives this parameter.
    """
    axes, split = bucket.axes, member.split
    writes = axes.replicate is None or axes.replicate.rank == turn % axes.replicate.size
    at, whole = (0,) * len(member.slot.shape), member.shape
    if split is not None:
        at, writes = _inside(split.mesh, split.placements, split.data_dims, whole, writes, turn)
    slot, part = member.slot, member.part
    if type(local) is not torch.Tensor:
        yield from _subclass_pieces(name, local, bucket, member, writes and (part.numel > 0))
    elif not part.numel:  # an empty tensor is written by the first rank
        empty = not torch.Size(whole).numel()
        yield empty_piece(name, whole, local, empty and writes and axes.shard.rank == 0)
    elif bucket.layout.holds_runs:
        for piece in run_pieces(name, slot.shape, slot.spec.order, part.start, part.start + part.numel, local):
            offsets = tuple(a + b for a, b in zip(at, piece.offsets, strict=True))
            yield replace(piece, shape=whole, offsets=offsets, writes=writes)
    else:
        offsets = tuple(a + (part.start if dim == slot.spec.dim else 0) for dim, a in enumerate(at))
        yield Piece(name, whole, offsets, part.shape, local.detach(), writes)


def run_pieces(
    name: str, shape: tuple[int, ...], order: Sequence[int], start: int, stop: int, local: torch.Tensor
) -> Iterator[Piece]:
    """The rectangles of elements [start, stop), in memory order, of a tensor of `shape`; `local` is 1-D, of these."""
    permuted = tuple(shape[dim] for dim in order)
    inverse = [list(order).index(dim) for dim in range(len(order))]
    for block in rectangles(permuted, start, stop):
        view = local.detach()[block.start :][: torch.Size(block.sizes).numel()].view(block.sizes).permute(inverse)
        offsets = tuple(block.offsets[i] for i in inverse)
        yield Piece(name, shape, offsets, tuple(view.shape), view)


def value_pieces(name: str, value: Any, turn: int, first: bool) -> Iterator[Piece]:
    """The pieces of a tensor that no unit holds, or of optimizer state that is not like its parameter.

    Args:
        turn: see `member_pieces`.
        first: whether this is the first rank, which writes plain tensors.

    Raises:
        CheckpointError: a placement that says neither who holds what nor that all hold it.
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
        at, writes = _inside(value.device_mesh, value.placements, (), shape, True, turn)
        if local.numel() or not torch.Size(shape).numel():
            yield Piece(name, shape, at, tuple(local.shape), local, writes)
        else:
            yield empty_piece(name, shape, local)
    elif type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "__tensor_flatten__"):
        for key in value.__tensor_flatten__()[0]:
            yield from value_pieces(f"{name}.{key}", getattr(value, key), turn, first)
    else:
        yield whole_piece(name, value, first)


def _inside(
    mesh: DeviceMesh, placements: Sequence[Any], skipped: Sequence[int], shape: tuple[int, ...], writes: bool, turn: int
) -> tuple[tuple[int, ...], bool]:
    """Where this rank's part of a DTensor begins, and whether it writes it, of the ranks that have the same part.

    Parts are those of `torch.chunk`, mesh dim by mesh dim (`torch.distributed.tensor`, "Placements").
    """
    at, left = [0] * len(shape), list(shape)
    for index, placement in enumerate(placements):
        if index in skipped:
            continue
        size, rank = mesh.size(index), mesh.get_local_rank(index)
        if placement.is_replicate():
            writes, turn = writes and rank == turn % size, turn // size
        elif type(placement) is Shard:
            rows = -(-left[placement.dim] // size)
            start = min(rank * rows, left[placement.dim])
            at[placement.dim] += start
            left[placement.dim] = min(rows, left[placement.dim] - start)
        else:
            raise CheckpointError(
                "A tensor is placed in a way that does not say which rank holds what of it.",
                expected="Shard or Replicate on every mesh dim",
                got=f"placements {tuple(placements)}",
                remedy="redistribute it before it is saved or loaded",
            )
    return tuple(at), writes


def _subclass_pieces(name: str, local: Any, bucket: Bucket, member: Member, writes: bool) -> Iterator[Piece]:
    """Those of the tensors inside a tensor subclass, such as a quantised weight's values and scales.

    A tensor whose first dim is that of the rank's rows is split as they are; another is the same on every rank.

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
        inner = getattr(local, key)
        inside = f"{name}.{key}"
        if type(inner) is not torch.Tensor and hasattr(inner, "__tensor_flatten__"):
            yield from _subclass_pieces(inside, inner, bucket, member, writes)
        elif inner.dim() and inner.shape[0] == part.shape[0]:
            if part.numel:
                shape, rest = (rows, *inner.shape[1:]), (0,) * (inner.dim() - 1)
                yield Piece(inside, shape, (part.start, *rest), tuple(inner.shape), inner.detach(), writes)
        else:
            yield whole_piece(inside, inner, writes and bucket.axes.shard.rank == 0)
