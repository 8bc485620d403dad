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

from ...comm import Comm, Pending, wait_all
from ...errors import ConfigError
from ...layout import Layout, Part, Slot
from ...mesh import Axis, MeshAxes
from ...torch_private.local_tensor import local_of, set_local
from ..full import Full, show_as_parameter
from ..member import Member, identity_of
from ..scratch import Scratch
from .rows import RowsForm, not_its_shard


def is_extension(tensor: Any) -> bool:
    """Whether a parameter is of a class with both methods of the protocol."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")


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

    def make(self, member: Member, original: nn.Parameter) -> nn.Parameter:
        chunk: torch.Tensor = member.local
        parameter = super().make(member, original)
        set_local(parameter, chunk)
        member.local = chunk
        return parameter

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
        if not is_extension(local) or local.shape != member.local.shape:
            raise not_its_shard(member, local, self.axes.global_rank)
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
        self._metadata: Any = None
        self._pending: list[Pending] = []

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for out in self._received)

    @property
    def live_bytes(self) -> int:
        return sum(out.storage.nbytes() for out in self._received)

    def issue(self, comm: Comm, axis: Axis, source: Any) -> tuple[int, int]:
        self._name_what_is_sent(source)
        sizes = [(tensor.numel() * axis.size, tensor.dtype) for tensor in self._sent]
        try:
            if sizes != [(out.tensor.numel(), out.tensor.dtype) for out in self._received]:
                self.member.unsharded, self._made, self._inner = None, None, []
                self._received = [Scratch(numel, dtype, self.device) for numel, dtype in sizes]
            for out, tensor in zip(self._received, self._sent, strict=True):
                out.allocate()
                self._pending.append(comm.gather(axis, out.tensor, tensor.view(-1)))
        except BaseException:
            self.free()
            raise
        return 0, self.nbytes

    def _name_what_is_sent(self, source: Any) -> None:
        slot, form = self.member.slot, self.form
        parameters = inspect.signature(type(source).fsdp_pre_all_gather).parameters
        with torch.no_grad():
            if len(parameters) == 2:  # the older form: fsdp_pre_all_gather(self, mesh)
                sent, self._metadata = source.fsdp_pre_all_gather(self._mesh())
            else:
                sent, self._metadata = source.fsdp_pre_all_gather(
                    self._mesh(), torch.Size(slot.shape), slot.stride, form.module(), form.policy
                )
        self._sent = [tensor.contiguous() for tensor in sent]

    def finish(self) -> int:
        try:
            wait_all(self._pending)
            for tensor in self._inner:
                _allocate(tensor)
            with torch.no_grad(), torch.inference_mode(False):
                self._fill()
        except BaseException:
            self.free()
            raise
        held = sum(t.untyped_storage().nbytes() for t in self._inner)
        return held + sum(out.nbytes for out, keeps in zip(self._received, self._keeps, strict=True) if keeps)

    def _fill(self) -> None:
        """Have the subclass make its tensor, or fill the one it made before."""
        world, member, chunk = self.form.axes.shard.size, self.member, self.member.local
        outputs = tuple(
            out.tensor.view(world * sent.shape[0], *sent.shape[1:]) if sent.dim() else out.tensor
            for out, sent in zip(self._received, self._sent, strict=True)
        )
        self._sent = []
        post: Any = chunk.fsdp_post_all_gather  # type: ignore[attr-defined]
        if self._made is not None:
            # A plain tensor is filled through an alias, which has a version counter of its own: autograd must not take
            # the same values for a change of what it saved. A subclass is the very object that the module uses, on
            # which attributes may be set.
            post(
                outputs,
                self._metadata,
                self.dtype,
                out=self._made.data if type(self._made) is torch.Tensor else member.unsharded,
            )
            return
        made, inner = post(outputs, self._metadata, self.dtype)
        if tuple(made.shape) != member.slot.shape:
            raise ConfigError(
                "fsdp_post_all_gather made a tensor of another shape than the parameter.",
                parameter=member.name,
                expected=member.slot.shape,
                got=tuple(made.shape),
            )
        ours = {out.storage.data_ptr() for out in self._received}
        used = {tensor.untyped_storage().data_ptr() for tensor in inner}
        self._inner = [t for t in inner if t.untyped_storage().data_ptr() not in ours]
        self._keeps = [out.storage.data_ptr() in used for out in self._received]
        show_as_parameter(member, made.data if type(made) is torch.Tensor else made)
        self._made = made

    def cut(self, axis: Axis) -> torch.Tensor:
        raise ConfigError("a tensor subclass with a gather of its own is freed whole", parameter=self.member.name)

    def settle(self) -> None:
        for out, keeps in zip(self._received, self._keeps, strict=True):
            if not keeps:
                out.free()

    def free(self) -> None:
        try:
            wait_all(self._pending)
        finally:
            for out in self._received:
                out.free()
            for tensor in self._inner:
                tensor.untyped_storage().resize_(0)

    def addresses(self) -> list[int]:
        return [out.storage.data_ptr() for out in self._received]

    def differs(self, source: torch.Tensor) -> torch.Tensor:
        return torch.ones((), dtype=torch.bool, device=self.device)  # it cannot be told: gathered anew

    def _mesh(self) -> DeviceMesh:
        """The mesh of the shard axis alone."""
        axes = self.form.axes
        if axes.replicate is None:
            return axes.mesh
        names = axes.mesh.mesh_dim_names
        if names:
            return axes.mesh[names[-1]]
        return DeviceMesh.from_group(axes.shard.group, axes.mesh.device_type)


def _allocate(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    needed = int((tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    if storage.nbytes() < needed:
        storage.resize_(needed)
