"""A unit's step: four moments. The usual case is here; `runner.py` and the table of phases handle everything else.

before forward   gather (or find it prefetched), show the unsharded parameters, prefetch the next unit; watch the inputs
after forward    watch the outputs; show the sharded parameters, free
before backward  an output got its gradient: gather, show, prefetch the next unit of the backward
after backward   a watched input got its gradient, so all parameters of this call have theirs: show, free, reduce
end of backward  reduce and free whatever was missed (no input needs a gradient, outputs unused) (`Root`)

A moment is usual if the pass is (`Root.usual_forward`), the unit is of the plain kind and untouched (`Unit.usual`), and
its settings are plain (`UnitSettings.usual`). It leaves the same state as the general path, so each moment may take
either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import call, is_, sub
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled, nn, strided
from torch.compiler import is_compiling

from ..agreement import NOTHING, VERB
from ..containers import borrowed_from, cast_floating, drain
from ..shard import State, Unit
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.graph_nodes import next_node, number_of
from ..torch_private.local_tensor import is_view, read_version
from ..torch_private.tensor_hooks import join, on_gradient
from ..torch_private.transforms import current_transform
from ..watcher import GATHER, RANK, REGATHER, VERB_BITS
from .call import ONE_TENSOR, Forward
from .hints import add_hint
from .kept_graph import Graph
from .messages import refused_transform
from .outputs import DICT, EMPTY, detached_from_unit
from .phases import Happening, Phase
from .runner import Runner
from .trace import Period
from .usual import AFTER_BACKWARD, AFTER_FORWARD, BEFORE_BACKWARD, BEFORE_FORWARD, UsualStep

if TYPE_CHECKING:
    from .root import Root

IDLE, FORWARD, BACKWARD = Phase.IDLE, Phase.FORWARD, Phase.BACKWARD
SHARDED, GATHERING, GATHERED = State

FORWARD_METHODS_KEY = "_fullshard_forward_methods"
"""Key under which a module keeps its methods that count as forwards, by name."""


def run(
    runner: Runner, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward`, a method of `module`, with the unit gathered; if it raises, the unit is closed."""
    before, after = before_forward, after_forward
    if is_compiling() or dynamo_is_active():  # a compiled block is one graph between the hooks
        before, after = _GUARDED_BEFORE, _GUARDED_AFTER
    depth = len(runner.forwards)
    try:
        args, kwargs = before(runner, args, kwargs)
        return after(runner, module, forward(*args, **kwargs))
    except BaseException as error:
        break_off(runner, depth, error)
        raise


