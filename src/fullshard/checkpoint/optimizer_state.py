"""Optimizer state by parameter name: collected from an optimizer's targets, and cut into them again.

An optimizer may update sharded parameters, the wrapper's local parts, plain parameters that are in no unit, or
`FlatParameter`s and `optimizer_view`s, which cover several parameters. Each is a `Target`, whose state is that of its
parameters. Saved state does not depend on the kind of target, nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from ..errors import CheckpointError, MissingStateError, class_and_value
from ..optim.plain_step import after_step, on_local_tensors
from ..optimizers import NOT_SETTINGS, SCHEDULED, groups_of, parameters_of
from ..shard import Bucket
from ..torch_private.step_hooks import needs_closure, without_step_hooks
from . import value_forms
from .fit import check_shape, check_value, rounding_error
from .group_settings import is_compatible, put_settings, settings_to_load
from .table import Named, Table
from .targets import Kinds, Target, kinds_of, merged_kinds, named_groups, settle_state, targets_of
from .value_forms import StateForm
from .whole import Wanted, saved_values

States = dict[str, dict[str, Any]]  # by parameter name and key


def blank_states(
    optimizer: torch.optim.Optimizer, tensors: Sequence[Any], frozen: bool = False
) -> list[dict[str, Any]]:
    """The state that a first step would create for each of `tensors`, zeroed; does not change them or the optimizer.

    It is created by a step, on local tensors if possible, as in training, with learning rate 0 and zero gradients,
    which changes no parameter and runs no hooks. An optimizer that computes losses itself (L-BFGS) cannot take such a
    step: the result is empty for every tensor. Frozen tensors get state only with `frozen`.
    """
    if needs_closure(type(optimizer)):
        return [{} for _ in tensors]
    settle_state(optimizer)
    grads = [(tensor, tensor.grad) for group in optimizer.param_groups for tensor in group["params"]]
    settings = [dict(group) for group in optimizer.param_groups]
    previous = [(tensor, optimizer.state.pop(tensor)) for tensor in tensors if tensor in optimizer.state]
    chosen = {id(tensor) for tensor in tensors}
    for tensor, _ in grads:
        steps = id(tensor) in chosen and (frozen or tensor.requires_grad)
        tensor.grad = torch.zeros_like(tensor) if steps else None
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    has_values = torch.get_default_device().type != "meta"  # step counts are created on the default device
    try:
        with torch.no_grad(), without_step_hooks(optimizer), nullcontext() if has_values else torch.device("cpu"):
            stepped = on_local_tensors(optimizer) or optimizer
            type(optimizer).step(stepped)
            after_step(optimizer, (stepped,), {})
            settle_state(optimizer)
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(before)
        states = [optimizer.state.pop(tensor, {}) for tensor in tensors]
        optimizer.state.update(previous)
    for state in states:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return states


def _has_settings_of(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether saved groups have exactly this optimizer's settings, so that it would create the state that was saved."""
    own = set(optimizer.defaults)
    return bool(groups) and all(set(group) - SCHEDULED - NOT_SETTINGS == own for group in groups)


