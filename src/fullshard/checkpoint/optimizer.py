"""Optimizer state by parameter name, as sharded tensors that `torch.distributed.checkpoint` saves and reshards.

The same for an optimizer of sharded parameters and for one of `optimizer_view`s: a view's state is cut into the
parameters it covers, so a checkpoint does not know which of them was used, nor on how many ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..shard import Bucket, LocalForm, Member, OptimizerView, members_of, names_of


class _Entry:
    """One tensor that an optimizer updates: the parameters whose state its state is."""

    def __init__(self, tensor: Any, parts: list[tuple[str, Bucket | None, Member | None]], view: OptimizerView | None):
        self.tensor, self.parts, self.view = tensor, parts, view


def _entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[_Entry]:
    """The optimizer's tensors in order, matched with the model's parameters.

    Raises:
        CheckpointError: the optimizer holds a tensor that is neither a parameter of the model nor a view of one.
    """
    names = names_of(model)
    views: dict[int, tuple[OptimizerView, Bucket]] = {}
    owners: dict[int, tuple[Bucket, Member]] = {}
    for bucket, gradients, member in members_of(model):
        if isinstance(bucket.form, LocalForm):
            raise CheckpointError(
                "The model is wrapped by FullyShardedDataParallel, whose parameters do not say how they are split.",
                parameter=member.name,
                remedy="use FullyShardedDataParallel.optim_state_dict(model, optimizer), and optim_state_dict_to_load",
            )
        owners[id(member.sharded)] = (bucket, member)
        for view in gradients.delivery.views:
            views[id(view.tensor)] = (view, bucket)
    found = []
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) in views:
                view, bucket = views[id(tensor)]
                members = [bucket.members[i] for i in view.members]
                found.append(_Entry(tensor, [(names[id(m.sharded)], bucket, m) for m in members], view))
            elif id(tensor) in names:
                owner = owners.get(id(tensor), (None, None))
                found.append(_Entry(tensor, [(names[id(tensor)], *owner)], None))
            else:
                raise CheckpointError(
                    "The optimizer holds a tensor that is not the model's.",
                    got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}",
                    remedy="build it from model.parameters() or optimizer_view(model) after fully_shard",
                )
    return found


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, keyed by parameter name.

    Args:
        model: the sharded model.
        optimizer: of its parameters, of its `optimizer_view`s, or both. One that has not stepped yet gives state of
            the right shapes filled with zeros, into which a checkpoint can be loaded; it is not changed.

    Returns:
        `{"state": {parameter: {key: tensor}}, "groups": {index: {setting: tensor}}}`. State of a parameter's shape is
        sharded as the parameter; scalars are plain tensors; numeric settings of groups are float64 tensors.

    Raises:
        CheckpointError: state of a view that is neither a scalar nor one value per element, or a foreign tensor.
    """
    entries = _entries(model, optimizer)
    states = {id(e.tensor): optimizer.state.get(e.tensor) or None for e in entries}
    if any(state is None for state in states.values()):
        states |= _blank_states(optimizer, [e.tensor for e in entries if states[id(e.tensor)] is None])
    result: dict[str, Any] = {}
    for entry in entries:
        state = states[id(entry.tensor)] or {}
        for name, bucket, member in entry.parts:
            result[name] = {k: _part_of(v, k, entry, bucket, member) for k, v in state.items() if v is not None}
    groups = {
        str(i): {k: torch.tensor(v, dtype=torch.float64) for k, v in group.items() if _numeric(v)}
        for i, group in enumerate(optimizer.param_groups)
    }
    return {"state": result, "groups": groups}


def _part_of(value: Any, key: str, entry: _Entry, bucket: Bucket | None, member: Member | None) -> Any:
    """One parameter's part of a view's state; anything else as it is."""
    if entry.view is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value if isinstance(value, torch.Tensor) else torch.tensor(value)
    assert bucket is not None and member is not None
    if tuple(value.shape) != (entry.view.length,):
        raise CheckpointError(
            f"State {key!r} of an optimizer view is not one value per element.",
            parameter=member.name,
            expected=f"shape ({entry.view.length},)",
            got=f"shape {tuple(value.shape)}",
            remedy="use this optimizer on the sharded parameters, not on optimizer_view",
        )
    part = bucket.layout.part(member.slot, bucket.axes.shard.rank)
    at = value.storage_offset() + (part.offset - entry.view.offset if part.numel else 0)
    return bucket.shown(value.as_strided(part.shape, part.stride, at), member)


