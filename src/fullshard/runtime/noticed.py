"""What users ask of torch's own functions, and Fullshard must know of.

`zero_grad()` gives up gradients that were accumulated without sync, too: they wait unsharded for the next reduction and
do not show in `.grad`, so that nothing on a parameter would tell: `Optimizer.zero_grad` and `Module.zero_grad` have
wrappers around them. `backward(inputs=parameters)` names sharded parameters, which are no
part of the graph: a wrapper around `torch.autograd.backward` names the unsharded ones in their place, and one around
`torch.autograd.grad`, whose results nothing would reduce, raises. Where a backward raises, units are put back before
the caller sees the error: after one for lack of memory, what was gathered is free. `register_parametrization` in a
forward (PEFT's LoRA for weights of experts) counts as a change of the weight, which it only moves, and would be refused
as one. The wrappers are put there when the first model is sharded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import PhaseError
from ..forms import WHOLE_KEY, Member, owner_of
from ..shard import State, Unit
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.versions import set_version
from ..watcher import RANK
from .messages import grad_of_sharded, input_never_ran, needs_what_was_freed
from .root import all_roots

_installed: list[Any] = []


def give_up(parameters: Iterable[Any], shown: bool) -> None:
    """Discard gradients of these parameters that were accumulated without sync, or not yet reduced.

    Args:
        shown: whether `.grad` becomes None, which optimizer views and the parameters under them share.
    """
    recover()
    units = [one.unit for root in all_roots() for one in root.units]
    if not any([g.accumulates or g.delivery.views for unit in units for g in unit.gradients]):
        return
    found: dict[int, tuple[Unit, set[int]]] = {}
    for parameter in parameters:
        unit = owner_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if unit is not None:
            found.setdefault(id(unit), (unit, set()))[1].add(id(parameter))
    for unit, ids in found.values():
        unit.give_up_gradients(ids)
        for gradients in unit.gradients if shown else ():
            gradients.delivery.let_go(ids)


def recover() -> None:
    """Bring every unit back to where a step begins whose backward was called from this thread and raised."""
    for root in all_roots():
        root.recover_if_broken_here()


def _recover_after(error: BaseException) -> None:
    RANK.catches(error)
    try:
        recover()
    except Exception as second:
        error.add_note(f"The units could not be put back after this: {second!r}")


def _apart(function: Callable[..., None]) -> Callable[..., None]:
    """`function`; where a whole step is compiled, past Dynamo, which cannot follow it nor the hooks that it runs."""
    guarded = torch.compiler.disable(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        (guarded if torch.compiler.is_compiling() or dynamo_is_active() else function)(*args, **kwargs)

    return called


def in_graph(inputs: Any) -> Any:
    """`inputs` of a backward, with what the graph knows in place of sharded parameters.

    Raises:
        PhaseError: a parameter whose unit never ran.
    """
    if inputs is None:
        return None
    found: list[Any] = []
    for tensor in (inputs,) if isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(inputs):
        unit = owner_of(tensor) if isinstance(tensor, torch.Tensor) else None
        members = [] if unit is None else _members_shown_as(unit, tensor)
        if not members:
            found.append(tensor)
        for member in members:
            if member.unsharded is None:
                raise input_never_ran(member.name)
            found.append(member.unsharded)
    return found


def _members_shown_as(unit: Unit, tensor: torch.Tensor) -> list[Member]:
    """The members that a sharded parameter, or a `FlatParameter`, stands for; none for an unsharded parameter."""
    return [m for b in unit.buckets for m in b.members if m.sharded is tensor or b.flat_parameter is tensor]


def freed_in_graph(error: BaseException, roots: Any) -> PhaseError | None:
    """What to say of autograd's error that a saved tensor was changed, which parameters count as while they are freed.

    None if it is another error, or no freed parameter of the graph above `roots` has the shape that it tells.
    """
    told = _CHANGED.search(str(error))
    if told is None:
        return None
    shape = tuple(int(size) for size in told[1].split(",") if size.strip())
    freed = [one.unit for root in all_roots() for one in root.units if one.unit.state is State.SHARDED]
    members = [m for unit in freed for m in unit.members if m.shape in (shape, shape[::-1])]
    reached = _leaves_above(roots) if members else set()
    names = [m.name for m in members if id(m.unsharded) in reached]
    if not names:
        return None
    return needs_what_was_freed(names, shape)


def _leaves_above(roots: Any) -> set[int]:
    """Ids of the tensors that a backward from `roots` gives gradients to."""
    given = (roots,) if isinstance(roots, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(roots)
    ahead: list[Any] = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in given]
    seen: set[Any] = set()  # of nodes, which live as long as it does: Python makes new objects for them else
    leaves: set[int] = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            ahead += [following for following, _ in node.next_functions]
    return leaves


def asked_of_grad(outputs: Any, inputs: Any, found: Sequence[Any] | None) -> PhaseError | None:
    """What to say where `torch.autograd.grad` was asked for gradients of sharded parameters that its graph gathers.

    Args:
        found: what it gave; None: an error, that an input is not in the graph.

    Returns:
        None if no input without a gradient is such a parameter.
    """
    given = (inputs,) if isinstance(inputs, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(inputs)
    results = found if found is not None else [None] * len(given)
    members = [
        member
        for tensor, result in zip(given, results, strict=True)
        if result is None and isinstance(tensor, torch.Tensor) and (unit := owner_of(tensor)) is not None
        for member in _members_shown_as(unit, tensor)
    ]
    reached = _leaves_above(outputs) if members else set()
    names = [member.name for member in members if id(member.unsharded) in reached]
    if not names:
        return None
    return grad_of_sharded(names)


_CHANGED = re.compile(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\]")


def install() -> None:
    """Notice every optimizer's `zero_grad` and every backward's `inputs`, and say which errors are ours. Once."""
    if _installed:
        return
    original, original_backward = torch.optim.Optimizer.zero_grad, torch.autograd.backward
    original_grad, of_module = torch.autograd.grad, nn.Module.zero_grad

    @_apart
    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        give_up([parameter for group in self.param_groups for parameter in group["params"]], set_to_none)
        original(self, set_to_none)

    @_apart
    @functools.wraps(of_module)
    def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        give_up(self.parameters(), set_to_none)
        of_module(self, set_to_none)

    @_apart
    @functools.wraps(original_backward)
    def backward(*args: Any, inputs: Any = None, **kwargs: Any) -> None:
        if len(args) > 5:  # inputs, by position
            args, inputs = args[:5], args[5]
        kwargs["inputs"] = in_graph(inputs)
        try:
            original_backward(*args, **kwargs)
        except BaseException as error:
            _recover_after(error)
            if (named := freed_in_graph(error, args[0] if args else kwargs["tensors"])) is not None:
                raise named from error
            raise

    @functools.wraps(original_grad)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found: Any = None
        try:
            found = original_grad(outputs, inputs, *args, **kwargs)
        except BaseException as error:
            _recover_after(error)
            if "not have been used in the graph" in str(error):
                if (named := asked_of_grad(outputs, inputs, None)) is not None:
                    raise named from error
            raise
        if any([one is None for one in found]) and (named := asked_of_grad(outputs, inputs, found)) is not None:
            raise named
        return found

    original_list = ParametrizationList.__init__

    @functools.wraps(original_list)
    def parametrized(self: ParametrizationList, modules: Any, original: Any, *args: Any, **kwargs: Any) -> None:
        gathered = WHOLE_KEY in getattr(original, "__dict__", ())
        before = (original._version, original.data_ptr()) if gathered else None
        original_list(self, modules, original, *args, **kwargs)
        # It has `original.set_(original)`, which is no change; one of `right_inverse` gives other memory, or counts.
        if before is not None and (original._version - 1, original.data_ptr()) == before:
            set_version(original, before[0])

    ParametrizationList.__init__ = parametrized  # type: ignore[method-assign]
    torch.autograd.grad = grad
    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    torch.autograd.backward = backward
    nn.Module.zero_grad = module_zero_grad  # type: ignore[method-assign]
    _installed.extend((zero_grad, module_zero_grad, backward, grad, parametrized))
