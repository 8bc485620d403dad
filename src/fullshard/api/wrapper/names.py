"""Names of what wrapper instances hold, as the unwrapped module has them, and what a state dict must fit."""

from __future__ import annotations

from typing import Any

from ...checkpoint.sharded_tensor import is_sharded_tensor
from ...names import WRAPPED, clean_name
from ...shard import ATTRIBUTE, Bucket, Member, owner_of
from ..functional.state_dict import shape_error


def prefixes_in(model: Any) -> dict[int, tuple[int, str]]:
    """By the id of each module's registry of parameters: its number in `model`, and what its clean names begin with."""
    found: dict[int, tuple[int, str]] = {}
    for number, (path, module) in enumerate(model.named_modules(remove_duplicate=False)):
        found.setdefault(id(module._parameters), (number, clean_name(f"{path}." if path else "")))
    return found


def names_in(prefixes: dict[int, tuple[int, str]], member: Member) -> list[str]:
    """The clean names of a parameter in a model, from `prefixes_in`; several if it is tied.

    The first is what `named_parameters` of the unwrapped model says, whichever instance manages a shared parameter.
    """
    found = []
    for place in member.places:
        if id(place.registry) in prefixes:
            number, prefix = prefixes[id(place.registry)]
            found.append((number, prefix + place.name))
    return [name for _, name in sorted(found, key=lambda item: item[0])]


def names_of_members(instance: Any) -> list[tuple[Bucket, Member, list[str]]]:
    """The instance's own parameters, each with its names within it."""
    prefixes = prefixes_in(instance._modules[WRAPPED])
    return [
        (bucket, member, names_in(prefixes, member) or [member.slot.name])
        for bucket in instance._runner().unit.buckets
        for member in bucket.members
    ]


def check_shapes(instance: Any, state_dict: Any, prefix: str) -> list[str]:
    """Refuse wrong shapes before anything changes.

    Returns:
        Names, within the instance, of plain buffers and parameters that no instance manages.

    Raises:
        CheckpointError: a parameter, managed or ignored, or a buffer has another shape in `state_dict`.
    """
    wanted = {name: member.shape for bucket, member, names in names_of_members(instance) for name in names}
    unmanaged: list[str] = []
    for path, child in instance._modules[WRAPPED].named_modules():
        if hasattr(child, "_arguments"):
            continue
        plain = {k: v for k, v in child._buffers.items() if k not in child._non_persistent_buffers_set}
        for key, tensor in {**plain, **child._parameters}.items():
            if tensor is not None and key != ATTRIBUTE and owner_of(tensor) is None:
                name = clean_name(f"{path}.{key}" if path else key)
                wanted.setdefault(name, tuple(tensor.shape))
                if not hasattr(tensor, "full_tensor"):
                    unmanaged.append(name)
    for name, expected in wanted.items():
        value = state_dict.get(prefix + name)
        shape = getattr(value, "shape", None) if not is_sharded_tensor(value) else value.size()
        if value is not None and shape is not None and tuple(shape) != expected:
            raise shape_error(prefix + name, expected, shape)
    return unmanaged
