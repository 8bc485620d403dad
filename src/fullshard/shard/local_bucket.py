"""Buckets of the wrapper front-end: sharded parameters are plain 1-D tensors, this rank's part of each, or all in one.

use_orig_params=True   the original Parameter objects, whose data becomes the part that this rank owns (maybe
                       empty): optimizers and names that knew them before still do
use_orig_params=False  one `FlatParameter` over the shard; the modules keep a stand-in that tells shapes only
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, PhaseError
from .bucket import Bucket
from .flat_parameter import ATTRIBUTE, FlatParameter, describe_layout
from .flat_shard import FlatShard
from .member import Draft, Member
from .parameter import OWNER_KEY, attributes_of, identity_of, part_view
from .replacement import check_meta
from .tensor_parallel import local_part
from .unit import owner_of


class LocalBucket(Bucket):
    """A flat bucket whose sharded parameters are plain tensors: 1-D parts; of full shape if the shard axis has one
    rank (`NO_SHARD`)."""

    keeps_originals = True
    gives_empty_gradients = False

    def _admit(self, draft: Draft, slot: Any) -> Member:
        part = self.layout.part(slot, self.axes.shard.rank)
        local = part_view(self.shard, part)
        original = draft.original
        if not original.is_meta and part.numel:
            with torch.no_grad():
                memory = local_part(original).permute(slot.spec.order).reshape(-1)
                local.copy_(memory[part.start : part.start + part.numel])
        shown = self.tensor_of(local, slot)
        if self.keeps_originals and type(original) is nn.Parameter and original.is_meta == shown.is_meta:
            original.grad = None
            original.data = shown
            sharded = original
        else:
            sharded = nn.Parameter(shown, requires_grad=original.requires_grad)
            sharded.__dict__.update(attributes_of(original))
        sharded.__dict__["_fullshard_name"] = slot.name
        return Member(slot, list(draft.places), sharded, shown)

    def _sharded_parameter(
        self, local: torch.Tensor, slot: Any, requires_grad: bool, attributes: dict[str, Any]
    ) -> nn.Parameter:
        parameter = nn.Parameter(self.tensor_of(local, slot), requires_grad=requires_grad)
        parameter.__dict__.update(attributes)
        return parameter

    def tensor_of(self, local: torch.Tensor, slot: Any) -> torch.Tensor:
        """A plain tensor over `local` [its length], of the whole parameter's shape if this rank holds all of it
        because nothing is split."""
        if self.layout.world > 1:
            return local
        return local.as_strided(slot.shape, slot.stride, local.storage_offset())

    def full_of(self, member: Member) -> torch.Tensor:
        if self.shard.is_meta:
            return torch.empty(member.slot.shape, dtype=self.storage_dtype, device="meta")
        local = self.view_of(self.shard, member.slot).to(self.axes.device)
        return FlatShard(local, self._run_of(member.slot)).full_tensor()

    def keep_object(self, old: Member, new: Member) -> None:
        if self.keeps_originals:
            old.sharded.data = new.local
            new.sharded = old.sharded
        else:
            super().keep_object(old, new)

    def flat_part(self, tensor: torch.Tensor, member: Member) -> torch.Tensor:
        return tensor.permute(member.slot.spec.order).reshape(-1) if self.layout.world == 1 else tensor

    # Storage that the user replaced.

    def rehome(self, shard: torch.Tensor) -> None:
        self.set_shard(shard)
        shard = self.shard
        for member in self.members:
            shown = self.tensor_of(self.view_of(shard, member.slot), member.slot)
            if member.sharded.data_ptr() != shown.data_ptr() or shard.is_meta or member.sharded.dtype != shown.dtype:
                member.sharded.data = shown
            member.local, member.unsharded = shown, None

    def replaced(self) -> bool:
        for member in self.members:
            sharded = member.sharded
            if sharded.data_ptr() != member.local.data_ptr() or sharded.is_meta != member.local.is_meta:
                return True
            for parameters, key in member.places:
                if parameters.get(key) is not sharded:
                    return True
        return False

    def take_over(self) -> None:
        for member in self.members:
            for parameters, key in member.places:
                found = parameters.get(key)
                if found is not member.sharded and found is not member.unsharded:
                    member.sharded = self._adopted(member, found)
        values = [member.sharded.detach() for member in self.members]
        check_meta(self, values)
        home = values[0]
        shard = self._new_shard(home.dtype, home.device)
        for member, value in zip(self.members, values, strict=True):
            shown = self.tensor_of(self.view_of(shard, member.slot), member.slot)
            if value.shape != shown.shape:
                self._refuse(member, value)
            if not value.is_meta:
                shown.copy_(value)
            for parameters, key in member.places:
                parameters[key] = member.sharded
        self.rehome(shard)

    def _adopted(self, member: Member, found: Any) -> nn.Parameter:
        """A Parameter that the user registered in this one's place: this rank's part, or the whole."""
        if not isinstance(found, nn.Parameter):
            self._refuse(member, found)
        if tuple(found.shape) == member.slot.shape and self.layout.world > 1:
            part = self.layout.part(member.slot, self.axes.shard.rank)
            memory = found.detach().permute(member.slot.spec.order).reshape(-1)
            found.data = memory[part.start : part.start + part.numel].clone()
        if found.shape != member.sharded.shape:
            self._refuse(member, found)
        found.__dict__.update(identity_of(member.sharded))
        adopted: nn.Parameter = found
        return adopted

    def _refuse(self, member: Member, found: Any) -> None:
        raise ConfigError(
            "A sharded parameter was replaced by something that does not fit it.",
            parameter=member.name,
            rank=self.axes.global_rank,
            expected=f"a Parameter of shape {member.slot.shape}, or this rank's part {tuple(member.local.shape)}",
            got=f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}",
            remedy="change values inside summon_full_params(model), or with copy_",
        )


class HiddenParameter(nn.Parameter):
    """Stands on a module for a parameter that lies in a `FlatParameter` and is not gathered now.

    Tells shape, dtype and device; any other use raises.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS or getattr(func, "__name__", "") in ("size", "dim", "numel", "__repr__", "ndimension"):
            with torch._C.DisableTorchFunctionSubclass():
                if getattr(func, "__name__", "") == "__repr__":
                    return f"HiddenParameter(shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
                return func(*args, **(kwargs or {}))
        name = next((a.__dict__.get("_fullshard_name") for a in args if isinstance(a, HiddenParameter)), "?")
        raise PhaseError(
            f"{getattr(func, '__name__', func)} was called on a parameter whose instance is not gathered now.",
            parameter=name,
            expected="use inside the forward of its FullyShardedDataParallel instance",
            got="use from outside it",
            remedy="read and write whole parameters inside FullyShardedDataParallel.summon_full_params(model)",
        )


