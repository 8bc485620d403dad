"""Determine what an optimizer steps independently: each element, each parameter, or only all parameters together.

Optimizers of torch and some others are listed by name, since a trial on small tensors may not show what they do. All
others are tried: a copy with the same settings steps a small matrix and a small vector, and other copies step the same
values split differently. If the results agree, the optimizer does not depend on the split.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..containers import tensors_in
from ..generators import restored_generators
from ..optimizers import SCHEDULED, group_settings
from ..torch_private.local_tensor import plain_tensors
from ..torch_private.step_hooks import step_part, without_step_hooks

STEPS = 30  # some need whole tensors only in later steps
LR = 0.05
SAME = 3e-5
"""Tolerance relative to the distance that parameters move: smaller differences are rounding errors."""
SHAPES = [((6, 4), (5,)), ((6, 4), (4, 3))]  # the second is for optimizers of matrices alone
ELEMENT_WISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch's optimizers that step each element independently."""
WHOLE_TENSORS = frozenset(
    {"LBFGS", "Adafactor", "Muon", "Shampoo", "DistributedShampoo", "SOAP", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars"}
    | {"ScalableShampoo", "Kron", "AdamP", "SGDP", "SWATS"}
)
"""Names of optimizers whose step needs a parameter's shape, its norm, or several parameters at once."""
COUPLED = frozenset(
    {"Prodigy", "ProdigyPlusScheduleFree", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptSGD", "DAdaptLion", "DAdaptAdan"}
    | {"DAdaptAdanIP"}
)
"""Names of optimizers that compute one number (a step size) from all parameters."""
Settings = Mapping[str, Any]
Take = Callable[[torch.optim.Optimizer, Sequence[nn.Parameter]], None]
"""Takes a step of all parameters, which have gradients."""
Cut = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor | None]]]
"""Splits tensors into those of one optimizer each; None stands for a parameter that it has but does not step."""


