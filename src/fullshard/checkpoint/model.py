"""Model state dicts: the wrapper's, unit by unit, and the hooks with which `fully_shard` adapts the modules' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..forms import ATTRIBUTE, SHARDED_TYPES, Member, owner_of
from ..runtime import Phase, Runner, runner_of, take_over_replaced
from ..shard import Bucket, Unit, refuse_undoable
from ..text import WRAPPED, clean_name
from ..torch_private.assigning import is_assigning
from ..torch_private.sharded_tensor import slices_sharded_tensor
from . import value_forms
from .fit import check_shape, check_value
from .table import Named, Table, rows_in
from .value_forms import StateForm
from .whole import Wanted, saved_values

_forced: ContextVar[StateForm | None] = ContextVar("fullshard_form", default=None)


@contextmanager
def in_form(form: StateForm) -> Iterator[None]:
    """Context in which state dicts of wrapper instances have `form`, whatever the instances are set to."""
    token = _forced.set(form)
    try:
        yield
    finally:
        _forced.reset(token)


# Saving an instance of the wrapper.


class _Placeholder(torch.Tensor):
    """A placeholder for a parameter while `nn.Module.state_dict` runs, recognized in the result by its class."""

    member: Member

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0]  # detach() and the like return the same placeholder


def save_instance(
    runner: Runner, save: Callable[[], Any], prefix: str, form: StateForm, dtypes: dict[str, torch.dtype], rank: int
) -> Any:
    """The state dict of a wrapper instance and everything in it, under the unwrapped module's names. Collective.

    Whole values are assembled one unit at a time, so that at most one unit is whole besides the result.

    Args:
        runner: the instance's runner.
        save: `nn.Module.state_dict` of the instance.
        prefix: the prefix of names in the result.
        form: the form that the instance is set to; `in_form` overrides it.
        dtypes: the dtypes in which to save buffers that were cast, by name within the instance.
        rank: this process's rank among the instance's ranks.
    """
    form = _forced.get() or form
    runner.reshard()
    runner.unit.refresh()
    with _placeholders(runner):
        result = save()
    result.pop(f"{prefix}{WRAPPED}.{ATTRIBUTE}", None)
    if form.kind == "names":
        strip(result, prefix)
        return result
    keys: dict[int, list[str]] = {}
    for key, value in result.items():
        if isinstance(value, _Placeholder):
            keys.setdefault(id(value.member), []).append(key)
    for index, bucket in enumerate(runner.unit.buckets):
        if form.kind == "local":
            _fill_slice(bucket, result, keys, _slice_name(prefix, index))
            continue
        saved = saved_values((Wanted(row.name, row) for row in rows_in(bucket)), form, form.wanted(rank))
        for member, value in zip(bucket.members, saved, strict=True):
            result.update(dict.fromkeys(keys.get(id(member), ()), value))
    for key in [key for key in result if key.startswith(prefix)]:
        if not form.wanted(rank):
            del result[key]
        elif isinstance(result[key], torch.Tensor):
            dtype = dtypes.get(key[len(prefix) :])
            value = result[key] if dtype is None else result[key].to(dtype)
            result[key] = value.cpu() if form.to_cpu and value.device.type != "cpu" else value
    strip(result, prefix)
    return result


@contextmanager
def _placeholders(runner: Runner) -> Iterator[None]:
    """Register placeholders for the unit's parameters, so that all appear in the result, in order, by their names."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for member in runner.unit.members:
            placeholder = torch.Tensor._make_subclass(_Placeholder, torch.empty(0, device="cpu"))
            placeholder.member = member
            for place in member.places:
                replaced.append((place.registry, place.name, place.registry.get(place.name)))
                place.registry[place.name] = placeholder
        yield
    finally:
        for registry, key, shown in reversed(replaced):  # a registry may stand in it twice, by two paths
            if shown is None:  # it is in a `FlatParameter`, and not registered itself
                registry.pop(key, None)
            else:
                registry[key] = shown


def _slice_name(prefix: str, index: int) -> str:
    return f"{prefix}{ATTRIBUTE}" if index == 0 else f"{prefix}{ATTRIBUTE}_{index}"


