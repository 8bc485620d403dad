"""Model state dicts: the wrapper's, unit by unit, and what `fully_shard`'s runner add to the modules' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..forms import ATTRIBUTE, Member
from ..names import WRAPPED, clean_name
from ..runtime import Phase, Runner, runner_of, take_over_replaced
from ..shard import Bucket, Unit
from ..torch_private.assigning import is_assigning
from . import values
from .fit import check_shape
from .names import Named, Table
from .values import Form
from .whole import Wanted, wholes

_forced: ContextVar[Form | None] = ContextVar("fullshard_form", default=None)


@contextmanager
def in_form(form: Form) -> Iterator[None]:
    """A context in which wrapper instances' state dicts have `form`, whatever they are set to."""
    token = _forced.set(form)
    try:
        yield
    finally:
        _forced.reset(token)


# Saving what an instance of the wrapper holds.


class _Mark(torch.Tensor):
    """Stands for a parameter while `nn.Module.state_dict` runs; found again in the result by what it is."""

    member: Member

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0]  # detach() and the like: still the same mark


def save_instance(
    runner: Runner, plain: Callable[[], Any], prefix: str, own: Form, dtypes: dict[str, torch.dtype], rank: int
) -> Any:
    """The state dict of one wrapper instance and all below it, under the unwrapped module's names. Collective.

    Whole values are made one unit at a time, so that at most one unit is held besides the result.

    Args:
        runner: the instance's.
        plain: `nn.Module.state_dict` of the instance.
        prefix: what names in the result begin with.
        own: the form that the instance is set to.
        dtypes: of buffers that were cast, by name within the instance: those to save them in.
        rank: this process's, among those of the instance.
    """
    form = _forced.get() or own
    runner.reshard()
    runner.unit.refresh()
    with _marked(runner):
        result = plain()
    result.pop(f"{prefix}{WRAPPED}.{ATTRIBUTE}", None)
    if form.kind == "names":
        strip(result, prefix)
        return result
    keys: dict[int, list[str]] = {}
    for key, value in result.items():
        if isinstance(value, _Mark):
            keys.setdefault(id(value.member), []).append(key)
    for index, bucket in enumerate(runner.unit.buckets):
        if form.kind == "local":
            _fill_slice(bucket, result, keys, _slice_name(prefix, index))
            continue
        rows = [Named(member.sharded, [member.name], bucket, member) for member in bucket.members]
        for member, (_, whole) in zip(bucket.members, wholes(Wanted(row.name, row) for row in rows), strict=True):
            value = values.saved_form(bucket, member, whole, form, form.wanted(rank))
            result.update(dict.fromkeys(keys.get(id(member), ()), value))
            del whole
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
def _marked(runner: Runner) -> Iterator[None]:
    """Marks in the places of the unit's parameters, so that they come out in order and under their names."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for member in runner.unit.members:
            mark = torch.Tensor._make_subclass(_Mark, torch.empty(0, device="cpu"))
            mark.member = member
            for place in member.places:
                before.append((place.registry, place.name, place.registry.get(place.name)))
                place.registry[place.name] = mark
        yield
    finally:
        for registry, key, shown in before:
            if shown is None:  # a `FlatParameter`'s, which is not registered on its own
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
    result[name] = values.slices_of(bucket)


def strip(result: Any, prefix: str) -> None:
    """Take `_fsdp_wrapped_module.` out of the names below `prefix`; the order stays, for they are the last ones."""
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


def check_shapes(table: Table, state: dict[str, Any], prefix: str) -> None:
    """Refuse wrong shapes before anything changes.

    Raises:
        CheckpointError: a parameter or buffer has another shape in `state`.
    """
    # Parameters of units around the model are theirs to check, and hold this rank's part by now.
    outside = {id(bucket) for unit, runner in table.units if runner is None for bucket in unit.buckets}
    wanted = {name: row.shape for row in table.parameters if id(row.bucket) not in outside for name in row.names}
    wanted |= {name: tuple(buffer.shape) for name, buffer in table.buffers.items()}
    for name, expected in wanted.items():
        found = values.shape_of(state.get(prefix + name))
        if found is not None:
            check_shape(prefix + name, expected, found)


def load_instance(instance: nn.Module, runner: Runner, state: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """Load pre-hook of a wrapper instance: names as the wrapped module knows them, values as this rank holds them.

    Raises:
        CheckpointError: a shape does not fit; nothing was loaded then.
    """
    runner.reshard()
    runner.unit.refresh()
    table = Table(instance)
    check_shapes(table, state, prefix)
    device = table.axes.device
    plain = [
        name for row in table.parameters if row.member is None and not _distributed(row.parameter) for name in row.names
    ]
    for name in (*plain, *table.buffers):
        value = state.get(prefix + name)
        if value is not None and _distributed(value):  # saved where an instance managed it, or only rank 0 has it
            state[prefix + name] = values.whole_of(value, device)
    for index, bucket in enumerate(runner.unit.buckets):
        _load_bucket(table, bucket, state, prefix, _slice_name(prefix, index), missing)
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state.pop(key)


def _distributed(value: Any) -> bool:
    return hasattr(value, "full_tensor") or hasattr(value, "local_shards")


def _load_bucket(
    table: Table, bucket: Bucket, state: dict[str, Any], prefix: str, slice_name: str, missing: list[str]
) -> None:
    """Replace whole values by this rank's parts; write them at once where modules do not have the parameters."""
    flat = bucket.flat_parameter
    given = state.pop(slice_name, None)
    buffer = None if given is None else values.slice_in(bucket, given, slice_name)
    for member in bucket.members:
        row = table.of(member)
        names = [] if row is None else row.names  # none: the user took its module out
        present = [name for name in names if prefix + name in state]
        local = None
        if buffer is not None:
            local = values.part(bucket, buffer, member)
        elif present:
            local = values.fit(bucket, state[prefix + present[-1]], member)
        if flat is None and local is not None:
            shown = bucket.shown(local, member)
            state.update({prefix + name: shown for name in (present if buffer is None else names)})
            continue
        for name in present:  # here, for a checkpoint wrapper around the module would rename the key
            del state[prefix + name]
        if flat is not None and buffer is None:
            missing.extend(prefix + name for name in names if name not in present)
        if flat is not None and local is not None:
            with torch.no_grad():
                values.part(bucket, bucket.shard, member).copy_(local)


