"""What the units under one root share: the order they run in, reductions in flight, and the ends of passes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from ..comm import Comm
from ..events import Ledger
from ..mesh import Axis
from ..shard import State, plain_access, refuse_meta
from ..torch_private.backward_end import BackwardEnd
from .agreement import END, check_agreement, check_order
from .schedule import Order

if TYPE_CHECKING:
    from .hooks import UnitHooks


class Root:
    """The context of one root unit and all units below it. Made at the first forward.

    Owns no tensors. `reducing` holds units whose reduction is in flight; they are finished in order, the oldest when
    a newer one is issued, all at the end of backward. Roots that share it (`share_comm_ctx`) bound their reductions
    in flight together.

    Args:
        top: hooks of the unit whose forward was called first.
        units: hooks of all units under it, `top` included, in module order.
        comm: collectives that compare ranks; units bring their own.
    """

    def __init__(self, top: UnitHooks, units: list[UnitHooks], comm: Comm) -> None:
        self.top, self.units, self.comm = top, units, comm
        self.ledger = Ledger()
        self.pass_top: UnitHooks | None = None  # whose forward began the pass that runs now
        self.pass_grad = False  # whether that pass builds a graph
        self.checks_order = False  # whether the pass is the first of its kind, and compared with the other ranks'
        self.orders: dict[tuple[int, bool], Order] = {}  # by (top of the pass, with gradients)
        self.forward_order = Order()
        self.backward_order = Order()
        self.reducing: deque[UnitHooks] = top.shared_reducing if top.shared_reducing is not None else deque()
        self.recomputed: UnitHooks | None = None
        self._backward: BackwardEnd | None = None
        for index, hooks in enumerate(units):
            hooks.index = index
            hooks.unit.ledger = self.ledger
        self.homes = [b.home for hooks in units for b in hooks.unit.buckets if b.home is not None]  # offloaded ones

    def agree(self) -> None:
        """Check once that all ranks hold the same units; see `agreement.py`."""
        lines, axes, device = [], {}, None
        for hooks in self.units:
            for bucket in hooks.unit.buckets:
                device = bucket.axes.device
                for axis in (bucket.axes.shard, bucket.axes.replicate):
                    if axis is not None:
                        axes[id(axis.group)] = axis
                for member in bucket.members:
                    dtype = str(bucket.storage_dtype).removeprefix("torch.")
                    compute = str(bucket.compute_dtype).removeprefix("torch.")
                    grad = "trainable" if member.sharded.requires_grad else "frozen"
                    lines.append(
                        f"{member.name}: shape {member.slot.shape}, {dtype}, computed in {compute}, {grad}, "
                        f"unit {hooks.unit.name or '(root)'!r}, layout {bucket.layout.name}"
                    )
        if device is not None:
            found: list[Axis] = list(axes.values())
            check_agreement(lines, found, self.comm, device)

    # Forward.

    def begin_forward(self, top: UnitHooks) -> None:
        """A unit's forward was called from outside any pass: usually the root's."""
        if self._backward is not None:  # a backward raised
            self.recover()
        if top.post_optim_event is not None:
            event, top.post_optim_event = top.post_optim_event, None
            event.wait()
        with plain_access():
            for hooks in self.units:
                hooks.unit.refresh()
        refuse_meta([hooks.unit for hooks in self.units])
        for hooks in self.units:
            hooks.unit.drop_stale()
        self.pass_top, self.pass_grad = top, torch.is_grad_enabled()
        self.forward_order = self.orders.setdefault((top.index, self.pass_grad), Order())
        self.forward_order.restart()
        self.checks_order = self.comm.communicates and not self.forward_order.known

    def check_order(self, hooks: UnitHooks | None) -> None:
        """Compare which unit is about to run with the other ranks; None: the pass is over.

        Raises:
            DivergenceError: another rank is about to run another one.
        """
        buckets = [b for h in ([hooks] if hooks else self.units) for b in h.unit.buckets]
        if buckets:
            axes = max((b.axes for b in buckets), key=lambda axes: axes.world)
            index, names = hooks.index if hooks else END, [h.unit.name for h in self.units]
            check_order(index, names, [a for a in (axes.shard, axes.replicate) if a], self.comm, axes.device)

    def end_forward(self) -> None:
        """The pass is over: its order is known, and what was prefetched in vain is freed."""
        if self.checks_order:
            self.check_order(None)
            self.checks_order = False
        self.forward_order.finish()
        if self.pass_grad:
            self.backward_order.suggest(self.forward_order.known[::-1])
        for hooks in self.units:
            unit = hooks.unit
            if unit.state is State.SHARDED or hooks.keep_gathered:
                continue
            if unit.state is State.GATHERING or hooks.reshards(self.pass_grad):
                unit.show_sharded()
                unit.free()
        self.pass_top = None

    # Backward.

    @property
    def in_backward(self) -> bool:
        """Whether a backward through this root runs now."""
        return self._backward is not None and self._backward.alive()

    def begin_backward(self) -> None:
        """The first gradient of a backward reached a unit."""
        if self._backward is not None:  # one before it raised
            self.recover()
        self._backward = BackwardEnd(self.end_backward)

    def end_backward(self) -> None:
        """Autograd is done: reduce what is left, wait for everything, free everything."""
        for hooks in reversed(self.units):
            hooks.end_backward()
        with plain_access(), torch.no_grad():
            while self.reducing:
                self.reducing.popleft().finish_reduce()
        for home in self.homes:
            home.settle()
        self.backward_order.finish()
        self.recomputed = None
        self._backward = None

    def share_reducing(self, reducing: deque[UnitHooks]) -> None:
        """Use `reducing` from now on, together with other roots."""
        if reducing is not self.reducing:
            with plain_access(), torch.no_grad():
                while self.reducing:
                    self.reducing.popleft().finish_reduce()
            self.reducing = reducing

    def make_room(self, hooks: UnitHooks) -> None:
        """Finish reductions in flight until one more may be, and until `hooks` has none."""
        while self.reducing and (len(self.reducing) >= hooks.max_reducing or hooks in self.reducing):
            self.reducing.popleft().finish_reduce()

    def finish_completed(self) -> None:
        """Deliver reductions that are done, so that their buffers are not held while more is gathered."""
        while self.reducing and self.reducing[0].unit.reduce_is_completed():
            with plain_access(), torch.no_grad():
                self.reducing.popleft().finish_reduce()

    def enqueue_reduce(self, hooks: UnitHooks) -> None:
        """Start reducing the gradients that a unit collected."""
        hooks.unit.issue_reduce(hooks.comm, hooks.divide_factor, hooks.force_sum)
        self.reducing.append(hooks)

    def dissolve(self) -> None:
        """The root module is gone: let go of the units, which may live on by themselves."""
        for hooks in self.units:
            hooks.root = None
        self.units = []

    # Prefetch and recovery.

    def prefetch(self, indices: tuple[int, ...], backward: bool) -> None:
        """Start gathering the units of these indices that are not gathered yet."""
        for index in indices:
            hooks = self.units[index]
            if hooks.unit.state is State.SHARDED and (hooks.unshard_in_backward or not backward):
                hooks.unit.issue_gather(hooks.comm)

    def recover(self) -> None:
        """Bring every unit back to where a step begins, after an exception broke one off.

        Gradients of the broken step that were not reduced yet, and those accumulated without sync, are dropped.
        """
        for hooks in [hooks for hooks in self.reducing if hooks.root is self]:  # not those of roots that share it
            self.reducing.remove(hooks)
        for hooks in self.units:
            hooks.reset()
        for order in (*self.orders.values(), self.backward_order):
            order.restart()
        self.pass_top = None
        self.recomputed = None
        self._backward = None
