"""Settings of optimizers (learning rate, weight decay, ...). They belong to parameters, in whatever groups these are.

    saved                              now                            each group gets
    [a, b] lr 0.1    [c] lr 0.2        [a] [b, c]                     an error: b has 0.1, c has 0.2
    [a, b] lr 0.1    [c] lr 0.2        [a] [b] [c]                    0.1, 0.1, 0.2
    [a] lr 0.1       [] lr 0.2         [a] []                         0.1, 0.2: the other groups are at their places
    [a] lr 0.1       [] lr 0.2         [] [a]                         its own, 0.1

State dicts and checkpoints on disk follow this one rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, message
from ..optimizers import group_settings
from .targets import Target
from .value_forms import same


def settings_to_load(
    targets: Iterable[Target], groups: Sequence[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The settings that each of an optimizer's groups takes from saved groups; none from parameters not saved.

    A group without parameters takes those of the saved one at its place, if the other groups are at theirs.

    Args:
        targets: the optimizer's targets.
        groups: its `param_groups`.
        saved: groups in saved form; `params` are names.

    Raises:
        CheckpointError: the parameters of a group were saved with different settings, or with a setting of another
            type.
    """
    saved = list(saved)
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    # Per group: saved groups, each with its first parameter here.
    sources: list[dict[int, str | None]] = [{} for _ in groups]
    for target in targets:
        for row in target.rows:
            number = next((group_of[name] for name in row.names if name in group_of), None)
            if number is not None:
                sources[target.group].setdefault(number, row.name)
    shifts = {source - number for number, of_group in enumerate(sources) for source in of_group}
    if len(shifts) == 1:  # 0, or the number of groups of optimizers saved before this one
        for number, place in enumerate(range(min(shifts), min(shifts) + len(groups))):
            is_empty = not groups[number]["params"] and 0 <= place < len(saved) and not saved[place]["params"]
            sources[number] |= {place: None} if is_empty else {}
    settings = [_settings_of(number, saved, sources[number]) for number in range(len(groups))]
    for number, group in enumerate(groups):
        for key, value in settings[number].items():
            if not is_compatible(group.get(key), value):
                raise CheckpointError(
                    f"A setting of optimizer group {number} was saved as a value of a different type; nothing was "
                    "loaded.",
                    parameter=next(iter(sources[number].values())),
                    expected=f"{key} as a {type(group[key]).__name__}, such as {group[key]}",
                    got=f"{str(value)[:80]!r}, a {type(value).__name__}",
                )
            settings[number][key] = converted(group.get(key), value)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _warn_of_split_groups(groups, settings, sources)
    return settings


def _settings_of(group: int, saved: Sequence[Mapping[str, Any]], sources: Mapping[int, str | None]) -> dict[str, Any]:
    """The union of these saved groups' settings, which must agree where several have the same setting."""
    settings: dict[str, Any] = {}
    parameter_of: dict[str, str | None] = {}
    for number, parameter in sources.items():
        for key, value in group_settings(saved[number]).items():
            if not same(settings.setdefault(key, value), value):
                raise CheckpointError(
                    f"Parameters of optimizer group {group} were saved with different values of {key!r}; nothing was "
                    "loaded.",
                    parameter=parameter,
                    expected=f"{key}={settings[key]}, as {parameter_of[key]}",
                    got=f"{key}={value}",
                    remedy="build the optimizer with a group for each saved value; settings can be changed after "
                    "loading, in optimizer.param_groups",
                )
            parameter_of.setdefault(key, parameter)
    return settings


def _warn_of_split_groups(
    groups: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    sources: Sequence[Mapping[int, str | None]],
) -> None:
    """Warn if groups with different settings become alike because they were saved as one, which is rarely intended."""
    first: dict[int, int] = {}  # per saved group: the first group here that has parameters of it
    for number, group in enumerate(groups):
        for source in sources[number]:
            other = groups[first.setdefault(source, number)]
            for key in settings[number]:
                if key in group and key in other and not same(group[key], other[key]):
                    warnings.warn(
                        message(
                            f"Optimizer groups {first[source]} and {number} have different values of {key!r}, but were "
                            "saved as one group; both take the saved value.",
                            expected=f"{key}={other[key]} and {group[key]}, as the optimizer was built",
                            got=f"{key}={settings[number][key]}, as saved",
                            remedy="to keep the new values, set them in optimizer.param_groups after loading",
                        ),
                        stacklevel=3,
                    )
                    return


def _is_number(value: Any) -> bool:
    """Whether `value` is a number or a tensor of one element."""
    return isinstance(value, (bool, int, float, complex)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def is_compatible(current: Any, saved: Any) -> bool:
    """Whether a saved setting or scalar can replace the current one: only a number or None can replace a number."""
    if isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(current) != len(saved) or all(map(is_compatible, current, saved))
    return saved is None or not _is_number(current) or _is_number(saved)


def converted(current: Any, saved: Any) -> Any:
    """A saved setting or scalar, converted to the type of the current one unless that would drop a fraction."""
    if isinstance(current, torch.Tensor) and _is_number(current) and saved is not None:
        saved = saved if isinstance(saved, torch.Tensor) else torch.tensor(saved, device="cpu")
        return saved.detach().to(current).reshape(current.shape)
    if isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)) and len(current) == len(saved):
        return type(current)(map(converted, current, saved))
    number = saved.item() if isinstance(saved, torch.Tensor) and isinstance(current, (int, float)) else saved
    if isinstance(current, (int, float)) and isinstance(number, (int, float)):
        with suppress(OverflowError, ValueError):  # infinity, NaN, an int too large for a float
            if (as_current := type(current)(number)) == number:
                return as_current
    return number


def put(target: Any, saved: Mapping[str, Any]) -> None:
    """Assign saved settings or scalars; tensors are filled in place, as others may refer to them."""
    for key, value in saved.items():
        current = target.get(key)
        new = converted(current, value)
        if isinstance(current, torch.Tensor) and isinstance(new, torch.Tensor) and new.shape == current.shape:
            with torch.no_grad():
                current.copy_(new)
        else:
            target[key] = new


def put_settings(groups: Sequence[dict[str, Any]], settings: Iterable[Mapping[str, Any]]) -> None:
    """Assign each group its saved settings; those that are not among them stay.

    A tensor that is a setting of several groups, as every default is, is filled only if all of them get its value; if
    not, all but the first get a tensor of their own.
    """
    settings = [*settings]
    users: dict[int, list[tuple[dict[str, Any], str, Any]]] = {}  # of each tensor: group, key, and new value
    for group, new in zip(groups, settings, strict=True):
        for key, current in group.items():
            if isinstance(current, torch.Tensor):
                users.setdefault(id(current), []).append((group, key, new.get(key, current)))
    for (_, _, first), *others in users.values():
        if not all(same(value, first) for _, _, value in others):
            for group, key, _ in others:
                group[key] = group[key].clone()
    for group, new in zip(groups, settings, strict=True):
        put(group, new)