_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "grad", "is_cuda")
}


class FlatBucket(LocalBucket):
    """A flat bucket shown as one `FlatParameter`, registered on `holder` as `_flat_param`.

    Ownership: `flat` is a view of `shard`, and is the one tensor that an optimizer updates.
    """

    keeps_originals = False
    flat: Any  # a FlatParameter
    holder: nn.Module

    def show_as_flat(self, holder: nn.Module, modules: dict[int, nn.Module]) -> FlatParameter:
        """Register the flat parameter on `holder`, and stand-ins on the modules.

        Args:
            holder: the wrapped module.
            modules: by the id of a module's `_parameters`, the module.
        """
        requires_grad = any(member.sharded.requires_grad for member in self.members)
        known = holder._parameters.get(ATTRIBUTE)
        self.holder = holder
        if known is not None and known.numel() == self.layout.shard_numel and owner_of(known) is None:
            known.data = self.shard
            describe_layout(known, self.layout, self.axes.shard.rank)
            self.flat = known
        else:
            self.flat = FlatParameter(self.shard, self.layout, self.axes.shard.rank, requires_grad)
        self.flat.__dict__[OWNER_KEY] = self.members[0].sharded.__dict__.get(OWNER_KEY)
        holder._parameters[ATTRIBUTE] = self.flat
        for member in self.members:
            hidden = member.hidden = hidden_like(member, self)
            places = []
            for parameters, key in member.places:
                module = getattr(parameters, "module", None) or modules.get(id(parameters))
                if module is not None:
                    module._parameters.pop(key, None)
                    place: Any = place_outside(module)
                else:
                    place = parameters
                place[key] = hidden
                places.append((place, key))
            member.places = places
        flat: FlatParameter = self.flat
        return flat

    def rehome(self, shard: torch.Tensor) -> None:
        super().rehome(shard)
        shard = self.shard
        if self.flat.data_ptr() != shard.data_ptr() or shard.is_meta or self.flat.dtype != shard.dtype:
            self.flat.data = shard
        self.flat._local_shard = self.flat.data
        for member in self.members:
            hidden = hidden_like(member, self)
            for place, key in member.places:
                if place.get(key) is member.hidden:
                    place[key] = hidden
            member.hidden = hidden

    def replaced(self) -> bool:
        flat, shard = self.flat, self.shard
        return (
            flat.data_ptr() != shard.data_ptr()
            or flat.is_meta != shard.is_meta
            or self.holder._parameters.get(ATTRIBUTE) is not flat
            or self._covered() is not None
        )

    def _covered(self) -> Member | None:
        """The first member in whose place on a module the user put something."""
        for member in self.members:
            for place, key in member.places:
                if place.get(key) is not member.hidden:
                    return member
        return None

    def take_over(self) -> None:
        if (covered := self._covered()) is not None:
            self._refuse(covered, registry_of(covered.places[0][0]).get(covered.places[0][1]))
        found = self.holder._parameters.get(ATTRIBUTE)
        if not isinstance(found, nn.Parameter) or found.shape != self.shard.shape:
            raise ConfigError(
                "A FlatParameter was replaced by something that is not its shard.",
                parameter=", ".join(member.name for member in self.members),
                rank=self.axes.global_rank,
                expected=f"a Parameter of shape {tuple(self.shard.shape)}",
                got=f"{type(found).__name__} of shape {tuple(getattr(found, 'shape', ()))}",
                remedy="change values inside summon_full_params(model), or in place",
            )
        if found is not self.flat:
            found.__dict__.update(self.flat.__dict__)
            self.flat = found
        self.rehome(found.detach().contiguous())

    def without(self, leaving: Member) -> Bucket | None:
        rest = super().without(leaving)
        if isinstance(rest, FlatBucket):
            rest.holder = self.holder
        else:
            self.holder._parameters.pop(ATTRIBUTE, None)
        return rest

    def sync_requires_grad(self) -> None:
        wanted = self.flat.requires_grad
        for member in self.members:
            if member.sharded.requires_grad != wanted:
                member.sharded.requires_grad_(wanted)
        super().sync_requires_grad()


