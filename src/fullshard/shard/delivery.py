"""Delivers a reduced slice as `.grad`, to sharded parameters and to optimizer views."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ..containers import NONES, drain
from ..forms import NAME_KEY, Member
from ..torch_private.local_tensor import inside, plain_access, read_grad, write_grad
from .bucket import Bucket
from .gradient_set import GradientSet, any_reassigned
from .hooks import run_hooks, sees_gradients
from .messages import two_gradients, view_of_another_shape, view_on_meta, viewed_twice, zero_in_a_view
from .views import OptimizerView, new_tensor

_ALL = -1
"""In place of a member's index: all members, in one `FlatParameter`."""


class Delivery:
    """Shows users a bucket's reduced slices as `.grad`.

    Args:
        bucket: the bucket of the gradients.

    Attributes:
        grad_dtype: dtype of `.grad`; see `gradient_dtypes`.
        set: the slice that is, or was last, shown.
        views: optimizer views over the bucket's shard.
        everyone, nobody: True, and False, for each member.
        got: by member, whether this rank had a gradient for it since the last reduction.
        used: the same, for the reductions since the ranks last agreed.
        undecided: indices of members without a gradient on this rank that show none or have hooks: the other ranks
            decide whether they get the reduced gradient, and whether their hooks run.
        aside: by index of a member without a gradient on this rank, the part that its hooks see if any rank had one.
        kept: indices of members that show zeros for gradients accumulated without sync.
        hooked: whether, at the last reduction, users' code ran for the gradient of any parameter or view.
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
        self.kept: set[int] = set()
        self.hooked = False
        self._warned_of_zeros = False

    # Deliver.

    def deliver(self, reduced: torch.Tensor, fill_unused: bool) -> list[torch.Tensor]:
        """Show `reduced` [shard_numel] as gradients, or add it to the existing ones.

        Args:
            reduced: the reduced slice; may be the memory of `writable()` itself.
            fill_unused: see `Gradients.deliver`.

        Returns:
            The hooked tensors that are known to have got a gradient: sharded parameters, even if this rank has no part
            of them, and optimizer views over them.
        """
        got, target, old = self.got, self.set, None
        if self.hooked:
            self._run_hooks(reduced, got)
        if not self.all_none():  # checked now: autograd may have reached sharded parameters since the issue
            target, old = self._added(reduced)
        elif target is None or target.flat is not reduced:
            target = self._written(reduced)
        receivers: list[torch.Tensor] = []
        self.got = self.nobody
        if got is self.everyone and not self.hooked:
            self.used = got
            target.shown = [*got]
            drain(map(write_grad, target.receivers, target.received))
        else:
            receivers = self._give_some(got, target, old, fill_unused)
        if self.views:
            self._show_views(target)
        return receivers

    def _give_some(
        self, got: Sequence[bool], target: GradientSet, old: Sequence[torch.Tensor | None] | None, fill_unused: bool
    ) -> list[torch.Tensor]:
        """Show members their gradients, and note which members all ranks must decide on; see `deliver`.

        Args:
            got: by member, whether this rank had a gradient for it.
            target: the gradients to show.
            old: the gradients that were there, by member; None: none.
            fill_unused: see `deliver`.

        Returns:
            See `deliver`.
        """
        indices: list[int] = []
        if old is None:
            target.shown = list(self.nobody)
        gives_empty, used = not self.bucket.form.shows_locals, list(self.used)
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
            target.shown[index] = True  # like `_give`, without a call for each parameter
            if gives_empty or target.parts[index].numel():
                write_grad(member.sharded, target.parts[index])
            if self.hooked and (got[index] or fills):
                indices.append(index)
        self.used = used
        return self.tensors(indices) if self.hooked else []

    def tensors(self, indices: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return the sharded parameters of the members with these indices (or all), and optimizer views over them."""
        members = self.bucket.members
        indices = range(len(members)) if indices is None else indices
        views = [view.tensor for view in self.views if not set(indices).isdisjoint(view.members)] if self.views else []
        return [*[members[index].sharded for index in indices], *[tensor for tensor in views if tensor is not None]]

    def _give(self, index: int, target: GradientSet) -> None:
        """Show a member's part as its `.grad`, unless the part is empty and the form shows no empty gradients."""
        target.shown[index] = True
        part = target.parts[index]
        if not self.bucket.form.shows_locals or part.numel():
            write_grad(self.bucket.members[index].sharded, part)

    def _run_hooks(self, reduced: torch.Tensor, got: Sequence[bool]) -> None:
        """Run hooks on sharded parameters; they see this reduction's gradient, and may replace it.

        Parts without a gradient on this rank are set aside until the ranks have agreed on whether any rank had one.
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
        flat, rank = self.bucket.flat_parameter, self.bucket.axes.global_rank
        reduced.copy_(run_hooks(flat, reduced.to(self.grad_dtype), names, rank))

    def _run_member(self, member: Member, local: torch.Tensor) -> None:
        shown = self.bucket.shown(local.to(self.grad_dtype), member)
        result = run_hooks(member.sharded, shown, member.name, self.bucket.axes.global_rank)
        local.copy_(self.bucket.local(result, member))

    def _set_aside(self, index: int, local: torch.Tensor) -> None:
        before = self.aside.get(index)
        self.aside[index] = local.clone() if before is None else before.add_(local)
        local.zero_()

    def _written(self, reduced: torch.Tensor) -> GradientSet:
        """Return a set that shows a copy of `reduced`, where there is no `.grad`."""
        target = self.writable()
        self._bring(target.flat, reduced)
        return target

    def _bring(self, target: torch.Tensor, reduced: torch.Tensor, then: Callable[[], object] | None = None) -> None:
        """Copy `reduced` [shard_numel] into `target`, possibly in host memory; then call `then`."""
        if self.bucket.home is not None:
            self.bucket.home.bring(target, reduced, self.bucket.turns, then)
            return
        target.copy_(reduced)
        if then is not None:
            then()

    def _added(self, reduced: torch.Tensor) -> tuple[GradientSet, list[torch.Tensor | None]]:
        """Return a set that shows the sum of `reduced` and the existing gradients, and the existing ones by member."""
        members, current = self.bucket.members, self.set
        old = [read_grad(m.sharded) for m in members]
        if current is not None and current.flat is reduced:  # there was no gradient when the reduction was issued
            current.shown = [False] * len(members)
            current.add(old)
            return current, old
        if current is not None and self._as_delivered(current, old):
            if self.bucket.home is None:
                current.flat.add_(reduced)
            else:
                brought = self.bucket.new_slice(reduced.dtype)
                self._bring(brought, reduced, partial(current.flat.add_, brought))
            return current, old
        fresh = self.set = self._make_set(self.bucket.new_slice(self.grad_dtype))
        fresh.settle()
        self._bring(fresh.flat, reduced, partial(fresh.add, old))
        return fresh, old

    @staticmethod
    def _as_delivered(current: GradientSet, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether `grads`, by member, are those that `current` delivered: no new `.grad` or `.data` was assigned."""
        return not current.reassigned() and all(
            [
                grad is part or (grad is None and not (shown and part.numel()))
                for grad, part, shown in zip(grads, current.parts, current.shown, strict=True)
            ]
        )

    def lacking(self) -> list[str]:
        """Names of parameters without a gradient here, whose gradients depend on whether any rank has one."""
        members = self.bucket.members
        if _ALL in self.aside:
            return [member.name for member in members]
        return [members[index].name for index in sorted({*self.undecided, *self.aside})]

    def decide(self, present: Sequence[bool]) -> list[torch.Tensor]:
        """Deliver gradients to undecided members if any rank had one.

        Args:
            present: by member index, whether any rank had a gradient for it.

        Returns:
            The tensors that got a gradient: sharded parameters, and optimizer views that had got none before.
        """
        candidates, self.undecided = list(dict.fromkeys(self.undecided)), []
        undecided = [index for index in candidates if present[index]]
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
                if grad is not None and grad is not part:  # autograd's own, which arrived after the delivery
                    part.add_(grad)
            if grad is not part:
                self._give(index, target)
        if undecided or aside:
            self._show_views(target)
        if self.views and not all(target.shown) and not self._warned_of_zeros:
            self._warned_of_zeros = self._warn_of_zeros(target, self.views)
        if not self.hooked:
            return []
        before = [view.tensor for view in self.views if any([used[i] for i in view.members])]
        return [t for t in self.tensors(undecided) if all(t is not tensor for tensor in before)]

    def may_show_zeros(self) -> bool:
        """Whether a view may show zeros for a parameter that got no gradient, and no warning was given yet."""
        return self.set is not None and not self._warned_of_zeros and not all(self.set.shown)

    # Gradients accumulated without sync.

    def show_kept(self) -> None:
        """Show zeros for members with gradients accumulated without sync, where no gradient is shown."""
        if not self.bucket.form.shows_locals:
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
        """Return the members whose zeros the user removed: give their accumulated gradients up before using them."""
        if not self.kept:
            return []
        kept, self.kept = self.kept, set()
        given_up = self._without_grad(kept)
        if self.bucket.flat_parameter is None and self.bucket.form.shows_locals:
            for member in [self.bucket.members[index] for index in kept]:
                if not member.part.numel:
                    write_grad(member.sharded, None)
        return given_up

    def all_given_up(self) -> bool:
        """Whether zeros were shown for accumulated gradients, and the user has removed all of them."""
        return bool(self.kept) and len(self._without_grad(self.kept)) == len(self.kept)

    def _without_grad(self, indices: set[int]) -> list[Member]:
        flat = self.bucket.flat_parameter
        members = [self.bucket.members[index] for index in sorted(indices)]
        if flat is not None:
            return members if flat.grad is None else []
        return [member for member in members if read_grad(member.sharded) is None]

    # Views.

    def add_views(self, runs: Sequence[tuple[int, int, list[int]]]) -> list[nn.Parameter]:
        """Create optimizer views of runs (offset, length, member indices) of the shard; returns their tensors.

        Raises:
            ConfigError: a parameter already has a view whose optimizer is alive, or has no values yet.
        """
        members = self.bucket.members
        if self.bucket.shard.is_meta:
            raise view_on_meta(member.name for member in members)
        views = [view for view in self.views if view.tensor is not None]
        viewed = {i for view in views for i in view.members}
        for _, _, indices in runs:
            for i in viewed.intersection(indices):
                raise viewed_twice(members[i].name)
        tensors = [new_tensor(self.bucket, *run) for run in runs]
        self.views = views + [OptimizerView(tensor, *run) for tensor, run in zip(tensors, runs, strict=True)]
        self.drop_set()  # it has the old views; gradients it delivered live on
        follow([self])
        return tensors

    def _show_views(self, current: GradientSet) -> None:
        """Show the optimizer views the gradients of their parameters."""
        for view, grad in zip(self.views, current.views, strict=True):
            tensor = view.tensor
            if tensor is not None and any([current.shown[i] for i in view.members]):
                tensor.grad, view.adopted, view.cleared = grad, None, False

    def all_none(self) -> bool:
        """Whether there is no `.grad` to add to, on parameters or optimizer views."""
        for view in self.views:
            self._agree(view)
            if view.alone and view.has_gradient:
                return False
        return all(map(is_, map(read_grad, self.bucket.sharded or self.bucket.list_sharded()), NONES))

    def _agree(self, view: OptimizerView) -> None:
        """Reconcile an optimizer view and its parameters, which share a gradient: setting None counts for both."""
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
        if view.length and whole is not view.adopted and whole.data_ptr() != at:  # assigned by the user
            self._adopt(view, whole)
        elif not view.alone and all(read_grad(member.sharded) is None for member in members):
            tensor.grad = view.adopted = None

    def _shares(self, view: OptimizerView, index: int, grad: torch.Tensor) -> bool:
        """Whether a parameter's gradient is still the memory last shared with the view: it was not assigned since."""
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

    def follow_assigned(self) -> None:
        """Take gradients that users assigned to parameters over into this bucket's optimizer views; see `follow`."""
        current, grads = self.set, [*map(read_grad, self.bucket.sharded or self.bucket.list_sharded())]
        delivered = current is not None and self._as_delivered(current, grads)
        for at, view in enumerate(self.views):
            if view.alone or (tensor := view.tensor) is None:
                continue
            if not (delivered and current is not None and tensor.grad is current.views[at]):
                self._follow(at, view, tensor)

    def _follow(self, at: int, view: OptimizerView, tensor: torch.Tensor) -> None:
        """Run `follow_assigned` for the view with this index, and its tensor."""
        members, current, whole = self.bucket.members, self.set, tensor.grad
        grads = {i: grad for i in view.members if (grad := read_grad(members[i].sharded)) is not None}
        assigned = {i: grad for i, grad in grads.items() if not self._shares(view, i, grad)}
        if whole is None:
            grads = assigned  # the other gradients were removed with the view's
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
        # In new memory: users may hold the previous gradients.
        fresh = self._make_set(self.bucket.new_slice(self.grad_dtype).zero_())
        for i in view.members:
            if i in grads:
                fresh.parts[i].copy_(grads[i])
                self._give(i, fresh)
            else:
                write_grad(members[i].sharded, None)
        tensor.grad = view.adopted = fresh.views[at]
        view.cleared = False
        if not self._warned_of_zeros:
            self._warned_of_zeros = self._warn_of_zeros(fresh, [view])

    def _adopt(self, view: OptimizerView, whole: torch.Tensor) -> None:
        """Show the gradient that the user assigned to an optimizer view as that of its parameters.

        Raises:
            ConfigError: the user assigned a different gradient to a parameter.
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
        """Remove all gradients of an optimizer view if it, or all parameters under it, are among `parameters` (ids)."""
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
        """Return the current set if nobody else holds it, else a new one. Its `flat` is allocated."""
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
            gradient_set = GradientSet(flat, parts, views)
        for member, part in zip(bucket.members, parts, strict=True):
            if not bucket.form.shows_locals or part.numel():
                gradient_set.receivers.append(member.sharded)
                gradient_set.received.append(part)
        return gradient_set

    def drop_set(self) -> None:
        """Create a new set at the next delivery; the tensors that this one delivered live on."""
        for view in self.views:
            if (tensor := view.tensor) is not None:
                view.adopted = tensor.grad
        self.set = None

    def forget(self) -> None:
        """Drop the set and repoint the views, after the shard moved."""
        self.drop_set()
        self.point_views()

    def point_views(self) -> None:
        """Point the optimizer views at the current shard."""
        for view in self.views:
            if (tensor := view.tensor) is not None:
                tensor.data = self.bucket.shard.narrow(0, view.offset, view.length)

    def replaced_views(self) -> list[tuple[int, torch.Tensor]]:
        """Return the optimizer views whose `.data` users have assigned, each with its first element in the shard.

        Raises:
            ConfigError: the assigned tensor has a different shape.
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
        """Warn of a parameter that has no gradient although the optimizer view of it and its neighbours has one.

        Returns:
            Whether there is such a parameter.
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


_SET, _VIEWS, _MEMBERS = attrgetter("set"), attrgetter("views"), attrgetter("bucket.sharded")
_PARTS, _ALONE, _TENSOR = attrgetter("parts"), attrgetter("alone"), attrgetter("tensor")


def follow(deliveries: Sequence[Delivery]) -> None:
    """Take gradients that users assigned to parameters over into optimizer views; call before an optimizer steps.

    Raises:
        ConfigError: users assigned a different gradient to a view as well.
    """
    with plain_access():
        if not _all_delivered(deliveries):
            with torch.no_grad():
                for delivery in deliveries:
                    delivery.follow_assigned()


def _all_delivered(deliveries: Sequence[Delivery]) -> bool:
    """Whether all parameters and views show the gradients that were delivered last; compared together, in C."""
    sets: list[Any] = [*map(_SET, deliveries)]
    members, join = [*map(_MEMBERS, deliveries)], chain.from_iterable
    if None in sets or [] in members or any_reassigned(sets):
        return False
    views = [*join(map(_VIEWS, deliveries))]
    tensors = [*map(_TENSOR, views)]
    if True in map(_ALONE, views) or any(map(is_, tensors, NONES)):
        return False
    return all(map(is_, map(read_grad, join(members)), join(map(_PARTS, sets)))) and all(
        map(is_, map(read_grad, tensors), join(map(_VIEWS, sets)))
    )
