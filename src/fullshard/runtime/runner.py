"""The actions of the table of phases (`phases.py`); `step.py` says when they run, and handles the usual case itself.

The four moments of a step are here again for everything unusual: a first pass, which ranks compare, units that stay
gathered, recomputation, exceptions, and user calls.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..agreement import arrive
from ..shard import State, Unit, refuse_meta, refuse_unready, settle
from ..text import plain_class
from ..watcher import GATHER, REGATHER
from .call import Forward
from .inputs import inputs_of
from .kept_graph import keep_from, keep_until, stays
from .messages import (
    copied_from_a_module_that_is_gone,
    not_while_it_runs,
    prefetches_another_model,
    root_is_gone,
)
from .outputs import FirstGradient, Leftovers
from .phases import Happening, Phase, row
from .root import Root
from .trace import Period
from .unit_settings import UnitSettings
from .usual import plan_usual_step

H = Happening
SHARDED, GATHERING, GATHERED = State
_OF_TENSOR = attrgetter("shape", "dtype")
_UNLIKE: Any = math.nan  # unequal to itself


class Runner:
    """Runs one unit. Owns no tensors.

    Args:
        unit: the unit to run.
        modules: the modules whose forwards are the unit's; usually one. Held weakly.
        settings: the user's settings; replaced as a whole.
        find_root: creates the root when this unit is run first.

    Attributes:
        phase: see `phases.py`.
        root: the context of all units under one root; None until the first forward.
        is_top: whether this is the root's own unit. A plain flag, as Dynamo cannot guard that two objects differ.
        index: index of this unit in the root.
        kept: whether the user called `unshard()`, or asked not to reshard after backward.
        is_whole: whether the unit is a single module; if not, the forwards of several modules together are one.
        held: number of `keep_gathered` blocks that the unit is in.
        forwards: the running forwards of this unit's modules and methods, innermost last.
        period: the period that began when the unit was last opened for a forward.
        leftovers: tensors that forwards leave on the unit's modules; None until there is a root.
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
        self.is_whole = len(self._modules) == 1
        unit.name = f"({plain_class(modules[0]).__name__})"
        if unit.buckets:
            arrive(unit.buckets[0].axes)
        self.root: Root | None = None
        self.is_top = False
        self.index = -1
        self.phase = Phase.IDLE
        self.kept = False
        self.held = 0
        self.leftovers: Leftovers | None = None
        self.post_optim_event: torch.Event | None = None  # the next pass waits for it once
        self.forwards: list[Forward] = []
        self.period = Period()
        self._ran: set[int] = set()  # ids of modules that ran since the unit was opened, if it has several
        self._first_gradient: FirstGradient | None = None
        self._late = False  # whether the prefetch waits until this unit is freed

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward through the unit's root is running."""
        root = self.root
        return root is not None and (root.pass_top is not None or root.in_backward)

    def rooted(self) -> Root:
        """The root above this unit; if there is none yet, this unit becomes one. Collective then.

        Raises:
            PhaseError: the unit's modules are gone, and a shallow copy of one is called.
        """
        if self.root is not None:
            return self.root
        if not self.modules:
            raise copied_from_a_module_that_is_gone(self.unit.name)
        return self.find_root(self)

    def recover_if_broken(self) -> None:
        """See `Root.recover_if_broken`; does nothing while there is no root."""
        if self.root is not None:
            self.root.recover_if_broken()

    def happens(self, happening: Happening) -> None:
        """Run the table's action, and enter the next phase."""
        action, following = ROWS[self.phase][happening]
        if action is not None:
            action(self)
        self.phase = following

    # The moments: forward.

    def before_forward(self, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Open the unit for the forward, or a method, of one of its modules; a pass may begin with it."""
        root = self.root
        if root is None:
            root = self.rooted()
        recomputing = root.backward is not None and root.in_backward
        if not recomputing and root.pass_top is None:
            self.begin_pass(root, args, kwargs)
        self.forwards.append(forward)
        self.happens(H.REENTER if recomputing else H.ENTER)

    def begin_pass(self, root: Root, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass by a call of this unit's module, with these arguments. `root`: the unit's."""
        root.begin_forward(self)
        if self.is_top and root.pass_grad:
            try:
                called = [*map(_OF_TENSOR, [*args, *kwargs.values()]), *kwargs]
            except Exception:  # an argument is not a plain tensor: its values may change
                called = _UNLIKE
            if called != root.called:
                root.called = called
                root.inputs = inputs_of(args, kwargs, self.settings.axes.device.type)

    def after_forward(self, module: nn.Module) -> None:
        """Close the unit after its outermost running forward."""
        root: Any = self.root
        top = root.pass_top is self
        self.happens(H.LEAVE if self.is_whole or top else self.left_partly(module))
        if top and self.phase is Phase.IDLE:
            root.end_forward()

    def watch_outputs(self, forward: Forward, output: Any) -> None:
        """Watch for gradients of the tensors that a forward returns or leaves on the unit's modules."""
        forward.watch_outputs(self.unit, output)
        leftovers = self.leftovers
        if leftovers is not None and (left := leftovers.tensors()):
            forward.watch(left)
        if forward.hides:
            self.keep_what_is_hidden(forward)
        if forward.leads_back:
            forward.call.period.leads_back = True

    def open_forward(self) -> None:
        """Gather for a forward, and prefetch the next units."""
        root, unit, index = self.root, self.unit, self.index
        assert root is not None
        if root.guide.active:
            unit.moving |= root.guide.enter(index)
        if root.ahead:
            root.ahead.pop(index, None)
        if unit.moving or (unit.state is not SHARDED and unit.version() != unit.gathered_version):
            unit.moving, unit.usual = True, None  # changed by the model's own code since the pass began
            unit.reshard()
            unit.refresh()
        if unit.state is not GATHERED:
            if unit.state is SHARDED:
                if root.ahead:
                    root.come_to(index)
                root.position.issue(GATHER, index)
                unit.issue_gather(self.settings.comm)
            unit.finish_gather(root.pass_grad)
        if (assigned := unit.showing.show_unsharded()) is not None:
            raise unit.assigned_error(assigned)
        trace = root.traces.current if torch.is_grad_enabled() else None
        self.period = period = Period.of(index, trace)
        if trace is not None:
            trace.entered(period)
        prefetch = self.settings.prefetch
        if prefetch.forward_units is not None:
            root.prefetch_chosen(self._chosen("forward_units", prefetch.forward_units))
        else:
            root.prefetch(prefetch.forward)

    def close_forward(self) -> None:
        """Show the sharded parameters, and free the unit unless it stays gathered."""
        if self._ran:
            self._ran.clear()
        unit, root, period = self.unit, self.root, self.period
        written = unit.written()
        if root is not None and root.guide.active:
            written += root.guide.written(self.index, period.leads_back)
        if written:
            self.kept = False
            unit.gathered_version = -1  # if it stays gathered: its values are not the shards'
            raise unit.written_error(written)
        if unit.usual is None and unit.state is GATHERED:
            plan_usual_step(self)
        assigned = unit.showing.show_sharded()
        if period.trace is not None:
            if period.leads_back:
                period.trace.steps.append((period, True))
            else:
                period.trace.left(period, root is not None and root.guide.goes_back(self.index))
        if unit.state is GATHERED and (assigned or root is None or self.reshards(root.pass_grad)):
            unit.free()
            self.kept = False
        if assigned is not None:
            raise unit.assigned_error(assigned)

    def break_forward(self) -> None:
        """Like `close_forward`, after an exception. It may stay gathered here too: other ranks may not have raised."""
        self._ran.clear()
        self.forwards.clear()
        self.unit.showing.show_sharded()
        if self.unit.state is GATHERED and (self.root is None or self.reshards(self.root.pass_grad)):
            self.unit.free()
            self.kept = False

    def settle(self) -> None:
        """Free the unit at the end of a pass if it was prefetched in vain, or does not stay gathered."""
        unit, root = self.unit, self.root
        if unit.state is SHARDED or self.kept or root is None:
            return
        if unit.state is GATHERING or self.reshards(root.pass_grad):
            unit.reshard()

    def reshards(self, with_grad: bool) -> bool:
        """Whether the unit is freed after a forward."""
        return not self.period.hides and not self.held and self.reshards_as_set(with_grad)

    def reshards_as_set(self, with_grad: bool) -> bool:
        """The setting `reshard_after_forward`: by default the root is not freed, unless no backward will follow."""
        chosen = self.settings.reshard_after_forward
        return not (self.is_top and with_grad) if chosen is None else chosen

    # Recomputation (activation checkpointing).

    def open_recompute(self) -> None:
        """Gather for a forward within a backward, and prefetch in the backward's order."""
        root = self.root
        assert root is not None
        self.period = Period.of(self.index)
        self._gather_and_show(GATHER)
        root.prefetch_back(self.settings.prefetch.forward)

    def close_recompute(self) -> None:
        """Make this the last recomputed unit, whose backward comes next; the previous one does not stay gathered.

        The previous one may be a unit around this one that is running again: it is not freed.
        """
        root = self.root
        assert root is not None
        previous, root.recomputed = root.recomputed, self
        if previous is not None and previous is not self:
            previous.happens(H.OVERTAKEN)

    # Backward.

    def before_backward(self, call: Any, gradient: Any = None) -> None:
        """Begin the backward of a `Call`: one of its outputs got its gradient, if it is known which."""
        root, period = self.root, call.period
        trace = period.trace
        if trace is not None and trace.root() is not root:
            root = trace.root()
            root = root.reclaimed(self) if root is not None else None
        if root is None:
            raise root_is_gone([member.name for member in self.unit.members])
        if root.backward is None or root.backward.alive() is None:
            root.begin_backward()
        if torch.is_grad_enabled() and isinstance(gradient, torch.Tensor) and gradient.requires_grad:
            keep_from(call, root.backward, gradient)
        if call.version != self.unit.version():
            root.reducer.changed(self)
        else:
            for bucket in self.unit.counting:
                if bucket.form.reassigned(bucket.members, bucket.shard):
                    root.reducer.changed(self)
        if (
            period.opened and self.phase is Phase.BACKWARD
        ):  # a second output, or a second call, of a backward that is running
            return
        period.opened = True
        if passed := root.traces.back_to(period, True):
            root.pass_back_over(passed)
        action, following = ROWS[self.phase][H.OUTPUT_GRAD]
        if action is not None:
            action(self)
        self.phase = following

    def open_backward(self) -> None:
        """Gather for the backward, and prefetch the next units."""
        root = self.root
        assert root is not None
        settings = self.settings
        prefetch = settings.prefetch
        if settings.unshard_in_backward:
            self._gather_and_show(REGATHER)
        if prefetch.late:
            self._late = True
        else:
            self._prefetch_back()

    def _prefetch_back(self) -> None:
        root, prefetch = self.root, self.settings.prefetch
        assert root is not None
        if prefetch.backward_units is not None:
            root.prefetch_back(0, self._chosen("backward_units", prefetch.backward_units))
        else:
            root.prefetch_back(prefetch.backward)

    def _chosen(self, setting: str, chosen: tuple[Runner, ...]) -> tuple[int, ...]:
        """Indices of the units that the user chose to prefetch; units of other models are dropped with a warning."""
        ours = tuple([runner for runner in chosen if runner.root is self.root])
        if len(ours) < len(chosen):
            foreign = [runner.unit.name for runner in chosen if runner.root is not self.root]
            self.set(**{f"prefetch_{setting}": ours})
            warnings.warn(prefetches_another_model(self.unit.name, foreign), stacklevel=2)
        return tuple([runner.index for runner in ours])

    def _gather_and_show(self, wish: int) -> None:
        """Gather if needed, and show the unsharded parameters; `wish` is the verb that `SharedOrder` announces."""
        unit, root = self.unit, self.root
        if unit.state is not GATHERED:
            in_step = None if root is None else root.guide.in_step
            if unit.state is SHARDED:
                if root is not None:
                    if root.ahead:
                        root.come_to(self.index)
                    if in_step is not None:
                        in_step.come_to(wish, self.index)
                    root.position.issue(REGATHER, self.index)
                unit.issue_gather(self.settings.comm)
            unit.finish_gather()
            if in_step is not None:
                unit.drop_kept()  # like ranks that only take part: all ranks must gather from the same source next
        unit.showing.show_unsharded()

    def take_part(self) -> None:
        """Gather along with other ranks; then free the unit, unless it was gathered before or is held."""
        unit, root = self.unit, self.root
        assert root is not None
        was_gathered = unit.state is not SHARDED
        if was_gathered:
            unit.free()
        root.position.issue(REGATHER, self.index)
        unit.issue_gather(self.settings.comm)
        unit.finish_gather()
        unit.drop_kept()
        if not was_gathered and not self.held:
            unit.free()

    def after_backward(self, call: Any, gradient: torch.Tensor | None) -> None:
        """End the backward of a `Call`: a watched input got its gradient, None if nothing that used it has one."""
        if call.hands_on and not call.period.opened:
            self.before_backward(call)
        if gradient is not None and gradient.requires_grad:
            # create_graph: differentiating this gradient needs the parameters first
            keep_until(call, None if self.root is None else self.root.backward, gradient)
        self.finish_call(call)

    def finish_call(self, call: Any) -> None:
        """End a `Call` whose parameters all have their gradients, and the unit's backward with its last call."""
        root, period = self.root, call.period
        if not call.done:
            call.done = True
            period.calls -= 1
        if period.calls > 0 or root is None or root.backward is None or root.backward.alive() is None:
            return
        if stays(period, root.backward):
            return
        if self.phase is Phase.BACKWARD and (passed := root.traces.back_to(period, False)):
            root.pass_back_over(passed)
        # With create_graph the second backward needs the parameters again.
        action, following = ROWS[self.phase][H.INPUT_GRAD_KEPT if torch.is_grad_enabled() else H.INPUT_GRAD]
        if action is not None:
            action(self)
        self.phase = following

    def close_backward(self) -> None:
        """Free the unit, and reduce or set aside its gradients, unless more calls will add to them."""
        self.release()
        root = self.root
        assert root is not None
        usual = self.unit.usual
        root.reducer.close(self, usual and usual.reduction, bool(root.traces.ahead.get(self.index)))

    def release(self, prefetches: bool = True) -> None:
        """Show the sharded parameters, free the unit unless it stays gathered, then do a delayed prefetch."""
        unit, root = self.unit, self.root
        unit.showing.show_sharded()
        self.period.hides = False
        # A gather that nobody waited for was prefetched in vain, even if units stay gathered.
        frees = unit.state is GATHERING
        if not self.held and not frees:  # with a shared order, a unit must stay gathered on all ranks or on none
            frees = self.settings.reshard_after_backward or (root is not None and root.guide.in_step is not None)
        if frees:
            if unit.kept_axis is not None:
                unit.drop_kept()
            self.kept = False
            if unit.state is not SHARDED:
                unit.free()
        else:
            self.kept = True
        if self._late:
            self._late = False
            if prefetches and self.root is not None:
                self._prefetch_back()

    def finish(self) -> None:
        """Release the unit at the end of a backward: its gradients are complete, whichever of its calls were seen."""
        if self.unit.state is not SHARDED and (self.phase is not Phase.IDLE or not self._stays()):
            self.release(prefetches=False)

    def hide(self) -> None:
        """Show the sharded parameters; the unit stays gathered for the next backward through the kept graph."""
        self.unit.showing.show_sharded()

    def _stays(self) -> bool:
        """Whether a unit that this backward did not use is gathered intentionally."""
        return self.kept and self.unit.state is GATHERED

    # Calls with no differentiable input (the first layer's), and possibly no visible output.

    def _gradient_arrived(self) -> None:
        root = self.root
        if root is not None and not root.in_backward:
            root.begin_backward()

    # Hidden outputs, and units of several modules.

    def watch_parameters(self) -> None:
        """Detect a backward by the gradients of the unit's parameters, where no input or output can."""
        if self._first_gradient is None:
            self._first_gradient = FirstGradient(self._gradient_arrived)
        self._first_gradient.expect(self.unit)

    def keep_what_is_hidden(self, forward: Forward) -> None:
        """Keep the unit gathered if the output of a forward may hide a graph."""
        if (
            not forward.leads_back
            and forward.call is not None
            and (forward.watches or any([bucket.trains for bucket in self.unit.buckets]))
        ):
            forward.call.period.hides = forward.leads_back = True
            self.watch_parameters()

    def left_partly(self, module: nn.Module) -> Happening:
        """Note that the outermost forward of one of several modules ended; `LEAVE` if all have run."""
        self._ran.add(id(module))
        return H.LEAVE if len(self._ran) == len(self._modules) else H.LEAVE_PARTLY

    # User calls.

    def unshard(self) -> None:
        """Start gathering, if the unit is sharded, on the user's behalf."""
        self.happens(H.UNSHARD)

    def gather_for_user(self) -> None:
        """See `unshard`."""
        unit = self.unit
        self.recover_if_broken()
        if unit.state is not SHARDED and unit.changed_since_gather():
            unit.reshard()
        if unit.state is SHARDED:
            unit.refresh()
            refuse_meta([unit])
            refuse_unready([unit])
            root, alone = self.root, self.root is None or self.root.pass_top is None
            if root is not None:
                (root.position.tell if alone else root.position.issue)(GATHER, self.index)
            unit.issue_gather(self.settings.comm, apart=alone)
            unit.touched.seen = unit.touched.count
        if self.root is not None:
            self.root.ahead.pop(self.index, None)  # from now on the user decides when it is freed
        self.kept = True

    def wait_unshard(self) -> None:
        """Finish what `unshard` started, and show the unsharded parameters."""
        if self.unit.state is GATHERING:
            self.unit.finish_gather()
            settle([bucket.home for bucket in self.unit.buckets])
        if self.unit.state is GATHERED:
            self.unit.showing.show_unsharded()

    def reshard(self) -> None:
        """Free the unit and show the sharded parameters."""
        self.happens(H.RESHARD)

    def free_for_user(self) -> None:
        """See `reshard`."""
        self.kept = False
        self._ran.clear()
        written = self.unit.written()
        self.unit.drop_kept()
        self.unit.reshard()
        settle([bucket.home for bucket in self.unit.buckets])
        if written:
            raise self.unit.written_error(written)

    def before_pass(self) -> None:
        """Wait for the post-optimizer event before a pass that begins at this unit."""
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()

    def set(self, **changes: Any) -> None:
        """Change settings; fields of `reduce` and `prefetch` are named `reduce_x` and `prefetch_x`."""
        if "comm" in changes or "reshard_after_forward" in changes:
            self.unit.usual = None
        self.settings = self.settings.with_changes(changes)

    def reset(self) -> None:
        """Reset to the beginning of a step, after an exception."""
        self.phase = Phase.IDLE  # even if the unit raises below
        self.kept = self.period.leads_back = self.period.hides = False
        self._ran.clear()
        self.forwards.clear()
        self._late = False
        self.unit.reset()


def _row(phase: Phase, happening: Happening) -> tuple[Callable[[Runner], object] | None, Phase]:
    entry = row(phase, happening)
    if entry is not None:
        return (getattr(Runner, entry[0]) if entry[0] else None), entry[1]

    def refuse(runner: Runner) -> None:
        asked = happening in (H.UNSHARD, H.RESHARD)
        assert asked, f"unit {runner.unit.name!r} met {happening.name} in {phase.name}: do threads share it?"
        raise not_while_it_runs(phase.name, happening.name, runner.unit.name)

    return refuse, phase


ROWS = [[_row(phase, happening) for happening in Happening] for phase in Phase]
"""`phases.row` by phase and happening, with methods of `Runner` in place of their names; refused happenings raise."""
