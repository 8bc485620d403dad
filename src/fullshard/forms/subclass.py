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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import Gathers, Pending
from ..layout import ALIGN_BYTES, Layout, Slot
from ..mesh import Axis, MeshAxes
from ..torch_private.foreach import columns_out, copy_all
from ..torch_private.local_tensor import local_of, set_local
from ..torch_private.versions import Versions
from .changes import owner_of
from .flat_shard import FlatShard
from .full import Full, GatherPlan, show_as_parameter
from .member import Member
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
_Sizes = list[tuple[torch.Size, torch.dtype]]
"""Of the tensors that a parameter sends."""


def is_extension(tensor: Any) -> bool:
    """Whether a parameter is gathered by its class: it has both methods of the protocol, or inner tensors.

    In the second case the methods must be there when it is gathered: programs set them on a class late.
    """
    if isinstance(tensor, (DTensor, FlatShard)):
        return False
    return all(hasattr(tensor, name) for name in _METHODS) or hasattr(tensor, "__tensor_flatten__")


class Chunks:
    """The shard of a bucket of extensions: this rank's chunk of each parameter, each of its own class.

    They agree on dtype, device, and whether they are on the meta device.

    Args:
        slots: of the parameters.
        tensors: the chunks, in the same order.
    """

    __slots__ = ("_by_slot", "tensors")

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [*tensors]
        self._by_slot = dict(zip(slots, self.tensors, strict=True))

    def of(self, slot: Slot) -> torch.Tensor:
        """The chunk of one parameter."""
        return self._by_slot[slot]

    def replaced(self, tensors: Iterable[torch.Tensor]) -> Chunks:
        """Other chunks of the same parameters."""
        return Chunks([*self._by_slot], [*tensors])

    def clone(self) -> Chunks:
        """Equal ones in memory of their own."""
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
        layout, axes: of kind rows, in plain elements: gradients are reduced by it.
        policy: given to `fsdp_pre_all_gather` as `mp_policy`.
    """

    plain = False

    def __init__(self, layout: Layout, axes: MeshAxes, policy: Any) -> None:
        super().__init__(layout, axes)
        self.policy = policy

    def _plain_view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if type(local) is torch.Tensor:  # a gradient
            return self._rows(member, local)
        made = self._rows(member, torch.empty(local.shape, dtype=local.dtype, device=local.device))
        set_local(made, local)
        return made

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        found = super().adopt(members)
        for member, local in zip(members, found, strict=True):
            if type(local) is not type(member.local) or local.shape != member.local.shape:
                raise replaced_by_another(member.name, self.axes.global_rank, member.sharded, local)
        return found

    def point(self, members: Sequence[Member], shard: Any) -> None:
        for member in members:
            local = shard.of(member.slot)
            if local_of(member.sharded) is not local:
                set_local(member.sharded, local)
            self._dress(member, member.sharded)
            member.local = local

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        return SubclassFull(self, members, device, dtype)

    def copied(self) -> SubclassForm:
        return type(self)(self.layout, self.axes, self.policy)


def chunk_of(original: Any, slot: Slot, axes: MeshAxes) -> Any:
    """This rank's rows of `original`, of its class, in memory of its own on the mesh's device.

    Raises:
        ConfigError: no rows, or a class that cannot be cut, copied or moved.
    """
    if not slot.shape or slot.spec.dim != 0:
        raise without_rows(type(original).__name__, slot.name, slot.spec.dim, slot.shape)
    try:
        with torch.no_grad():
            chunk = rows_on_rank(original.detach(), axes.shard).clone()
            return chunk if chunk.is_meta or chunk.device == axes.device else chunk.to(axes.device)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise not_cut_into_chunks(type(original).__name__, slot.name, error) from error


def rows_on_rank(tensor: Any, axis: Axis) -> Any:
    """This rank's chunk of `torch.chunk` on dim 0, maybe empty; shares memory."""
    chunks = torch.chunk(tensor, axis.size, 0)
    return chunks[axis.rank] if axis.rank < len(chunks) else chunks[0][:0]


