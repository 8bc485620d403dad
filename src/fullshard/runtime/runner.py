"""Runs one unit: does what the table of phases says when its module is called and when gradients arrive.

before forward   gather (or find it prefetched), show the unsharded parameters, prefetch the next unit
after forward    show the sharded ones, free (unless kept), watch the outputs
before backward  a watched output got its gradient: gather, show, prefetch the next unit of the backward
after backward   a watched input got its gradient, so all parameters of this call have theirs: reduce, free
end of backward  whatever was missed (no input needs a gradient, outputs unused) is reduced and freed
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..containers import cast_floating
from ..errors import PhaseError
from ..shard import State, Unit
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.transforms import current_transform
from .asked import Asked
from .call import Call
from .outputs import Leftovers, detached_from_unit, on_first_gradient, refuse_views
from .phases import ROWS, Happening, Phase, impossible, refused_transform
from .reducer import InFlight
from .root import Root
from .settings import UnitSettings
from .trace import Period

H = Happening


class Runner(Asked):
    """Runs one unit. Owns no tensors.

    Args:
        unit: what is held.
        modules: the modules whose forwards are this unit's; usually one. Held weakly.
        settings: what the user set; replaced as a whole.
        find_root: makes the root when this unit is run first.

    Attributes:
        phase: see `phases.py`.
        root: the context of all units under one root; None until the first forward.
        index: of this unit in the root.
        open_calls: forward calls with gradients whose backward has not come.
        kept: whether the user called `unshard()`, or asked not to reshard after backward.
        leftovers: what forwards leave on the unit's modules; None until there is a root.
    """

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[nn.Module],
        settings: UnitSettings,
        find_root: Callable[[Runner], Root],
    ) -> None:
        self.unit, self.settings, self.find_root = unit, settings, find_root
        self._modules = [weakref.ref(module) for module in modules]
        self.root: Root | None = None
        self.index = -1
        self.phase = Phase.IDLE
        self.open_calls = 0
        self.kept = False
        self.leftovers: Leftovers | None = None
        self.shared_in_flight: InFlight | None = None  # reductions of roots that share one communication context
        self.post_optim_event: torch.Event | None = None  # the next pass waits for it, once
        self._depth = 0  # of this unit's modules and methods, how many are inside their forward now
        self._ran: set[int] = set()  # ids of modules of a unit of several that ran since it was opened
        self._calls: list[Call | None] = []  # of the forwards that run now, innermost last
        self._period = Period(-1)  # since the unit was opened for a forward
        self._leads_back = False  # whether an output of the forward that runs now leads to a backward
        self._hides = False  # whether what the last forward returned may hide a graph: the unit stays gathered for it
        self._late: tuple[int, ...] = ()  # prefetched once this unit is freed

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def happens(self, event: Happening) -> None:
        """Do what the table says, and go to the phase that follows."""
        row = ROWS[self.phase][event]
        if row is None:
            raise impossible(self.phase, event, self.unit.name)
        action, following = row
        if action:
            getattr(self, action)()
        self.phase = following

    # The module's call.

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward`, which is `module`'s, with the unit gathered; whatever it raises, the unit is freed."""
        if torch.compiler.is_compiling() or dynamo_is_active():  # a compiled block is one graph between the hooks
            enter, leave, break_off = self._guarded_enter, self._guarded_leave, self._guarded_break
        else:
            enter, leave, break_off = self.enter, self.leave, self.break_off
        try:
            args, kwargs = enter(args, kwargs)
            return leave(module, forward(*args, **kwargs))
        except BaseException as error:
            break_off(error)
            raise

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, and watch the inputs; returns them, cast and watched."""
        self._depth += 1
        if current_transform() is not None:
            raise refused_transform(self.unit.name)
        root = self.root
        if root is None:
            root = self.find_root(self)
        recomputing = root.in_backward
        if not recomputing and root.pass_top is None:
            root.begin_forward(self)
        self.happens(H.REENTER if recomputing else H.ENTER)
        policy = self.settings.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args = cast_floating(policy.param_dtype, args)
            kwargs = cast_floating(policy.param_dtype, kwargs)
        if not torch.is_grad_enabled():
            self._calls.append(None)
            return args, kwargs
        call = Call(self, self._period)
        self._calls.append(call)
        args, kwargs = call.watch_inputs(args, kwargs)
        if not call.watches:
            on_first_gradient(self.unit, weakref.WeakMethod(self._gradient_arrived))
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Watch the output, and free. Returns the output, cast."""
        call = self._calls.pop()
        unit = self.unit
        output = detached_from_unit(output, unit)
        if call is not None:
            output = call.watch_outputs(output)
            self._watch_what_is_hidden(call)
            self._leads_back = self._leads_back or call.leads_back
        dtype = self.settings.policy.output_dtype
        if dtype is not None:
            output = cast_floating(dtype, output)
        self._depth -= 1
        if self._depth:
            return output
        root = self.root
        assert root is not None
        top = root.pass_top is self
        if len(self._modules) > 1 and not top:
            self._ran.add(id(module))
            self.happens(H.LEAVE if len(self._ran) == len(self._modules) else H.LEAVE_PARTLY)
        else:
            self.happens(H.LEAVE)
        if top and self.phase is Phase.IDLE:
            root.end_forward()
        return output

    def _watch_what_is_hidden(self, call: Call) -> None:
        """Watch what the forward left on modules; keep the unit gathered if what it returned may hide a graph."""
        if self.leftovers is not None and (left := self.leftovers.tensors()):
            call.watch(left)
        if call.hides and not call.leads_back and (call.watches or any([g.trains() for g in self.unit.gradients])):
            self._hides = call.leads_back = True
            on_first_gradient(self.unit, weakref.WeakMethod(self._gradient_arrived))

    def check_given(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `refuse_views`."""
        refuse_views(tensors, self.unit)

    def break_off(self, error: BaseException) -> None:
        """The forward raised, or what comes before or after it: that is what the user sees, whatever happens here."""
        self._depth = max(self._depth - 1, 0)
        del self._calls[self._depth :]
        root = self.root
        if self._depth or root is None:
            return
        try:
            self.happens(H.BROKEN)
            if root.pass_top is self:
                root.break_forward()
        except Exception as second:
            error.add_note(f"Unit {self.unit.name or '(root)'!r} could not be put back after this: {second!r}")

    _guarded_enter = torch.compiler.disable(enter)
    _guarded_leave = torch.compiler.disable(leave)
    _guarded_break = torch.compiler.disable(break_off)

    # Actions of the table: forward.

    def open_forward(self) -> None:
        """Gather for a forward, and prefetch what follows."""
        root, unit = self.root, self.unit
        assert root is not None
        if root.first_pass is not None:
            root.compare(self)
        with_grad = root.pass_grad
        if unit.moving or (unit.state is not State.SHARDED and unit.changed_since_gather()):
            unit.moving = True  # by the model's own code, since the pass began
            unit.reshard()
            unit.refresh()
        if unit.state is not State.GATHERED:
            if unit.state is State.SHARDED:
                unit.issue_gather(self.settings.comm)
            unit.finish_gather(keep=with_grad)
        if (assigned := unit.show_unsharded()) is not None:
            raise unit.assigned_error(assigned)
        self._period = Period(self.index, root.trace if torch.is_grad_enabled() else None)
        self._leads_back = self._hides = False
        if self._period.trace is not None:
            self._period.trace.entered(self._period)
        prefetch = self.settings.prefetch
        upcoming = root.forward_order.visit(self.index, prefetch.forward)
        if prefetch.forward_units is not None:
            upcoming = tuple(runner.index for runner in prefetch.forward_units)
        if upcoming:
            root.prefetch(upcoming, backward=False)

    def close_forward(self) -> None:
        """Show the sharded parameters, and free unless they are to stay."""
        self._ran.clear()
        unit, root = self.unit, self.root
        if root is not None and (written := root.written(unit)):
            self.kept = False
            raise unit.written_error(written)
        assigned = unit.show_sharded()
        if self._period.trace is not None:
            self._period.trace.left(self._period, self._leads_back)
        if unit.state is State.GATHERED and (assigned or root is None or self.reshards(root.pass_grad)):
            unit.free()
            self.kept = False
        if assigned is not None:
            raise unit.assigned_error(assigned)

    def break_forward(self) -> None:
        """After an exception: as `close_forward`, whatever was to stay."""
        self._ran.clear()
        self._calls.clear()
        self.unit.show_sharded()
        if self.unit.state is not State.SHARDED and not self.kept:
            self.unit.free()

    def settle(self) -> None:
        """The pass is over: what was prefetched in vain, or is not to stay, is freed."""
        unit, root = self.unit, self.root
        if unit.state is State.SHARDED or self.kept or root is None:
            return
        if unit.state is State.GATHERING or self.reshards(root.pass_grad):
            unit.reshard()

    def reshards(self, with_grad: bool) -> bool:
        """Whether the unit is freed after a forward. The root is not, unless no backward will come."""
        if self._hides:
            return False
        if self.settings.reshard_after_forward is None:
            return not self.is_top or not with_grad
        return self.settings.reshard_after_forward

    # Recomputation (activation checkpointing).

    def open_recompute(self) -> None:
        """Gather for a forward within a backward, and prefetch by the backward's order."""
        root = self.root
        assert root is not None
        self._period = Period(self.index)
        self._gather_and_show()
        upcoming = root.backward_order.visit(self.index, self.settings.prefetch.forward)
        if upcoming:
            root.prefetch(upcoming, backward=True)

    def close_recompute(self) -> None:
        """The backward of the unit that was recomputed last comes next; one before it is not to stay.

        A unit around this one may have been that one: it runs again now, and is not to be freed.
        """
        root = self.root
        assert root is not None
        previous, root.recomputed = root.recomputed, self
        if previous is not None and previous is not self:
            previous.happens(H.OVERTAKEN)

    # Backward.

    def version(self) -> int:
        """See `Unit.version`."""
        return self.unit.version()

    def before_backward(self, call: Call) -> None:
        """An output of a call received its gradient."""
        root, period = self.root, call.period
        if root is not None and period.trace is not None:
            root = period.trace.root()
            root = root.reclaimed(self) if root is not None else None
        if root is None:
            raise PhaseError(
                "A backward reached a unit whose root is gone.",
                parameter=", ".join(member.name for member in self.unit.members),
                remedy="keep the root module until the backwards of its forwards are done",
            )
        if not root.in_backward:
            root.begin_backward()
        if call.version != self.unit.version():
            root.reducer.changed(self)
        if period.opened and self.phase is Phase.BACKWARD:  # another output, or another call, of what runs already
            return
        period.opened = True
        root.reach(period, True)
        self.happens(H.OUTPUT_GRAD)

    def open_backward(self) -> None:
        """Gather for the backward, and prefetch what follows."""
        root = self.root
        assert root is not None
        for bucket in self.unit.buckets:
            bucket.follow_requires_grad()  # which may have been off and on again since the forward
        prefetch = self.settings.prefetch
        if self.settings.unshard_in_backward:
            self._gather_and_show()
        root.reducer.deliver_completed()
        learned = root.backward_order.visit(self.index, prefetch.backward)
        upcoming = root.upcoming(prefetch.backward) or learned
        if prefetch.backward_units is not None:
            upcoming = tuple(runner.index for runner in prefetch.backward_units)
        if prefetch.late:
            self._late = upcoming
        elif upcoming:
            root.prefetch(upcoming, backward=True)

    def _gather_and_show(self) -> None:
        unit = self.unit
        if unit.state is not State.GATHERED:
            if unit.state is State.SHARDED:
                unit.issue_gather(self.settings.comm)
                if self.root is not None:
                    self.root.reducer.note_gather(self.index)
            unit.finish_gather()
        unit.show_unsharded()

    def after_backward(self, period: Period) -> None:
        """All parameters of a call have their gradients."""
        root = self.root
        if root is None or period.calls > 0 or not root.in_backward:
            return
        if self.phase is Phase.BACKWARD:
            root.reach(period, False)
        # With create_graph the parameters are needed again, by the second backward.
        self.happens(H.INPUT_GRAD_KEPT if torch.is_grad_enabled() else H.INPUT_GRAD)

    def close_backward(self) -> None:
        """Free, and reduce or set aside the gradients, unless more calls of this unit will add to them."""
        self.release()
        root = self.root
        assert root is not None
        root.reducer.close(self, root.comes_again(self.index))

    def release(self, prefetches: bool = True) -> None:
        """Show the sharded parameters and free the unit, unless it is to stay; then prefetch what was put off."""
        unit = self.unit
        unit.show_sharded()
        self._hides = False
        if self.settings.reshard_after_backward:
            unit.drop_kept()
            self.kept = False
            if unit.state is not State.SHARDED:
                unit.free()
        else:
            self.kept = True
        late, self._late = self._late, ()
        if late and prefetches and self.root is not None:
            self.root.prefetch(late, backward=True)

    def finish(self) -> None:
        """The backward is over: this unit's gradients are complete, whatever was seen of its calls."""
        if self.unit.state is not State.SHARDED and (self.phase is not Phase.IDLE or not self._stays()):
            self.release(prefetches=False)

    def hide(self) -> None:
        """Show the sharded parameters; the unit stays gathered for the next backward through the graph that is kept."""
        self.unit.show_sharded()

    def _stays(self) -> bool:
        """Whether a unit that this backward did not use is gathered on purpose."""
        return self.kept and self.unit.state is State.GATHERED

    # Calls without an input that needs a gradient (the first layer's), of which maybe no output is seen either.

    def _gradient_arrived(self) -> None:
        root = self.root
        if root is not None and not root.in_backward:
            root.begin_backward()

    def reset(self) -> None:
        """After an exception: as at the beginning of a step."""
        self.phase = Phase.IDLE  # whatever the unit raises
        self.kept = self._leads_back = self._hides = False
        self._ran.clear()
        self._depth = 0
        self._calls.clear()
        self._late = ()
        self.unit.reset()
