"""Local parts: the original Parameter objects, whose data become the 1-D part that this rank owns (possibly empty).

The wrapper's form with use_orig_params=True: existing references and names of the parameters stay valid. Without
splitting (NO_SHARD) a part is the whole parameter, in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, methodcaller, ne
from typing import Any

import torch
from torch import nn

from ..errors import ReplacementError
from ..layout import Layout, Part, Slot
from ..mesh import MeshAxes
from ..torch_private.local_tensor import local_part, read_device, read_dtype, read_is_meta, same_memory
from .changes import Untouched
from .flat_shard import FlatShard, Run
from .form import Form
from .member import NAME_KEY, PART_KEY, Member, attributes_of, hooks_onto
from .messages import replaced_by_another
from .row_shard import full_of


class LocalForm(Form):
    """See the module's docstring, and `Form`. The layout is flat."""

    keeps_originals = True
    shows_locals = True

    def __init__(self, layout: Layout, axes: MeshAxes, apart: bool = False) -> None:
        super().__init__(layout, axes, apart)
        self.split = layout.world > 1

    def take(self, slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
        local.copy_(Run.of(self.layout, slot, self.axes).cut(local_part(original)))

    def make(self, member: Member, original: nn.Parameter) -> nn.Parameter:
        shown = self.view(member, member.local)
        if self.keeps_originals and type(original) is nn.Parameter and original.is_meta == shown.is_meta:
            original.grad = None
            original.data = shown
            sharded = original
        else:
            sharded = nn.Parameter(shown, requires_grad=original.requires_grad)
            sharded.__dict__.update(attributes_of(original))
            hooks_onto(sharded, original)
        sharded.__dict__[NAME_KEY] = member.name
        if self.keeps_originals:
            sharded.__dict__["_fsdp_flattened"] = True  # PyTorch's mark; libraries check for it on parameters
        if self.split:
            sharded.__dict__[PART_KEY] = "this rank's part of a parameter (use_orig_params=True)"
        member.local = shown
        return sharded

    def view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if self.split:
            return local
        return local.as_strided(member.slot.shape, member.slot.stride, local.storage_offset())

    def local(self, member: Member, shown: torch.Tensor) -> torch.Tensor:
        return shown if self.split else shown.permute(member.slot.spec.order).reshape(-1)

    def whole(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta:
            return torch.empty(member.slot.shape, dtype=local.dtype, device="meta")
        run = Run.of(self.layout, member.slot, self.axes)
        whole = FlatShard(local.detach().to(self.axes.device), run).full_tensor()
        if member.split is not None:
            whole = full_of(member.split.unsharded(whole))
        return whole

    def cut(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        if member.split is not None:
            whole = member.split.local_of_whole(whole)
        return Run.of(self.layout, member.slot, self.axes).cut(whole)

    def untouched(self, members: Sequence[Member], shard: torch.Tensor) -> Untouched:
        places = [(place.reader, member.sharded) for member in members for place in member.places]
        return Untouched(places, [fact for member in members for fact in memory_of(member.sharded, member.local)])

    def counters(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        return [member.sharded for member in members]

    def reassigned(self, members: Sequence[Member], shard: torch.Tensor) -> bool:
        return any(map(ne, map(_ADDRESS, map(_SHARDED, members)), map(_ADDRESS, map(_LOCAL, members))))

    def _check_replacement(self, member: Member, shown: Any) -> None:
        if not isinstance(shown, nn.Parameter):
            raise self._not_fitting(member, shown)

    def _adopted(self, member: Member, parameter: nn.Parameter) -> torch.Tensor:
        """Accept this rank's part, or in a replacement the whole value, of which it keeps this rank's part."""
        if self.split and parameter is not member.sharded and tuple(parameter.shape) == member.slot.shape:
            return self.cut(member, parameter.detach())
        if parameter.shape != member.local.shape:
            raise self._not_fitting(member, parameter)
        return super()._adopted(member, parameter)

    def _not_fitting(self, member: Member, shown: Any) -> ReplacementError:
        """The error for an object in a sharded parameter's place that cannot be adopted."""
        expected = f"a Parameter of shape {member.slot.shape}, or this rank's part {tuple(member.local.shape)}"
        return replaced_by_another(member.name, self.axes.global_rank, expected, shown)

    def _point(self, member: Member, local: torch.Tensor) -> None:
        shown, sharded = self.view(member, local), member.sharded
        if not same_memory(sharded, shown) or shown.is_meta or sharded.dtype != shown.dtype:
            sharded.data = shown
        member.local = shown

    def succeed(self, old: Member, new: Member) -> None:
        if self.keeps_originals:
            old.sharded.data = new.local
            new.sharded = old.sharded
        else:
            super().succeed(old, new)


_SHARDED, _LOCAL = attrgetter("sharded"), attrgetter("local")
_ADDRESS = methodcaller("data_ptr")


def memory_of(tensor: torch.Tensor, like: torch.Tensor) -> list[tuple[Callable[[], Any], Any]]:
    """Pairs for `Untouched`: functions that read a tensor's address, dtype and device, and the expected values."""
    facts = [(partial(read, tensor), read(like)) for read in (read_dtype, read_device, read_is_meta)]
    return [(tensor.data_ptr, like.data_ptr()), *facts]