def hidden_like(member: Member, bucket: Bucket) -> HiddenParameter:
    """The stand-in for a parameter of `bucket`: its shape, dtype and device over memory of one element."""
    one = torch.empty((), dtype=bucket.storage_dtype, device=bucket.device)
    made: Any = torch.Tensor._make_subclass(
        HiddenParameter, one.expand(member.slot.shape), member.sharded.requires_grad
    )
    made.__dict__["_fullshard_name"] = member.name
    made.__dict__["_fullshard_successor"] = member.sharded
    return made


class _Watched(dict[str, Any]):
    """Stands for the `__dict__` of a module that keeps lists of its parameters besides (`nn.LSTM` does)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __setitem__(self, key: str, value: Any) -> None:
        self.module.__dict__[key] = value
        names: Any = self.module.__dict__["_flat_weights_names"]
        self.module.__dict__["_flat_weights"] = [getattr(self.module, name, None) for name in names]

    def get(self, key: str, default: Any = None) -> Any:
        return self.module.__dict__.get(key, default)


def place_outside(module: nn.Module) -> dict[str, Any]:
    """Where a parameter of `module` is put so that `named_parameters` does not see it."""
    return _Watched(module) if "_flat_weights_names" in module.__dict__ else module.__dict__


def registry_of(place: Any) -> dict[str, Any]:
    """The `_parameters` of the module that a place is of."""
    module = getattr(place, "module", None)
    if module is not None:
        registry: dict[str, Any] = module._parameters
        return registry
    found: dict[str, Any] = place.get("_parameters", place)
    return found
