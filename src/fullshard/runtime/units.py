"""Where a module keeps the unit that it is (one of) the modules of, and how a root is found."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..agreement import Line, check_same_model, check_same_weights, meet
from ..mesh import Axis
from ..names import clean_name, clean_path
from ..shard import Unit, check_ties, refuse_meta
from .additions import Additions
from .messages import setting_below_the_root, several_reductions, tokens_of_fewer_ranks
from .outputs import Leftovers
from .root import Root, all_roots
from .runner import Runner

RUNNER_KEY = "_fullshard_runner"
"""Where a unit's module keeps its runner, in its `__dict__`."""


def runner_of(module: nn.Module) -> Runner | None:
    """The runner of the unit that `module` is (one of) the modules of; None if it is no unit."""
    found: Runner | None = module.__dict__.get(RUNNER_KEY)
    return found


def runners_in(module: nn.Module) -> list[Runner]:
    """The runners of `module` and of all modules below it, each once, in module order."""
    found = {id(runner): runner for child in module.modules() if (runner := runner_of(child)) is not None}
    return list(found.values())


def take_over_replaced(module: nn.Module) -> None:
    """Have the units in `module` take over what users put in the place of their shards. Between steps.

    Call this before anything outside of a forward reads or writes the model's values; a forward does it by itself. A
    unit in the middle of a step is left alone: its next forward takes over what was put there, or refuses it.

    Raises:
        ConfigError: a parameter was replaced by something that is not its shard.
    """
    for runner in runners_in(module):
        root = runner.root
        running = root is not None and (root.pass_top is not None or root.in_backward)
        if not running and runner.unit.replaced():
            runner.unit.refresh()


