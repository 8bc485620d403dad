"""A forward call of a unit, from inputs to backward: the tensors whose gradients mark the backward's start and end.

Between two units one tensor marks both: the unchanged output of one is the input of the next. When it gets its
gradient, the backward of the next unit has ended and that of the previous unit begins.

An input's gradient marks the end of the call's backward because the watched tensor is a view made when the call began:
every node of the call was created later, and autograd runs later nodes first, so when the view's node runs, all of the
call's nodes have run. Where that order does not hold (threads of several devices), late gradients are reduced at the
end of backward, with the same result.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..containers import Borrowed, leaves_in, map_own, tensors_in
from ..shard import Unit
from ..torch_private.dispatch_modes import view_of
from ..torch_private.graph_nodes import next_node, number_of
from ..torch_private.local_tensor import is_view, view_base
from ..torch_private.tensor_hooks import hooks_of, join, on_gradient, on_gradient_first, put_first
from .outputs import PLAIN, refuse_views, tensors_behind
from .usual import UsualStep

ONE_TENSOR = [torch.Tensor]
"""The types of a call's arguments in the usual case."""

View = tuple[torch.Tensor, Any, int, Any, Any]
"""A watched input: our view, its node and version; the node that produced the input, and its gradient hooks."""


class Forward:
    """A running forward of a unit, and the tensors that belong to it. Ends when the forward returns or raises.

    Attributes:
        borrowed: the mutable containers among its arguments, if any.
        call: tracks the call's backward; None without gradients.
        watches: whether an input marks the end of the call's backward.
        leads_back: whether an output needs a gradient, so that a backward may follow.
        hides: whether an output may hold tensors that cannot be found.
        usual: how the unit was opened, if that was usual.
        first_node: the number of the call's first autograd node.
        views: the watched views of inputs that no other unit watches.
    """

    borrowed: Borrowed | None = None
    call: Any = None  # a `Call`
    usual: UsualStep | None = None
    watches = leads_back = hides = False
    first_node = 0
    views: Sequence[View] = ()

    def watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Watch for an input's gradient: replace the input by a view of it, unless another unit watches it already.

        If all inputs are inside the user's own containers, one is watched in place: its gradient comes later, when
        everything that used it has run.
        """
        args = (self._watch(args[0]),) if [*map(type, args)] == ONE_TENSOR else map_own(self._watch, args)
        if kwargs:
            kwargs = {name: map_own(self._watch, value) for name, value in kwargs.items()}
        if self.borrowed is not None and not self.watches:
            self._watch_in_place([tensor for value in self.borrowed.values for tensor in tensors_in(value)])
        self.first_node = next_node()
        return args, kwargs

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        if join(tensor, self.call.after_backward):
            self.watches = True
            return tensor
        return self._watch_apart(tensor)

    def _watch_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Watch an input that is not another unit's untouched output, through a view passed to the forward."""
        if tensor.is_nested or tensor.layout is not torch.strided:  # these have no views
            self._watch_in_place([tensor])
            return tensor
        view = view_of(tensor)
        self.watches = True
        self.views = [*self.views, (view, view.grad_fn, view._version, tensor.grad_fn, hooks_of(tensor))]
        on_gradient(view, self.call.after_backward)
        return view

    def _watch_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Watch the tensor created last: by the time it gets its gradient, the whole call has run."""
        call = self.call
        results = [tensor for tensor in tensors if tensor.grad_fn is not None]
        if call is None or not results:
            return
        self.watches = True
        reference = weakref.ref(call)  # the tensor may outlive the graph

        def after_backward(gradient: torch.Tensor | None) -> None:
            if (call := reference()) is not None:
                call.after_backward(gradient)

        forget = on_gradient_first(max(results, key=lambda tensor: number_of(tensor.grad_fn)), after_backward)
        call.forgets = [*(call.forgets or ()), forget]

    def watch_outputs(self, unit: Unit, output: Any) -> None:
        """Watch for the gradients of outputs, and of tensors that the call stored in its arguments."""
        if self.views:
            self._watch_producers()
        if type(output) is torch.Tensor:
            if output.requires_grad:
                self._watch_output(output)
        else:
            for leaf in leaves_in(output):
                if isinstance(leaf, torch.Tensor):
                    if leaf.requires_grad:
                        self._watch_output(leaf)
                elif not isinstance(leaf, PLAIN):
                    tensors, closed = tensors_behind(leaf)
                    refuse_views(tensors, unit)
                    self.hides = self.hides or closed
                    self.watch(tensors)
        if self.borrowed is not None:
            for value in self.borrowed.values:
                if value is not output:
                    self.watch(tensors_behind(value)[0])

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Watch for the gradients of the tensors, among these, that this call produced."""
        for tensor in tensors:
            node = tensor.grad_fn
            if node is not None and number_of(node) >= self.first_node:
                self._watch_output(tensor)

    def _watch_output(self, tensor: torch.Tensor) -> None:
        self.leads_back = True
        node, call = tensor.grad_fn, self.call
        if node is not None and number_of(node) >= self.first_node:
            on_gradient(tensor, call.before_backward)
            if is_view(tensor):
                self.watch_base(tensor)
        else:
            call.hands_on = True

    def watch_base(self, view: torch.Tensor) -> None:
        """Also watch the node that produced the base of an output, for when it is about to run.

        A view that is later changed in place gets a new history, starting at its base, which does not contain its hook.
        """
        base = view_base(view)
        node: Any = base.grad_fn if base is not None else None
        if node is not None and number_of(node) >= self.first_node:
            node.register_prehook(self.call.before_backward)

    def _watch_producers(self) -> None:
        """Watch the producers of inputs that the call changed in place: their new history does not contain our view.

        The node that produced such an input is still there: when it is about to run, everything that used the input
        has run. If a unit produced it, that unit's hooks are on it already, and ours goes before them: this call's
        backward ends before that unit's begins.
        """
        for view, node, version, producer, hooks in self.views:
            if view._version != version and view.grad_fn is not node and producer is not None:
                if hooks is not None:
                    put_first(hooks, self.call.producer_runs)
                else:
                    producer.register_prehook(self.call.producer_runs)
