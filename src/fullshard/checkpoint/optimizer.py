"""Optimizer state by parameter name: collected from whatever an optimizer updates, and cut into it again.

An optimizer may update sharded parameters, the wrapper's local parts, `FlatParameter`s or `optimizer_view`s, which
cover several parameters, or plain parameters that no unit holds. Each is one `Held`, whose state is that of its rows
of the table; a file does not know which of them was used, nor on how many ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch

from ..errors import CheckpointError, MissingStateError
from ..shard import Bucket
from ..torch_private.step_hooks import without_step_hooks
from . import values
from .fit import check_shape, rounding_error
from .held import Held, Kind, Kinds, agreed, held_by, kinds_of, settle_state, structure_of
from .names import Named, Table
from .settings import is_like, named_groups, settings_to_load
from .values import Form
from .whole import Wanted, wholes

States = dict[str, dict[str, Any]]  # by parameter name and key
Blank = Literal["never", "unless stepped", "where missing"]


def blank_states(
    optimizer: torch.optim.Optimizer, tensors: list[Any], frozen: bool = False
) -> dict[int, dict[str, Any]]:
    """The state that a first step would make for `tensors`, zeroed, by id; the optimizer and they stay as they are.

    Made by a step with learning rate 0 and zero gradients, which changes no parameter, and of which no hook learns. Of
    an optimizer that computes losses itself (L-BFGS) that cannot be had, and none is made. Frozen tensors get state
    only with `frozen`.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return {id(tensor): {} for tensor in tensors}
    settle_state(optimizer)
    grads = [(tensor, tensor.grad) for group in optimizer.param_groups for tensor in group["params"]]
    settings = [dict(group) for group in optimizer.param_groups]
    own = [(tensor, optimizer.state.pop(tensor)) for tensor in tensors if tensor in optimizer.state]
    blank = {id(tensor) for tensor in tensors}
    for tensor, _ in grads:
        steps = id(tensor) in blank and (frozen or tensor.requires_grad)
        tensor.grad = torch.zeros_like(tensor) if steps else None
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    has_values = torch.get_default_device().type != "meta"  # step counts are made on the default device
    states = {}
    try:
        with torch.no_grad(), without_step_hooks(optimizer), nullcontext() if has_values else torch.device("cpu"):
            type(optimizer).step(optimizer)
            settle_state(optimizer)
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(before)
        for tensor in tensors:
            states[id(tensor)] = optimizer.state.pop(tensor, {})
        optimizer.state.update(own)
    for state in states.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return states


_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Settings that torch's schedulers add to groups."""


