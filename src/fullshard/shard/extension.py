"""Tensor subclasses that say themselves what is gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

A quantised weight, for one, keeps its values in one form, sends another, and is computed with in a third. The protocol
is that of PyTorch's `fully_shard`: before each gather the subclass, which holds this rank's chunk, names plain tensors
to gather; after it, it makes the unsharded parameter of them the first time, and fills the same one later.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import Comm, Pending
from ..errors import ConfigError, LayoutError
from ..layout import Layout, ParameterSpec, Slot
from ..mesh import Axis, MeshAxes
from .bucket import Bucket
from .member import Draft, Member
from .parameter import OWNER_KEY, attributes_of, local_of, rows_parameter, rows_tensor, set_local
from .replacement import check_replacement
from .scratch import Scratch
from .staleness import stamp

_SENT_AS_BYTES = tuple(
    getattr(torch, name) for name in dir(torch) if name.startswith("float8_") or name in ("int16", "uint16")
)  # dtypes that not every backend gathers


def is_extension(tensor: Any) -> bool:
    """Whether a parameter is of a class with both methods of the protocol."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")


class ExtensionBucket(Bucket):
    """One parameter of a subclass with `fsdp_pre_all_gather` and `fsdp_post_all_gather`; always split into rows.

    Ownership: `shard` is the chunk itself, of the subclass. What is gathered lies in `Scratch` buffers made at the
    first gather; tensors that the subclass makes of them are its own, but their storage is given back with the unit's
    and taken again before the subclass fills them.

    Args:
        as `Bucket`'s, of one draft; `layout` is of kind rows, in plain elements: gradients are reduced by it.
        policy: given to `fsdp_pre_all_gather` as `mp_policy`.
    """

    shard: Any
    plain = False

    def __init__(
        self,
        drafts: Sequence[Draft],
        layout: Layout,
        axes: MeshAxes,
        compute_dtype: torch.dtype | None,
        plan: Callable[[Sequence[ParameterSpec]], Layout],
        home: Any = None,
        policy: Any = None,
    ) -> None:
        (draft,) = drafts
        original: Any = draft.original
        if home is not None:
            raise ConfigError(
                "CPU offload does not work with parameters of tensor subclasses yet.",
                parameter=draft.name,
                got=type(original).__name__,
                remedy="shard their unit without CPUOffloadPolicy",
            )
        self.layout, self.axes, self.plan, self.policy, self.home = layout, axes, plan, policy, None
        self.device = original.device if original.is_meta else axes.device
        self.storage_dtype, self.own_compute_dtype = original.dtype, compute_dtype
        self.parallel = {}
        self.module = draft.module
        (slot,) = layout.slots
        self.shard = _chunk(original, slot, axes)
        self.full = self.copied = self.staging = self.small = None
        self.gathered_at = (-1, -1)
        self._pending: list[Pending] = []
        self._sent: list[torch.Tensor] = []
        self._metadata: Any = None
        self._received: list[Scratch] = []
        self._made: Any = None  # the unsharded tensor as the subclass made it
        self._inner: list[torch.Tensor] = []
        attributes = {**attributes_of(original), "_fullshard_name": slot.name}
        sharded = self._sharded_parameter(self.shard, slot, original.requires_grad, attributes)
        self.members = [Member(slot, list(draft.places), sharded, self.shard)]
        parameters = inspect.signature(type(original).fsdp_pre_all_gather).parameters
        self._short = len(parameters) == 2  # the older form: fsdp_pre_all_gather(self, mesh)

    # As sharded.

    def _sharded_parameter(
        self, local: torch.Tensor, slot: Slot, requires_grad: bool, attributes: dict[str, Any]
    ) -> nn.Parameter:
        parameter = rows_parameter(self._plain_like(local, slot), requires_grad, attributes)
        set_local(parameter, local)
        return parameter

    def _plain_like(self, local: torch.Tensor, slot: Slot) -> DTensor:
        return rows_tensor(torch.empty(local.shape, dtype=local.dtype, device=local.device), slot, self.axes)

    def tensor_of(self, local: torch.Tensor, slot: Slot) -> torch.Tensor:
        if type(local) is torch.Tensor:  # a gradient
            return rows_tensor(local, slot, self.axes)
        made = self._plain_like(local, slot)
        set_local(made, local)
        return made

    def view_of(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        return super().view_of(buffer, slot) if type(buffer) is torch.Tensor else buffer

    def new_slice(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.layout.shard_numel, dtype=dtype, device=self.device)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of what was gathered last; before the first gather, of the plain parameter."""
        return sum(out.nbytes for out in self._received) if self._received else super().gathered_bytes

    # Gather and free.

    def issue_gather(self, comm: Comm, small_axis: Axis | None) -> tuple[int, int]:
        member, axis = self.members[0], self.axes.shard
        self.gathered_at = stamp(self.shard)
        with torch.no_grad():
            if self._short:
                sent, self._metadata = self.shard.fsdp_pre_all_gather(self._mesh())
            else:
                slot, module = member.slot, self.module() if self.module else None
                sent, self._metadata = self.shard.fsdp_pre_all_gather(
                    self._mesh(), torch.Size(slot.shape), slot.stride, module, self.policy
                )
        self._sent = [tensor.contiguous() for tensor in sent]
        sizes = [(tensor.numel() * axis.size, tensor.dtype) for tensor in self._sent]
        if sizes != [(out.tensor.numel(), out.tensor.dtype) for out in self._received]:
            with torch.inference_mode(False):
                self._received = [Scratch(numel, dtype, self.device) for numel, dtype in sizes]
            member.unsharded, self._made, self._inner = None, None, []
        for out, tensor in zip(self._received, self._sent, strict=True):
            out.allocate()
            whole, mine = out.tensor, tensor.view(-1)
            if tensor.dtype in _SENT_AS_BYTES:
                whole, mine = whole.view(torch.uint8), mine.view(torch.uint8)
            self._pending.append(comm.gather(axis, whole, mine))
        return 0, self.gathered_bytes

    def finish_gather(self, keep_small: Axis | None) -> int:
        for pending in self._pending:
            pending.wait()
        self._pending = []
        member, world = self.members[0], self.axes.shard.size
        outputs = tuple(
            out.tensor.view(world * sent.shape[0], *sent.shape[1:]) if sent.dim() else out.tensor
            for out, sent in zip(self._received, self._sent, strict=True)
        )
        self._sent = []
        for tensor in self._inner:
            _allocate(tensor)
        with torch.no_grad(), torch.inference_mode(False):
            if self._made is None:
                made, inner = self.shard.fsdp_post_all_gather(outputs, self._metadata, self.compute_dtype)
                self._made = made
                kept = {out.storage.data_ptr() for out in self._received}
                self._inner = [t for t in inner if t.untyped_storage().data_ptr() not in kept]
                self._kept = {t.untyped_storage().data_ptr() for t in inner}
                self._keeps = [out.storage.data_ptr() in self._kept for out in self._received]
            else:
                # A plain tensor is filled through an alias, which has a version counter of its own: autograd must not
                # take the same values for a change of what it saved. A subclass is the very object that the module
                # uses, on which attributes may be set.
                out = self._made.data if type(self._made) is torch.Tensor else member.unsharded
                self.shard.fsdp_post_all_gather(outputs, self._metadata, self.compute_dtype, out=out)
            if member.unsharded is None:
                self._show(member)
        for scratch, keeps in zip(self._received, self._keeps, strict=True):
            if not keeps:
                scratch.free()
        held = sum(t.untyped_storage().nbytes() for t in self._inner)
        return held + sum(out.nbytes for out, keeps in zip(self._received, self._keeps, strict=True) if keeps)

    def _show(self, member: Member) -> None:
        made = self._made
        if tuple(made.shape) != member.slot.shape:
            raise ConfigError(
                "fsdp_post_all_gather made a tensor of another shape than the parameter.",
                parameter=member.name,
                expected=member.slot.shape,
                got=tuple(made.shape),
            )
        view = made.data if type(made) is torch.Tensor else made
        member.trains = member.sharded.requires_grad
        member.unsharded = nn.Parameter(view, requires_grad=member.trains)
        member.unsharded.__dict__.update(attributes_of(member.sharded))
        member.unsharded.__dict__[OWNER_KEY] = member.sharded.__dict__.get(OWNER_KEY)

    def free(self) -> None:
        for out in self._received:
            out.free()
        for tensor in self._inner:
            tensor.untyped_storage().resize_(0)

    def forget_buffers(self) -> None:
        super().forget_buffers()
        self._received, self._inner, self._made, self._pending, self._sent = [], [], None, [], []

    def _mesh(self) -> DeviceMesh:
        """The mesh of the shard axis alone."""
        if self.axes.replicate is None:
            return self.axes.mesh
        names = self.axes.mesh.mesh_dim_names
        if names:
            return self.axes.mesh[names[-1]]
        return DeviceMesh.from_group(self.axes.shard.group, self.axes.mesh.device_type)

    # Storage that the user replaced, and leaving.

    def rehome(self, shard: Any) -> None:
        member = self.members[0]
        self.shard, self.device, self.storage_dtype = shard, shard.device, shard.dtype
        if local_of(member.sharded) is not shard:
            set_local(member.sharded, shard)
        member.local = shard
        self.forget_buffers()

    def take_over(self) -> None:
        member = self.members[0]
        for parameters, key in member.places:
            found = parameters.get(key)
            if found is not member.sharded and found is not member.unsharded:
                check_replacement(self, member, found)
                assert isinstance(found, nn.Parameter)
                found.__dict__.update({k: v for k, v in member.sharded.__dict__.items() if k.startswith("_fullshard")})
                member.sharded = found
        local = local_of(member.sharded)
        if not is_extension(local) or local.shape != member.local.shape:
            raise ConfigError(
                "A parameter of a tensor subclass was replaced by one that cannot be gathered as it was.",
                parameter=member.name,
                rank=self.axes.global_rank,
                expected=f"local {type(member.local).__name__} of shape {tuple(member.local.shape)}",
                got=f"local {type(local).__name__} of shape {tuple(local.shape)}",
                remedy="change values in place, or replace the parameter before fully_shard",
            )
        for parameters, key in member.places:
            parameters[key] = member.sharded
        self.rehome(local)

    def without(self, leaving: Member) -> Bucket | None:
        """Never called: a tie of such a parameter across units is refused."""
        raise LayoutError(f"{leaving.name} is a tensor subclass and cannot leave its unit")


def _allocate(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    needed = int((tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    if storage.nbytes() < needed:
        storage.resize_(needed)


def _chunk(original: Any, slot: Slot, axes: MeshAxes) -> Any:
    """This rank's rows of `original`, of its class, in memory of its own on the mesh's device.

    Raises:
        ConfigError: rows that do not divide evenly, or a class that cannot be cut, copied or moved.
    """
    world, rank = axes.shard.size, axes.shard.rank
    if not slot.shape or slot.shape[0] % world or slot.spec.dim != 0:
        raise ConfigError(
            f"A parameter of class {type(original).__name__} cannot be split evenly over the ranks.",
            parameter=slot.name,
            expected=f"a first dim that is a multiple of {world}",
            got=f"shape {slot.shape}, split on dim {slot.spec.dim}",
            remedy="give it a mesh of fewer ranks (shard_placement_fn), pad it, or put it in ignored_params",
        )
    try:
        with torch.no_grad():
            chunk = torch.chunk(original.detach(), world, 0)[rank].clone()
            return chunk if chunk.is_meta or chunk.device == axes.device else chunk.to(axes.device)
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"A parameter of class {type(original).__name__} cannot be cut into chunks: an operation on it failed.",
            parameter=slot.name,
            expected="detach, split (torch.chunk), clone and, from another device, to",
            got=f"{type(error).__name__}: {error}",
            remedy="implement them in the class's __torch_dispatch__, or put it in ignored_params",
        ) from error


def weak_module(module: nn.Module | None) -> Callable[[], nn.Module | None] | None:
    """What `fsdp_pre_all_gather` gets as `module`, held weakly."""
    return weakref.ref(module) if module is not None else None
