"""How a reduced slice becomes `.grad`, and what optimizers' views of it show."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

import torch

from ..containers import NONES, drain
from ..forms import NAME_KEY, Member
from ..torch_private.local_tensor import inside, plain_access, read_grad, write_grad
from .bucket import Bucket
from .gradient_set import GradientSet
from .hooks import hooked_flat, hooked_member, sees_gradients
from .messages import two_gradients, view_of_another_shape, zero_in_a_view
from .optimizer_view import OptimizerView

_ALL = -1
"""In place of a member's index: all of them, in one `FlatParameter`."""


class Delivery:
    """Gives a bucket's reduced slices to users as `.grad`.

    Args:
        bucket: whose gradients these are.

    Attributes:
        grad_dtype: of `.grad`; see `GradientDtypes`.
        set: the slice that is shown now, or was last.
        views: optimizer views over the bucket's shard.
        everyone, nobody: True, and False, for each member.
        got: per member, whether this rank had a gradient for it since the last reduction.
        used: the same for reductions since the ranks last agreed.
        undecided: indices of members that this rank had no gradient for, and that show none or have hooks: whether they
            get what was reduced, and hooks run, is for all ranks to say.
        aside: by index of a member that this rank had no gradient for, the part that its hooks see if any rank had one.
        hooked: whether users' code runs when any of the parameters or views gets a gradient, when it was reduced last.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.grad_dtype = bucket, bucket.storage_dtype
        self.set: GradientSet | None = None
        self.views: list[OptimizerView] = []
        self.everyone, self.nobody = (True,) * len(bucket.members), (False,) * len(bucket.members)
        self.got: Sequence[bool] = self.nobody
        self.used: Sequence[bool] = self.nobody
        self.undecided: list[int] = []
        self.aside: dict[int, torch.Tensor] = {}
        self.kept: set[int] = set()  # indices of members that show zeros for what was accumulated without sync
        self.hooked = False
        self._told_of_zeros = False

    # Deliver.

    def deliver(self, reduced: torch.Tensor, fill_unused: bool) -> list[torch.Tensor]:
        """Show `reduced` [shard_numel] as gradients, or add it to those that are there.

        Args:
            reduced: of this reduction; may be the memory of `writable()` itself.
            fill_unused: see `Gradients.deliver`.

        Returns:
            What is known to have got a gradient and is hooked: sharded parameters, also those of which this rank holds
            nothing, and optimizer views over them.
        """
        got, target, old = self.got, self.set, None
        if self.hooked:
            self._run_hooks(reduced, got)
        if not self.all_none():  # asked now: autograd may have reached the sharded parameters since it was issued
            target, old = self._added(reduced)
        elif target is None or target.flat is not reduced:
            target = self._written(reduced)
        given: list[torch.Tensor] = []
        self.got = self.nobody
        if got is self.everyone and not self.hooked:
            self.used = got
            target.shown = [*got]
            drain(map(write_grad, target.receivers, target.received))
        else:
            given = self._give_some(got, target, old, fill_unused)
        if self.views:
            self._show_views(target)
        return given

    def _give_some(
        self, got: Sequence[bool], target: GradientSet, old: Sequence[torch.Tensor | None] | None, fill_unused: bool
    ) -> list[torch.Tensor]:
        """Show members their gradients, and note what all ranks have to say; see `deliver`.

        Args:
            got: by member, whether this rank had a gradient for it.
            target: what is shown.
            old: what was there, by member; None: nothing.
            fill_unused: see `deliver`.

        Returns:
            See `deliver`.
        """
        given: list[int] = []
        if old is None:
            target.shown = list(self.nobody)
        gives_empty, used = self.bucket.form.gives_empty, list(self.used)
        for index, member in enumerate(self.bucket.members):
            fills = False
            if got[index]:
                used[index] = True
            else:
                trains = member.sharded.requires_grad
                fills = fill_unused and trains and index not in self.aside
                shows = (fill_unused and trains) or (old is not None and old[index] is not None)
                if trains and not fills and (not shows or (self.hooked and sees_gradients(self.tensors([index])))):
                    self.undecided.append(index)
                if not shows:
                    continue
            target.shown[index] = True  # as `_give`, without a call for each parameter
            if gives_empty or target.parts[index].numel():
                write_grad(member.sharded, target.parts[index])
            if self.hooked and (got[index] or fills):
                given.append(index)
        self.used = used
        return self.tensors(given) if self.hooked else []

    def tensors(self, given: Sequence[int] | None = None) -> list[torch.Tensor]:
        """The sharded parameters of members by index, or of all, and the optimizer views over them."""
        members = self.bucket.members
        given = range(len(members)) if given is None else given
        views = [view.tensor for view in self.views if not set(given).isdisjoint(view.members)] if self.views else []
        return [*[members[index].sharded for index in given], *[tensor for tensor in views if tensor is not None]]

    def _give(self, index: int, target: GradientSet) -> None:
        """Show a member's part as its `.grad`; not where this rank has none of it and its form shows no empty one."""
        target.shown[index] = True
        part = target.parts[index]
        if self.bucket.form.gives_empty or part.numel():
            write_grad(self.bucket.members[index].sharded, part)

    def _run_hooks(self, reduced: torch.Tensor, got: Sequence[bool]) -> None:
        """Hooks on sharded parameters see this reduction's gradient, and may replace it.

        Where this rank had none the part is set aside, until the ranks have agreed on whether any had.
        """
        bucket = self.bucket
        flat = bucket.flat_parameter
        if flat is not None and flat._backward_hooks:
            if True in got:
                self._run_flat(reduced)
            else:
                self._set_aside(_ALL, reduced)
        for index, member in enumerate(bucket.members):
            if member.sharded._backward_hooks:
                if got[index]:
                    self._run_member(member, bucket.part(reduced, member))
                elif member.sharded.requires_grad:
                    self._set_aside(index, bucket.part(reduced, member))

    def _run_flat(self, reduced: torch.Tensor) -> None:
        names = ", ".join(member.name for member in self.bucket.members)
        hooked_flat(self.bucket.flat_parameter, names, reduced, self.grad_dtype, self.bucket.axes.global_rank)

    def _run_member(self, member: Member, local: torch.Tensor) -> None:
        hooked_member(self.bucket.form, member, local, self.grad_dtype, self.bucket.axes.global_rank)

    def _set_aside(self, index: int, local: torch.Tensor) -> None:
        before = self.aside.get(index)
        self.aside[index] = local.clone() if before is None else before.add_(local)
        local.zero_()

    def _written(self, reduced: torch.Tensor) -> GradientSet:
        """A set that shows a copy of `reduced`; no `.grad` is there."""
        target = self.writable()
        if self.bucket.home is None:
            target.flat.copy_(reduced)
        else:
            self.bucket.home.bring(target.flat, reduced, self.bucket.turns)
        return target

    def _added(self, reduced: torch.Tensor) -> tuple[GradientSet, list[torch.Tensor | None]]:
        """A set that shows the sum of `reduced` and what is there; and what is there, by member."""
        members, current, home = self.bucket.members, self.set, self.bucket.home
        old = [read_grad(m.sharded) for m in members]
        if current is not None and current.flat is reduced:  # none was there when the reduction was issued
            current.shown = [False] * len(members)
            current.add(old)
            return current, old
        if current is not None and self._as_delivered(current, old):
            if home is None:
                current.flat.add_(reduced)
            else:
                brought = self.bucket.new_slice(reduced.dtype)
                home.bring(brought, reduced, self.bucket.turns, partial(current.flat.add_, brought))
            return current, old
        if home is None:
            fresh = self.set = self._make_set(reduced.to(self.grad_dtype, copy=True))
            fresh.settle()
            fresh.add(old)
        else:
            fresh = self.set = self._make_set(self.bucket.new_slice(self.grad_dtype))
            fresh.settle()
            home.bring(fresh.flat, reduced, self.bucket.turns, partial(fresh.add, old))
        return fresh, old

    @staticmethod
    def _as_delivered(current: GradientSet, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether `grads`, by member, are what `current` gave out: nobody has assigned another `.grad` or `.data`."""
        return not current.astray() and all(
            [
                grad is part or (grad is None and not (shown and part.numel()))
                for grad, part, shown in zip(grads, current.parts, current.shown, strict=True)
            ]
        )

    def asks(self) -> bool:
        """Whether this rank has to know what others used."""
        return bool(self.undecided or self.aside)

    def decide(self, present: Sequence[bool]) -> list[torch.Tensor]:
        """Give undecided members the gradients that other ranks had.

        Args:
            present: by index of a member, whether any rank had a gradient for it.

        Returns:
            What got a gradient: sharded parameters, and optimizer views that got none of it before.
        """
        asked, self.undecided = list(dict.fromkeys(self.undecided)), []
        undecided = [index for index in asked if present[index]]
        aside, self.aside = self.aside, {}
        used, self.used = self.used, self.nobody
        target = self.set
        if target is None:
            return []
        if _ALL in aside and any(present):
            self._run_flat(aside[_ALL])
            target.flat.add_(aside[_ALL].to(target.flat.device))
        for index in undecided:
            member = self.bucket.members[index]
            grad, part = read_grad(member.sharded), target.parts[index]
            with torch.no_grad():
                if (local := aside.get(index)) is not None:
                    self._run_member(member, local)
                    to = self.bucket.local(part, member)
                    to.copy_(local) if grad is None else to.add_(local.to(to.device))
                if grad is not None and grad is not part:  # autograd's own, which came since the delivery
                    part.add_(grad)
            if grad is not part:
                self._give(index, target)
        if undecided or aside:
            self._show_views(target)
        if self.views and not all(target.shown) and not self._told_of_zeros:
            self._told_of_zeros = self._warn_of_zeros(target, self.views)
        if not self.hooked:
            return []
        before = [view.tensor for view in self.views if any([used[i] for i in view.members])]
        return [t for t in self.tensors(undecided) if all(t is not tensor for tensor in before)]

    def may_show_zeros(self) -> bool:
        """Whether a view may show zeros for a parameter that got no gradient, and nobody was told yet."""
        return self.set is not None and not self._told_of_zeros and not all(self.set.shown)

    # What was accumulated without sync.

    def show_kept(self) -> None:
        """Let members with gradients that were accumulated without sync show zeros, where nothing is shown."""
        if not self.bucket.form.shows_kept:
            return
        flat = self.bucket.flat_parameter
        for index, member in enumerate(self.bucket.members):
            if self.got[index]:
                self.kept.add(index)
                if flat is None and read_grad(member.sharded) is None:
                    write_grad(member.sharded, torch.zeros_like(member.sharded))
                elif flat is not None and flat.grad is None:
                    flat.grad = torch.zeros_like(flat)

    def given_up(self) -> list[Member]:
        """The members whose zeros the user took away: what they stood for is given up, too. Asked before it is used."""
        if not self.kept:
            return []
        kept, self.kept = self.kept, set()
        given_up = self._without_grad(kept)
        if self.bucket.flat_parameter is None and not self.bucket.form.gives_empty:
            for member in [self.bucket.members[index] for index in kept]:
                if not member.part.numel:
                    write_grad(member.sharded, None)
        return given_up

    def all_given_up(self) -> bool:
        """Whether there is something accumulated without sync that shows, and none of it does any more."""
        return bool(self.kept) and len(self._without_grad(self.kept)) == len(self.kept)

    def _without_grad(self, indices: set[int]) -> list[Member]:
        flat = self.bucket.flat_parameter
        members = [self.bucket.members[index] for index in sorted(indices)]
        if flat is not None:
            return members if flat.grad is None else []
        return [member for member in members if read_grad(member.sharded) is None]

    # Views.

    def _show_views(self, current: GradientSet) -> None:
        """Give the optimizer views the gradients that their parameters have."""
        for view, grad in zip(self.views, current.views, strict=True):
            tensor = view.tensor
            if tensor is not None and any([current.shown[i] for i in view.members]):
                tensor.grad, view.adopted, view.cleared = grad, None, False

    def all_none(self) -> bool:
        """Whether no `.grad` is there to be added to, on parameters or optimizer views."""
        for view in self.views:
            self._agree(view)
            if view.alone and view.has_gradient:
                return False
        return all(map(is_, map(read_grad, self.bucket.sharded or self.bucket.list_sharded()), NONES))

    def _agree(self, view: OptimizerView) -> None:
        """An optimizer view and its parameters share one gradient: whoever set it to None set it for both."""
        tensor = view.tensor
        if tensor is None:
            return
        members = [self.bucket.members[i] for i in view.members]
        if (whole := tensor.grad) is None:
            for index, member in zip(view.members, members, strict=True):
                grad = read_grad(member.sharded)
                if grad is not None and (view.alone or self._shares(view, index, grad)):
                    write_grad(member.sharded, None)
            view.adopted = None
            return
        at = -1 if self.set is None else self.set.flat.data_ptr() + view.offset * self.set.flat.element_size()
        if view.length and whole is not view.adopted and whole.data_ptr() != at:  # the user's own
            self._adopt(view, whole)
        elif not view.alone and all(read_grad(member.sharded) is None for member in members):
            tensor.grad = view.adopted = None

    def _shares(self, view: OptimizerView, index: int, grad: torch.Tensor) -> bool:
        """Whether a parameter's gradient lies where it and the view had theirs last: nobody has assigned it since."""
        part, current = self.bucket.members[index].part, self.set
        if view.cleared:
            return False
        if not part.numel:  # it has no address
            return view.adopted is not None or (current is not None and grad is current.parts[index])
        at = inside(grad).data_ptr()
        if current is not None and at == current.flat.data_ptr() + part.offset * current.flat.element_size():
            return True
        adopted = view.adopted
        return adopted is not None and at == adopted.data_ptr() + (part.offset - view.offset) * adopted.element_size()

    def follow(self) -> None:
        """Before an optimizer steps views: what users assigned to the `.grad` of parameters under them counts there.

        Raises:
            ConfigError: they assigned another to the view as well.
        """
        with plain_access(), torch.no_grad():
            current, grads = self.set, [read_grad(member.sharded) for member in self.bucket.members]
            delivered = current is not None and self._as_delivered(current, grads)
            for at, view in enumerate(self.views):
                if view.alone or (tensor := view.tensor) is None:
                    continue
                if not (delivered and current is not None and tensor.grad is current.views[at]):
                    self._follow(at, view, tensor)

    def _follow(self, at: int, view: OptimizerView, tensor: torch.Tensor) -> None:
        members, current, whole = self.bucket.members, self.set, tensor.grad
        grads = {i: grad for i in view.members if (grad := read_grad(members[i].sharded)) is not None}
        assigned = {i: grad for i, grad in grads.items() if not self._shares(view, i, grad)}
        if whole is None:
            grads = assigned  # the others went with the view's
            if not assigned:
                return
        elif current is not None and whole is current.views[at]:
            gone = [i for i in view.members if i not in grads and current.shown[i] and members[i].part.numel]
            if not assigned and not gone:
                return
        elif whole is not view.adopted:
            self._adopt(view, whole)
            return
        elif not assigned and all(i in grads or not members[i].part.numel for i in view.members):
            return
        if not grads:
            tensor.grad = view.adopted = None
            return
        # In memory of its own: users may hold what was there before.
        fresh = self._make_set(self.bucket.new_slice(self.grad_dtype).zero_())
        for i in view.members:
            if i in grads:
                fresh.parts[i].copy_(grads[i])
                self._give(i, fresh)
            else:
                write_grad(members[i].sharded, None)
        tensor.grad = view.adopted = fresh.views[at]
        view.cleared = False
        if not self._told_of_zeros:
            self._told_of_zeros = self._warn_of_zeros(fresh, [view])

    def _adopt(self, view: OptimizerView, whole: torch.Tensor) -> None:
        """Make a gradient that the user gave an optimizer view that of its parameters.

        Raises:
            ConfigError: the user gave one of them another.
        """
        for index in view.members if not view.alone else ():
            member = self.bucket.members[index]
            grad = read_grad(member.sharded)
            if grad is not None and member.part.numel and not self._shares(view, index, grad):
                raise two_gradients(member.name, self.bucket.axes.global_rank)
        for index in view.members:
            member = self.bucket.members[index]
            part = member.part
            at = whole.storage_offset() + (part.offset - view.offset if part.numel else 0)
            local = whole.as_strided(part.shape, part.stride, at)
            write_grad(member.sharded, self.bucket.shown(local, member))
        view.adopted, view.cleared = whole, False

    def let_go(self, parameters: set[int]) -> None:
        """`zero_grad()` of an optimizer view or of all parameters under one, by id: none of them keeps a gradient."""
        for view in self.views:
            if view.alone or (tensor := view.tensor) is None:
                continue
            members = [self.bucket.members[i].sharded for i in view.members]
            if id(tensor) in parameters or parameters.issuperset(map(id, members)):
                with plain_access():
                    for sharded in members:
                        write_grad(sharded, None)
                tensor.grad = view.adopted = None
                view.cleared = True

    # Memory.

    def writable(self) -> GradientSet:
        """The kept set if nobody else holds it, else a new one. Its `flat` is allocated."""
        current = self.set
        shape_fits = current is not None and len(current.views) == len(self.views)
        if current is not None and shape_fits and not current.storage.nbytes():
            current.take()  # `release` found that nobody else holds it
        elif current is None or not shape_fits or not current.reusable():
            self.set = self._make_set(self.bucket.new_slice(self.grad_dtype))
            self.set.settle()
        assert self.set is not None
        return self.set

    def _make_set(self, flat: torch.Tensor) -> GradientSet:
        bucket = self.bucket
        with plain_access():
            parts = [bucket.shown(bucket.part(flat, m), m) for m in bucket.members]
            views = [flat.narrow(0, view.offset, view.length) for view in self.views]
            if self.grad_dtype is not bucket.storage_dtype:
                for tensor in (*(m.sharded for m in bucket.members), *(view.tensor for view in self.views)):
                    if tensor is not None and tensor.grad_dtype not in (None, self.grad_dtype):
                        tensor.grad_dtype = None
            made = GradientSet(flat, parts, views)
        for member, part in zip(bucket.members, parts, strict=True):
            if bucket.form.gives_empty or part.numel():
                made.receivers.append(member.sharded)
                made.received.append(part)
        return made

    def drop_set(self) -> None:
        """Make another set at the next delivery; what this one gave out lives on."""
        for view in self.views:
            if (tensor := view.tensor) is not None:
                view.adopted = tensor.grad
        self.set = None

    def forget(self) -> None:
        """After the shard moved."""
        self.drop_set()
        self.point_views()

    def point_views(self) -> None:
        """Make the optimizer views views of the shard that there is now."""
        for view in self.views:
            if (tensor := view.tensor) is not None:
                tensor.data = self.bucket.shard.narrow(0, view.offset, view.length)

    def replaced_views(self) -> list[tuple[int, torch.Tensor]]:
        """Optimizer views whose `.data` users have assigned: first element in the shard, and what they show now.

        Raises:
            ConfigError: it is of another shape.
        """
        replaced: list[tuple[int, torch.Tensor]] = []
        for view in self.views:
            if view.alone or (tensor := view.tensor) is None:
                continue
            shard = self.bucket.shard
            if tensor.data_ptr() != shard.data_ptr() + view.offset * shard.element_size() and view.length:
                if tuple(tensor.shape) != (view.length,):
                    name = tensor.__dict__.get(NAME_KEY, "?")
                    raise view_of_another_shape(name, (view.length,), tuple(tensor.shape))
                replaced.append((view.offset, tensor))
        return replaced

    def _warn_of_zeros(self, current: GradientSet, views: Sequence[OptimizerView]) -> bool:
        """Say which parameter has no gradient although the optimizer's view of it and its neighbours has one.

        Returns:
            Whether there is one.
        """
        for view in views:
            if view.alone or not view.has_gradient:
                continue
            for index in view.members:
                member: Any = self.bucket.members[index]
                if not current.shown[index] and member.part.numel:
                    warnings.warn(zero_in_a_view(member.name), stacklevel=2)
                    return True
        return False