def is_unit(module: nn.Module) -> bool:
    """Whether `module` is (one of) the modules of a unit."""
    return RUNNER_KEY in module.__dict__


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` is (one of) the modules of; None if it is no unit."""
    runner = runner_of(module)
    return runner.unit if runner is not None else None


def find_root(top: Runner) -> Root:
    """The root of all units in the modules of `top`, which the first forward reached.

    If `top` is a root already, units that were added to its modules since become that root's.

    Raises:
        PhaseError: a unit below is a root of its own, or another root's, which runs; parameters without values.
        LayoutError: a tied weight is used outside of its unit.
        DivergenceError: ranks hold different units or parameters.
        ConfigError: units reduce their gradients in different ways.
    """
    own = top.root if top.is_top else None
    if own is not None and not any(one.root is None for module in top.modules for one in runners_in(module)):
        return own
    below: dict[int, Any] = {id(runner): runner for runner in own.units} if own is not None else {}
    known = len(below)
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for module in top.modules:
        for path, child in module.named_modules():
            runner = runner_of(child)
            if runner is None or id(runner) in below or (own is not None and runner.root is not None):
                continue
            if runner.root is not None:
                runner.root.lend(runner, clean_path(path))
            below[id(runner)] = runner
            runner.unit.name = clean_path(path)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            named.setdefault(id(parameter), (clean_name(name), parameter))
    units: list[Any] = list(below.values())
    added = units[known:]
    _check_reductions(top, units)
    _warn_of_settings_below(top, units)
    ignored = partial(left_alone, units)
    inside = {id(runner.unit): {id(m) for module in runner.modules for m in module.modules()} for runner in units}
    for module in top.modules:
        check_ties(module, unit_of, lambda unit, user: id(user) in inside.get(id(unit), ()), ignored())
    name_members(top.modules)
    for runner in added:
        runner.unit.refresh()
        runner.unit.settle_dtypes()
    refuse_meta([runner.unit for runner in added])
    if own is None:
        additions = Additions(top.modules, ignored, top.unit.rank)
        root = Root(top, units, top.settings.comm, additions)
        weakref.finalize(top.modules[0], _dissolve, weakref.ref(root))
    else:
        root = own
        root.take_in(added)
    apart = ignored()
    _check_alike(root, [each for key, each in named.items() if key in apart])
    root.take_units()
    for runner in units:
        runner.leftovers = Leftovers(_own_modules(runner))
    return root


def _check_alike(root: Root, ignored: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Compare units, their settings and their weights, and make ranks' watchers known to each other. Collective.

    Args:
        root: whose units.
        ignored: parameters that are left alone, by name.

    Raises:
        DivergenceError: ranks hold other units; see `agreement/model.py` and `agreement/weights.py`.
    """
    units, own, comm = root.units, root.top.settings, root.comm
    root.position.begin_model()
    lines = [Line("(settings of the root)", "none", f"check={own.check!r}, unused={own.unused!r}")]
    axes: dict[int, Axis] = {}
    device = None
    for one in units:
        if one.unit.kept_axis is not None:
            axes[id(one.unit.kept_axis.group)] = one.unit.kept_axis
        for bucket in one.unit.buckets:
            device = bucket.axes.device
            axes |= {id(axis.group): axis for axis in bucket.axes.all}
            for member in bucket.members:
                dtype = str(bucket.storage_dtype).removeprefix("torch.")
                compute = str(bucket.compute_dtype).removeprefix("torch.")
                grad = "trainable" if member.sharded.requires_grad else "frozen"
                facts = f"{dtype}, computed in {compute}, {grad}, layout {bucket.layout.name}"
                facts += ", in keep_gathered" if one.held else ""
                lines.append(Line(member.name, str(member.slot.shape), facts, one.unit.name))
        # After the parameters: one of another dtype is told by its own line, not by what the unit's gradients become.
        if reduced := sorted({str(gradients.reduce_dtype).removeprefix("torch.") for gradients in one.unit.gradients}):
            facts = f"gradients reduced in {', '.join(reduced)}{one.settings.reduce.fact}"
            lines.append(Line("(gradients)", "none", facts, one.unit.name))
    if device is not None:
        left = [Line(name, str(tuple(parameter.shape))) for name, parameter in ignored]
        for axis in axes.values():
            meet(axis, comm, device)
            check_same_model(lines, left, [axis], comm, device)
        check_same_weights([one.unit for one in units], comm)


def name_members(modules: Sequence[nn.Module]) -> None:
    """Let errors call the parameters of all units in `modules` by their names from there."""
    for module in modules:
        named: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            named.setdefault(id(parameter), clean_name(name))
        for path, child in module.named_modules():
            runner = runner_of(child)
            for member in runner.unit.members if runner is not None else ():
                below = f"{path}.{member.slot.name}" if path else member.slot.name
                member.qualify(named.get(id(member.sharded), clean_name(below)))


def _check_reductions(top: Runner, units: Iterable[Runner]) -> None:
    """One loss has one divisor: parameters of some units would move by other multiples of its gradient."""
    mesh = top.settings.axes
    names: dict[str, list[str]] = {}
    for runner in units:
        names.setdefault(runner.settings.reduce.reduction, []).append(runner.unit.name or "(root)")
    if len(names) > 1:
        raise several_reductions(names)

    for runner in units if "tokens" in names else ():
        for bucket in runner.unit.buckets:
            if bucket.axes.world > mesh.world:
                raise tokens_of_fewer_ranks(runner.unit.name, bucket.axes.world, mesh.world)


def _warn_of_settings_below(top: Runner, units: Iterable[Runner]) -> None:
    """What ranks compare, and what becomes of units that some leave out, is one for all: the root's."""
    own = {"check": top.settings.check, "unused": top.settings.unused}
    for setting, default in (("check", "first"), ("unused", "error")):
        other = {one.unit.name: value for one in units if (value := getattr(one.settings, setting)) != own[setting]}
        asked = {name: value for name, value in other.items() if value != default}
        if asked:
            warnings.warn(setting_below_the_root(setting, own[setting], asked), stacklevel=2)


def _dissolve(ref: weakref.ref[Root]) -> None:
    if (root := ref()) is not None:
        root.dissolve()


def left_alone(runners: Iterable[Runner]) -> frozenset[int]:
    """Ids of the parameters that are there now and that any of these units was told to leave alone."""
    return frozenset().union(*[runner.settings.ignored.ids() for runner in runners])


def left_alone_by_all() -> frozenset[int]:
    """`left_alone` of all units of this process that have run."""
    return left_alone(runner for root in all_roots() for runner in root.units if isinstance(runner, Runner))


def _own_modules(runner: Runner) -> list[nn.Module]:
    """The modules of a unit, and those below them that are in no other unit."""
    found: list[nn.Module] = []
    ahead: list[nn.Module] = list(runner.modules)
    while ahead:
        module = ahead.pop()
        if runner_of(module) in (None, runner):
            found.append(module)
            ahead += module.children()
    return list({id(module): module for module in found}.values())


def own_modules(module: nn.Module, ignored: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """`module` and all below it that are not below another instance, nor among, or below, `ignored`."""
    found, waiting, seen = [], [module], {id(module), *map(id, ignored)}
    while waiting:
        owner = waiting.pop(0)
        found.append(owner)
        for child in owner.children():
            if not is_unit(child) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


def move_buffers(owners: Iterable[nn.Module], device: torch.device) -> None:
    """The modules' buffers follow the parameters to the mesh's device."""
    for owner in owners:
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                owner._buffers[name] = buffer.to(device)


# Marks on the modules of a unit, by which libraries and dynamo know that somebody else manages their parameters.


def is_managed(module: nn.Module) -> bool:
    """Whether a unit holds, or held, this module's parameters; a copy of such a module says so, too."""
    return "_is_fsdp_managed_module" in module.__dict__


def mark_managed(modules: Iterable[nn.Module], originals: bool) -> None:
    """Mark modules as PyTorch's front-ends do.

    Transformers generates on all ranks together if `_is_fsdp_managed_module` is there. Dynamo looks at it, too, and
    does not trace modules without `_fsdp_use_orig_params`.

    Args:
        modules: those whose parameters a unit holds.
        originals: whether they go on showing parameters of their own.
    """
    for module in modules:
        module.__dict__["_is_fsdp_managed_module"] = True
        module.__dict__["_fsdp_use_orig_params"] = originals
