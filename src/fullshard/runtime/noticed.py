"""Wrappers around the PyTorch functions whose calls the engine must notice. Installed when the first model is sharded.

- `Optimizer.zero_grad` and `Module.zero_grad` also discard gradients accumulated without sync: these wait unsharded for
  the next reduction and do not appear in `.grad`, so nothing on a parameter would show that they were given up.
- `torch.autograd.backward(inputs=parameters)` names sharded parameters, which are not part of the graph: the wrapper
  passes the unsharded ones instead. If a backward raises, units are restored before the caller sees the error, so
  that gathered memory is free again after running out of memory.
- `torch.autograd.grad` raises for sharded parameters: nothing would reduce its results. Called by a pipeline whose
  schedule splits backwards, it also accumulates the gradients of units' parameters: see `_of_inputs_and_parameters`.
- `register_parametrization` in a forward (PEFT's LoRA for weights of experts) only moves the weight, but counts as a
  change of it, and would be refused: the wrapper takes the count back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..containers import NONES, drain
from ..errors import PhaseError
from ..forms import SHARDED_TYPES, WHOLE_KEY, Member, owner_of
from ..shard import State, Unit
from ..torch_private.dynamo import dynamo_is_active
from ..torch_private.local_tensor import plain_access, write_grad
from ..torch_private.pipelines import splits_backward
from ..torch_private.versions import set_version
from ..watcher import RANK
from .hints import explain_failed_allocation
from .messages import grad_of_sharded, input_never_ran, needs_what_was_freed
from .out_of_memory import is_out_of_memory
from .root import all_roots

_installed: list[Any] = []


def give_up(parameters: Iterable[Any], shown: bool) -> None:
    """Discard gradients of these parameters that were accumulated without sync or are not yet reduced.

    Args:
        parameters: sharded parameters, or optimizer views over them; anything else is ignored.
        shown: whether `.grad` becomes None too; optimizer views share it with the parameters under them.
    """
    recover()
    parameters = [*parameters]
    if shown:  # at once, in place of the setter of each
        with plain_access():
            drain(map(write_grad, compress(parameters, map(SHARDED_TYPES.__contains__, map(type, parameters))), NONES))
    units = [runner.unit for root in all_roots() for runner in root.units]
    if not any([g.accumulates or g.delivery.views for unit in units for g in unit.gradients]):
        return
    by_unit: dict[int, tuple[Unit, set[int]]] = {}
    for parameter in parameters:
        unit = owner_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if unit is not None:
            by_unit.setdefault(id(unit), (unit, set()))[1].add(id(parameter))
    for unit, ids in by_unit.values():
        unit.give_up_gradients(ids)
        for gradients in unit.gradients if shown else ():
            gradients.delivery.let_go(ids)


def recover() -> None:
    """Reset every unit whose backward this thread called, and which raised, to the beginning of a step."""
    for root in all_roots():
        root.recover_if_broken_here()


def _recover_after(error: BaseException) -> None:
    RANK.catches(error)
    for root in all_roots() if is_out_of_memory(error) else ():
        if root.backward is not None:
            explain_failed_allocation(error, root.units)
    try:
        recover()
    except Exception as second:
        error.add_note(f"The units could not be restored after this error: {second!r}")


def apart(function: Callable[..., None]) -> Callable[..., None]:
    """Let `function` bypass Dynamo when a whole step is compiled: Dynamo can trace neither it nor its hooks."""
    guarded = torch.compiler.disable(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        (guarded if torch.compiler.is_compiling() or dynamo_is_active() else function)(*args, **kwargs)

    return called


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    """An argument of `torch.autograd`'s functions, one tensor or edge or several, as a tuple."""
    return (tensors,) if isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge)) else tuple(tensors)


def in_graph(inputs: Any) -> Any:
    """Return the `inputs` of a backward with the graph's unsharded parameters in place of sharded ones.

    Raises:
        PhaseError: the unit of a parameter never ran.
    """
    if inputs is None:
        return None
    tensors: list[Any] = []
    for tensor in _as_tuple(inputs):
        unit = owner_of(tensor) if isinstance(tensor, torch.Tensor) else None
        members = [] if unit is None else _members_shown_as(unit, tensor)
        if not members:
            tensors.append(tensor)
        for member in members:
            if member.unsharded is None:
                raise input_never_ran(member.name)
            tensors.append(member.unsharded)
    return tensors


def _members_shown_as(unit: Unit, tensor: torch.Tensor) -> list[Member]:
    """The members that a sharded parameter or a `FlatParameter` stands for; empty for an unsharded parameter."""
    return [m for b in unit.buckets for m in b.members if m.sharded is tensor or b.flat_parameter is tensor]


def freed_in_graph(error: BaseException, roots: Any) -> PhaseError | None:
    """Explain autograd's error that a saved tensor was changed; to autograd, freed parameters are changed.

    Returns:
        The error to raise; None if `error` is a different one, or if no freed parameter of the graph above `roots` has
        the shape that it states.
    """
    match = _CHANGED.search(str(error))
    if match is None:
        return None
    shape = tuple(int(size) for size in match[1].split(",") if size.strip())
    freed = [runner.unit for root in all_roots() for runner in root.units if runner.unit.state is State.SHARDED]
    members = [m for unit in freed for m in unit.members if m.shape in (shape, shape[::-1])]
    reached = _leaves_above(roots) if members else set()
    names = [m.name for m in members if id(m.unsharded) in reached]
    if not names:
        return None
    return needs_what_was_freed(names, shape)