def treats_elements(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether an optimizer can step arbitrary runs of elements, with the settings of all its groups.

    Returns:
        None if it cannot be determined: for example, it uses random numbers or computes gradients itself.
    """
    kind = type(optimizer)
    if names_of(kind) & WHOLE_TENSORS:
        return False
    if (known := _known(kind)) is not None:
        return known
    tried = _tried.setdefault(kind, {})
    if (settings := repr(list(_trials(kind, optimizer.defaults, optimizer.param_groups)[1]))) not in tried:
        tried[settings] = _verdict(kind, optimizer.defaults, optimizer.param_groups, _runs)
    return tried[settings]


def treats_parameters(
    optimizer_class: type[torch.optim.Optimizer], settings: Settings, groups: Sequence[Settings]
) -> bool | None:
    """Whether a parameter's step is the same when others have no gradients; None if it cannot be determined."""
    return _verdict(optimizer_class, settings, groups, _alone)


def steps_in_parts(
    optimizer_class: type[torch.optim.Optimizer], settings: Settings, groups: Sequence[Settings]
) -> bool | None:
    """Whether one step is, bit for bit, a `step_part` of each parameter and a step without gradients.

    That of one which counts steps in place, in what its parts share, or changes parameters or state without gradients
    is not. None if it cannot be determined.
    """
    return _verdict(optimizer_class, settings, groups, _together, _in_parts)


def names_of(optimizer_class: type) -> set[str]:
    """The names of a class and its base classes."""
    return {base.__name__ for base in optimizer_class.__mro__}


def _known(optimizer_class: Any) -> bool | None:
    """False for coupled optimizers, True for those with an element-wise step of torch's; None: unknown."""
    if names_of(optimizer_class) & COUPLED:
        return False
    is_torch_step = optimizer_class.step.__module__.startswith("torch.optim.")
    return True if is_torch_step and names_of(optimizer_class) & ELEMENT_WISE else None


_tried: weakref.WeakKeyDictionary[type, dict[str, bool | None]] = weakref.WeakKeyDictionary()


def _together(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    return [list(tensors)]


def _alone(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    """One optimizer per tensor, in which the other tensors have no gradients."""
    return [[tensor if tensor is chosen else None for tensor in tensors] for chosen in tensors]


def _runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    """Two flat runs of all elements, split inside the first tensor."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return [[run] for run in flat.split([11, flat.numel() - 11])]


def _at_once(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    optimizer.step()


def _in_parts(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Step parameters one by one, the last first, so that it comes first in its group; a second group is empty."""
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group(
            {**optimizer.param_groups[0], "params": [nn.Parameter(torch.zeros(2, 2, device="cpu"))]}
        )
    for parameter in reversed(parameters):
        step_part(optimizer, [parameter])
        parameter.grad = None
    optimizer.step()


def arguments_of(optimizer_class: type[torch.optim.Optimizer], defaults: Settings) -> dict[str, Any]:
    """The arguments with which a class makes an optimizer that has these `defaults`."""
    accepted: set[str] = set()
    for kind in optimizer_class.__mro__:  # an __init__ with **kwargs may pass them on to its base
        constructor: Any = vars(kind).get("__init__")
        if kind is torch.optim.Optimizer or constructor is None:
            continue
        parameters = inspect.signature(constructor).parameters
        accepted |= parameters.keys()
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return {key: value for key, value in defaults.items() if key in accepted}
    return dict(defaults)


def _trials(
    optimizer_class: type[torch.optim.Optimizer], defaults: Settings, groups: Sequence[Settings]
) -> tuple[Settings, dict[str, Settings]]:
    """The arguments and the group settings of trials, the latter once each, by their text.

    Learning rates, which may start at zero, and what schedulers add to groups do not make trials differ.
    """
    arguments = arguments_of(optimizer_class, defaults)
    own = [{k: v for k, v in group_settings(g).items() if k in defaults or k not in SCHEDULED} for g in groups]
    if isinstance(arguments.get("lr"), (float, int, torch.Tensor)):
        arguments, own = {**arguments, "lr": LR}, [{**settings, "lr": LR} for settings in own]
    return arguments, {repr(settings): settings for settings in own}


def _verdict(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Settings,
    groups: Sequence[Settings],
    cut: Cut,
    take: Take = _at_once,
) -> bool | None:
    if (known := _known(optimizer_class)) is not None:
        return known
    if "Distributed" in optimizer_class.__name__ or "ZeroRedundancy" in optimizer_class.__name__:
        return None  # they communicate
    arguments, distinct = _trials(optimizer_class, defaults, groups)
    verdicts = [_of_group(optimizer_class, arguments, group, cut, take) for group in distinct.values()]
    return None if None in verdicts else all(verdicts)


def _of_group(
    optimizer_class: type[torch.optim.Optimizer], arguments: Settings, group: Settings, cut: Cut, take: Take
) -> bool | None:
    for shapes in SHAPES:
        generator = torch.Generator("cpu").manual_seed(0)
        values = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
        # gradients have a constant mean, for optimizers whose step size grows
        means = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
        gradients = [
            [mean + torch.randn(mean.shape, generator=generator, device="cpu") for mean in means] for _ in range(STEPS)
        ]

        def flat(
            cut: Cut, seed: int, take: Take, values: Any = values, gradients: Any = gradients
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            """All elements after the steps, and the tensors of the optimizers' states."""
            each = zip(cut(values), *map(cut, gradients), strict=True)
            stepped = [_stepped(optimizer_class, arguments, group, seed, take, values, *tensors) for tensors in each]
            elements = torch.cat([tensor.reshape(-1) for tensors, _ in stepped for tensor in tensors])
            return elements, [tensor for _, state in stepped for tensor in state]

        try:
            whole, state = flat(_together, 0, _at_once)
            if not torch.equal(whole, flat(_together, 1, _at_once)[0]):
                return None  # random
        except Exception:  # any error of the user's class: try the next shapes
            continue
        try:
            other, other_state = flat(cut, 0, take)
        except Exception:  # it fails on anything but whole parameters
            return False
        moved = (whole - torch.cat([value.reshape(-1) for value in values])).norm()
        if not (moved > 0 and moved.isfinite()):
            return None
        if take is _in_parts:
            same = len(state) == len(other_state) and all(map(torch.equal, state, other_state))
            return same and torch.equal(whole, other)
        return bool((whole - other).norm() <= SAME * moved)
    return None


def _stepped(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Settings,
    group: Settings,
    seed: int,
    take: Take,
    all_values: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    *gradients: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The `values` after the steps of a new optimizer, and the tensors of its state.

    Where a value is None, it has that of `all_values`, unstepped.
    """
    parameters = [nn.Parameter((all_values[at] if value is None else value).clone()) for at, value in enumerate(values)]
    arguments, group = tree_map_only(torch.Tensor, torch.clone, (dict(arguments), dict(group)))  # it may count in place
    with _unseen(seed):
        optimizer = optimizer_class([{**group, "params": parameters}], **arguments)
        with without_step_hooks(optimizer):
            for each in gradients:
                for parameter, gradient in zip(parameters, each, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
                take(optimizer, parameters)
    state = [
        plain
        for parameter in parameters
        for tensor in tensors_in(optimizer.state.get(parameter) or {})
        for plain in plain_tensors(tensor)
    ]
    return [p.detach() for p, value in zip(parameters, values, strict=True) if value is not None], state


@contextlib.contextmanager
def _unseen(seed: int) -> Iterator[None]:
    """Suppress output and warnings, and restore the random state at the end."""
    with (
        restored_generators(),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        torch.device("cpu"),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        random.seed(seed)
        yield