def _numeric(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(_numeric(v) for v in value)
    return isinstance(value, (int, float, bool))


def _blank_states(optimizer: torch.optim.Optimizer, tensors: list[Any]) -> dict[int, dict[str, Any]]:
    """The state that a first step would make for `tensors`, zeroed; the optimizer and its tensors stay as they are.

    Made by a step with learning rate 0 and zero gradients, which changes no parameter.
    """
    saved = [(tensor, tensor.grad) for group in optimizer.param_groups for tensor in group["params"]]
    rates = [group.get("lr") for group in optimizer.param_groups]
    blank = {id(t) for t in tensors}
    for tensor, _ in saved:
        tensor.grad = torch.zeros_like(tensor) if id(tensor) in blank and tensor.requires_grad else None
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    try:
        with torch.no_grad():
            optimizer.step()
    finally:
        for tensor, grad in saved:
            tensor.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    made = {}
    for tensor in tensors:
        state = optimizer.state.pop(tensor, {})
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        made[id(tensor)] = state
    return made


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Make `state`, in the form of `optimizer_state_dict`, the optimizer's state.

    Everything is checked before anything changes.

    Args:
        model, optimizer: as for `optimizer_state_dict`, on any number of ranks and with views or without.
        state: of the same model; typically filled in place by `torch.distributed.checkpoint.load`.

    Raises:
        CheckpointError: a parameter is missing, a shape differs, or the parameters of one view have different scalars
            (such as step counts), which one tensor cannot hold.
    """
    entries = _entries(model, optimizer)
    by_name = state["state"]
    loaded = [(entry, _assemble(entry, by_name)) for entry in entries]
    for entry, values in loaded:
        if values:
            optimizer.state[entry.tensor] = values
        else:
            optimizer.state.pop(entry.tensor, None)
    for i, group in enumerate(optimizer.param_groups):
        for key, value in state.get("groups", {}).get(str(i), {}).items():
            if _numeric(group.get(key)):
                group[key] = _like(group[key], value.tolist())


def _like(old: Any, new: Any) -> Any:
    """`new`, floats out of a tensor, in the types of `old`."""
    if isinstance(old, (tuple, list)):
        return type(old)(_like(a, b) for a, b in zip(old, new, strict=True))
    return type(old)(new)


def _assemble(entry: _Entry, by_name: dict[str, Any]) -> dict[str, Any]:
    """The state of one optimizer tensor from that of its parameters."""
    for name, _, _ in entry.parts:
        if name not in by_name:
            raise CheckpointError("The optimizer state to load lacks a parameter.", parameter=name)
    if entry.view is None:
        return dict(by_name[entry.parts[0][0]])
    values: dict[str, Any] = {}
    for name, bucket, member in entry.parts:
        assert bucket is not None and member is not None
        for key, value in by_name[name].items():
            if value.dim() == 0:
                known = values.setdefault(key, value.clone())
                if not torch.equal(known, value):
                    raise CheckpointError(
                        f"State {key!r} differs between parameters that one optimizer view covers.",
                        parameter=name,
                        expected=known.item(),
                        got=value.item(),
                        remedy="give these parameters views of their own: optimizer_view(model, params=...)",
                    )
                continue
            if value.shape != member.sharded.shape:
                raise CheckpointError(
                    f"State {key!r} has another shape than its parameter.",
                    parameter=name,
                    expected=tuple(member.sharded.shape),
                    got=tuple(value.shape),
                )
            flat = values.get(key)
            if flat is None:
                flat = values[key] = entry.tensor.detach().new_zeros(entry.view.length, dtype=value.dtype)
            part = bucket.layout.part(member.slot, bucket.axes.shard.rank)
            if part.numel:
                flat.as_strided(part.shape, part.stride, part.offset - entry.view.offset).copy_(value._local_tensor)
    return values