def before_forward(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0912 - on one page
    """Gather, and watch the inputs; return them cast and watched."""
    if current_transform() is not None:
        raise refused_transform(runner.unit.name)
    root: Any = runner.root
    forward, unit, settings = Forward(), runner.unit, runner.settings
    usual, trains = unit.usual, is_grad_enabled()
    if runner.is_top and usual is not None and root.pass_top is root.backward is None:
        usual = begin_pass(runner, root, args, kwargs)
    if (
        usual is not None
        and BEFORE_FORWARD(runner) == (usual if trains else usual.evaluation).before_forward
        and sum(map(read_version, usual.counters), unit.touched.changes) == unit.gathered_version
        and all(map(is_, map(call, usual.read), usual.sharded))
    ):
        index, forward.usual = runner.index, usual
        runner.forwards.append(forward)
        open_unit(unit, usual)
        trace, ahead, depth = root.traces.current, root.ahead, settings.prefetch.forward
        runner.phase, runner.period = FORWARD, (period := Period())
        period.unit, period.trace = index, trace
        if trains:
            trace.steps.append((period, False))
            trace.ahead[index] += 1
        ahead.pop(index, None)
        token = root.position.log.expected
        if len(ahead) < depth and token & VERB == GATHER and gather_ahead(root, token):
            ahead[token >> VERB_BITS] = True
            if runner.is_top:  # the pass begins: nothing else was gathered ahead
                root.prefetch(depth)
        else:
            root.prefetch(depth)
    else:
        runner.before_forward(forward, args, kwargs)
    plain = not kwargs and [*map(type, args)] == ONE_TENSOR
    if not plain:
        forward.borrowed = borrowed_from(args, kwargs)
    if settings.inputs_dtype is not None:
        args = cast_floating(settings.inputs_dtype, args, forward.borrowed)
        kwargs = cast_floating(settings.inputs_dtype, kwargs, forward.borrowed)
    if trains:
        forward.call = watching = Call()
        watching.runner, watching.period, watching.version = runner, runner.period, unit.gathered_version
        runner.period.calls += 1
        if plain and args[0].requires_grad and join(args[0], watching.after_backward):
            forward.watches, forward.first_node = True, next_node()
        else:
            args, kwargs = forward.watch_inputs(args, kwargs)
            if not forward.watches:
                runner.watch_parameters()
    return args, kwargs


def after_forward(runner: Runner, module: nn.Module, output: Any) -> Any:  # noqa: PLR0912 - on one page
    """Watch the output, and free; return the output, cast."""
    forwards, unit, settings = runner.forwards, runner.unit, runner.settings
    forward = forwards[-1]
    borrowed, usual, watching = forward.borrowed, forward.usual, forward.call
    end: Any = usual  # how the forward ends; see `UsualForward`
    plain = borrowed is None and type(output) is Tensor
    if usual is not None and plain and output.layout is strided:
        owned = output.untyped_storage().data_ptr() in map(call, usual.addresses)
    else:
        owned = not plain or unit.owns(output)
    if owned:
        if borrowed is not None:
            borrowed.give_back()
        output = detached_from_unit(output, unit, borrowed)
    if watching is not None:
        node = output.grad_fn if plain and not forward.views else None
        if node is not None and number_of(node) >= forward.first_node:
            on_gradient(output, watching.before_backward)
            if is_view(output):
                forward.watch_base(output)
            watching.period.leads_back = True
            left = runner.leftovers
            if left is not None and (
                left.names or [*map(len, map(getattr, map(call, left.modules), DICT, EMPTY))] != left.sizes
            ):
                forward.watch(left.tensors())
        else:
            runner.watch_outputs(forward, output)
    elif usual is not None:
        end = usual.evaluation
    if settings.outputs_dtype is not None:
        output = cast_floating(settings.outputs_dtype, output, borrowed)
    forwards.pop()
    if (
        usual is not None
        and usual is unit.usual
        and AFTER_FORWARD(runner) == end.after_forward
        and [*map(read_version, usual.watched)] == usual.numbers
        and [*map(sub, map(call, usual.addresses_of), map(call, usual.bases))] == usual.offsets
        and all(map(is_, map(call, usual.read), usual.unsharded))
    ):
        drain(map(call, end.leaves))
        unit.state, unit.gathered, unit.showing.unsharded = end.left
        if watching is not None:
            period: Any = runner.period
            period.trace.steps.append((period, True))
        runner.phase, runner.kept = IDLE, runner.kept and end.stays
        if runner.is_top and (root := runner.root) is not None and root.pass_top is runner:
            root.end_forward()
    elif not forwards:
        runner.after_forward(module)
    return output


def open_unit(unit: Unit, usual: UsualStep) -> None:
    """Finish the gather, which was planned as in `usual`, and show the unsharded parameters."""
    pending, unit.pending = unit.pending, None
    try:
        pending.wait()
        drain(map(call, usual.opens))
    except BaseException:
        unit.free(failed=True)
        raise
    unit.state, unit.showing.unsharded = GATHERED, True


def begin_pass(runner: Runner, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UsualStep | None:
    """Begin a pass with the root's own unit, and start its gather, which no unit could start earlier.

    Returns:
        The unit's `usual` now: it may have changed since the last pass.
    """
    runner.begin_pass(root, args, kwargs)
    usual, token = runner.unit.usual, root.position.log.expected
    if (
        usual is not None
        and BEFORE_FORWARD(runner) == (usual if root.pass_grad else usual.evaluation).before_pass
        and token == GATHER | runner.index << VERB_BITS
    ):
        gather_ahead(root, token)
    return usual


def gather_ahead(root: Root, token: int) -> bool:
    """Start the gather that the log expects next, if its unit takes the usual path and is sharded.

    Args:
        root: the units' root.
        token: the log's expected token, a gather.

    Returns:
        Whether it was started; if not, `Root.prefetch` or `Root.prefetch_back` may start a different one.
    """
    runner = root.units[token >> VERB_BITS]
    unit: Any = runner.unit
    usual, position = unit.usual, root.position
    if usual is None or unit.state is not SHARDED or not runner.settings.usual:
        return False
    log, gather = position.log, usual.gather
    log.expected = next(log.ahead, NOTHING)
    RANK.record(token + next(position.turns))
    unit.gathered = gather
    try:
        *_, unit.pending = map(call, gather.starts)
    except BaseException:
        unit.free(failed=True)
        raise
    unit.state = GATHERING
    unit.gathered_version = sum(map(read_version, usual.counters), unit.touched.changes)
    usual.count()
    return True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def break_off(runner: Runner, depth: int, error: BaseException) -> None:
    """Clean up after the forward, or the code before or after it, raised; the user sees `error` whatever happens here.

    Args:
        runner: the unit's runner.
        depth: number of forwards of the unit's modules that were running around this one.
        error: the exception raised; gets notes.
    """
    root, forwards = runner.root, runner.forwards
    if isinstance(error, RuntimeError):
        add_hint(error, runner)
    if len(forwards) > depth and (borrowed := forwards.pop().borrowed) is not None:
        borrowed.give_back()
    if forwards or root is None:
        return
    try:
        runner.happens(Happening.BROKEN)
        if root.pass_top is runner:
            RANK.catches(error)
            root.break_forward(error)
    except Exception as second:
        error.add_note(f"Unit {runner.unit.name or '(root)'!r} could not be restored after this error: {second!r}")


_GUARDED_BEFORE = torch.compiler.disable(before_forward)
_GUARDED_AFTER = torch.compiler.disable(after_forward)


class Call:
    """A forward call whose backward has not ended. Only the autograd graph holds it, so it dies with the graph.

    Owns no tensor: hooks on the graph's tensors hold the call, and Python's garbage collector cannot see through them.

    Attributes:
        runner: runs the unit.
        period: the unit's period in which it was called.
        version: version of the shards that were gathered when the call began.
        hands_on: whether the call returned a tensor that it did not produce; an input's gradient can then open the
            backward.
        forgets: remove the hooks on tensors that may outlive the graph.
    """

    runner: Runner
    period: Period
    version: int
    done = hands_on = False
    forgets: Sequence[Callable[[], None]] = ()
    graph: Graph | None = None  # left by the last backward with `create_graph`

    def __del__(self) -> None:
        if not self.done:
            self.period.calls -= 1
        for forget in self.forgets:
            forget()

    def before_backward(self, gradient: Tensor) -> None:
        """Open the unit for its backward: an output got its gradient."""
        runner, period = self.runner, self.period
        root: Any = runner.root
        trace: Any = period.trace
        unit = runner.unit
        usual = unit.usual
        if runner.is_top and usual is not None and trace is not None and trace.root() is root and root.backward is None:
            root.begin_backward()
            root.traces.reach(trace)
            usual = unit.usual
        if (
            usual is not None
            and BEFORE_BACKWARD(runner) == usual.before_backward
            and trace is root.traces.reached is not None
            and trace.steps[-1:] == [(period, True)]
            and sum(map(read_version, usual.counters), unit.touched.changes) == self.version
            and [*map(call, usual.pointers)] == usual.places
            and all(map(is_, map(call, usual.read), usual.sharded))
            and root.backward.alive() is not None
        ):
            steps, depth = trace.steps, runner.settings.prefetch.backward
            steps.pop()
            if usual.stays:
                drain(map(call, usual.shows))
                unit.showing.unsharded = True
            else:
                open_unit(unit, usual)
            runner.phase, period.opened = BACKWARD, True
            token = root.position.log.expected
            follows_trace = depth == 1 and len(steps) > 1 and (below := steps[usual.below])[1]
            if not follows_trace or token != REGATHER | below[0].unit << VERB_BITS or not gather_ahead(root, token):
                root.prefetch_back(depth)
        else:
            runner.before_backward(self, gradient)

    def after_backward(self, gradient: Tensor | None) -> None:
        """Close the unit: a watched input got its gradient (None in a reentrant checkpoint where none arrived)."""
        runner, period = self.runner, self.period
        root: Any = runner.root
        trace: Any = period.trace
        unit = runner.unit
        usual = unit.usual
        if (
            usual is not None
            and AFTER_BACKWARD(runner) == usual.after_backward
            and trace is root.traces.reached is not None
            and trace.steps[-1:] == [(period, False)]
            and not self.done
            and all(map(is_, map(call, usual.read), usual.unsharded))
            and root.backward.alive() is not None
        ):
            self.done, period.calls, period.hides = True, 0, False
            trace.steps.pop()
            ahead = trace.ahead[runner.index] = trace.ahead[runner.index] - 1
            drain(map(call, usual.closes))
            unit.state, unit.gathered, unit.showing.unsharded = SHARDED, None, False
            runner.phase, runner.kept = IDLE, False
            root.reducer.close(runner, usual.reduction, ahead > 0)
        else:
            runner.after_backward(self, gradient)

    def producer_runs(self, gradients: object) -> None:
        """End the call: the node that produced an input is about to run, so everything that used the input has run."""
        self.runner.finish_call(self)


def run_method(module: nn.Module, runner: Runner, name: str) -> None:
    """Make a method of a unit's module count as a forward: gather the unit before it, and free it after."""
    method, methods = getattr(module, name), module.__dict__.setdefault(FORWARD_METHODS_KEY, {})
    if name in methods and getattr(method, "__wrapped__", None) is methods[name]:
        return  # it does already

    def forward_method(*args: Any, **kwargs: Any) -> Any:
        return run(runner, module, method, args, kwargs)

    functools.update_wrapper(forward_method, method)  # libraries read its signature
    object.__setattr__(module, name, forward_method)
    methods[name] = method