def _fill_slice(bucket: Bucket, result: Any, keys: dict[int, list[str]], name: str) -> None:
    if bucket.layout.world == 1:
        raise CheckpointError(
            "LOCAL_STATE_DICT can only be used when parameters are flattened and sharded: not with NO_SHARD"
        )
    for member in bucket.members:
        for key in keys.get(id(member), ()):
            del result[key]
    axis = bucket.axes.shard
    result[name] = slices_sharded_tensor(bucket.shard.detach(), axis.group, axis.ranks, axis.rank)


def strip(result: Any, prefix: str) -> None:
    """Remove `_fsdp_wrapped_module.` from the names below `prefix`; these are the last ones, so the order stays."""
    inside = f"{prefix}{WRAPPED}."
    for key in [key for key in result if key.startswith(prefix)]:
        value = result.pop(key)
        result[prefix + key[len(inside) :] if key.startswith(inside) else key] = value
    metadata = getattr(result, "_metadata", None)
    if metadata is not None:
        for key in list(metadata):
            if f"{key}.".startswith(inside):
                metadata[(prefix + clean_name(f"{key}."[len(inside) :])).rstrip(".")] = metadata.pop(key)


# Loading.


def _check_values(state: Mapping[str, Any], expected: Mapping[str, Named]) -> None:
    """Check all values in `state` before any of them is used.

    Raises:
        CheckpointError: a value is not a tensor, or does not have the shape of the row of its name.
    """
    for name in filter(state.__contains__, expected):
        bucket = expected[name].bucket
        check_value(name, state[name], None if bucket is None else bucket.shard)
        saved = value_forms.shape_of(state[name])
        if saved is not None:
            check_shape(name, expected[name].shape, saved)


def load_instance(instance: nn.Module, runner: Runner, state: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """Load pre-hook of a wrapper instance: change names to the wrapped module's, and values to this rank's parts.

    Raises:
        CheckpointError: a value does not fit; nothing was loaded.
    """
    runner.reshard()
    runner.unit.refresh()
    table = Table(instance)
    # Units around the instance check their own parameters, for which `state` has this rank's parts by now.
    outside = {id(bucket) for unit, inner in table.units if inner is None for bucket in unit.buckets}
    rows = [row for row in (*table.parameters, *table.buffer_rows) if id(row.bucket) not in outside]
    _check_values(state, {prefix + name: row for row in rows for name in row.names})
    device = table.axes.device
    plain = [
        name for row in table.parameters if row.member is None and not _distributed(row.parameter) for name in row.names
    ]
    for name in (*plain, *table.buffers):
        value = state.get(prefix + name)
        if value is not None and _distributed(value):  # it was in an instance when it was saved, or only rank 0 has it
            state[prefix + name] = value_forms.whole_of(value, device)
    for index, bucket in enumerate(runner.unit.buckets):
        _load_bucket(table, bucket, state, prefix, _slice_name(prefix, index), missing)
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state.pop(key)


def _distributed(value: Any) -> bool:
    return hasattr(value, "full_tensor") or hasattr(value, "local_shards")


def _load_bucket(
    table: Table, bucket: Bucket, state: dict[str, Any], prefix: str, slice_name: str, missing: list[str]
) -> None:
    """Replace whole values by this rank's parts, or write these into a `FlatParameter`, whose parts no module has."""
    flat = bucket.flat_parameter
    saved_slice = state.pop(slice_name, None)
    buffer = None if saved_slice is None else value_forms.slice_in(bucket, saved_slice, slice_name)
    for member in bucket.members:
        row = table.of(member)
        names = [] if row is None else row.names  # none if the user removed its module
        present = [name for name in names if prefix + name in state]
        local = None
        if buffer is not None:
            local = bucket.part(buffer, member)
        elif present:
            local = value_forms.local_of(bucket, state[prefix + present[-1]], member)
        if flat is None and local is not None:
            shown = bucket.shown(local, member)
            state.update({prefix + name: shown for name in (present if buffer is None else names)})
            continue
        for name in present:  # removed here, because a checkpoint wrapper around the module would rename the key
            del state[prefix + name]
        if flat is not None and buffer is None:
            missing.extend(prefix + name for name in names if name not in present)
        if flat is not None and local is not None:
            with torch.no_grad():
                bucket.part(bucket.shard, member).copy_(local)


def materialize(table: Table, state: Mapping[str, Any], strict: bool) -> None:
    """Allocate memory for tensors on the meta device that have a value in `state`. The values are loaded later.

    Args:
        strict: skip buckets if `state` lacks any of their parameters; `load_state_dict` will report these.

    Raises:
        CheckpointError: `state` has only some of the parameters of one bucket; nothing was loaded.
    """
    complete: list[tuple[Unit, Bucket]] = []
    on_meta = [(unit, bucket) for unit, _ in table.units for bucket in unit.buckets if bucket.shard.is_meta]
    for unit, bucket in on_meta:
        rows = [row for member in bucket.members if (row := table.of(member)) is not None]
        lacking = [row.name for row in rows if not any(name in state for name in row.names)]
        if not lacking:
            complete.append((unit, bucket))
        elif len(lacking) < len(rows) and not strict:
            raise CheckpointError(
                "A state dict has values for only some parameters of a unit on the meta device. They share one buffer, "
                "so the others would be left without values. Nothing was loaded.",
                parameter=", ".join(lacking),
                expected="values for all of them, or for none",
                remedy="call model.to_empty(device=...) and initialize every module first, then load",
                topic="weights-on-meta",
            )
    for unit, bucket in complete:
        unit.materialize(bucket)
    device = table.axes.device
    for row in [*table.parameters, *table.buffer_rows]:
        tensor = row.parameter
        if row.member is None and tensor.is_meta and any(name in state for name in row.names):
            memory = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, memory)  # keeps the object, to which optimizers and ties refer


