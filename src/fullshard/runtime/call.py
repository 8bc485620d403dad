"""One forward call of a unit, from its inputs to its backward: the tensors that tell when that begins and ends.

Why an input's gradient tells that the call's backward is over: what is watched is a view made when the call began, so
every node of the call was created later, and autograd runs later nodes first; when the view's node runs, all of the
call's nodes have run. Where that order does not hold (several devices' threads) gradients that come late are reduced at
the end of backward: the result is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..containers import leaves_in, map_tensors
from ..shard import Unit
from ..torch_private.graph_nodes import made_since, next_node
from ..torch_private.tensor_hooks import hooks_of, on_gradient, put_first
from .outputs import PLAIN, tensors_behind
from .trace import Period

Input = tuple[torch.Tensor, Any, int, Any, Any]
"""A watched input: our view of it, the view's node and version; what made the input, and hooks on its gradient."""


class Watcher(Protocol):
    """What is told of calls: a `Runner`."""

    unit: Unit

    def before_backward(self, call: Call) -> None:
        """An output of a call got its gradient."""

    def after_backward(self, period: Period) -> None:
        """A watched input of a call got its gradient."""

    def check_given(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise if one of these tensors, which a forward gives away, will be no more when the unit is freed."""


class Call:
    """One forward call whose backward is still to come. Held by the autograd graph alone: dies with it.

    Attributes:
        period: of the unit, in which it was called.
        version: of the unit when the call began.
        watches: whether an input tells when the call's backward is over.
        leads_back: whether an output needs a gradient, so that a backward may come.
        hides: whether an output may hold tensors where nobody sees them.
    """

    __slots__ = ("_first_node", "_inputs", "done", "hides", "leads_back", "period", "runner", "version", "watches")

    def __init__(self, runner: Watcher, period: Period) -> None:
        self.runner, self.period = runner, period
        self.done = self.watches = self.leads_back = self.hides = False
        self.version = runner.unit.version()
        self._inputs: list[Input] = []
        self._first_node = next_node()
        period.calls += 1

    def __del__(self) -> None:
        if not self.done:
            self.period.calls -= 1

    def watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace each input that needs a gradient by a view of it, and be told when the view gets its gradient."""
        if len(args) == 1 and type(args[0]) is torch.Tensor:  # the common case, without walking
            args = (self._watch(args[0]),)
        else:
            args = map_tensors(self._watch, args)
        if kwargs:
            kwargs = map_tensors(self._watch, kwargs)
        return args, kwargs

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        self.watches = True
        view = tensor.view_as(tensor)
        self._inputs.append((view, view.grad_fn, view._version, tensor.grad_fn, hooks_of(tensor)))
        on_gradient(view, self.after_backward)
        return view

    def watch_outputs(self, output: Any) -> Any:
        """Be told when an output gets its gradient. Returns the output; inputs in it are replaced by views of them.

        Without that an input that is handed on would tell that the backward is over before it tells that it begins.
        """
        inputs, self._inputs = self._inputs, []
        if inputs:
            self._watch_producers(inputs)
        if type(output) is torch.Tensor:
            return self._watch_output(output, inputs)
        leaves = list(leaves_in(output))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any([tensor is one[0] for tensor in tensors for one in inputs]):
            output = map_tensors(lambda one: self._watch_output(one, inputs), output)
        else:
            for tensor in tensors:
                self._watch_output(tensor, ())
        if len(tensors) != len(leaves):
            self._watch_objects([leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))], inputs)
        return output

    def _watch_objects(self, objects: Sequence[Any], inputs: Sequence[Input]) -> None:
        """Watch what this call made and put into objects; those are left as they are, inputs in them unwatched."""
        for one in objects:
            tensors, closed = tensors_behind(one)
            self.runner.check_given(tensors)
            self.hides = self.hides or closed
            self.watch([tensor for tensor in tensors if not any([tensor is entry[0] for entry in inputs])])

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Be told when one of these gets its gradient, of which only some were made by this call."""
        for tensor in tensors:
            if made_since(tensor, self._first_node):
                self._watch_output(tensor, ())

    def _watch_output(self, tensor: torch.Tensor, inputs: Sequence[Input]) -> torch.Tensor:
        if tensor.requires_grad:
            self.leads_back = True
            if any([tensor is one[0] for one in inputs]):
                tensor = tensor.view_as(tensor)
            on_gradient(tensor, self.before_backward)
        return tensor

    def _watch_producers(self, inputs: list[Input]) -> None:
        """An input that the call changed in place got another history, in which our view does not occur.

        What made the input is still there: when it is about to run, all that used the input has run. If that was a unit
        its hooks are there already, and ours goes before them: this call's backward ends before that unit's begins.
        """
        for view, node, version, producer, hooks in inputs:
            if view._version != version and view.grad_fn is not node and producer is not None:
                if hooks is not None:
                    put_first(hooks, self._producer_runs)
                else:
                    producer.register_prehook(self._producer_runs)

    def _producer_runs(self, gradients: Any) -> None:
        self.finish()

    def before_backward(self, gradient: torch.Tensor) -> None:
        """An output got its gradient."""
        self.runner.before_backward(self)

    def after_backward(self, gradient: torch.Tensor) -> None:
        """A watched input got its gradient."""
        if gradient.requires_grad:  # create_graph: whoever differentiates this gradient needs the parameters first
            on_gradient(gradient, self.before_backward)
        self.finish()

    def finish(self) -> None:
        """All parameters of the call have their gradients."""
        if not self.done:
            self.done = True
            self.period.calls -= 1
        self.runner.after_backward(self.period)