def _leaves_above(roots: Any) -> set[int]:
    """Ids of the tensors that get gradients in a backward from `roots`."""
    ahead: list[Any] = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in _as_tuple(roots)]
    seen: set[Any] = set()  # nodes; holding them keeps Python from creating new objects for them
    leaves: set[int] = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            ahead += [following for following, _ in node.next_functions]
    return leaves


def asked_of_grad(outputs: Any, inputs: Any, gradients: Sequence[Any] | None) -> PhaseError | None:
    """Explain a `torch.autograd.grad` that was asked for gradients of sharded parameters gathered in its graph.

    Args:
        outputs, inputs: its arguments.
        gradients: its results; None: it raised, as an input is not in the graph.

    Returns:
        The error to raise; None if no input without a gradient is such a parameter.
    """
    tensors = _as_tuple(inputs)
    results = gradients if gradients is not None else [None] * len(tensors)
    members = [
        member
        for tensor, result in zip(tensors, results, strict=True)
        if result is None and isinstance(tensor, torch.Tensor) and (unit := owner_of(tensor)) is not None
        for member in _members_shown_as(unit, tensor)
    ]
    reached = _leaves_above(outputs) if members else set()
    names = [member.name for member in members if id(member.unsharded) in reached]
    if not names:
        return None
    return grad_of_sharded(names)


def _of_inputs_and_parameters(outputs: Any, inputs: Sequence[torch.Tensor], grad_outputs: Any) -> Any:
    """Run the whole backward of units in a pipeline's stage where its schedule asks for the inputs' gradients only.

    The schedule computes gradients of parameters later, by nodes between these and the inputs. But the parameters that
    it lists are sharded, and so in no graph: it would find none, and train nothing.

    Args:
        outputs, inputs, grad_outputs: arguments of `torch.autograd.grad`; inputs need gradients.

    Returns:
        The inputs' gradients, None for those that are not used; None if no parameter of a unit is in the graph.
    """
    reached = _leaves_above(outputs)
    members = [member for root in all_roots() for runner in root.units for member in runner.unit.members]
    parameters = {
        id(m.unsharded): m.unsharded for m in members if m.unsharded is not None and id(m.unsharded) in reached
    }
    if not parameters:
        return None
    before = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:  # other parameters of the stage still get theirs later, from the same graph
        torch.autograd.backward(outputs, grad_outputs, retain_graph=True, inputs=[*inputs, *parameters.values()])
        return tuple([tensor.grad for tensor in inputs])
    finally:
        for tensor, gradient in zip(inputs, before, strict=True):
            tensor.grad = gradient


_CHANGED = re.compile(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\]")


def install() -> None:
    """Install the wrappers described above, once in this process."""
    if _installed:
        return
    original, original_backward = torch.optim.Optimizer.zero_grad, torch.autograd.backward
    original_grad, of_module = torch.autograd.grad, nn.Module.zero_grad

    @apart
    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        give_up(chain.from_iterable([group["params"] for group in self.param_groups]), set_to_none)
        original(self, set_to_none)

    @apart
    @functools.wraps(of_module)
    def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        give_up(self.parameters(), set_to_none)
        of_module(self, set_to_none)

    @apart
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
        outputs, inputs = [tuple(each) if isinstance(each, Iterator) else each for each in (outputs, inputs)]
        if splits_backward() and all([isinstance(tensor, torch.Tensor) for tensor in _as_tuple(inputs)]):
            grad_outputs = args[0] if args else kwargs.get("grad_outputs")
            if (gradients := _of_inputs_and_parameters(outputs, _as_tuple(inputs), grad_outputs)) is not None:
                return gradients
        try:
            gradients = original_grad(outputs, inputs, *args, **kwargs)
        except BaseException as error:
            _recover_after(error)
            if "not have been used in the graph" in str(error):
                if (named := asked_of_grad(outputs, inputs, None)) is not None:
                    raise named from error
            raise
        if (
            any([gradient is None for gradient in gradients])
            and (named := asked_of_grad(outputs, inputs, gradients)) is not None
        ):
            raise named
        return gradients

    original_list = ParametrizationList.__init__

    @functools.wraps(original_list)
    def parametrized(self: ParametrizationList, modules: Any, original: Any, *args: Any, **kwargs: Any) -> None:
        gathered = WHOLE_KEY in getattr(original, "__dict__", ())
        before = (original._version, original.data_ptr()) if gathered else None
        original_list(self, modules, original, *args, **kwargs)
        # PyTorch runs `original.set_(original)`, which changes nothing; `right_inverse` brings new memory, or counts.
        if before is not None and (original._version - 1, original.data_ptr()) == before:
            set_version(original, before[0])

    ParametrizationList.__init__ = parametrized  # type: ignore[method-assign]
    torch.autograd.grad = grad
    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    torch.autograd.backward = backward
    nn.Module.zero_grad = module_zero_grad  # type: ignore[method-assign]
    _installed.extend((zero_grad, module_zero_grad, backward, grad, parametrized))
