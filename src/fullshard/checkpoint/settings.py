"""Settings of optimizers (learning rate, weight decay, ...), which belong to parameters, whatever groups these are in.

    saved                              now                            each group gets
    [a, b] lr 0.1    [c] lr 0.2        [a] [b, c]                     an error: b has 0.1, c has 0.2
    [a, b] lr 0.1    [c] lr 0.2        [a] [b] [c]                    0.1, 0.1, 0.2

The one rule, for state dicts and for checkpoints on a disk.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, message
from .held import Held
from .values import same

_NAMES = ("params", "param_names")  # of a group's parameters: not settings


def named_groups(held: Sequence[Held], groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's groups as they are saved: copies of settings, and the names of parameters."""
    return [
        {key: copy.copy(value) for key, value in group.items() if key not in _NAMES}
        | {"params": [row.name for one in held if one.group == number for row in one.rows]}
        for number, group in enumerate(groups)
    ]


def settings_to_load(
    held: Iterable[Held], groups: Sequence[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What each of an optimizer's groups takes over of saved ones; of parameters that were not saved, nothing.

    Args:
        held: the optimizer's tensors.
        groups: its `param_groups`.
        saved: groups as they were saved; `params` are names.

    Raises:
        CheckpointError: one group's parameters were saved with different settings, or with one of another type.
    """
    saved = list(saved)
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    sources: list[dict[int, str]] = [{} for _ in groups]  # of each: its parameters' saved groups; the first of these
    for one in held:
        for row in one.rows:
            number = next((group_of[name] for name in row.names if name in group_of), None)
            if number is not None:
                sources[one.group].setdefault(number, row.name)
    settings = [_settings_of(number, saved, sources[number]) for number in range(len(groups))]
    for number, group in enumerate(groups):
        for key, value in settings[number].items():
            if not is_like(group.get(key), value):
                raise CheckpointError(
                    f"A setting of the optimizer's group {number} was saved as a value of a different type; nothing "
                    "was loaded.",
                    parameter=next(iter(sources[number].values())),
                    expected=f"{key} as a {type(group[key]).__name__}, such as {group[key]}",
                    got=f"{str(value)[:80]!r}, a {type(value).__name__}",
                )
            settings[number][key] = like_own(group.get(key), value)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _warn_of_split_groups(groups, settings, sources)
    return settings


def _settings_of(group: int, saved: Sequence[Mapping[str, Any]], sources: Mapping[int, str]) -> dict[str, Any]:
    """The settings that all these saved groups have, or those that have them at all."""
    found: dict[str, Any] = {}
    parameter_of: dict[str, str] = {}
    for number, parameter in sources.items():
        for key, value in saved[number].items():
            if key in _NAMES:
                continue
            if not same(found.setdefault(key, value), value):
                raise CheckpointError(
                    f"Parameters of the optimizer's group {group} were saved with different settings {key!r}; nothing "
                    "was loaded.",
                    parameter=parameter,
                    expected=f"{key}={found[key]}, as {parameter_of[key]}",
                    got=f"{key}={value}",
                    remedy="make the optimizer with a group for each; settings can be changed after loading, in "
                    "optimizer.param_groups",
                )
            parameter_of.setdefault(key, parameter)
    return found


def _warn_of_split_groups(
    groups: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]], sources: Sequence[Mapping[int, str]]
) -> None:
    """Groups that differ here, and that were one when they were saved, become alike: hardly what they were made for."""
    first: dict[int, int] = {}  # by saved group: the first group that has parameters of it
    for number, group in enumerate(groups):
        for source in sources[number]:
            other = groups[first.setdefault(source, number)]
            for key in settings[number]:
                if key in group and key in other and not same(group[key], other[key]):
                    warnings.warn(
                        message(
                            f"Groups {first[source]} and {number} of the optimizer have different settings {key!r}; "
                            "they were one group when it was saved, and both take its value.",
                            expected=f"{key}={other[key]} and {group[key]}, as the optimizer was made",
                            got=f"{key}={settings[number][key]}, as saved",
                            remedy="to keep the new ones, set them in optimizer.param_groups after loading",
                        ),
                        stacklevel=3,
                    )
                    return


def _is_number(value: Any) -> bool:
    """Whether `value` is one number: plain, or a tensor of one element."""
    return isinstance(value, (bool, int, float, complex)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def is_like(own: Any, saved: Any) -> bool:
    """Whether a saved setting or scalar can replace the optimizer's own: a number stays one, or becomes None."""
    if isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(own) != len(saved) or all(map(is_like, own, saved))
    return saved is None or not _is_number(own) or _is_number(saved)


def like_own(own: Any, saved: Any) -> Any:
    """A saved setting or scalar in the type of the optimizer's own, which it replaces; a fraction stays one."""
    if isinstance(own, torch.Tensor) and _is_number(own) and saved is not None:
        saved = saved if isinstance(saved, torch.Tensor) else torch.tensor(saved, device="cpu")
        return saved.detach().to(own).reshape(own.shape)
    if isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)) and len(own) == len(saved):
        return type(own)(map(like_own, own, saved))
    number = saved.item() if isinstance(saved, torch.Tensor) and isinstance(own, (int, float)) else saved
    if isinstance(own, (int, float)) and isinstance(number, (int, float)) and type(own)(number) == number:
        return type(own)(number)
    return number


def put(target: Any, saved: Mapping[str, Any]) -> None:
    """Put settings or scalars in place: a tensor stays that tensor, where others may hold it."""
    for key, value in saved.items():
        current = target.get(key)
        fits = value is not None and (
            _is_number(current) or getattr(value, "shape", None) == getattr(current, "shape", 0)
        )
        if isinstance(current, torch.Tensor) and fits:
            number = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
            with torch.no_grad():
                current.copy_(number.reshape(current.shape))
        else:
            target[key] = like_own(current, value)
