"""Extensions: tensor subclasses that define their own gather, `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

For example, a quantised weight may be stored in one representation, sent in a second and used for computation in a
third. The protocol is that of PyTorch's `fully_shard`: before each gather the subclass, which holds this rank's chunk,
returns plain tensors to gather; after the first gather it makes the unsharded parameter from the gathered tensors, and
after later ones fills the same parameter.

Rows need not divide evenly: a rank's chunk is that of `torch.chunk`, possibly empty. A subclass may pad the tensors it
sends to equal size on all ranks, or send its rows as they are, and a scale for every few of them: the engine pads both,
and returns all rows without padding.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import Gathers, Pending
from ..layout import ALIGN_BYTES, Layout, Slot
from ..mesh import Axis, MeshAxes
from ..torch_private.foreach import columns_out, copy_all
from ..torch_private.local_tensor import local_of, plain_tensors, set_local
from ..torch_private.versions import Versions
from .changes import owner_of
from .flat_shard import FlatShard
from .full import Full, GatherPlan, show_as_parameter
from .member import Member
from .messages import (
    does_not_gather_itself,
    kind_and_shape,
    not_cut_into_chunks,
    replaced_by_another,
    returned_another_shape,
    sends_uneven_rows,
    without_rows,
)
from .rows import RowsForm
from .scratch import Scratch

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
_MOST = 15
"""The most tensors that a subclass with uneven rows may send."""
_Sizes = list[tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes of the tensors that a parameter sends."""


def is_extension(tensor: Any) -> bool:
    """Whether a parameter's class defines its gather: it has both methods of the protocol, or inner tensors.

    In the second case the methods must exist at the first gather: programs may set them on a class late.
    """
    if isinstance(tensor, (DTensor, FlatShard)):
        return False
    return all(hasattr(tensor, name) for name in _METHODS) or hasattr(tensor, "__tensor_flatten__")


class Chunks:
    """The shard of a bucket of extensions: this rank's chunk of each parameter, of the parameter's class.

    All chunks have the same dtype and device, which may be the meta device.

    Args:
        slots: of the parameters.
        tensors: the chunks, in the same order.
    """

    __slots__ = ("_by_slot", "_to_device", "tensors")

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [*tensors]
        self._by_slot = dict(zip(slots, self.tensors, strict=True))
        self._to_device: Callable[[list[torch.Tensor], Callable[..., Any]], Any] | None = None

    def of(self, slot: Slot) -> torch.Tensor:
        """The chunk of a parameter."""
        return self._by_slot[slot]

    def replaced(self, tensors: Iterable[torch.Tensor]) -> Chunks:
        """`Chunks` of the same parameters with these tensors."""
        return Chunks([*self._by_slot], [*tensors])

    def copied_by(self, to_device: Callable[[list[torch.Tensor], Callable[..., Any]], Any]) -> Chunks:
        """`Chunks` of the same tensors, which gathers copy to the device by `to_device`, a home's."""
        chunks = self.replaced(self.tensors)
        chunks._to_device = to_device
        return chunks

    def on_device(self, prepare: Callable[..., object]) -> int:
        """Call `prepare` with the tensors on the compute device; returns the bytes that were copied there."""
        if self._to_device is None:
            prepare(*self.tensors)
            return 0
        self._to_device(self.tensors, prepare)
        return sum([plain.nbytes for tensor in self.tensors for plain in plain_tensors(tensor)])

    def clone(self) -> Chunks:
        """A copy in separate memory."""
        return self.replaced([tensor.clone() for tensor in self.tensors])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def is_meta(self) -> bool:
        return self.tensors[0].is_meta


class SubclassForm(RowsForm):
    """See the module's docstring, and `Form`. The shard is `Chunks`.

    Args:
        layout, axes: of kind rows, in plain elements, for the reduction of gradients.
        policy: passed to `fsdp_pre_all_gather` as `mp_policy`.
        apart: whether shards are on a different device than the mesh (offloading).
    """

    plain = False

    def __init__(self, layout: Layout, axes: MeshAxes, policy: Any, apart: bool = False) -> None:
        super().__init__(layout, axes, apart)
        self.policy = policy

    def _plain_view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if type(local) is torch.Tensor:  # a gradient
            return super()._plain_view(member, local)
        view = super()._plain_view(member, torch.empty(local.shape, dtype=local.dtype, device=local.device))
        set_local(view, local)
        return view

    def _adopted(self, member: Member, parameter: nn.Parameter) -> torch.Tensor:
        local = super()._adopted(member, parameter)
        if type(local) is not type(member.local) or local.shape != member.local.shape:
            raise replaced_by_another(member.name, self.axes.global_rank, kind_and_shape(parameter), local)
        return local

    def point(self, members: Sequence[Member], shard: Any) -> None:
        for member in members:
            local = shard.of(member.slot)
            if local_of(member.sharded) is not local:
                set_local(member.sharded, local)
            self._dress(member, member.sharded)
            member.local = local

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        return SubclassFull(self, members, device, dtype)

    def copied(self) -> Self:
        return type(self)(self.layout, self.axes, self.policy, self.apart)


