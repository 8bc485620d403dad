"""Parks a unit: moves its shards and gradients to host memory for a while, to make room on the device; or for good.

A parked bucket is offloaded (`Home`) and refuses to be gathered. Its sharded parameters, their gradients and optimizer
views stay the same objects with different memory. Tensors that share memory still do after the move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ..torch_private.local_tensor import follow_local, plain_access, plain_tensors, read_grad, view_base
from .bucket import Bucket
from .delivery import follow
from .gradient_set import GradientSet
from .gradients import Gradients
from .messages import parked_asked_to_compute
from .offload import Home, settle
from .unit import Unit


class Parking(Home):
    """The home of a parked bucket.

    Args:
        compute: the bucket's compute device.
        pinned: whether the memory is page-locked.
        before: the bucket's home when it is not parked.
        apart: the form's `apart` then: whether shards lie apart from the mesh's device.

    Attributes:
        alive: all instances, including those of copied parked models; while it is empty, no unit is parked.
    """

    alive: ClassVar[weakref.WeakSet[Parking]] = weakref.WeakSet()

    def __new__(cls, *_: Any, **__: Any) -> Parking:
        """Register the instance; `copy` and `pickle` call this too."""
        parking = super().__new__(cls)
        cls.alive.add(parking)
        return parking

    def __init__(self, compute: torch.device, pinned: bool, before: Home | None, apart: bool) -> None:
        super().__init__(torch.device("cpu"), compute, pinned)
        self.before, self.apart = before, apart

    def begin(self, unit: str) -> None:
        """Refuse the gather, even of a backward whose forward ran before parking."""
        raise parked_asked_to_compute([unit])


class Mover:
    """Moves tensors to a device, each storage once: tensors that share memory still do there.

    Args:
        device: the destination.
        pinned: whether the destination is page-locked memory; other memory of the device is then moved too.

    Attributes:
        moved: bytes copied.
        stayed: bytes that were there already.
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device, self.pinned = device, pinned
        self.moved = self.stayed = 0
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # by address: the old storage, its copy
        self._seen: set[int] = set()  # addresses of storages that stay, or were created here

    def needed(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage must be moved."""
        return storage.device != self.device or (self.pinned and not storage.is_pinned())

    def move(self, plain: torch.Tensor) -> torch.Tensor:
        """Return the same elements at the destination, in the same memory order; `plain` itself if it is there."""
        storage = plain.untyped_storage()
        at = storage.data_ptr()
        if plain.is_meta:
            return plain
        if not storage.nbytes():
            return plain if plain.device == self.device else plain.to(self.device)
        if at in self._seen:
            return plain
        if not self.needed(storage):
            self.stayed += storage.nbytes()
            self._seen.add(at)
            return plain
        if at not in self._copies:
            source = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage)
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device, pin_memory=self.pinned)
            copy.copy_(source)
            self._seen.add(copy.data_ptr())
            self._copies[at] = storage, copy  # the old storage is kept alive so that its address is not reused
            self.moved += storage.nbytes()
        target = self._copies[at][1].untyped_storage()
        moved = torch.empty(0, dtype=plain.dtype, device=self.device)
        return moved.set_(target, plain.storage_offset(), plain.shape, plain.stride())

    def move_inside(self, tensor: torch.Tensor) -> None:
        """Move the memory of a tensor of any class; the tensor stays the same object."""
        with plain_access(), torch.no_grad():
            for plain in plain_tensors(tensor):
                for inner in (view_base(plain), plain):
                    if inner is not None and (moved := self.move(inner)) is not inner:
                        inner.data = moved
        follow_local(tensor)


def refuse_parked(units: Iterable[Unit]) -> None:
    """Raise if any of these units is parked.

    Raises:
        PhaseError: units are parked; names them, and `fullshard.resume`.
    """
    names = [unit.name for unit in units if is_parked(unit)]
    if names:
        raise parked_asked_to_compute(names)


def is_parked(unit: Unit) -> bool:
    """Whether the unit's shards are parked."""
    return True in [type(bucket.home) is Parking for bucket in unit.buckets]


def offload_unit(unit: Unit, home: Home) -> None:
    """Move a unit's shards to `home`, for good, as if it had been built there. The unit must be idle; it is freed."""
    _put_at_rest(unit)
    for bucket in unit.buckets:
        bucket.home, bucket.form.apart = home, True
        if not bucket.form.plain and not bucket.shard.is_meta:  # a class knows its device: its tensors are made anew
            bucket.rehome(bucket.shard)
            for member in bucket.members:
                follow_local(member.sharded)
    _move(unit, Mover(home.device, home.pinned))


def _put_at_rest(unit: Unit) -> None:
    unit.drop_kept()
    unit.reshard()
    settle([bucket.home for bucket in unit.buckets])


def park_unit(unit: Unit, mover: Mover) -> None:
    """Move a unit's shards and gradients to the destination of `mover`. The unit must be idle; it is freed."""
    _put_at_rest(unit)
    for bucket in unit.buckets:
        form: Any = bucket.form
        bucket.home = Parking(bucket.axes.device, mover.pinned, bucket.home, form.apart)
        form.apart = True
    _move(unit, mover)


def resume_unit(unit: Unit) -> tuple[int, int]:
    """Move a parked unit back to its home.

    Returns:
        Bytes copied to the device, and bytes that were there already.
    """
    unit.refresh()
    nbytes = [0, 0]
    for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
        home, form = bucket.home, bucket.form
        if type(home) is not Parking:
            continue
        before = home.before
        mover = Mover(home.compute if before is None else before.device, before is not None and before.pinned)
        _move_bucket(unit, bucket, gradients, mover)
        bucket.home, form.apart = before, home.apart  # only now: a move that fails can be repeated
        nbytes = [nbytes[0] + mover.moved, nbytes[1] + mover.stayed]
    unit.drop_plans()
    return nbytes[0], nbytes[1]


def _move(unit: Unit, mover: Mover) -> None:
    for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
        _move_bucket(unit, bucket, gradients, mover)
    unit.drop_plans()


def _move_bucket(unit: Unit, bucket: Bucket, gradients: Gradients, mover: Mover) -> None:
    """Move values, then gradients. Versions continue unchanged, also after an error: nothing was changed."""
    before = unit.version()
    bucket.turns.take()
    try:
        with plain_access(), torch.no_grad():
            _move_values(bucket, gradients, mover)
            _move_gradients(bucket, gradients, mover)
    finally:
        bucket.turns.give()
        unit.touched.changes += before - unit.version()


def _move_values(bucket: Bucket, gradients: Gradients, mover: Mover) -> None:
    if not bucket.form.plain:
        for chunk in bucket.shard_tensors:
            mover.move_inside(chunk)
    elif (shard := mover.move(bucket.shard)) is not bucket.shard:
        bucket.shard = shard
        bucket.form.point(bucket.members, shard)
        for member in bucket.members:
            follow_local(member.sharded)
        gradients.delivery.point_views()


def _move_gradients(bucket: Bucket, gradients: Gradients, mover: Mover) -> None:
    """Move the gradients that users see (parts of the delivered slice, and those that they assigned), and residuals."""
    delivery = gradients.delivery
    for name, residual in gradients.residuals.items():
        gradients.residuals[name] = mover.move(residual)
    follow([delivery])
    holders: list[Any] = [member.sharded for member in bucket.members]
    holders += [tensor for view in delivery.views if (tensor := view.tensor) is not None]
    grads = [grad for holder in holders if (grad := read_grad(holder)) is not None]
    current = delivery.set
    reassigned = current is not None and current.reassigned()  # then users no longer see it
    for grad in grads:
        mover.move_inside(grad)
    delivery.set = None
    if current is None or reassigned or not grads or not current.storage.nbytes():
        return
    for shows in (current.flat, *current.parts, *current.views):  # those shown as `.grad` have moved already
        mover.move_inside(shows)
    moved = GradientSet(current.flat, current.parts, current.views)
    moved.shown, moved.receivers, moved.received = current.shown, current.receivers, current.received
    delivery.set = moved
