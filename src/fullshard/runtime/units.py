"""Maps modules to their units and runners, and finds or creates the root of a model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..agreement import Line, check_same_model, check_same_weights, meet, meet_jointly
from ..comm import HookComm
from ..dtypes import dtype_name
from ..mesh import Axis
from ..shard import Unit, check_ties, refuse_meta
from ..text import clean_name, clean_path
from .additions import Additions
from .messages import setting_below_the_root, several_reductions, tokens_of_fewer_ranks
from .outputs import Leftovers
from .root import Root, all_roots
from .runner import Runner

RUNNER_KEY = "_fullshard_runner"
"""Key of a unit's runner in the `__dict__` of each of its modules."""


def runner_of(module: nn.Module) -> Runner | None:
    """Return the runner of the unit that has `module` as one of its modules, or None."""
    runner: Runner | None = module.__dict__.get(RUNNER_KEY)
    return runner


def runners_in(module: nn.Module) -> list[Runner]:
    """Return the runners of `module` and of all modules below it, without duplicates, in module order."""
    runners = {id(runner): runner for child in module.modules() if (runner := runner_of(child)) is not None}
    return list(runners.values())


def take_over_replaced(module: nn.Module) -> None:
    """Let the units in `module` take over storage that users put in place of their shards. Call between steps.

    Call this before code outside a forward reads or writes the model's values; a forward does it itself. Units in the
    middle of a step are skipped: their next forward takes the replacement over, or refuses it.

    Raises:
        ConfigError: a parameter was replaced by a tensor that cannot be its shard.
    """
    for runner in runners_in(module):
        if not runner.is_running and runner.unit.replaced():
            runner.unit.refresh()


def is_unit(module: nn.Module) -> bool:
    """Whether `module` is (one of) the modules of a unit."""
    return RUNNER_KEY in module.__dict__


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that has `module` as one of its modules, or None."""
    runner = runner_of(module)
    return runner.unit if runner is not None else None


def find_root(top: Runner) -> Root:
    """Return the root of all units in the modules of `top`, which the first forward reached; create it if needed.

    If `top` is a root already, units added to its modules since become that root's.

    Raises:
        PhaseError: a unit below is a root itself, or belongs to a different root that is running; or parameters have no
            values.
        LayoutError: a tied weight is used outside its unit.
        DivergenceError: ranks have different units or parameters.
        ConfigError: units have different values of `reduction=`.
    """
    existing = top.root if top.is_top else None
    if existing is not None and not any(inner.root is None for module in top.modules for inner in runners_in(module)):
        return existing
    below: dict[int, Any] = {id(runner): runner for runner in existing.units} if existing is not None else {}
    existing_count = len(below)
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for module in top.modules:
        for path, child in module.named_modules():
            runner = runner_of(child)
            if runner is None or id(runner) in below or (existing is not None and runner.root is not None):
                continue
            if runner.root is not None:
                runner.root.lend(runner, clean_path(path))
            below[id(runner)] = runner
            runner.unit.name = clean_path(path)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            named.setdefault(id(parameter), (clean_name(name), parameter))
    units: list[Any] = list(below.values())
    added = units[existing_count:]
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
    if existing is None:
        additions = Additions(top.modules, ignored, top.unit.rank)
        comm = top.settings.comm
        root = Root(top, units, comm.inner if isinstance(comm, HookComm) else comm, additions)
        weakref.finalize(top.modules[0], _dissolve, weakref.ref(root))
    else:
        root = existing
        root.take_in(added)
    apart = ignored()
    _check_alike(root, [entry for key, entry in named.items() if key in apart])
    root.take_units()
    for runner in units:
        owners = {id(owner): owner for module in runner.modules for owner in own_modules(module)}
        runner.leftovers = Leftovers([*owners.values()])
    return root


def _check_alike(root: Root, ignored: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Compare units, their settings and their weights between ranks, and introduce the ranks' watchers. Collective.

    Args:
        root: the root of the units.
        ignored: ignored parameters, with their names.

    Raises:
        DivergenceError: ranks have different units; see `agreement/start.py`.
    """
    units, settings, comm = root.units, root.top.settings, root.comm
    root.position.begin_model()
    lines = [Line("(settings of the root)", "none", f"check={settings.check!r}, unused={settings.unused!r}")]
    axes: dict[int, Axis] = {}
    device = None
    for runner in units:
        if runner.unit.kept_axis is not None:
            axes[id(runner.unit.kept_axis.group)] = runner.unit.kept_axis
        for bucket in runner.unit.buckets:
            device = bucket.axes.device
            axes |= {id(axis.group): axis for axis in bucket.axes.all}
            for member in bucket.members:
                dtype = dtype_name(bucket.storage_dtype)
                compute = dtype_name(bucket.compute_dtype)
                grad = "trainable" if member.sharded.requires_grad else "frozen"
                facts = f"{dtype}, computed in {compute}, {grad}, layout {bucket.layout.name}"
                packed = (
                    ("gathered", bucket.gather_dtype),
                    ("exchanged", bucket.scatter_dtype),
                    ("exchanged between replicas", bucket.all_reduce_dtype),
                )
                facts += "".join([f", {verb} in {str(d).removeprefix('torch.')}" for verb, d in packed if d])
                facts += ", with error feedback" if bucket.error_feedback else ""
                facts += ", in keep_gathered" if runner.held else ""
                lines.append(Line(member.name, str(member.slot.shape), facts, runner.unit.name))
        # After the parameters: a parameter of a different dtype is reported by its own line, not by this consequence.
        if reduced := sorted({dtype_name(gradients.reduce_dtype) for gradients in runner.unit.gradients}):
            facts = f"gradients reduced in {', '.join(reduced)}{runner.settings.reduce.fact}"
            lines.append(Line("(gradients)", "none", facts, runner.unit.name))
    if device is not None:
        ignored_lines = [Line(name, str(tuple(parameter.shape))) for name, parameter in ignored]
        for axis in axes.values():
            meet(axis, comm, device)
        check_same_model(lines, ignored_lines, axes.values(), comm, device)
        for mesh in dict.fromkeys(bucket.axes for runner in units for bucket in runner.unit.buckets):
            meet_jointly(mesh, comm)
        check_same_weights([runner.unit for runner in units], comm)


