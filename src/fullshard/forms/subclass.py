"""Tensor subclasses that say themselves what is gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

A quantised weight, for one, keeps its values in one form, sends another, and is computed with in a third. The protocol
is that of PyTorch's `fully_shard`: before each gather the subclass, which holds this rank's chunk, names plain tensors
to gather; after it, it makes the unsharded parameter of them the first time, and fills the same one later.

Rows need not divide evenly: a rank's chunk is `torch.chunk`'s, maybe empty. A subclass may pad what it sends, so that
all ranks send as much, or send its rows as they are: they are padded on the way, and it is given all rows together.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import Gathers, Pending, Several
from ..layout import Layout, Part, Slot
from ..mesh import Axis, MeshAxes
from ..torch_private.local_tensor import local_of, set_local
from ..torch_private.versions import Versions
from .changes import owner_of
from .flat_shard import FlatShard
from .full import Full, GatherPlan, show_as_parameter
from .member import Member, identity_of
from .messages import (
    does_not_gather_itself,
    freed_whole,
    made_another_shape,
    not_cut_into_chunks,
    replaced_by_another,
    sends_uneven_rows,
    without_rows,
)
from .rows import RowsForm
from .scratch import Scratch

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
_MOST = 15
"""Tensors that a subclass with uneven rows may send."""


def is_extension(tensor: Any) -> bool:
    """Whether a parameter is gathered by its class: it has both methods of the protocol, or inner tensors.

    In the second case the methods must be there when it is gathered: programs set them on a class late.
    """
    if isinstance(tensor, (DTensor, FlatShard)):
        return False
    return all(hasattr(tensor, name) for name in _METHODS) or hasattr(tensor, "__tensor_flatten__")


class SubclassForm(RowsForm):
    """See the module's docstring, and `Form`. The shard is the chunk itself, of the subclass; one member.

    Args:
        layout, axes: of kind rows, in plain elements: gradients are reduced by it.
        policy: given to `fsdp_pre_all_gather` as `mp_policy`.
        module: given to it as `module`; held weakly.
    """

    plain = False

    def __init__(self, layout: Layout, axes: MeshAxes, policy: Any, module: nn.Module | None) -> None:
        super().__init__(layout, axes)
        self.policy = policy
        self.module: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else lambda: None

    def _plain_view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if type(local) is torch.Tensor:  # a gradient
            return self._rows(member, local)
        made = self._rows(member, torch.empty(local.shape, dtype=local.dtype, device=local.device))
        set_local(made, local)
        return made

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        (member,) = members
        for place in member.places:
            found = place.shown()
            if found is not member.sharded and found is not member.unsharded:
                self._check(member, found)
                found.__dict__.update(identity_of(member.sharded))
                member.sharded = found
        local = local_of(member.sharded)
        if type(local) is not type(member.local) or local.shape != member.local.shape:
            raise replaced_by_another(member.name, self.axes.global_rank, member.sharded, local)
        return [local]

    def point(self, members: Sequence[Member], shard: torch.Tensor) -> None:
        (member,) = members
        if local_of(member.sharded) is not shard:
            set_local(member.sharded, shard)
        self._dress(member, member.sharded)
        member.local = shard

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        return SubclassFull(self, members[0], device, dtype)

    def copied(self) -> SubclassForm:
        new = type(self)(self.layout, self.axes, self.policy, None)
        new.module = self.module
        return new


def chunk_of(original: Any, slot: Slot, part: Part, axes: MeshAxes) -> Any:
    """This rank's rows of `original`, of its class, in memory of its own on the mesh's device.

    Raises:
        ConfigError: no rows, or a class that cannot be cut, copied or moved.
    """
    world, rank = axes.shard.size, axes.shard.rank
    if not slot.shape or slot.spec.dim != 0:
        raise without_rows(type(original).__name__, slot.name, slot.spec.dim, slot.shape)
    try:
        with torch.no_grad():
            chunks = torch.chunk(original.detach(), world, 0)
            chunk = (chunks[rank] if rank < len(chunks) else chunks[0][:0]).clone()
            return chunk if chunk.is_meta or chunk.device == axes.device else chunk.to(axes.device)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise not_cut_into_chunks(type(original).__name__, slot.name, error) from error


class SubclassFull:
    """What a subclass is gathered into.

    Ownership: what is gathered lies in `Scratch` buffers made at the first gather; tensors that the subclass makes of
    them are its own, but their storage is given back with the unit's and taken again before the subclass fills them.
    """

    def __init__(self, form: SubclassForm, member: Member, device: torch.device, dtype: torch.dtype) -> None:
        self.form, self.member, self.device, self.dtype = form, member, device, dtype
        self._received: list[Scratch] = []
        self._keeps: list[bool] = []  # whether the subclass goes on using a buffer after it made its tensor
        self._inner: list[torch.Tensor] = []  # tensors of the subclass's own
        self._made: Any = None  # the unsharded tensor as the subclass made it
        self._sent: list[torch.Tensor] = []
        self._sizes: list[tuple[torch.Size, torch.dtype]] = []  # of what this rank sends
        self._rows: list[tuple[int, int]] = []  # of each: rows that every rank sends, padded; rows of all without it
        self._metadata: Any = None
        self._versions: Versions | None = None
        self.passing_bytes = self.copied_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for out in self._received)

    @property
    def live_bytes(self) -> int:
        return sum(out.storage.nbytes() for out in self._received)

    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: Any, keeps: bool = False) -> None:
        to.begins.append(partial(self._begin, comm, axis, source))
        to.gathers.append(partial(self._gather, comm, axis))
        to.fills.append(self._fill)
        to.ends.append(self._end)
        to.intact.append(self.intact)
        to.varying.append(self)

    def _begin(self, comm: Gathers, axis: Axis, source: Any) -> None:
        self._name_what_is_sent(source)
        sizes = [(tensor.shape, tensor.dtype) for tensor in self._sent]
        if sizes != self._sizes:
            self._rows = self._rows_of_all(comm, axis)
            self.member.unsharded, self._made, self._inner = None, None, []
            if (unit := owner_of(self.member.sharded)) is not None:
                unit.drop_plans()  # modules are shown another parameter from now on
            self._received = [
                Scratch(axis.size * rows * math.prod(shape[1:]), dtype, self.device)
                for (rows, _), (shape, dtype) in zip(self._rows, sizes, strict=True)
            ]
            self._sizes = sizes
        for out in self._received:
            out.allocate()
        self.passing_bytes = self.nbytes

    def _gather(self, comm: Gathers, axis: Axis) -> Pending:
        pairs = zip(self._received, self._sent, strict=True)
        return Several([partial(self._gather_one, comm, axis, out, tensor) for out, tensor in pairs])

    def _gather_one(self, comm: Gathers, axis: Axis, out: Scratch, tensor: torch.Tensor) -> Pending:
        sent, numel = tensor.view(-1), out.tensor.numel() // axis.size
        if sent.numel() < numel:
            sent = torch.cat([sent, sent.new_zeros(numel - sent.numel())])
        return comm.gather(axis, out.tensor, sent)

    def _rows_of_all(self, comm: Gathers, axis: Axis) -> list[tuple[int, int]]:
        """For each tensor that is sent, how many rows every rank sends, and how many there are of all ranks.

        Where rows divide evenly, no rank can send another number than this one. Else the ranks are asked, once.

        Raises:
            DivergenceError: ranks send other numbers of tensors, or of rows that are neither alike nor their chunks'.
        """
        mine = [tensor.shape[0] if tensor.dim() else 1 for tensor in self._sent]
        extent = self.member.slot.shape[0]
        if extent % axis.size == 0:
            return [(rows, axis.size * rows) for rows in mine]
        sent = torch.full((1 + _MOST,), -1, dtype=torch.int64)
        sent[: 1 + len(mine[:_MOST])] = torch.tensor([len(mine), *mine[:_MOST]])
        everyone = torch.empty(axis.size * sent.numel(), dtype=torch.int64, device=self.device)
        comm.gather(axis, everyone, sent.to(self.device)).wait()
        counts, *columns = everyone.view(axis.size, -1).T.tolist()
        chunk = -(-extent // axis.size)
        chunks = [max(0, min(chunk, extent - rank * chunk)) for rank in range(axis.size)]
        columns = columns[: len(mine)]
        if set(counts) != {len(mine)} or any(len(set(c)) > 1 and c != chunks for c in columns) or len(mine) > _MOST:
            raise sends_uneven_rows(self.member.name, self.form.axes.global_rank, _MOST, chunks, counts, columns)
        return [(max(column), sum(column)) for column in columns]

    def _name_what_is_sent(self, source: Any) -> None:
        slot, form = self.member.slot, self.form
        missing = [name for name in _METHODS if not hasattr(source, name)]
        if missing:
            raise does_not_gather_itself(self.member.name, _METHODS, type(source).__name__, missing)
        with torch.no_grad():
            method: Any = source.fsdp_pre_all_gather  # of its class, or set on this very tensor
            if _arguments(getattr(method, "__func__", method)) - inspect.ismethod(method) == 1:
                sent, self._metadata = method(self._mesh())  # the older form
            else:
                sent, self._metadata = method(
                    self._mesh(), torch.Size(slot.shape), slot.stride, form.module(), form.policy
                )
        self._sent = [_plain(tensor) for tensor in sent]

    def cut(self, axis: Axis) -> torch.Tensor:
        raise freed_whole(self.member.name)

    def _fill(self) -> None:
        for tensor in self._inner:
            _allocate(tensor)
        with torch.no_grad(), torch.inference_mode(False):
            self._have_it_made()
        assert self.member.unsharded is not None
        self._versions = Versions([self.member.unsharded])

    def _end(self) -> None:
        self.copied_bytes = sum(t.untyped_storage().nbytes() for t in self._inner)
        for out, keeps in zip(self._received, self._keeps, strict=True):
            if keeps:
                self.copied_bytes += out.nbytes
            else:
                out.free()

    def _have_it_made(self) -> None:
        """Have the subclass make its tensor, or fill the one it made before."""
        member, chunk = self.member, self.member.local
        outputs = tuple(
            out.tensor[: rows * math.prod(sent.shape[1:])].view(rows, *sent.shape[1:])
            for out, sent, (_, rows) in zip(self._received, self._sent, self._rows, strict=True)
        )
        self._sent = []
        post: Any = chunk.fsdp_post_all_gather  # type: ignore[attr-defined]
        if self._made is not None:
            # A plain tensor is filled through an alias, which has a version counter of its own: autograd must not take
            # the same values for a change of what it saved. A subclass is the very object that the module uses, on
            # which attributes may be set, unless padded rows were cut off it.
            out = member.unsharded if tuple(self._made.shape) == member.slot.shape else self._made
            post(outputs, self._metadata, self.dtype, out=self._made.data if type(self._made) is torch.Tensor else out)
            return
        made, inner = post(outputs, self._metadata, self.dtype)
        shape, ranks = member.slot.shape, self.form.axes.shard.size
        shown = made
        if tuple(made.shape) != shape and tuple(made.shape) == (-(-shape[0] // ranks) * ranks, *shape[1:]):
            shown = made.narrow(0, 0, shape[0])  # of padded rows it made padded rows
        if tuple(shown.shape) != shape:
            raise made_another_shape(member.name, member.slot.shape, tuple(made.shape))
        ours = {out.storage.data_ptr() for out in self._received}
        used = {tensor.untyped_storage().data_ptr() for tensor in (*inner, *_plain_parts(made))}
        self._inner = [t for t in inner if t.untyped_storage().data_ptr() not in ours]
        self._keeps = [out.storage.data_ptr() in used for out in self._received]
        show_as_parameter(member, shown.data if type(shown) is torch.Tensor else shown)
        self._made = made

    def frees(self, keep: bool = False) -> list[Callable[[], object]]:
        return [self._free]

    def _free(self) -> None:
        for out in self._received:
            out.free()
        for tensor in self._inner:
            tensor.untyped_storage().resize_(0)

    def addresses(self) -> list[int]:
        return [out.storage.data_ptr() for out in self._received]

    def differs(self, source: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, dtype=torch.bool, device=self.device)  # it cannot be told: gathered anew

    def intact(self) -> bool:
        return self._versions is None or not self._versions.moved()

    def written(self) -> list[Member]:
        return [self.member] if self._versions is not None and self._versions.moved() else []

    def overlook(self, tensor: torch.Tensor) -> None:
        if self._versions is not None:
            self._versions.overlook(tensor)

    def _mesh(self) -> DeviceMesh:
        """The mesh of the shard axis alone."""
        axes = self.form.axes
        if axes.replicate is None:
            return axes.mesh
        names = axes.mesh.mesh_dim_names
        if names:
            return axes.mesh[names[-1]]
        return DeviceMesh.from_group(axes.shard.group, axes.mesh.device_type)


@functools.lru_cache(maxsize=64)
def _arguments(method: Callable[..., Any]) -> int:
    return len(inspect.signature(method).parameters)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a backend can send: a subclass has no memory of its own, and is copied as it says itself."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.contiguous()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)
    return plain


def _plain_parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that a subclass is made of, at any depth; a plain one is made of itself."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        inner = [value for value in tensor.__dict__.values() if isinstance(value, torch.Tensor)]
    return [part for one in inner for part in _plain_parts(one)]


def _allocate(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    needed = int((tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    if storage.nbytes() < needed:
        storage.resize_(needed)