class SubclassFull:
    """What a bucket of extensions is gathered into.

    The bytes of all tensors that the parameters send lie side by side in one buffer, which a single collective gathers.
    What comes is rank-major: one kernel copies it out, the rows of all ranks into a buffer for each tensor.

    Ownership: the buffers are made at the first gather, and anew when what is sent changes its shape or dtype. Those of
    the collective have memory from `begins` to `fills`, those of tensors from `fills` on: to `ends` where the subclass
    copied what it needs, else to `frees`.

    Args:
        form: of the bucket.
        members: its parameters.
        device, dtype: compute device, and compute dtype: given to `fsdp_post_all_gather`.
    """

    def __init__(self, form: SubclassForm, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> None:
        self.form, self.device = form, device
        self._gathered = [_Gathered(member, device, dtype) for member in members]
        self._sizes: list[_Sizes] = []  # of what each parameter sends
        self._send = self._come = Scratch(0, torch.uint8, device)  # [S] and [world * S + padding] bytes
        self._targets: list[torch.Tensor] = []  # by tensor that has elements here, its bytes in `_send`
        self._copy_out: Callable[[], object] = bool
        self._received: list[Scratch] = []  # those of all parameters
        self._versions: Versions | None = None
        self.nbytes = self.passing_bytes = self.received_bytes = self.copied_bytes = 0

    @property
    def live_bytes(self) -> int:
        buffers = (self._send, self._come, *self._received)
        inner = [storage for each in self._gathered for storage, _ in each.inner]
        return sum([storage.nbytes() for storage in (*[buffer.storage for buffer in buffers], *inner)])

    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: Chunks, keeps: bool = False) -> None:
        to.begins.append(partial(self._begin, comm, axis, self._mesh(), source))
        to.gathers.append(partial(self._gather, comm, axis))
        to.fills.append(self._fill)
        to.ends.append(self._end)
        to.intact.append(self.intact)
        to.varying.append(self)

    def _begin(self, comm: Gathers, axis: Axis, mesh: DeviceMesh, source: Chunks) -> None:
        with torch.no_grad():
            sent = [
                each.name_what_is_sent(chunk, mesh, self.form.policy)
                for each, chunk in zip(self._gathered, source.tensors, strict=True)
            ]
            sizes = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in sent]
            if sizes != self._sizes:
                self._arrange(comm, axis, sizes)
            self._send.allocate()
            self._come.allocate()
            copy_all(self._targets, [_octets(tensor) for tensors in sent for tensor in tensors if tensor.numel()])

    def _gather(self, comm: Gathers, axis: Axis) -> Pending:
        return comm.gather(axis, self._come.tensor[: self.nbytes], self._send.tensor)

    @torch.inference_mode(False)  # what is made here must serve training later
    def _arrange(self, comm: Gathers, axis: Axis, sizes: list[_Sizes]) -> None:
        """Make the buffers for what parameters send now."""
        rows = self._rows_of_all(comm, axis, sizes)
        for each, own, counts in zip(self._gathered, sizes, rows, strict=True):
            each.expect(axis.size, own, counts)
        if (unit := owner_of(self._gathered[0].member.sharded)) is not None:
            unit.drop_plans()  # modules are shown other parameters from now on
        self._received = [out for each in self._gathered for out in each.received]
        self.received_bytes = sum([out.nbytes for out in self._received])
        order = [i for i, out in enumerate(self._received) if out.nbytes]
        widths = [out.nbytes // axis.size for out in self._received]
        order.sort(key=lambda i: widths[i] % ALIGN_BYTES != 0)  # those that keep what follows aligned come first
        starts = dict(zip(order, accumulate([widths[i] for i in order], initial=0), strict=False))
        used = sum(widths)
        length = -(-used // ALIGN_BYTES) * ALIGN_BYTES
        padding = length - used
        self._send = Scratch(length, torch.uint8, self.device)
        self._come = Scratch(axis.size * (length + padding), torch.uint8, self.device)
        self.nbytes, self.passing_bytes = axis.size * length, self._send.nbytes + self._come.nbytes
        mine = [math.prod(shape) * dtype.itemsize for own in sizes for shape, dtype in own]
        self._targets = [self._send.tensor.narrow(0, starts[i], mine[i]) for i in range(len(mine)) if mine[i]]
        self._copy_out = bool
        if order:
            columns = [_octets(self._received[i].tensor).view(axis.size, -1) for i in order]
            if padding:
                columns.append(self._come.tensor[self.nbytes :].view(axis.size, padding))
            matrix = self._come.tensor[: self.nbytes].view(axis.size, length)
            self._copy_out = columns_out(matrix, [column.shape[1] for column in columns], columns)
        self._send.free()
        self._come.free()
        self._sizes = sizes

    def _rows_of_all(self, comm: Gathers, axis: Axis, sizes: Sequence[_Sizes]) -> list[list[tuple[int, int]]]:
        """For each tensor of each parameter, how many rows every rank sends, and how many there are of all ranks.

        Where rows divide evenly, no rank can send another number than this one. Else the ranks are asked.

        Raises:
            DivergenceError: ranks send other numbers of tensors, or of rows that are neither alike nor their chunks'.
        """
        mine = [[shape[0] if shape else 1 for shape, _ in own] for own in sizes]
        found = [[(rows, axis.size * rows) for rows in own] for own in mine]
        extents = [each.member.slot.shape[0] for each in self._gathered]
        uneven = [i for i, extent in enumerate(extents) if extent % axis.size]
        if not uneven:
            return found
        sent = torch.full((len(uneven), 1 + _MOST), -1, dtype=torch.int64)
        for line, i in zip(sent, uneven, strict=True):
            line[: 1 + len(mine[i][:_MOST])] = torch.tensor([len(mine[i]), *mine[i][:_MOST]])
        everyone = torch.empty(axis.size * sent.numel(), dtype=torch.int64, device=self.device)
        comm.gather(axis, everyone, sent.view(-1).to(self.device)).wait()
        for i, told in zip(uneven, everyone.view(axis.size, len(uneven), -1).permute(1, 2, 0).tolist(), strict=True):
            (counts, *columns), own, extent = told, mine[i], extents[i]
            chunk = -(-extent // axis.size)
            chunks = [max(0, min(chunk, extent - rank * chunk)) for rank in range(axis.size)]
            columns = columns[: len(own)]
            if set(counts) != {len(own)} or any(len(set(c)) > 1 and c != chunks for c in columns) or len(own) > _MOST:
                name, rank = self._gathered[i].member.name, self.form.axes.global_rank
                raise sends_uneven_rows(name, rank, _MOST, chunks, counts, columns)
            found[i] = [(max(column), sum(column)) for column in columns]
        return found

    def cut(self, axis: Axis) -> torch.Tensor:
        raise freed_whole(self._gathered[0].member.name)

    def _fill(self) -> None:
        for out in self._received:
            out.allocate()
        self._copy_out()
        self._send.free()
        self._come.free()
        unsharded = []
        with torch.no_grad(), torch.inference_mode(False):
            for each in self._gathered:
                each.have_it_made(self.form.axes.shard.size)
                assert each.member.unsharded is not None
                unsharded.append(each.member.unsharded)
        self._versions = Versions(unsharded)

    def _end(self) -> None:
        self.copied_bytes = sum([each.free_what_it_copied() for each in self._gathered])

    def frees(self, keep: bool = False) -> list[Callable[[], object]]:
        return [self._free]

    def _free(self) -> None:
        for out in (self._send, self._come, *self._received):
            out.free()
        for each in self._gathered:
            for storage, _ in each.inner:
                storage.resize_(0)

    def addresses(self) -> list[int]:
        return [out.storage.data_ptr() for out in self._received]

    def differs(self, source: Any) -> torch.Tensor:
        # It cannot be told: gathered anew.
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
    """One parameter: what it receives, and the tensor that its class makes of that.

    Ownership: tensors that the class makes are its own, but their storage is given back with the unit's and taken again
    before the class fills them.

    Attributes:
        received: by tensor that it sends, that of all ranks: [world * rows, ...], rows padded as they were sent.
        inner: memory of the class's own tensors, each once, and its bytes.
    """

    def __init__(self, member: Member, device: torch.device, dtype: torch.dtype) -> None:
        self.member, self.device, self.dtype = member, device, dtype
        self.received: list[Scratch] = []
        self.inner: list[tuple[torch.UntypedStorage, int]] = []
        self._expected: tuple[_Sizes, list[tuple[int, int]]] | None = None  # sizes and rows that `received` is of
        self._outputs: tuple[torch.Tensor, ...] = ()  # views of `received` without padded rows
        self._keeps: list[bool] = []  # whether the class goes on using a buffer after it made its tensor
        self._made: Any = None  # the unsharded tensor as the class made it
        self._metadata: Any = None

    def name_what_is_sent(self, source: Any, mesh: DeviceMesh, policy: Any) -> list[torch.Tensor]:
        """Ask the chunk what it sends: plain tensors without gaps.

        Raises:
            ConfigError: its class does not say.
        """
        slot = self.member.slot
        missing = [name for name in _METHODS if not hasattr(source, name)]
        if missing:
            raise does_not_gather_itself(self.member.name, _METHODS, type(source).__name__, missing)
        method: Any = source.fsdp_pre_all_gather  # of its class, or set on this very tensor
        if _arguments(getattr(method, "__func__", method)) - inspect.ismethod(method) == 1:
            sent, self._metadata = method(mesh)  # the older form
        else:
            module = self.member.places[0].module
            sent, self._metadata = method(mesh, torch.Size(slot.shape), slot.stride, module, policy)
        return [_plain(tensor) for tensor in sent]

    def expect(self, world: int, sizes: _Sizes, rows: list[tuple[int, int]]) -> None:
        """What it sends is of these sizes: make new buffers, unless they are those of the last gather."""
        if self._expected == (sizes, rows):
            return
        self._expected = sizes, rows
        self.member.unsharded, self._made, self.inner = None, None, []
        self.received, outputs = [], []
        for (sent, total), (shape, dtype) in zip(rows, sizes, strict=True):
            out = Scratch(world * sent * math.prod(shape[1:]), dtype, self.device)
            self.received.append(out)
            # `.data`: a gather rewrites equal values, which must not look to autograd like a change of what it saved.
            outputs.append(out.tensor.data[: total * math.prod(shape[1:])].view(total, *shape[1:]))
            out.free()
        self._outputs = tuple(outputs)

    def have_it_made(self, ranks: int) -> None:
        """Have the class make its tensor, or fill the one it made before.

        Raises:
            ConfigError: it is of another shape than the parameter.
        """
        member, chunk, outputs = self.member, self.member.local, self._outputs
        for storage, nbytes in self.inner:
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)
        post: Any = chunk.fsdp_post_all_gather  # type: ignore[attr-defined]
        if self._made is not None:
            # A plain tensor is filled through an alias, which has a version counter of its own: autograd must not take
            # the same values for a change of what it saved. A subclass is the very object that the module uses, on
            # which attributes may be set, unless padded rows were cut off it.
            out = member.unsharded if tuple(self._made.shape) == member.slot.shape else self._made
            post(outputs, self._metadata, self.dtype, out=self._made.data if type(self._made) is torch.Tensor else out)
            return
        made, inner = post(outputs, self._metadata, self.dtype)
        shape = member.slot.shape
        shown = made
        if tuple(made.shape) != shape and tuple(made.shape) == (-(-shape[0] // ranks) * ranks, *shape[1:]):
            shown = made.narrow(0, 0, shape[0])  # of padded rows it made padded rows
        if tuple(shown.shape) != shape:
            raise made_another_shape(member.name, member.slot.shape, tuple(made.shape))
        ours = {out.storage.data_ptr() for out in self.received}
        used = {tensor.untyped_storage().data_ptr() for tensor in (*inner, *_plain_parts(made))}
        own = {storage.data_ptr(): storage for storage in [tensor.untyped_storage() for tensor in inner]}
        self.inner = [(storage, storage.nbytes()) for at, storage in own.items() if at not in ours]
        self._keeps = [out.storage.data_ptr() in used for out in self.received]
        show_as_parameter(member, shown.data if type(shown) is torch.Tensor else shown)
        self._made = made

    def free_what_it_copied(self) -> int:
        """Give back buffers that the class does not go on using; returns bytes of all that is left."""
        kept = sum([nbytes for _, nbytes in self.inner])
        for out, keeps in zip(self.received, self._keeps, strict=True):
            if keeps:
                kept += out.nbytes
            else:
                out.free()
        return kept


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor without gaps in bytes: [numel * itemsize]."""
    return tensor.view(-1).view(torch.uint8)


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