def cut_whole_values(table: Table, state: dict[str, Any], prefix: str = "") -> None:
    """Replace the values in `state` for parameters of `fully_shard`'s units by this rank's parts of them.

    No communication, unless `state` has sharded tensors of a different layout.

    Raises:
        CheckpointError: a tensor's shape is not the parameter's; nothing was replaced.
    """
    rows: dict[str, Named] = {}
    for row in table.parameters:
        for name in row.names if row.has_full_tensor else ():
            rows |= {prefix + name: row, prefix + clean_name(name): row}  # checkpoint wrappers insert their part later
    _check_values(state, rows)
    for name, row in rows.items():
        value, bucket, member = state.get(name), row.bucket, row.member
        if bucket is None or member is None or value is None:
            continue
        cut_by_outer_unit = type(value) is type(member.sharded) and owner_of(value) is None
        if not cut_by_outer_unit or not value_forms.is_part(value, member):
            state[name] = bucket.shown(value_forms.local_of(bucket, value, member), member)


def after_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """State-dict hook of `fully_shard`: save the sharded parameters, whatever the phase.

    The model is not changed, because another thread may run a step meanwhile, and gather and free parameters.
    """
    runner = runner_of(module)
    if runner is None:
        return
    refuse_undoable([runner.unit])
    paths: dict[int, list[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(inner), []).append(f"{path}." if path else "")
    for bucket in runner.unit.buckets:
        for member in bucket.members:
            for place in member.places:
                shown = place.shown()
                if shown is not member.sharded and shown is not member.unsharded:
                    continue  # the user replaced it
                for path in paths.get(id(place.module), ()):
                    name = path + place.name
                    for key in {prefix + name, prefix + clean_name(name)}:  # checkpoint wrappers remove their part
                        value = state_dict.get(key)
                        if isinstance(value, torch.Tensor) and type(value) not in SHARDED_TYPES:
                            keeps = isinstance(value, nn.Parameter)
                            state_dict[key] = member.sharded if keeps else member.sharded.detach()


def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    """Load pre-hook of `fully_shard`: check shapes before the first parameter changes, and cut whole tensors.

    A state dict of an unsharded model can be loaded into a sharded one: each rank takes its part of every tensor.

    Raises:
        CheckpointError: a tensor's shape is not the parameter's.
    """
    runner = runner_of(module)
    if runner is not None:
        runner.unit.showing.show_sharded()
    if runner is not None and runner.phase is Phase.IDLE:
        runner.unit.reshard()  # gathered values, and writes to them, are about to be replaced
    if not is_assigning(metadata):  # otherwise a unit of several modules may be partly assigned by now
        take_over_replaced(module)
    cut_whole_values(Table(module, lambda name: name), state_dict, prefix)
