"""Finds the tensors that a forward hands out other than in plain containers.

These are views of memory that is about to be freed, tensors inside objects, and tensors left on modules (auxiliary
losses). Through any of them a backward can reach the unit, which must be gathered by then.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from itertools import repeat
from operator import call
from typing import Any

import torch
from torch import nn

from ..containers import Borrowed, leaves_in, map_tensors, tensors_in
from ..forms import NAME_KEY, PART_KEY, owner_of
from ..shard import Unit
from .messages import generator_calls_unit, object_holds_view

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, type),
    *(torch.dtype, torch.device, torch.Generator, types.ModuleType, types.BuiltinFunctionType, weakref.ref),
)
"""Types of objects that hold no tensors."""
_MOST = 10_000  # objects inspected at most


def detached_from_unit(output: Any, unit: Unit, borrowed: Borrowed | None) -> Any:
    """Return `output` with copies in place of views of gathered memory (a forward that returns its own weight).

    Views that the forward stored in containers among its arguments are replaced in place. See `_run_later` for
    generators.
    """
    if not unit.buckets:
        return output

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if unit.owns(tensor) else tensor

    if borrowed is not None:
        map_tensors(copy, borrowed.values, borrowed)
    return _run_later(output, unit) if type(output) is types.GeneratorType else map_tensors(copy, output, borrowed)


def _run_later(generator: Generator[Any, Any, Any], unit: Unit) -> Generator[Any, Any, Any]:
    """Run a generator that a forward returned, with its unit freed: the unit's modules raise if they show parts.

    Parameters of other forms refuse computation by themselves.
    """
    resume: Callable[[Any], Any] = generator.send
    sent: Any = None
    while True:
        whole = unit.showing.unsharded or unit.showing.whole_here
        places = [] if whole else [place for member in unit.members for place in member.places]
        owners = {id(module): module for place in places if (module := place.module) is not None}
        guards = [owner.register_forward_pre_hook(_refuse_parts) for owner in owners.values()]
        try:
            value = resume(sent)
        except StopIteration as end:
            return end.value
        finally:
            for guard in guards:
                guard.remove()
        try:
            resume, sent = generator.send, (yield value)
        except BaseException as thrown:  # by `throw`, or `close`
            resume, sent = generator.throw, thrown


def _refuse_parts(module: nn.Module, args: Any) -> None:
    if (name := shown_part(module)) is not None:
        raise generator_calls_unit(name)


def shown_part(module: nn.Module) -> str | None:
    """Return the name of a direct parameter that the module shows only in part (this rank's); None without one.

    A copy of a sharded parameter does not count.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None and PART_KEY in parameter.__dict__ and owner_of(parameter) is not None:
            return str(parameter.__dict__.get(NAME_KEY, name))
    return None


def refuse_views(tensors: Sequence[torch.Tensor], unit: Unit) -> None:
    """Raise if a tensor found in an object that cannot be rebuilt is a view of the unit's gathered memory.

    Raises:
        PhaseError: names the unit's parameters.
    """
    for tensor in tensors:
        if unit.owns(tensor):
            alike = [member.name for member in unit.members if member.shape == tuple(tensor.shape)]
            raise object_holds_view(", ".join(alike) or unit.name, unit.rank)


def tensors_behind(value: Any) -> tuple[list[torch.Tensor], bool]:
    """Find the tensors in an object that is not a plain container: in its attributes, items and closures.

    Returns:
        The tensors, and whether something could not be inspected (an iterator).
    """
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # by id; kept alive, so that ids are not used again
    ahead, closed = [value], False
    while ahead:
        item = ahead.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif not isinstance(item, PLAIN) and id(item) not in seen:
            seen[id(item)] = item
            inside = list(_inside(item)) if len(seen) < _MOST else None
            closed = closed or inside is None or (not inside and not _can_be_empty(item))
            ahead += inside or ()
    return tensors, closed


def _inside(value: Any) -> Iterator[Any]:
    """Yield the contents of an object, as far as they are visible without running its code."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, Set)):
        yield from value
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield from _contents(cell)
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    if isinstance(value, nn.Module):  # its attributes, not its submodules
        yield from [item for name, item in value.__dict__.items() if name not in _MODULES_OWN]
        return
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield getattr(value, name)


def _contents(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # not assigned yet
        return


def _can_be_empty(value: Any) -> bool:
    """Whether an object with no visible contents is really empty; if not, it may hold tensors out of sight."""
    if isinstance(value, (Mapping, list, tuple, Set, types.FunctionType, nn.Module)):
        return True
    return hasattr(value, "__dict__") or hasattr(value, "__array__") or "__slots__" in type(value).__dict__


class FirstGradient:
    """Detects a backward by the gradients of a unit's parameters, when no input of a forward can.

    Args:
        arrived: called at the first gradient after `expect`. Held weakly: autograd holds the hooks.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = weakref.WeakMethod(arrived)
        self._expected: list[weakref.WeakMethod[Callable[[], None]]] = []  # what is called next, if anything
        self._generation = -1  # generation of the parameters that have the hook

    def expect(self, unit: Unit) -> None:
        """A forward began that a backward may follow. The unsharded parameters are shown."""
        if not self._expected:
            self._expected.append(self._arrived)
        if self._generation == unit.showing.generation:
            return
        self._generation = unit.showing.generation
        expected = self._expected

        def hook(parameter: torch.Tensor) -> None:
            if expected and (arrived := expected.pop()()) is not None:
                arrived()

        for member in unit.members:
            parameter = member.unsharded
            if parameter is not None and parameter.requires_grad and _WATCHED not in parameter.__dict__:
                parameter.__dict__[_WATCHED] = True
                parameter.register_post_accumulate_grad_hook(hook)


_WATCHED = "_fullshard_watched"  # on an unsharded parameter: its first gradient shows that a backward runs

_MODULES_OWN = frozenset(nn.Module().__dict__)
DICT, EMPTY = repeat("__dict__"), repeat(())  # modules that are gone have no attributes


class Leftovers:
    """Tensors that forwards leave on a unit's modules as attributes, or in lists and dicts there.

    Attributes that may hold tensors are searched for once per module, and again when it gains attributes.

    Args:
        modules: the unit's own, without those of units below. Held weakly. PyTorch's own modules leave nothing.

    Attributes:
        modules: references to those modules.
        sizes: their numbers of attributes when they were searched last.
        names: attributes that may hold tensors: index of the module, and name.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [
            weakref.ref(module) for module in modules if not type(module).__module__.startswith("torch.nn.")
        ]
        self.sizes: list[int] = []
        self.names: list[tuple[int, str]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Return the current ones that are part of a graph."""
        if None in map(call, self.modules):
            self.modules, self.names = [ref for ref in self.modules if ref() is not None], []
        sizes = [*map(len, map(getattr, map(call, self.modules), DICT, EMPTY))]
        if sizes != self.sizes:
            self.sizes, self.names = sizes, [*dict.fromkeys([*self.names, *self._find_names()])]
        return self._current() if self.names else []

    def _find_names(self) -> list[tuple[int, str]]:
        attributes = [(index, item) for index, ref in enumerate(self.modules) for item in ref().__dict__.items()]
        return [(index, name) for index, (name, value) in attributes if _may_hold(name, value)]

    def _current(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for index, name in self.names:
            value = self.modules[index]().__dict__.get(name)
            if type(value) is torch.Tensor:
                if value.grad_fn is not None:
                    tensors.append(value)
            elif isinstance(value, (list, tuple, dict)):
                tensors += [tensor for tensor in tensors_in(value) if tensor.grad_fn is not None]
        return tensors


def _may_hold(name: str, value: Any) -> bool:
    """Whether an attribute is, or may become, a tensor or a container of tensors: a loss that begins as None or 0."""
    if name in _MODULES_OWN or name.startswith("_fullshard"):
        return False
    if isinstance(value, (list, tuple, dict)):
        leaves = list(leaves_in(value))
        return not leaves or any(isinstance(leaf, torch.Tensor) or leaf is None for leaf in leaves)
    return value is None or isinstance(value, torch.Tensor) or (type(value) in (int, float) and value == 0)