def has_settings_of(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether saved groups are those of such an optimizer, which with their settings makes the state that was saved."""
    own = set(optimizer.defaults)
    return bool(groups) and all(set(group) - _SCHEDULED - {"params", "param_names"} == own for group in groups)


def described_state(one: Held, described: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Zeroed state, one value an element, of what was saved of a tensor's parameters; single values are not in it.

    Args:
        described: for each of `one.rows`, by key: shape and dtype of the state, or a value that is no tensor. The dtype
            is None where it was the parameter's own.

    Returns:
        None: this does not say what the optimizer would make.
    """
    state: dict[str, Any] = {}
    on_device = one.tensor.device.type != "cpu"  # where a step count lies depends on settings
    for row, own in zip(one.rows, described, strict=True):
        for key, saved in own.items():
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
                state.setdefault(key, torch.zeros_like(one.tensor, dtype=dtype, requires_grad=False))
    return state


# Collecting.


def collect(
    table: Table,
    held: list[Held],
    optimizer: Any,
    form: Form,
    blank: Blank = "never",
    given: Mapping[Any, Any] | None = None,
    wanted: bool = True,
    agree: bool = True,
) -> States:
    """State by parameter name, in the model's order, whatever the optimizer's. Collective, unless `agree` is False.

    A bucket's state is gathered key by key, so that at most one is whole at a time besides the result. Single values
    (steps) come from a rank that holds some of the parameter; one that holds nothing may have no state for it.

    Args:
        blank: which tensors without state get what a first step makes, zeroed: none; all if none has any, on any
            rank; or each.
        given: state by number or name in place of the optimizer's own.
        wanted: whether this rank keeps a result.
        agree: compare ranks. Without, `form` must be sharded, and no instance of the wrapper in the model.

    Raises:
        CheckpointError: state that is neither a scalar nor one value per element.
        DivergenceError: ranks' optimizers hold different parameters.
    """
    if given is None:
        settle_state(optimizer)
    states = {id(one): _state_of(table, one, optimizer, given) for one in held}
    structure = structure_of(held, len(optimizer.param_groups))
    for repeated in (False, True):
        lacking = [one for one in held if not states[id(one)]]
        if lacking and (blank == "where missing" or repeated):
            made = blank_states(optimizer, [one.tensor for one in lacking])
            states |= {id(one): made[id(one.tensor)] for one in lacking}
        kinds, error = _all_kinds(held, states)
        if agree:
            kinds = agreed(table, structure, kinds, error)
        elif error is not None:
            raise error
        if blank != "unless stepped" or any(kinds.values()):
            break
    holder = {row.name: one for one in held for row in one.rows}
    result: States = {}
    for row in table.parameters:
        if row.bucket is None and row.name in holder and kinds.get(row.name):
            one = holder[row.name]
            result[row.name] = {
                key: _as_shown(row, one, value, form, table.axes.device) for key, value in states[id(one)].items()
            }
    for bucket in table.buckets():
        known = [named for m in bucket.members if (named := table.of(m)) is not None and kinds.get(named.name)]
        found = [(row, one := holder[row.name], states[id(one)], kinds[row.name]) for row in known]
        _collect_bucket(bucket, found, form, wanted, result)
    return {row.name: result[row.name] for row in table.parameters if row.name in result} if wanted else {}


def _all_kinds(held: list[Held], states: dict[int, Any]) -> tuple[Kinds, CheckpointError | None]:
    kinds: Kinds = {}
    try:
        for one in held:
            kinds |= kinds_of(one, states[id(one)])
    except CheckpointError as found:
        return kinds, found
    return kinds, None


def _state_of(table: Table, one: Held, optimizer: Any, given: Mapping[Any, Any] | None) -> Mapping[str, Any]:
    if given is None:
        return optimizer.state.get(one.tensor) or {}
    keys = (one.index, one.rows[0].name, table.raw.get(id(one.tensor)))
    return next((given[key] for key in keys if given.get(key)), {})


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _collect_bucket(
    bucket: Bucket,
    rows: list[tuple[Named, Held, Mapping[str, Any], dict[str, Kind]]],
    form: Form,
    wanted: bool,
    result: States,
) -> None:
    alike: dict[tuple[str, str, Any], list[tuple[Named, Held, Any, Any]]] = {}  # by key, kind, and dtype of elements
    for row, tensor, state, kinds in rows:
        for key, kind in kinds.items():
            dtype = kind.detail if kind.what == "element" else None
            alike.setdefault((key, kind.what, dtype), []).append((row, tensor, state.get(key), kind.detail))
    for (key, what, dtype), entries in alike.items():
        if what == "value":
            for row, tensor, value, detail in entries:
                single = value if tensor.takes_any_shape and value is not None else detail
                result.setdefault(row.name, {})[key] = _copied(single)
        elif what == "other" or (form.kind == "sharded" and entries[0][0].says_whole) or not bucket.form.plain:
            for row, tensor, value, _ in entries:
                if value is not None:
                    result.setdefault(row.name, {})[key] = _as_shown(row, tensor, value, form, bucket.axes.device)
        else:
            nothing = torch.zeros((), dtype=dtype, device=bucket.shard.device)  # where the rank has no state
            parts = [nothing if value is None else tensor.local(row, value) for row, tensor, value, _ in entries]
            wanted_rows = (Wanted(row.name, row, local=part) for (row, *_), part in zip(entries, parts, strict=True))
            for (row, *_), (_, whole) in zip(entries, wholes(wanted_rows), strict=True):
                assert row.member is not None
                saved = values.saved_form(bucket, row.member, whole, form, wanted)
                result.setdefault(row.name, {})[key] = saved
                del whole


def _as_shown(row: Named, one: Held, value: Any, form: Form, device: torch.device) -> Any:
    """State in the form of the parameter, sharing memory with the optimizer's; or what that says of the whole."""
    if not values.is_array(value):
        return _copied(value)
    if one.view is not None and row.bucket is not None and row.member is not None:
        value = row.bucket.shown(one.local(row, value), row.member)
    if form.kind == "whole":
        return values.kept(values.whole_of(value, device), form)
    return value.detach().cpu() if form.to_cpu else value


# Loading.


def cut_states(
    table: Table, held: list[Held], saved: Mapping[str, Mapping[str, Any]], needs_all: bool = False
) -> dict[int, dict[str, Any]]:
    """The state of an optimizer's tensors from that of the model's parameters, by number. Collective if split.

    Every tensor's is cut before the next is made whole, in the model's order on every rank.

    Args:
        saved: whole or sharded values and scalars, by parameter name; state of a tied parameter by any of its names.
        needs_all: refuse state that lacks a parameter which requires a gradient.

    Returns:
        Nothing for tensors none of whose parameters has state, or of which this rank holds nothing.

    Raises:
        MissingStateError: a parameter lacks state, or a key of it that another of the same tensor has; or `needs_all`.
        CheckpointError: a shape that is not the parameter's, or parameters of one tensor with different scalars.
    """
    number = {row.name: i for i, row in enumerate(table.parameters)}
    per_element = {key for own in saved.values() for key, value in own.items() if values.is_array(value)}
    result: dict[int, dict[str, Any]] = {}
    for one in sorted(held, key=lambda one: min(number[row.name] for row in one.rows)):
        found = [(row, next((saved[name] for name in row.names if name in saved), None)) for row in one.rows]
        present = [(row, own) for row, own in found if own]
        unknown = needs_all and one.tensor.requires_grad and any(own is None for _, own in found)
        if present or unknown:
            check_complete(found, present)
        state: dict[str, Any] = {}
        for row, own in present:
            for key, value in own.items():
                _cut_into(state, one, row, key, value, table, key in per_element)
        if state and (one.tensor.numel() or one.rows[0].bucket is None):
            result[one.index] = state
    return result


def check_complete(
    found: Sequence[tuple[Named, Mapping[str, Any] | None]], present: Sequence[tuple[Named, Mapping[str, Any]]]
) -> None:
    """Refuse state of one tensor that lacks a parameter, or a key that another parameter of the tensor has.

    Raises:
        MissingStateError: names them.
    """
    remedy = "load it with use_orig_params=True" if present else "save a state that has it, or strict=False"
    if lacking := [row.name for row, own in found if not own]:
        raise MissingStateError(
            "The optimizer state to load lacks a parameter.",
            parameter=", ".join(lacking),
            expected="state" + (f", as of {present[0][0].name}, which is in the same tensor" if present else ""),
            got="none",
            remedy=remedy,
            topic="optimizer-state",
        )
    keys = dict.fromkeys(key for _, own in present for key in own)
    for row, own in present:
        if missing := [key for key in keys if key not in own]:
            raise MissingStateError(
                "The optimizer state to load of a parameter lacks what that of others in the same tensor has.",
                parameter=row.name,
                expected=", ".join(map(str, keys)),
                got=f"none of {', '.join(map(str, missing))}",
                remedy=remedy,
                topic="optimizer-state",
            )


def add_scalar(
    state: dict[str, Any], one: Held, row: Named, key: str, value: Any, like: Any = None, cast: bool = True
) -> None:
    """Add one value for a whole parameter to the state of its tensor, all parameters of which must have the same.

    Args:
        like: what the optimizer has there; None: nothing is known.
        cast: whether the value may be rounded to the dtype of `like`.

    Raises:
        CheckpointError: a value of another type or of more digits than `like`, or different from a parameter before.
    """
    if not is_like(like, value) or (values.is_array(like) and value is not None):
        raise CheckpointError(
            f"State {key!r} was saved as a value of a different type; nothing was loaded.",
            parameter=row.name,
            expected=f"a {type(like).__name__}",
            got=f"{str(value)[:80]!r}, a {type(value).__name__}",
        )
    if not cast and isinstance(like, torch.Tensor) and isinstance(value, torch.Tensor) and like.dtype != value.dtype:
        if not values.same(value.reshape(like.shape).to(like.dtype).to(value.dtype), value.reshape(like.shape)):
            raise rounding_error(f"{row.name}.{key}", like.dtype, value.dtype)
    known = state.setdefault(key, value)
    if not values.same(known, value):
        raise CheckpointError(
            f"State {key!r} differs between parameters of one FlatParameter or optimizer view; nothing was loaded.",
            parameter=row.name,
            expected=f"{known}, as {one.rows[0].name}",
            got=value,
            remedy="load it where each parameter has state of its own: use_orig_params=True, or "
            "optimizer_view(model, params=...)",
        )


def _cut_into(
    state: dict[str, Any], one: Held, row: Named, key: str, value: Any, table: Table, per_element: bool
) -> None:
    """Add one key of a parameter's state to that of the optimizer's tensor.

    Args:
        per_element: whether the key has one value per element for other parameters. A parameter without dims does not
            say: its average and its step count look alike.
    """
    bucket, member = row.bucket, row.member
    no_dims = row.shape == () and member is not None and per_element and values.shape_of(value) == ()
    if not values.is_array(value) and not no_dims:
        add_scalar(state, one, row, key, _copied(value))
    elif bucket is None or member is None:
        state[key] = values.like_plain(one.tensor, value, table.axes.device)
    elif values.shape_of(value) != row.shape and one.takes_any_shape:
        keeps = row.says_whole and isinstance(value, torch.Tensor)
        whole = value if keeps else values.whole_of(value, bucket.axes.device)
        state[key] = whole.detach().clone()
    else:
        check_shape(f"{row.name}.{key}", row.shape, values.shape_of(value))
        local = values.fit(bucket, value, member)
        if one.view is None:
            state[key] = bucket.shown(local.clone(), member)
            return
        if key not in state:
            state[key] = one.tensor.detach().new_zeros(one.view[1], dtype=local.dtype)
        values.part(bucket, state[key], member, one.view[0]).copy_(local)


# As `torch.optim.Optimizer.state_dict` has it, by name.


def named_state(
    table: Table,
    optimizer: Any,
    form: Form,
    blank: Blank = "never",
    given: Mapping[str, Any] | None = None,
    wanted: bool = True,
) -> dict[str, Any]:
    """`{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`; see `collect`.

    Args:
        given: in the form of `optimizer.state_dict()`, in place of the optimizer's own; without `param_groups`, the
            result has none either.
    """
    held = held_by(table, optimizer.param_groups)
    state = collect(table, held, optimizer, form, blank, None if given is None else given["state"], wanted)
    if not wanted:
        return {}
    source = optimizer.param_groups if given is None else given.get("param_groups")
    if source is None:
        return {"state": state}
    return {"state": state, "param_groups": named_groups(held, source)}


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, which makes "<generator object ...>" of a text among the state (PyTorch 2.13)."""
    optimizer.load_state_dict(state)
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    keys = (key for group in state["param_groups"] for key in group["params"])
    for tensor, key in zip(tensors, keys, strict=True):
        texts = {name: value for name, value in state["state"].get(key, {}).items() if isinstance(value, str)}
        if texts:
            optimizer.state[tensor].update(texts)


def state_to_load(
    table: Table, groups: list[Any], saved: Mapping[str, Any], named: bool = False, needs_all: bool = False
) -> dict[str, Any]:
    """`saved`, in the form of `named_state`, in the form that `optimizer.load_state_dict` takes. Collective.

    Args:
        groups: the optimizer's `param_groups`.
        saved: without `param_groups`, the optimizer's own settings stay.
        named: keys are the model's own names of the tensors, wrapping included, rather than numbers.

    Raises:
        MissingStateError: `saved` has no `state` on some rank; see `cut_states` and `settings_to_load` for others.
        DivergenceError: ranks' optimizers hold different parameters.
    """
    held: list[Held] = []
    error: CheckpointError | None = None
    try:
        held = held_by(table, groups)
    except CheckpointError as found:
        error = found
    if "state" not in saved:
        error = MissingStateError(
            "What was given to load is not an optimizer state dict.",
            expected="a 'state'",
            got=f"keys {list(saved)}",
            topic="optimizer-state",
        )
    agreed(table, structure_of(held, len(groups)), {}, error)
    states = cut_states(table, held, saved["state"], needs_all)
    keys = {one.index: table.raw.get(id(one.tensor), one.rows[0].name) if named else one.index for one in held}
    settings = settings_to_load(held, groups, saved.get("param_groups", ()))
    result = []
    for g, group in enumerate(groups):
        kept = {key: value for key, value in {**group, **settings[g]}.items() if key != "param_names"}
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        result.append({**kept, **names, "params": [keys[one.index] for one in held if one.group == g]})
    return {"state": {keys[index]: state for index, state in states.items()}, "param_groups": result}