def materialize(table: Table, state: Mapping[str, Any], strict: bool) -> None:
    """Give memory to what is on the meta device and has a value in `state`. The values themselves are loaded later.

    Args:
        strict: a name that `state` lacks is an error of `load_state_dict`, which names it: its buffer is left alone.

    Raises:
        CheckpointError: `state` has only some of the parameters of one buffer; nothing was loaded then.
    """
    with_values: list[tuple[Unit, Bucket]] = []
    on_meta = [(unit, bucket) for unit, _ in table.units for bucket in unit.buckets if bucket.shard.is_meta]
    for owner, bucket in on_meta:
        rows = [row for member in bucket.members if (row := table.of(member)) is not None]
        lacking = [row.name for row in rows if not any(name in state for name in row.names)]
        if not lacking:
            with_values.append((owner, bucket))
        elif len(lacking) < len(rows) and not strict:
            raise CheckpointError(
                "A state dict has values for only some parameters of a unit on the meta device, which lie in one "
                "buffer: the others would be left without values. Nothing was loaded.",
                parameter=", ".join(lacking),
                expected="values for all of them, or for none",
                remedy="call model.to_empty(device=...) and initialize every module first, then load",
                topic="weights-on-meta",
            )
    for owner, bucket in with_values:
        owner.materialize(bucket)
    device = table.axes.device
    plain = [(row.names, row.parameter) for row in table.parameters if row.member is None]
    for names, tensor in [*plain, *(([name], buffer) for name, buffer in table.buffers.items())]:
        if tensor.is_meta and any(name in state for name in names):
            memory = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, memory)  # the same object: optimizers and ties keep it


def cut_whole_values(table: Table, state: dict[str, Any], prefix: str = "") -> None:
    """Replace what `state` has for parameters of `fully_shard`'s units by values that these can be loaded from.

    No communication, unless `state` holds tensors of another layout.

    Raises:
        CheckpointError: a tensor's shape is not the parameter's; nothing was replaced.
    """
    found: dict[str, Named] = {}
    for row in table.parameters:
        for name in row.names if row.says_whole else ():
            found |= {prefix + name: row, prefix + clean_name(name): row}  # a checkpoint wrapper inserts its part later
    for name, row in found.items():
        size = values.shape_of(state.get(name))
        if size is not None:
            check_shape(name, row.shape, size)
    for name, row in found.items():
        if values.shape_of(state.get(name)) is not None and row.bucket is not None and row.member is not None:
            local = values.fit(row.bucket, state[name], row.member)
            state[name] = row.bucket.shown(local, row.member)


def after_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """State-dict hook of `fully_shard`: what is saved is the sharded parameters, whatever the phase.

    The model is left as it is: another thread may run a step of it meanwhile, and show and free parameters.
    """
    runner = runner_of(module)
    if runner is None:
        return
    paths: dict[int, list[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(inner), []).append(f"{path}." if path else "")
    for bucket in runner.unit.buckets:
        for member in bucket.members:
            for place in member.places:
                shown = place.shown()
                if shown is not member.sharded and shown is not member.unsharded:
                    continue  # the user's own, put there since
                for path in paths.get(id(place.module), ()):
                    name = path + place.name
                    for key in (prefix + name, prefix + clean_name(name)):  # checkpoint wrappers take their part out
                        if isinstance(state_dict.get(key), torch.Tensor):
                            keeps = isinstance(state_dict[key], nn.Parameter)
                            state_dict[key] = member.sharded if keeps else member.sharded.detach()


def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    """Load pre-hook of `fully_shard`: refuse wrong shapes before the first parameter changes, and cut whole tensors.

    A state dict of an unsharded model loads into a sharded one: each rank takes its part of every tensor.

    Raises:
        CheckpointError: a tensor's shape is not the parameter's.
    """
    runner = runner_of(module)
    if runner is not None:
        runner.unit.showing.show_sharded()
    if runner is not None and runner.phase is Phase.IDLE:
        runner.unit.reshard()  # what is gathered, and what was written to it, is about to be replaced
    if not is_assigning(metadata):  # else a unit of several modules may have been assigned in part by now
        take_over_replaced(module)
    cut_whole_values(Table(module, lambda name: name), state_dict, prefix)
