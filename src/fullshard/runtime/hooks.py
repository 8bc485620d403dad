"""When a unit is gathered, freed and reduced: the hooks on its modules and on the tensors that pass through them.

    before forward   gather (or find it prefetched), show the unsharded parameters, prefetch the next unit
    after forward    show the sharded ones, free (unless kept), watch the outputs
    before backward  a watched output got its gradient: gather, show, prefetch the next unit of the backward
    after backward   a watched input got its gradient, so all parameters of this call have theirs: reduce, free
    end of backward  whatever was missed (no input needs a gradient, outputs unused) is reduced and freed

Why "after backward" is right: the watched input is a view made when the call began, so every node of the call was
created later, and autograd runs later nodes first; when the view's node runs, all of the call's nodes have run. Where
that order does not hold (several devices' threads) gradients that come late are reduced at the end of backward: the
result is the same.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..comm import Comm
from ..containers import cast_floating, map_tensors, tensors_in
from ..policies import MixedPrecisionPolicy
from ..shard import State, Unit, plain_access, refuse_meta
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.tensor_hooks import on_gradient
from .call import Call
from .root import Root

_no_grad = torch.no_grad
_NOTHING = nullcontext()
_COUNTED = "_fullshard_counted"  # on an unsharded parameter: its arriving gradients are counted


class UnitHooks:
    """Runs one unit. Settings are plain attributes, read at each use; `api/` sets them.

    Args:
        unit: what is held.
        modules: the modules whose forwards are this unit's; usually one.
        comm: collectives.
        policy: mixed precision.
        reshard_after_forward: free after forward; None: True unless this is the root.
    """

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[nn.Module],
        comm: Comm,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        prefetch: int,
    ) -> None:
        self.unit, self.comm, self.policy = unit, comm, policy
        self._modules = [weakref.ref(module) for module in modules]  # weak: a deleted model is freed at once
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.unshard_in_backward = True
        self.divide_factor: float | None = None
        self.force_sum = False
        self.is_last_backward = True
        self.max_reducing = 1
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.uses_group_memory = False
        self.post_optim_event: torch.Event | None = None  # the next pass waits for it, once
        self.prefetch_depth = prefetch
        self.backward_depth = prefetch
        self.prefetches_late = False  # in backward: only once this unit is freed
        self._late: tuple[int, ...] = ()
        self.forward_prefetch: tuple[UnitHooks, ...] | None = None
        self.backward_prefetch: tuple[UnitHooks, ...] | None = None
        self.shared_reducing: deque[UnitHooks] | None = None  # of roots that share one communication context
        self.root: Root | None = None
        self.find_root: Callable[[UnitHooks], Root] | None = None
        self.index = -1
        self.open_calls = 0  # forward calls with gradients whose backward has not come
        self.in_backward = False  # between before_backward and after_backward
        self.keep_gathered = False  # the user called unshard(), or asked not to reshard after backward
        self._ran: set[int] = set()  # ids of modules of a grouped unit that ran since it was last freed
        self._running = 0  # of this unit's modules, how many are inside their forward now
        self._watched = False  # whether an input of the last call tells when its backward is over
        self._arrived = 0
        self._calls: list[Call | None] = []  # of the forwards that run now, innermost last
        self.second_backward = False  # the graph of this backward is kept, to be differentiated again

    @property
    def modules(self) -> list[nn.Module]:
        """The unit's modules that are alive."""
        return [module for ref in self._modules if (module := ref()) is not None]

    # Forward.

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward`, which is `module`'s, with the unit gathered; whatever it raises, the unit is freed."""
        if torch.compiler.is_compiling() or dynamo_is_active():  # a compiled block is one graph between the hooks
            before, after = self._guarded_before, self._guarded_after
        else:
            before, after = self.before_forward, self.after_forward
        try:
            args, kwargs = before(module, args, kwargs)
            output = forward(*args, **kwargs)
        except BaseException:
            if self.root is not None:
                self.root.checks_order = False  # the other ranks are elsewhere
            after(module, None)
            raise
        return after(module, output)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, and watch the inputs; returns them, cast and watched."""
        root = self.root
        if root is None:
            root = self._find_root()
        recomputing = root.in_backward
        if not recomputing and root.pass_top is None:
            root.begin_forward(self)
        self._running += 1
        if not self.in_backward:
            self._gather_for_forward(root, recomputing)
        policy = self.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args = cast_floating(policy.param_dtype, args)
            kwargs = cast_floating(policy.param_dtype, kwargs)
        if torch.is_grad_enabled():
            call = Call(self)
            self._calls.append(call)
            args, kwargs = self._watch_inputs(call, args, kwargs)
        else:
            self._calls.append(None)
        return args, kwargs

    def _gather_for_forward(self, root: Root, recomputing: bool) -> None:
        unit = self.unit
        if root.checks_order and not recomputing:
            root.check_order(self)
        if unit.state is not State.GATHERED:
            if unit.state is State.SHARDED:
                unit.issue_gather(self.comm)
            unit.finish_gather(keep_small=root.pass_grad and not recomputing)
        unit.show_unsharded()
        order = root.backward_order if recomputing else root.forward_order
        upcoming = order.visit(self.index, self.prefetch_depth)
        if self.forward_prefetch is not None and not recomputing:
            upcoming = tuple(hooks.index for hooks in self.forward_prefetch)
        if upcoming:
            root.prefetch(upcoming, recomputing)

    def _find_root(self) -> Root:
        assert self.find_root is not None
        return self.find_root(self)

    def _watch_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace each input that needs a gradient by a view of it, and be told when the view gets its gradient."""
        hook = call.after_backward
        watched = False

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal watched
            if not tensor.requires_grad:
                return tensor
            watched = True
            view = tensor.view_as(tensor)
            on_gradient(view, hook)
            return view

        if len(args) == 1 and type(args[0]) is torch.Tensor:  # the common case, without walking
            args = (watch(args[0]),)
        else:
            args = map_tensors(watch, args)
        if kwargs:
            kwargs = map_tensors(watch, kwargs)
        self._watched = watched
        if not watched:
            self._count_gradients()
        return args, kwargs

    def after_forward(self, module: nn.Module, output: Any) -> Any:
        """Watch the output, and free; `output` is None if the forward raised. Returns it, cast."""
        root = self.root
        if root is None or not self._running:
            return output
        self._running -= 1
        recomputing = root.in_backward
        call = self._calls.pop() if self._calls else None
        if call is not None:
            self._watch_outputs(output, call)
        dtype = self.policy.output_dtype
        if dtype is not None:
            output = cast_floating(dtype, output)
        if self.in_backward or self._running:
            return output
        if recomputing:
            self._after_recompute(root)
        else:
            self._after_pass(root, module)
        return output

    _guarded_before = torch.compiler.disable(before_forward)
    _guarded_after = torch.compiler.disable(after_forward)

    def _watch_outputs(self, output: Any, call: Call) -> None:
        hook = call.before_backward
        if type(output) is torch.Tensor:
            if output.requires_grad:
                on_gradient(output, hook)
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                on_gradient(tensor, hook)

    def _after_pass(self, root: Root, module: nn.Module) -> None:
        unit = self.unit
        unit.show_sharded()
        if len(self._modules) > 1:  # the unit stays until each of its modules has run
            self._ran.add(id(module))
            if len(self._ran) < len(self._modules) and root.pass_top is not self:
                return
            self._ran.clear()
        if unit.state is State.GATHERED and self.reshards(root.pass_grad):
            unit.free()
            self.keep_gathered = False
        if root.pass_top is self:
            root.end_forward()

    def reshards(self, with_grad: bool) -> bool:
        """Whether the unit is freed after this forward. The root is not, unless no backward will come."""
        if self.reshard_after_forward is None:
            return not self.is_top or not with_grad
        return self.reshard_after_forward

    def _after_recompute(self, root: Root) -> None:
        """Activation checkpointing ran the forward again; its backward comes next for the last such unit only.

        A unit around this one may have been the last before: it runs again now, and is not to be freed.
        """
        previous, root.recomputed = root.recomputed, self
        if previous not in (None, self) and not (previous.in_backward or previous._running):
            previous.release_after_backward()

    # Backward.

    def before_backward(self) -> None:
        """An output of this unit received its gradient."""
        if self.in_backward:
            return
        root = self.root
        assert root is not None
        if not root.in_backward:
            root.begin_backward()
        self.in_backward = True
        unit = self.unit
        if self.unshard_in_backward:
            if unit.state is not State.GATHERED:
                if unit.state is State.SHARDED:
                    unit.issue_gather(self.comm)
                unit.finish_gather()
            unit.show_unsharded()
        root.finish_completed()
        upcoming = root.backward_order.visit(self.index, self.backward_depth)
        if self.backward_prefetch is not None:
            upcoming = tuple(hooks.index for hooks in self.backward_prefetch)
        if self.prefetches_late:
            self._late = upcoming
        elif upcoming:
            root.prefetch(upcoming, backward=True)

    def after_backward(self) -> None:
        """All parameters of a call of this unit have their gradients."""
        self.in_backward = False
        if torch.is_grad_enabled():  # create_graph: the parameters are needed again, by the second backward
            self.second_backward = True
            return
        self.release_after_backward()
        self._finish_gradients()

    def _finish_gradients(self, complete: bool = False) -> None:
        """Reduce, or set aside, the gradients; unless more calls of this unit will add to them."""
        unit, root = self.unit, self.root
        assert root is not None
        if (self.open_calls > 0 and not complete) or not unit.has_gradients():
            return
        self._arrived = 0
        with plain_access(), _no_grad() if torch.is_grad_enabled() else _NOTHING:  # on only with create_graph
            root.make_room(self)
            unit.collect_gradients()
            if self.requires_gradient_sync:
                root.enqueue_reduce(self)

    def release_after_backward(self) -> None:
        """Show the sharded parameters and free the unit, unless it is to stay."""
        unit = self.unit
        unit.show_sharded()
        if self.reshard_after_backward:
            unit.drop_small()
            self.keep_gathered = False
            if unit.state is State.GATHERED:
                unit.free()
        else:
            self.keep_gathered = True
        if self._late and self.root is not None:
            self.root.prefetch(self._late, backward=True)
            self._late = ()

    def end_backward(self) -> None:
        """The backward is over: this unit's gradients are complete, whatever was seen of its calls."""
        self.in_backward = False
        self._arrived = 0
        if self.second_backward:
            self.second_backward = False
            self.unit.show_sharded()
        elif self.unit.state is not State.SHARDED:
            if self.unit.state is State.GATHERING:
                self.unit.finish_gather()
            self.release_after_backward()
        self._finish_gradients(complete=True)

    def finish_reduce(self) -> None:
        """Wait for this unit's reduction, deliver the gradients, and run the hooks users put on parameters."""
        root = self.root
        assert root is not None
        for parameter in self.unit.finish_reduce(self.comm, self.requires_all_reduce, self.all_reduce_hook):
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                for home in root.homes:
                    home.settle()
                with torch._C._EnableTorchFunction():
                    for hook in list(hooks.values()):
                        hook(parameter)

    # Calls without an input that needs a gradient (the first layer): count the parameters' gradients instead.

    def _count_gradients(self) -> None:
        arrived = weakref.WeakMethod(self._arrived_one)  # the parameter must not keep its own unit alive

        def hook(parameter: torch.Tensor) -> None:
            if (method := arrived()) is not None:
                method(parameter)

        for member in self.unit.members:
            parameter = member.unsharded
            if parameter is not None and parameter.requires_grad and _COUNTED not in parameter.__dict__:
                parameter.__dict__[_COUNTED] = True
                parameter.register_post_accumulate_grad_hook(hook)

    def _arrived_one(self, parameter: torch.Tensor) -> None:
        root = self.root
        if root is not None and not root.in_backward:
            root.begin_backward()
        if not self.in_backward or self._watched or self.open_calls > 1 or self.is_top:
            return
        self._arrived += 1
        if self._arrived >= sum(m.unsharded is not None and m.unsharded.requires_grad for m in self.unit.members):
            self.in_backward = False
            if not torch.is_grad_enabled():
                self.release_after_backward()
                self._finish_gradients(complete=True)

    @property
    def is_top(self) -> bool:
        return self.root is not None and self.root.top is self

    # Calls from outside.

    def unshard(self) -> None:
        """Start gathering (if it is sharded) on the user's behalf."""
        self.unit.drop_stale()
        if self.unit.state is State.SHARDED:
            self.unit.refresh()
            refuse_meta([self.unit])
            self.unit.issue_gather(self.comm)
        self.keep_gathered = True

    def wait_unshard(self) -> None:
        """Finish what `unshard` started, and show the unsharded parameters."""
        if self.unit.state is State.GATHERING:
            self.unit.finish_gather()
        if self.unit.state is State.GATHERED:
            self.unit.show_unsharded()

    def reshard(self) -> None:
        """Free the unit and show the sharded parameters."""
        self.unit.show_sharded()
        self.unit.drop_small()
        self.keep_gathered = False
        if self.unit.state is not State.SHARDED:
            self.unit.free()

    def reset(self) -> None:
        """After an exception: as at the beginning of a step."""
        self.in_backward = self.keep_gathered = False
        self._ran.clear()
        self._running = self._arrived = 0
        self._calls.clear()
        self.unit.reset()