def _described_state(target: Target, described: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Zeroed state with one value per element, from a description of the saved state; scalars are left out.

    Args:
        described: for each of `target.rows`, by key: the shape and dtype of the state, or a value that is not a tensor.
            The dtype is None if it was the parameter's own.

    Returns:
        The state; None if the description does not determine what the optimizer would create.
    """
    state: dict[str, Any] = {}
    on_device = target.tensor.device.type != "cpu"  # settings decide on which device a step count is
    for row, entries in zip(target.rows, described, strict=True):
        for key, saved in entries.items():
            if not isinstance(saved, tuple):
                if not (saved is None or isinstance(saved, (bool, int, float))):
                    return None
                continue
            shape, dtype = saved
            if "." in key or shape not in (row.shape, ()) or row.shape == () or (shape == () and on_device):
                return None
            if shape and dtype is not None and not dtype.is_floating_point:
                return None
            if shape:
                state.setdefault(key, torch.zeros_like(target.tensor, dtype=dtype, requires_grad=False))
    return state


def new_states(
    optimizer: torch.optim.Optimizer,
    targets: Sequence[Target],
    described: Sequence[Sequence[Mapping[str, Any]]] | None,
    groups: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Zeroed state for targets that have none, into which saved state is read.

    It is allocated as it was saved, or where that does not determine it, created by a step: see `blank_states`.

    Args:
        described: for each target: see `_described_state`; None: no description is complete.
        groups: the targets' groups in saved form.
    """
    states: list[dict[str, Any] | None] = [None] * len(targets)
    if described is not None and _has_settings_of(optimizer, groups):
        states = [_described_state(*pair) for pair in zip(targets, described, strict=True)]
    if None in states:  # frozen=True: a tensor may have been frozen since the save
        return blank_states(optimizer, [target.tensor for target in targets], frozen=True)
    return [state or {} for state in states]


# Collecting.


def sharded_state(table: Table, targets: Sequence[Target], optimizer: Any) -> States:
    """State of `fully_shard`'s parameters as sharded tensors; zeros where a first step would create it.

    No communication.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
    """
    states = _states_of(table, targets, optimizer, None)
    _add_blank_states(states, targets, optimizer)
    return _collect(table, targets, states, _kinds(targets, states), StateForm("sharded"))


def named_state(
    table: Table,
    optimizer: Any,
    form: StateForm,
    zeros: bool = False,
    saved: Mapping[str, Any] | None = None,
    wanted: bool = True,
) -> dict[str, Any]:
    """`{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`, in the model's order. Collective.

    State is gathered bucket by bucket and key by key. Scalars (step counts) come from a rank that owns elements of the
    parameter; a rank that owns none may have no state for it.

    Args:
        zeros: if no rank has any state, the result is the state that a first step would create, zeroed.
        saved: state in the form of `optimizer.state_dict()` to take in place of the optimizer's own. If it has no
            `param_groups`, neither has the result.
        wanted: whether this rank needs the result; if not, it gets an empty dict.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
        DivergenceError: ranks' optimizers have different parameters.
    """
    if saved is not None and (error := form_error(saved)) is not None:
        raise error
    targets = targets_of(table, groups_of(optimizer))
    states = _states_of(table, targets, optimizer, None if saved is None else saved["state"])
    kinds = _kinds_of_all_ranks(table, targets, states, optimizer, form)
    if zeros and not any(kinds.values()):
        _add_blank_states(states, targets, optimizer)
        kinds = _kinds_of_all_ranks(table, targets, states, optimizer, form)
    state = _collect(table, targets, states, kinds, form, wanted)
    if not wanted:
        return {}
    groups = optimizer.param_groups if saved is None else saved.get("param_groups")
    return {"state": state} if groups is None else {"state": state, "param_groups": named_groups(targets, groups)}


def _states_of(
    table: Table, targets: Sequence[Target], optimizer: Any, saved: Mapping[Any, Any] | None
) -> list[Mapping[str, Any]]:
    """The state of each target, from `saved` (by number or name) or from the optimizer."""
    if saved is None:
        settle_state(optimizer)
        return [optimizer.state.get(target.tensor) or {} for target in targets]
    keys = [(target.index, target.rows[0].name, table.raw.get(id(target.tensor))) for target in targets]
    return [next((saved[key] for key in alternatives if saved.get(key)), {}) for alternatives in keys]


def _add_blank_states(states: list[Mapping[str, Any]], targets: Sequence[Target], optimizer: Any) -> None:
    lacking = [target for target in targets if not states[target.index]]
    if lacking:
        for target, state in zip(lacking, blank_states(optimizer, [t.tensor for t in lacking]), strict=True):
            states[target.index] = state


def _kinds(targets: Sequence[Target], states: Sequence[Mapping[str, Any]], shown: bool = False) -> Kinds:
    return {name: kinds for target in targets for name, kinds in kinds_of(target, states[target.index], shown).items()}


def _kinds_of_all_ranks(
    table: Table, targets: Sequence[Target], states: Sequence[Mapping[str, Any]], optimizer: Any, form: StateForm
) -> Kinds:
    kinds: Kinds = {}
    error: CheckpointError | None = None
    try:
        kinds = _kinds(targets, states, form.kind == "sharded")
    except CheckpointError as caught:
        error = caught
    return merged_kinds(table, targets, len(optimizer.param_groups), kinds, error)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _collect(
    table: Table,
    targets: Sequence[Target],
    states: Sequence[Mapping[str, Any]],
    kinds: Kinds,
    form: StateForm,
    wanted: bool = True,
) -> States:
    """State by parameter name, in the model's order. Collective, unless `form` is sharded and so are the parameters."""
    target_of = {row.name: target for target in targets for row in target.rows}
    result: States = {}
    for row in table.parameters:
        if row.bucket is None and row.name in target_of and kinds.get(row.name):
            target = target_of[row.name]
            state = states[target.index]
            result[row.name] = {key: _as_shown(row, target, v, form, table.axes.device) for key, v in state.items()}
    for bucket in table.buckets():
        alike: dict[tuple[str, str, Any], list[_Entry]] = {}  # by key, kind, and dtype of elements
        for row in filter(None, map(table.of, bucket.members)):
            for key, kind in kinds.get(row.name, {}).items():
                target = target_of[row.name]
                entry = (row, target, states[target.index].get(key), kind.value)
                alike.setdefault((key, kind.per, kind.dtype), []).append(entry)
        for (key, per, dtype), entries in alike.items():
            for row, value in _collect_key(bucket, entries, per, dtype, form, wanted):
                result.setdefault(row.name, {})[key] = value
    return {row.name: result[row.name] for row in table.parameters if row.name in result}


_Entry = tuple[Named, Target, Any, Any]  # a parameter, its target, and its state by one key: this rank's, all ranks'


def _collect_key(
    bucket: Bucket, entries: Sequence[_Entry], per: str, dtype: torch.dtype | None, form: StateForm, wanted: bool
) -> Iterator[tuple[Named, Any]]:
    """Yield the state by one key of some of a bucket's parameters, in `form`."""
    if per == "parameter":
        for row, target, value, common in entries:
            yield row, _copied(value if target.takes_any_shape and value is not None else common)
    elif per == "other" or (form.kind == "sharded" and entries[0][0].has_full_tensor) or not bucket.form.plain:
        for row, target, value, _ in entries:
            if value is not None:
                yield row, _as_shown(row, target, value, form, bucket.axes.device)
    else:
        zero = torch.zeros((), dtype=dtype, device=bucket.shard.device)  # where this rank has no state
        parts = [zero if value is None else target.local(row, value) for row, target, value, _ in entries]
        tensors = (Wanted(row.name, row, local=part) for (row, *_), part in zip(entries, parts, strict=True))
        yield from zip((row for row, *_ in entries), saved_values(tensors, form, wanted), strict=True)


def _as_shown(row: Named, target: Target, value: Any, form: StateForm, device: torch.device) -> Any:
    """State as the optimizer has it, sharing memory, or whole; a view's state has the form of the shown parameter."""
    if not value_forms.is_array(value):
        return _copied(value)
    if target.view is not None and row.bucket is not None and row.member is not None:
        value = row.bucket.shown(target.local(row, value), row.member)
    if form.kind == "whole":
        return value_forms.copied(value_forms.whole_of(value, device), form)
    return value.detach().cpu() if form.to_cpu else value


# Loading.


def cut_states(
    table: Table,
    targets: Sequence[Target],
    saved: Mapping[str, Mapping[str, Any]],
    needs_all: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[int, dict[str, Any]]:
    """The state of an optimizer's targets, by their numbers, from state by parameter name.

    Collective if values are sharded. Every target's state is cut before the next is made whole, in the model's order,
    which is the same on every rank.

    Args:
        saved: whole or sharded values and scalars; a tied parameter's state is under any of its names.
        needs_all: see `saved_rows`.
        optimizer: of these targets. If all parameters in `saved` are 0-d, only its own state shows which keys have one
            value per element; None: none has.

    Returns:
        The states; nothing for targets without state, or without elements on this rank.

    Raises:
        MissingStateError: see `saved_rows`.
        CheckpointError: a shape that is not the parameter's, or different scalars for the parameters of one target.
    """
    number = {row.name: i for i, row in enumerate(table.parameters)}
    per_element = {key for state in saved.values() for key, value in state.items() if value_forms.is_array(value)}
    if not per_element and optimizer is not None and saved:
        states = _states_of(table, targets, optimizer, None)
        _add_blank_states(states, targets, optimizer)
        kinds = _kinds(targets, states).values()
        per_element = {key for of_row in kinds for key, kind in of_row.items() if kind.per == "element"}
    result: dict[int, dict[str, Any]] = {}
    for target in sorted(targets, key=lambda target: min(number[row.name] for row in target.rows)):
        state: dict[str, Any] = {}
        for row, entries in saved_rows(target, saved, needs_all):
            for key, value in entries.items():
                _cut_into(state, target, row, key, value, table, key in per_element)
        if state and (target.tensor.numel() or target.rows[0].bucket is None):
            result[target.index] = state
    return result


_Keys = TypeVar("_Keys", bound=Collection[str])


def saved_rows(target: Target, saved: Mapping[str, _Keys], needs_all: bool = False) -> list[tuple[Named, _Keys]]:
    """Each parameter of a target, with its saved state; an empty list if none of them has any.

    Args:
        saved: by parameter name, state by key, or only its keys; a tied parameter's is under any of its names.
        needs_all: require state, if the target requires a gradient and is not empty.

    Raises:
        MissingStateError: a parameter lacks state, or a key of it, that others of the target have; or `needs_all`.
    """
    of_rows = [(row, next((saved[name] for name in row.names if name in saved), None)) for row in target.rows]
    present = [row.name for row, keys in of_rows if keys]
    unsaved = any(keys is None and 0 not in row.shape for row, keys in of_rows)  # not every step updates empty ones
    if not present and not (unsaved and needs_all and target.tensor.requires_grad):
        return []
    remedy = "load it with use_orig_params=True" if present else "save a state that has it, or pass strict=False"
    if lacking := [row.name for row, keys in of_rows if not keys]:
        raise MissingStateError(
            "The optimizer state to load lacks a parameter.",
            parameter=", ".join(lacking),
            expected="state" + (f", as of {present[0]}, which is in the same tensor" if present else ""),
            got="none",
            remedy=remedy,
            topic="optimizer-state",
        )
    complete = [(row, keys) for row, keys in of_rows if keys is not None]
    all_keys = dict.fromkeys(key for _, keys in complete for key in keys)
    for row, keys in complete:
        if missing := [key for key in all_keys if key not in keys]:
            raise MissingStateError(
                "The optimizer state to load lacks keys of a parameter that others in the same tensor have.",
                parameter=row.name,
                expected=", ".join(map(str, all_keys)),
                got=f"none of {', '.join(map(str, missing))}",
                remedy=remedy,
                topic="optimizer-state",
            )
    return complete


def add_scalar(
    state: dict[str, Any], target: Target, row: Named, key: str, value: Any, like: Any = None, cast: bool = True
) -> None:
    """Add one value for a whole parameter to the state of its target, all parameters of which must have the same.

    Args:
        like: the optimizer's current value; None if there is none.
        cast: whether the value may be rounded to the dtype of `like`.

    Raises:
        CheckpointError: the value's type differs from `like`'s, it would be rounded, or it differs between parameters.
    """
    if not is_compatible(like, value) or (value_forms.is_array(like) and value is not None):
        raise CheckpointError(
            f"State {key!r} was saved as a value of a different type; nothing was loaded.",
            parameter=row.name,
            expected=f"a {type(like).__name__}",
            got=f"{str(value)[:80]!r}, a {type(value).__name__}",
        )
    if not cast and isinstance(like, torch.Tensor) and isinstance(value, torch.Tensor) and like.dtype != value.dtype:
        if not value_forms.same(value.reshape(like.shape).to(like.dtype).to(value.dtype), value.reshape(like.shape)):
            raise rounding_error(f"{row.name}.{key}", like.dtype, value.dtype)
    first = state.setdefault(key, value)
    if not value_forms.same(first, value):
        raise CheckpointError(
            f"State {key!r} differs between parameters of one FlatParameter or optimizer view; nothing was loaded.",
            parameter=row.name,
            expected=f"{first}, as {target.rows[0].name}",
            got=value,
            remedy="load it where each parameter has its own state: use_orig_params=True, or "
            "optimizer_view(model, params=...)",
        )


def _cut_into(
    state: dict[str, Any], target: Target, row: Named, key: str, value: Any, table: Table, per_element: bool
) -> None:
    """Add one key of a parameter's state to that of its target.

    Args:
        per_element: whether the key has one value per element. State of a 0-d parameter does not show it: its average
            and its step count look alike.
    """
    bucket, member, shape = row.bucket, row.member, value_forms.shape_of(value)
    is_element = row.shape == () and member is not None and per_element and shape == ()
    if shape is None or not (value_forms.is_array(value) or is_element):
        add_scalar(state, target, row, key, _copied(value))
    elif bucket is None or member is None:
        state[key] = value_forms.like_plain(target.tensor, value, table.axes.device)
    elif shape != row.shape and target.takes_any_shape:
        as_is = row.has_full_tensor and isinstance(value, torch.Tensor)
        whole = value if as_is else value_forms.whole_of(value, bucket.axes.device)
        state[key] = whole.detach().clone()
    else:
        check_value(f"{row.name}.{key}", value, bucket.shard)
        check_shape(f"{row.name}.{key}", row.shape, shape)
        local = value_forms.local_of(bucket, value, member)
        if target.view is None:
            state[key] = bucket.shown(local.clone(), member)
            return
        if key not in state:
            state[key] = target.tensor.detach().new_zeros(target.view[1], dtype=local.dtype)
        if not value_forms.is_array(state[key]):
            add_scalar(state, target, row, key, value)  # raises: another parameter has a single value
        target.local(row, state[key]).copy_(local)


def assign_state(
    optimizer: torch.optim.Optimizer,
    states: Iterable[tuple[Target, dict[str, Any] | None]],
    settings: Iterable[Mapping[str, Any]],
) -> None:
    """Make loaded state and settings the optimizer's own.

    Args:
        states: of every target; None or an empty dict: it has no state.
        settings: of every group; settings that are not among them stay.
    """
    for target, state in states:
        optimizer.state.pop(target.tensor, None)
        if state:
            optimizer.state[target.tensor] = state
    put_settings(optimizer.param_groups, settings)
    # As `load_state_dict` does last.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, which turns strings in the state into "<generator object ...>" (PyTorch 2.13)."""
    optimizer.load_state_dict(state)
    tensors = parameters_of([optimizer])
    keys = (key for group in state["param_groups"] for key in group["params"])
    for tensor, key in zip(tensors, keys, strict=True):
        texts = {name: value for name, value in state["state"].get(key, {}).items() if isinstance(value, str)}
        if texts:
            optimizer.state[tensor].update(texts)


def wrong_form(saved: Any, expected: str, remedy: str | None = None) -> MissingStateError:
    """The error for what is not an optimizer state dict of the expected form."""
    return MissingStateError(
        "What was passed is not an optimizer state dict of the form that this function loads; nothing was loaded.",
        expected=expected,
        got=f"a dict of {', '.join(map(repr, saved)) or 'nothing'}"
        if isinstance(saved, Mapping)
        else class_and_value(saved),
        remedy=remedy,
        topic="optimizer-state",
    )


def form_error(saved: Any) -> MissingStateError | None:
    """The error for `saved` if it is not of the form of `named_state`."""
    if not isinstance(saved, Mapping) or "state" not in saved:
        return wrong_form(saved, "a dict with 'state'")
    states, groups = saved["state"], saved.get("param_groups", ())
    if not isinstance(states, Mapping):
        return wrong_form(states, "a dict, by parameter, as its 'state'")
    if (name := next((name for name, state in states.items() if not isinstance(state, Mapping)), None)) is not None:
        return wrong_form(states[name], f"a dict as the state of {name!r}")
    if not isinstance(groups, (list, tuple)):
        return wrong_form(groups, "a list of dicts as its 'param_groups'")
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            return wrong_form(group, "a dict with a list as its 'params', in its 'param_groups'")
    return None


def state_to_load(
    table: Table,
    groups: list[Any],
    saved: Mapping[str, Any],
    named: bool = False,
    needs_all: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """`saved`, in the form of `named_state`, in the form that `optimizer.load_state_dict` takes. Collective.

    Args:
        groups: the optimizer's `param_groups`.
        saved: the state; without `param_groups`, the optimizer's own settings stay.
        named: use the model's own names of the tensors, wrapping included, as keys, not numbers.
        needs_all, optimizer: see `cut_states`.

    Raises:
        MissingStateError: see `form_error`, on some rank, and `cut_states`.
        CheckpointError: see `cut_states` and `settings_to_load`.
        DivergenceError: ranks' optimizers have different parameters.
    """
    targets: list[Target] = []
    error: CheckpointError | None = None
    try:
        targets = targets_of(table, groups)
    except CheckpointError as caught:
        error = caught
    error = form_error(saved) or error
    merged_kinds(table, targets, len(groups), {}, error)
    states = cut_states(table, targets, saved["state"], needs_all, optimizer)
    keys = {t.index: table.raw.get(id(t.tensor), t.rows[0].name) if named else t.index for t in targets}
    settings = settings_to_load(targets, groups, saved.get("param_groups", ()))
    return {
        "state": {keys[index]: state for index, state in states.items()},
        "param_groups": [
            {**group, **settings[g], "params": [keys[target.index] for target in targets if target.group == g]}
            for g, group in enumerate(groups)
        ],
    }
