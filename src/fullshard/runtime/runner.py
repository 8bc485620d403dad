"""What the table of phases (`phases.py`) has a unit do, whatever happens; `step.py` says when, and does the usual.

Each of the four moments of a step is here once more, for what is not usual: a first pass, which ranks compare, units
that stay gathered, recomputation, exceptions, what users ask for.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..agreement import arrive
from ..shard import State, Unit, refuse_meta, refuse_parked, settle
from ..torch_private.tensor_hooks import on_gradient
from ..watcher import GATHER, REGATHER
from .call import Forward
from .messages import not_while_it_runs, prefetches_another_model, root_is_gone
from .outputs import FirstGradient, Leftovers
from .phases import Happening, Phase, row
from .root import Root
from .settings import UnitSettings
from .trace import Period
from .usual import plan_usual_step

H = Happening
SHARDED, GATHERING, GATHERED = State


class Runner:
    """Runs one unit. Owns no tensors.

    Args:
        unit: what is held.
        modules: the modules whose forwards are this unit's; usually one. Held weakly.
        settings: what the user set; replaced as a whole.
        find_root: makes the root when this unit is run first.

    Attributes:
        phase: see `phases.py`.
        root: the context of all units under one root; None until the first forward.
        is_top: whether this is the root's own unit. Plain: Dynamo does not guard that two objects are not the same.
        index: of this unit in the root.
        kept: whether the user called `unshard()`, or asked not to reshard after backward.
        is_whole: whether it is one module, not several whose forwards make one together.
        held: how many `keep_gathered` blocks the unit is in now.
        forwards: of this unit's modules and methods that run now, innermost last.
        period: since the unit was opened for a forward last.
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
        self.is_whole = len(self._modules) == 1
        if unit.buckets:
            arrive(unit.buckets[0].axes)
        self.root: Root | None = None
        self.is_top = False
        self.index = -1
        self.phase = Phase.IDLE
        self.kept = False
        self.held = 0
        self.leftovers: Leftovers | None = None
        self.post_optim_event: torch.Event | None = None  # the next pass waits for it, once
        self.forwards: list[Forward] = []
        self.period = Period(-1)
        self._ran: set[int] = set()  # ids of modules of a unit of several that ran since it was opened
        self._first_gradient: FirstGradient | None = None
        self._late = False  # whether what comes next is prefetched once this unit is freed

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def happens(self, event: Happening) -> None:
        """Do what the table says, and go to the phase that follows."""
        action, following = ROWS[self.phase][event]
        if action is not None:
            action(self)
        self.phase = following

    # The moments: forward.

    def before_forward(self, forward: Forward) -> None:
        """The forward of a module, or a method of one, is called: a pass may begin with it."""
        root = self.root
        if root is None:
            root = self.find_root(self)
        recomputing = root.backward is not None and root.in_backward
        if not recomputing and root.pass_top is None:
            root.begin_forward(self)
        self.forwards.append(forward)
        self.happens(H.REENTER if recomputing else H.ENTER)

    def after_forward(self, module: nn.Module) -> None:
        """The outermost of the forwards that run is over."""
        root: Any = self.root
        top = root.pass_top is self
        self.happens(H.LEAVE if self.is_whole or top else self.left_partly(module))
        if top and self.phase is Phase.IDLE:
            root.end_forward()

    def watch_outputs(self, forward: Forward, output: Any) -> None:
        """Be told when what a forward gives away, or leaves on the unit's modules, gets its gradient."""
        forward.watch_outputs(self.unit, output)
        leftovers = self.leftovers
        if leftovers is not None and (left := leftovers.tensors()):
            forward.watch(left)
        if forward.hides:
            self.keep_what_is_hidden(forward)
        if forward.leads_back:
            forward.call.period.leads_back = True

    def open_forward(self) -> None:
        """Gather for a forward, and prefetch what follows."""
        root, unit, index = self.root, self.unit, self.index
        assert root is not None
        if root.guide.active:
            unit.moving |= root.guide.enter(index)
        if root.ahead:
            root.ahead.pop(index, None)
        if unit.moving or (unit.state is not SHARDED and unit.version() != unit.gathered_version):
            unit.moving, unit.usual = True, None  # by the model's own code, since the pass began
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
        self.period = period = Period(index, trace)
        if trace is not None:
            trace.entered(period)
        prefetch = self.settings.prefetch
        if prefetch.forward_units is not None:
            root.prefetch_chosen(self._chosen("forward_units", prefetch.forward_units))
        else:
            root.prefetch(prefetch.forward)

    def close_forward(self) -> None:
        """Show the sharded parameters, and free unless they are to stay."""
        if self._ran:
            self._ran.clear()
        unit, root, period = self.unit, self.root, self.period
        written = unit.written()
        if root is not None and root.guide.active:
            written += root.guide.written(self.index, period.leads_back)
        if written:
            self.kept = False
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
        """After an exception: as `close_forward`. What is to stay does: on other ranks nothing may have been raised."""
        self._ran.clear()
        self.forwards.clear()
        self.unit.showing.show_sharded()
        if self.unit.state is GATHERED and (self.root is None or self.reshards(self.root.pass_grad)):
            self.unit.free()
            self.kept = False

    def settle(self) -> None:
        """The pass is over: what was prefetched in vain, or is not to stay, is freed."""
        unit, root = self.unit, self.root
        if unit.state is SHARDED or self.kept or root is None:
            return
        if unit.state is GATHERING or self.reshards(root.pass_grad):
            unit.reshard()

    def reshards(self, with_grad: bool) -> bool:
        """Whether the unit is freed after a forward. The root is not, unless no backward will come."""
        if self.period.hides or self.held:
            return False
        if self.settings.reshard_after_forward is None:
            return not self.is_top or not with_grad
        return self.settings.reshard_after_forward

    # Recomputation (activation checkpointing).

    def open_recompute(self) -> None:
        """Gather for a forward within a backward, and prefetch by the backward's order."""
        root = self.root
        assert root is not None
        self.period = Period(self.index)
        self._gather_and_show(GATHER)
        root.prefetch_back(self.settings.prefetch.forward)

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

    def before_backward(self, call: Any) -> None:
        """An output of a `Call` received its gradient."""
        root, period = self.root, call.period
        trace = period.trace
        if trace is not None and trace.root() is not root:
            root = trace.root()
            root = root.reclaimed(self) if root is not None else None
        if root is None:
            raise root_is_gone([member.name for member in self.unit.members])
        if root.backward is None or root.backward.alive() is None:
            root.begin_backward()
        if call.version != self.unit.version():
            root.reducer.changed(self)
        else:
            for bucket in self.unit.counting:
                if bucket.form.reassigned(bucket.members, bucket.shard):
                    root.reducer.changed(self)
        if period.opened and self.phase is Phase.BACKWARD:  # another output, or another call, of what runs already
            return
        period.opened = True
        if passed := root.traces.back_to(period, True):
            root.pass_back_over(passed)
        action, following = ROWS[self.phase][H.OUTPUT_GRAD]
        if action is not None:
            action(self)
        self.phase = following

    def open_backward(self) -> None:
        """Gather for the backward, and prefetch what follows."""
        root = self.root
        assert root is not None
        settings = self.settings
        prefetch = settings.prefetch
        if settings.unshard_in_backward:
            self._gather_and_show(REGATHER)
        if prefetch.late:
            self._late = True
        elif prefetch.backward_units is None:
            root.prefetch_back(prefetch.backward)
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
        """Indices of the units that the user chose to prefetch; those of other models are left out, with a warning."""
        own = tuple([runner for runner in chosen if runner.root is self.root])
        if len(own) < len(chosen):
            foreign = [runner.unit.name for runner in chosen if runner.root is not self.root]
            self.set(**{f"prefetch_{setting}": own})
            warnings.warn(prefetches_another_model(self.unit.name, foreign), stacklevel=2)
        return tuple([runner.index for runner in own])

    def _gather_and_show(self, wish: int) -> None:
        """Gather, if it has to be; `wish` says what for, see `SharedOrder`."""
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
                unit.drop_kept()  # as who takes part in passing: the next gather is among all ranks, or none
        unit.showing.show_unsharded()

    def take_part(self) -> None:
        """Gather for other ranks; what is gathered stays so, and what is not does not."""
        unit, root = self.unit, self.root
        assert root is not None
        stays = unit.state is not SHARDED
        if stays:
            unit.free()
        root.position.issue(REGATHER, self.index)
        unit.issue_gather(self.settings.comm)
        unit.finish_gather()
        unit.drop_kept()
        if not stays and not self.held:
            unit.free()

    def after_backward(self, call: Any, gradient: torch.Tensor | None) -> None:
        """A watched input of a `Call` got its gradient; None where nothing that used it has one."""
        if call.hands_on and not call.period.opened:
            self.before_backward(call)
        if gradient is not None and gradient.requires_grad:
            # create_graph: whoever differentiates this gradient needs the parameters first
            on_gradient(gradient, call.before_backward)
        self.finish_call(call)

    def finish_call(self, call: Any) -> None:
        """All parameters of a `Call` have their gradients."""
        root, period = self.root, call.period
        if not call.done:
            call.done = True
            period.calls -= 1
        if period.calls > 0 or root is None or root.backward is None or root.backward.alive() is None:
            return
        if self.phase is Phase.BACKWARD and (passed := root.traces.back_to(period, False)):
            root.pass_back_over(passed)
        # With create_graph the parameters are needed again, by the second backward.
        action, following = ROWS[self.phase][H.INPUT_GRAD_KEPT if torch.is_grad_enabled() else H.INPUT_GRAD]
        if action is not None:
            action(self)
        self.phase = following

    def close_backward(self) -> None:
        """Free, and reduce or set aside the gradients, unless more calls of this unit will add to them."""
        self.release()
        root = self.root
        assert root is not None
        root.reducer.close(self, bool(root.traces.ahead.get(self.index)))

    def release(self, prefetches: bool = True) -> None:
        """Show the sharded parameters and free the unit, unless it is to stay; then prefetch what was put off."""
        unit, root = self.unit, self.root
        unit.showing.show_sharded()
        self.period.hides = False
        # A gather that nobody waited for was prefetched in vain, also where units stay gathered.
        frees = unit.state is GATHERING
        if not self.held and not frees:  # in step: what stays has to on all ranks
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
        """The backward is over: this unit's gradients are complete, whatever was seen of its calls."""
        if self.unit.state is not SHARDED and (self.phase is not Phase.IDLE or not self._stays()):
            self.release(prefetches=False)

    def hide(self) -> None:
        """Show the sharded parameters; the unit stays gathered for the next backward through the graph that is kept."""
        self.unit.showing.show_sharded()

    def _stays(self) -> bool:
        """Whether a unit that this backward did not use is gathered on purpose."""
        return self.kept and self.unit.state is GATHERED

    # Calls without an input that needs a gradient (the first layer's), of which maybe no output is seen either.

    def _gradient_arrived(self) -> None:
        root = self.root
        if root is not None and not root.in_backward:
            root.begin_backward()

    # What forwards leave, and when a unit of several modules is left.

    def watch_parameters(self) -> None:
        """Be told of a backward by the gradients of the unit's parameters, where no input or output tells."""
        if self._first_gradient is None:
            self._first_gradient = FirstGradient(self._gradient_arrived)
        self._first_gradient.expect(self.unit)

    def keep_what_is_hidden(self, forward: Forward) -> None:
        """Keep the unit gathered, as what a forward returned may hide a graph."""
        if (
            not forward.leads_back
            and forward.call is not None
            and (forward.watches or any([bucket.trains for bucket in self.unit.buckets]))
        ):
            forward.call.period.hides = forward.leads_back = True
            self.watch_parameters()

    def left_partly(self, module: nn.Module) -> Happening:
        """The outermost forward of a module is over, one of several: whether all have run."""
        self._ran.add(id(module))
        return H.LEAVE if len(self._ran) == len(self._modules) else H.LEAVE_PARTLY

    # What users ask for.

    def unshard(self) -> None:
        """Start gathering (if it is sharded) on the user's behalf."""
        self.happens(H.UNSHARD)

    def gather_for_user(self) -> None:
        """See `unshard`."""
        unit = self.unit
        if self.root is not None:
            self.root.recover_if_broken()
        if unit.state is not SHARDED and unit.changed_since_gather():
            unit.reshard()
        if unit.state is SHARDED:
            unit.refresh()
            refuse_meta([unit])
            refuse_parked([unit])
            root, alone = self.root, self.root is None or self.root.pass_top is None
            if root is not None:
                (root.position.tell if alone else root.position.issue)(GATHER, self.index)
            unit.issue_gather(self.settings.comm, apart=alone)
            unit.touched.seen = unit.touched.count
        if self.root is not None:
            self.root.ahead.pop(self.index, None)  # the user's from now on
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
        """A pass begins at this unit."""
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()

    def set(self, **changes: Any) -> None:
        """Replace settings; those of `reduce` and `prefetch` are named `reduce_x` and `prefetch_x`."""
        if "comm" in changes or "reshard_after_forward" in changes:
            self.unit.usual = None
        self.settings = self.settings.with_changes(changes)

    def reset(self) -> None:
        """After an exception: as at the beginning of a step."""
        self.phase = Phase.IDLE  # whatever the unit raises
        self.kept = self.period.leads_back = self.period.hides = False
        self._ran.clear()
        self.forwards.clear()
        self._late = False
        self.unit.reset()


def _row(phase: Phase, event: Happening) -> tuple[Callable[[Runner], object] | None, Phase]:
    found = row(phase, event)
    if found is not None:
        return (getattr(Runner, found[0]) if found[0] else None), found[1]

    def refuse(runner: Runner) -> None:
        asked = event in (H.UNSHARD, H.RESHARD)
        assert asked, f"unit {runner.unit.name!r} met {event.name} in {phase.name}: do threads share it?"
        raise not_while_it_runs(phase.name, event.name, runner.unit.name)

    return refuse, phase


ROWS = [[_row(phase, event) for event in Happening] for phase in Phase]
"""`phases.row` by number, with `Runner`'s methods in place of their names; what is refused raises."""