def name_members(modules: Sequence[nn.Module]) -> None:
    """Qualify the names of all units' parameters in `modules` for errors, from those modules on."""
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
    """Refuse different values of `reduction=`: one loss has one divisor, units would scale its gradient differently.

    Raises:
        ConfigError: values differ, or tokens are counted over fewer ranks than gradients are summed over.
    """
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
    """Warn of settings below the root that are ignored: `check` and `unused` are the root's for all units."""
    of_root = {"check": top.settings.check, "unused": top.settings.unused}
    for setting, default in (("check", "first"), ("unused", "error")):
        other = {
            runner.unit.name: value
            for runner in units
            if (value := getattr(runner.settings, setting)) != of_root[setting]
        }
        differing = {name: value for name, value in other.items() if value != default}
        if differing:
            warnings.warn(setting_below_the_root(setting, of_root[setting], differing), stacklevel=2)


def _dissolve(ref: weakref.ref[Root]) -> None:
    if (root := ref()) is not None:
        root.dissolve()


def left_alone(runners: Iterable[Runner]) -> frozenset[int]:
    """Return the ids of the current parameters that any of these units was set to ignore."""
    return frozenset().union(*[runner.settings.ignored.ids() for runner in runners])


def left_alone_by_all() -> frozenset[int]:
    """Return `left_alone` of all units of this process that have run."""
    return left_alone(runner for root in all_roots() for runner in root.units if isinstance(runner, Runner))


def own_modules(module: nn.Module, ignored: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return `module` and all modules below it, except other units, `ignored`, and everything below these."""
    owners, waiting, seen = [], [module], {id(module), *map(id, ignored)}
    while waiting:
        owner = waiting.pop(0)
        owners.append(owner)
        for child in owner.children():
            if not is_unit(child) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return owners


def move_buffers(owners: Iterable[nn.Module], device: torch.device) -> None:
    """Move the modules' buffers to the mesh's device, where the parameters are."""
    for owner in owners:
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                owner._buffers[name] = buffer.to(device)


# Marks on the modules of a unit that tell libraries and Dynamo that their parameters are managed.


def is_managed(module: nn.Module) -> bool:
    """Whether a unit holds, or held, this module's parameters; also True for a copy of such a module."""
    return "_is_fsdp_managed_module" in module.__dict__


def mark_managed(modules: Iterable[nn.Module], originals: bool) -> None:
    """Mark modules as PyTorch's front-ends do.

    Transformers generates on all ranks together if `_is_fsdp_managed_module` is set. Dynamo reads it too, and does not
    trace modules without `_fsdp_use_orig_params`.

    Args:
        modules: the modules whose parameters a unit holds.
        originals: whether the modules keep showing their original Parameter objects.
    """
    for module in modules:
        module.__dict__["_is_fsdp_managed_module"] = True
        module.__dict__["_fsdp_use_orig_params"] = originals