def chunk_of(
    original: Any, slot: Slot, axes: MeshAxes, keep: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Any:
    """This rank's rows of `original`, of the same class, in separate memory on the mesh's device.

    Args:
        original: the whole parameter.
        slot: of the parameter.
        axes: the mesh.
        keep: copies a tensor to where shards are, if that is not the mesh's device.

    Raises:
        ConfigError: no rows, or a class that does not support cutting, copying or moving.
    """
    if not slot.shape or slot.spec.dim != 0:
        raise without_rows(type(original).__name__, slot.name, slot.spec.dim, slot.shape)
    try:
        with torch.no_grad():
            chunk = rows_on_rank(original.detach(), axes.shard)
            if keep is not None and not chunk.is_meta:
                return keep(chunk)
            chunk = chunk.clone()
            return chunk if chunk.is_meta or chunk.device == axes.device else chunk.to(axes.device)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise not_cut_into_chunks(type(original).__name__, slot.name, error) from error


def rows_on_rank(tensor: Any, axis: Axis) -> Any:
    """This rank's chunk of `torch.chunk` on dim 0, possibly empty; shares memory."""
    chunks = torch.chunk(tensor, axis.size, 0)
    return chunks[axis.rank] if axis.rank < len(chunks) else chunks[0][:0]


class SubclassFull(Full):
    """The full buffers of a bucket of extensions.

    The bytes of all tensors that the parameters send lie side by side in a buffer, which a single collective gathers.
    The result is rank-major: a single kernel copies it out, the rows of all ranks into a buffer per tensor.

    Ownership: the buffers are created at the first gather, and again when a sent tensor changes its shape or dtype.
    Those of the collective are allocated from `begins` to `fills` (`_send`, for chunks in host memory, under the copy
    stream: see `comm/lanes.py`); those per tensor from `fills` to `ends` if the subclass copied the data it needs, else
    to `frees`.

    Args:
        form: of the bucket.
        members: its parameters.
        device, dtype: compute device and compute dtype; the dtype is passed to `fsdp_post_all_gather`.

    Attributes:
        passing_bytes, copied_bytes: of the last gather; see `GatherPlan`.
        received_bytes: allocated from `fills` to `ends` of the last gather, including its part of `copied_bytes`.
    """

    def __init__(self, form: SubclassForm, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> None:
        self.form, self.device = form, device
        self._gathered = [_Gathered(member, device, dtype) for member in members]
        self._sizes: list[_Sizes] = []  # per parameter
        self._send = self._receive = Scratch(0, torch.uint8, device)  # [S] and [world * S + padding] bytes
        self._targets: list[torch.Tensor] = []  # per non-empty tensor, its bytes in `_send`
        self._copy_out: Callable[[], object] = bool
        self._received: list[Scratch] = []  # buffers of all parameters
        self._versions: Versions | None = None
        self.nbytes = self.passing_bytes = self.received_bytes = self.copied_bytes = 0

    @property
    def live_bytes(self) -> int:
        buffers = (self._send, self._receive, *self._received)
        inner = [storage for gathered in self._gathered for storage, _ in gathered.inner]
        return sum([storage.nbytes() for storage in (*[buffer.storage for buffer in buffers], *inner)])

    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: Any, gather_dtype: torch.dtype | None) -> None:
        to.begins.append(partial(self._begin, comm, axis, self._mesh(), source))
        to.gathers.append(partial(self._gather, comm, axis))
        to.fills.append(self._fill)
        to.ends.append(self._end)
        to.intact.append(self.intact)
        to.varying.append(self)

    def _begin(self, comm: Gathers, axis: Axis, mesh: DeviceMesh, source: Chunks) -> None:
        copied_bytes = source.on_device(partial(self._prepare, comm, axis, mesh))
        self.passing_bytes = self._send.nbytes + self._receive.nbytes + copied_bytes
        self._receive.allocate()

    @torch.no_grad()
    def _prepare(self, comm: Gathers, axis: Axis, mesh: DeviceMesh, *chunks: torch.Tensor) -> None:
        """Fill `_send`. For chunks in host memory this runs on the copy stream, beside the computation."""
        sent = [
            gathered.tensors_to_send(chunk, mesh, self.form.policy)
            for gathered, chunk in zip(self._gathered, chunks, strict=True)
        ]
        sizes = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in sent]
        if sizes != self._sizes:
            self._arrange(comm, axis, sizes)
        self._send.allocate()
        copy_all(self._targets, [_octets(tensor) for tensors in sent for tensor in tensors if tensor.numel()])

    def _gather(self, comm: Gathers, axis: Axis) -> Pending:
        return comm.gather(axis, self._receive.tensor[: self.nbytes], self._send.tensor)

    @torch.inference_mode(False)  # tensors created here must be usable in training later
    def _arrange(self, comm: Gathers, axis: Axis, sizes: list[_Sizes]) -> None:
        """Create the buffers for tensors of these sizes."""
        rows = self._rows_of_all(comm, axis, sizes)
        for gathered, local_sizes, counts in zip(self._gathered, sizes, rows, strict=True):
            gathered.expect(axis.size, local_sizes, counts)
        if (unit := owner_of(self._gathered[0].member.sharded)) is not None:
            unit.drop_plans()  # modules get new unsharded parameters
        self._received = [out for gathered in self._gathered for out in gathered.received]
        self.received_bytes = sum([out.nbytes for out in self._received])
        order = [i for i, out in enumerate(self._received) if out.nbytes]
        widths = [out.nbytes // axis.size for out in self._received]
        order.sort(key=lambda i: widths[i] % ALIGN_BYTES != 0)  # aligned widths first: what follows stays aligned
        starts = dict(zip(order, accumulate([widths[i] for i in order], initial=0), strict=False))
        used = sum(widths)
        length = -(-used // ALIGN_BYTES) * ALIGN_BYTES
        padding = length - used
        self._send = Scratch(length, torch.uint8, self.device)
        self._receive = Scratch(axis.size * (length + padding), torch.uint8, self.device)
        self.nbytes = axis.size * length
        lengths = [math.prod(shape) * dtype.itemsize for local_sizes in sizes for shape, dtype in local_sizes]
        self._targets = [self._send.tensor.narrow(0, starts[i], n) for i, n in enumerate(lengths) if n]
        self._copy_out = bool
        if order:
            columns = [_octets(self._received[i].tensor).view(axis.size, -1) for i in order]
            if padding:
                columns.append(self._receive.tensor[self.nbytes :].view(axis.size, padding))
            matrix = self._receive.tensor[: self.nbytes].view(axis.size, length)
            self._copy_out = columns_out(matrix, [column.shape[1] for column in columns], columns)
        self._send.free()
        self._receive.free()
        self._sizes = sizes

    def _rows_of_all(self, comm: Gathers, axis: Axis, sizes: Sequence[_Sizes]) -> list[list[tuple[int, int]]]:
        """For each tensor of each parameter, the rows that every rank sends (padded), and the rows of all ranks.

        If rows divide evenly, all ranks send as many rows as this rank. If not, ranks exchange their numbers.

        Raises:
            DivergenceError: ranks send different numbers of tensors, or a rank before the last that has rows sends
                fewer than the first: with padding in between the rows of all ranks would not lie together.
        """
        local_rows = [[shape[0] if shape else 1 for shape, _ in local_sizes] for local_sizes in sizes]
        counts_of_all = [[(count, axis.size * count) for count in rows] for rows in local_rows]
        extents = [gathered.member.slot.shape[0] for gathered in self._gathered]
        uneven = [i for i, extent in enumerate(extents) if extent % axis.size]
        if not uneven:
            return counts_of_all
        sent = torch.full((len(uneven), 1 + _MOST), -1, dtype=torch.int64, device="cpu")
        for line, i in zip(sent, uneven, strict=True):
            rows = [len(local_rows[i]), *local_rows[i][:_MOST]]
            line[: len(rows)] = torch.tensor(rows, device="cpu")
        everyone = torch.empty(axis.size * sent.numel(), dtype=torch.int64, device=self.device)
        comm.gather(axis, everyone, sent.view(-1).to(self.device)).wait()
        lines = everyone.view(axis.size, len(uneven), -1).permute(1, 2, 0).tolist()
        for i, (counts, *columns) in zip(uneven, lines, strict=True):
            number = len(local_rows[i])
            columns = columns[:number]
            if set(counts) != {number} or number > _MOST or not all(map(_lie_together, columns)):
                name, rank = self._gathered[i].member.name, self.form.axes.global_rank
                raise sends_uneven_rows(name, rank, _MOST, counts, columns)
            counts_of_all[i] = [(max(column), sum(column)) for column in columns]
        return counts_of_all

    def _fill(self) -> None:
        for out in self._received:
            out.allocate()
        self._copy_out()
        self._send.free()
        self._receive.free()
        unsharded = []
        with torch.no_grad(), torch.inference_mode(False):
            for gathered in self._gathered:
                gathered.make_unsharded(self.form.axes.shard.size)
                assert gathered.member.unsharded is not None
                unsharded.append(gathered.member.unsharded)
        self._versions = Versions(unsharded)

    def _end(self) -> None:
        self.copied_bytes = sum([gathered.free_unused() for gathered in self._gathered])

    def frees(self, keep: bool) -> list[Callable[[], object]]:
        return [self._free]

    def _free(self) -> None:
        for out in (self._send, self._receive, *self._received):
            out.free()
        for gathered in self._gathered:
            gathered._sent = None
            for storage, _ in gathered.inner:
                storage.resize_(0)

    def addresses(self) -> list[int]:
        """The current addresses of the buffers."""
        return [out.storage.data_ptr() for out in self._received]

    def differs(self, source: Any) -> torch.Tensor:
        # Values cannot be compared: report a difference, so that the bucket is gathered again.
        return torch.ones(len(self._gathered), dtype=torch.bool, device=self.device)

    def intact(self) -> bool:
        return self._versions is None or not self._versions.moved()

    def written(self) -> list[Member]:
        moved = self._versions.moved() if self._versions is not None else []
        return [self._gathered[index].member for index in moved]

    def _mesh(self) -> DeviceMesh:
        """The mesh of the shard axis alone."""
        axes = self.form.axes
        if axes.replicate is None:
            return axes.mesh
        names = axes.mesh.mesh_dim_names
        if names:
            return axes.mesh[names[-1]]
        return DeviceMesh.from_group(axes.shard.group, axes.mesh.device_type)


class _Gathered:
    """The buffers of a parameter, and the unsharded tensor that its class creates from them.

    Ownership: tensors that the class creates belong to it, but their storage is freed with the unit's, and allocated
    again before the class fills them.

    Attributes:
        received: per sent tensor, that of all ranks: [world * rows, ...], rows padded as sent.
        inner: each storage of the class's own tensors once, and its bytes.
    """

    def __init__(self, member: Member, device: torch.device, dtype: torch.dtype) -> None:
        self.member, self.device, self.dtype = member, device, dtype
        self.received: list[Scratch] = []
        self.inner: list[tuple[torch.UntypedStorage, int]] = []
        self._expected: tuple[_Sizes, list[tuple[int, int]]] | None = None  # sizes and rows of `received`
        self._outputs: tuple[torch.Tensor, ...] = ()  # views of `received` without padded rows
        self._keeps: list[bool] = []  # per buffer, whether the class's tensor uses it
        self._unsharded: Any = None  # the tensor that the class returned
        self._metadata: Any = None
        self._sent: Any = None  # the chunk on the device, while gathering

    def tensors_to_send(self, source: Any, mesh: DeviceMesh, policy: Any) -> list[torch.Tensor]:
        """Call the chunk's `fsdp_pre_all_gather`; returns the tensors that it sends, plain and contiguous.

        Raises:
            ConfigError: its class lacks a method of the protocol.
        """
        slot = self.member.slot
        missing = [name for name in _METHODS if not hasattr(source, name)]
        if missing:
            raise does_not_gather_itself(self.member.name, _METHODS, type(source).__name__, missing)
        module = self.member.places[0].module
        sent, self._metadata = _before_gather(source, mesh, torch.Size(slot.shape), slot.stride, module, policy)
        self._sent = source
        return sent

    def expect(self, world: int, sizes: _Sizes, rows: list[tuple[int, int]]) -> None:
        """Create buffers for sent tensors of these sizes, unless sizes and rows equal those of the last gather."""
        if self._expected == (sizes, rows):
            return
        self._expected = sizes, rows
        self.member.unsharded, self._unsharded, self.inner = None, None, []
        self.received, outputs = [], []
        for (sent, total), (shape, dtype) in zip(rows, sizes, strict=True):
            out = Scratch(world * sent * math.prod(shape[1:]), dtype, self.device)
            self.received.append(out)
            # `.data`: a gather rewrites equal values, which must not look to autograd like a change of a saved tensor.
            outputs.append(out.tensor.data[: total * math.prod(shape[1:])].view(total, *shape[1:]))
            out.free()
        self._outputs = tuple(outputs)

    def make_unsharded(self, ranks: int) -> None:
        """Let the class create its unsharded tensor, or fill the tensor that it created before.

        Raises:
            ConfigError: the tensor does not have the parameter's shape.
        """
        member, chunk, outputs = self.member, self._sent, self._outputs
        for storage, nbytes in self.inner:
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)
        post: Any = chunk.fsdp_post_all_gather
        if (unsharded := self._unsharded) is not None:
            # A plain tensor is filled through an alias with a separate version counter: autograd must not take equal
            # values for a change of a saved tensor. A subclass is filled as the object that the module uses, on which
            # attributes may be set, unless padded rows were cut off.
            out = member.unsharded if tuple(unsharded.shape) == member.slot.shape else unsharded
            out = unsharded.data if type(unsharded) is torch.Tensor else out
            post(outputs, self._metadata, self.dtype, out=out)
            return
        unsharded, inner = post(outputs, self._metadata, self.dtype)
        shape = member.slot.shape
        shown = unsharded
        if tuple(unsharded.shape) != shape and tuple(unsharded.shape) == (-(-shape[0] // ranks) * ranks, *shape[1:]):
            shown = unsharded.narrow(0, 0, shape[0])  # created from padded rows, it has padding too
        if tuple(shown.shape) != shape:
            raise returned_another_shape(member.name, member.slot.shape, tuple(unsharded.shape))
        buffers = {out.storage.data_ptr() for out in self.received}
        used = {tensor.untyped_storage().data_ptr() for tensor in (*inner, *plain_tensors(unsharded))}
        storages = {storage.data_ptr(): storage for storage in [tensor.untyped_storage() for tensor in inner]}
        self.inner = [(storage, storage.nbytes()) for at, storage in storages.items() if at not in buffers]
        self._keeps = [out.storage.data_ptr() in used for out in self.received]
        show_as_parameter(member, shown.data if type(shown) is torch.Tensor else shown)
        self._unsharded = unsharded

    def free_unused(self) -> int:
        """Free buffers that the class's tensor does not use; returns the bytes that remain."""
        self._sent = None
        remaining = sum([nbytes for _, nbytes in self.inner])
        for out, keeps in zip(self.received, self._keeps, strict=True):
            if keeps:
                remaining += out.nbytes
            else:
                out.free()
        return remaining


def as_gathered(whole: Any, mesh: DeviceMesh, module: nn.Module, policy: Any, dtype: torch.dtype) -> torch.Tensor:
    """What `module` computes with: the tensor that the class of a whole parameter makes of what a single rank sends.

    Args:
        whole: of a class that may define its gather; if not, it is returned.
        mesh, policy, dtype: passed to its methods; the mesh has one rank.
    """
    if not all(hasattr(whole, name) for name in _METHODS):
        return whole
    sent, metadata = _before_gather(whole, mesh, whole.shape, whole.stride(), module, policy)
    unsharded: torch.Tensor = whole.fsdp_post_all_gather(tuple(sent), metadata, dtype)[0]
    return unsharded


def with_parts(tensor: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor of the same class, with `make` called on each of its plain tensors, at any depth."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return make(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: with_parts(getattr(tensor, name), make) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def _before_gather(
    source: Any, mesh: DeviceMesh, size: torch.Size, stride: Sequence[int], module: nn.Module | None, policy: Any
) -> tuple[list[torch.Tensor], Any]:
    """Call `fsdp_pre_all_gather`; returns the tensors that it sends, plain and contiguous, and its metadata."""
    method: Any = source.fsdp_pre_all_gather  # of its class, or set on this tensor
    older = _arguments(getattr(method, "__func__", method)) - inspect.ismethod(method) == 1
    sent, metadata = method(mesh) if older else method(mesh, size, stride, module, policy)
    return [_plain(tensor) for tensor in sent], metadata


def _lie_together(counts: Sequence[int]) -> bool:
    """Whether padding every rank to the first rank's number of rows adds padding only after the last row."""
    most, total = counts[0], sum(counts)
    return list(counts) == [max(0, min(most, total - rank * most)) for rank in range(len(counts))]


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """A byte view of a contiguous tensor: [numel * itemsize]."""
    return tensor.view(-1).view(torch.uint8)


@functools.lru_cache(maxsize=64)
def _arguments(method: Callable[..., Any]) -> int:
    return len(inspect.signature(method).parameters)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous plain tensor for the backend: a subclass has no memory itself, and is copied by its own `copy_`."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.contiguous()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)
    return plain
