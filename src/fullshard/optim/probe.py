"""What an optimizer treats by itself: an element, a parameter, or all parameters at once.

torch's optimizers are known, and so are a few of others, by name: three steps on small tensors would not show what they
do. Any other is tried. A copy of it, with its settings, steps a small matrix and a small vector in one process; another
copy steps the same numbers cut differently. Where both come to the same numbers, the cut does not matter to it.
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

from ..torch_private.step_hooks import without_step_hooks

STEPS = 30  # some begin to look at whole tensors later
LR = 0.05
SAME = 3e-5
"""Of how far parameters move: what differs by less is rounding."""
SHAPES = [((6, 4), (5,)), ((6, 4), (4, 3))]  # the second is for optimizers of matrices alone
ELEMENT_WISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch's optimizers to which an element is an element, wherever it lies."""
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
Cut = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor | None]]]
"""From tensors to those that one optimizer each has; None for a parameter that it has, but does not step."""


def treats_elements(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether an optimizer may step any runs of elements, with the settings of each of its groups.

    Returns:
        None: that cannot be found out; it draws random numbers, say, or wants to compute gradients itself.
    """
    kind = type(optimizer)
    if names_of(kind) & (WHOLE_TENSORS | COUPLED):
        return False
    if _is_known(kind):
        return True
    groups = _distinct(optimizer.param_groups)
    tried = _tried.setdefault(kind, {})
    if (settings := repr(groups)) not in tried:
        tried[settings] = _verdict(kind, optimizer.defaults, groups, _runs)
    return tried[settings]


def treats_parameters(
    optimizer_class: type[torch.optim.Optimizer], settings: Settings, groups: Sequence[Settings]
) -> bool | None:
    """Whether a parameter's step is the same where others have no gradients. As `treats_elements`."""
    if names_of(optimizer_class) & COUPLED:
        return False
    if _is_known(optimizer_class):
        return True
    return _verdict(optimizer_class, settings, _distinct(groups), _alone)


def names_of(optimizer_class: type) -> set[str]:
    """Names of a class and of those that it is derived from."""
    return {base.__name__ for base in optimizer_class.__mro__}


def _is_known(optimizer_class: Any) -> bool:
    """Whether the step is that of one of torch's element-wise optimizers."""
    own = optimizer_class.step.__module__.startswith("torch.optim.")
    return own and bool(names_of(optimizer_class) & ELEMENT_WISE)


_tried: weakref.WeakKeyDictionary[type, dict[str, bool | None]] = weakref.WeakKeyDictionary()


def _together(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    return [list(tensors)]


def _alone(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    """Each in an optimizer of its own, which has the others without gradients."""
    return [[one if one is chosen else None for one in tensors] for chosen in tensors]


def _runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor | None]]:
    """All elements in one dim, cut within the first tensor."""
    flat = torch.cat([one.reshape(-1) for one in tensors])
    return [[run] for run in flat.split([11, flat.numel() - 11])]


def _distinct(groups: Sequence[Settings]) -> list[Settings]:
    plain = [{key: v for key, v in group.items() if key not in ("params", "param_names")} for group in groups]
    return list({repr(group): group for group in plain}.values())


def _verdict(
    optimizer_class: type[torch.optim.Optimizer], defaults: Settings, groups: Sequence[Settings], cut: Cut
) -> bool | None:
    if "Distributed" in optimizer_class.__name__ or "ZeroRedundancy" in optimizer_class.__name__:
        return None  # they communicate
    known = inspect.signature(optimizer_class).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    arguments = {key: value for key, value in defaults.items() if takes_all or key in known}
    verdicts = [_of_group(optimizer_class, arguments, group, cut) for group in groups]
    return None if None in verdicts else all(verdicts)


def _of_group(
    optimizer_class: type[torch.optim.Optimizer], arguments: Settings, group: Settings, cut: Cut
) -> bool | None:
    for shapes in SHAPES:
        generator = torch.Generator("cpu").manual_seed(0)
        values = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
        mean = [
            torch.randn(shape, generator=generator, device="cpu") for shape in shapes
        ]  # steady, for step sizes that grow
        gradients = [
            [one + torch.randn(one.shape, generator=generator, device="cpu") for one in mean] for _ in range(STEPS)
        ]

        def flat(cut: Cut, seed: int, values: Any = values, gradients: Any = gradients) -> torch.Tensor:
            """All elements after the steps."""
            each = zip(cut(values), *map(cut, gradients), strict=True)
            stepped = [_stepped(optimizer_class, arguments, group, seed, values, *one) for one in each]
            return torch.cat([tensor.reshape(-1) for tensors in stepped for tensor in tensors])

        try:
            whole = flat(_together, 0)
            if not torch.equal(whole, flat(_together, 1)):
                return None  # random
        except Exception:  # of the user's class, whatever it is: the next shapes, or not known
            continue
        try:
            other = flat(cut, 0)
        except Exception:  # it steps whole parameters, and fails on others
            return False
        moved = (whole - torch.cat([value.reshape(-1) for value in values])).norm()
        return bool((whole - other).norm() <= SAME * moved) if moved > 0 and moved.isfinite() else None
    return None


def _stepped(
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Settings,
    group: Settings,
    seed: int,
    all_values: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor | None],
    *gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """The `values` after steps of a new optimizer; those that it does not step are as in `all_values`."""
    parameters = [nn.Parameter((all_values[at] if value is None else value).clone()) for at, value in enumerate(values)]
    with _unseen(seed):
        if isinstance(arguments.get("lr"), (float, int, torch.Tensor)):
            arguments = {**arguments, "lr": LR}  # it may be zero at first
            group = {**group, "lr": LR}
        optimizer = optimizer_class([{**group, "params": parameters}], **arguments)
        with without_step_hooks(optimizer):
            for each in gradients:
                for parameter, gradient in zip(parameters, each, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
                optimizer.step()
    return [parameter.detach() for parameter, value in zip(parameters, values, strict=True) if value is not None]


@contextlib.contextmanager
def _unseen(seed: int) -> Iterator[None]:
    """Nothing is printed, and the process' random numbers stay what they are."""
    before = random.getstate()
    with (
        torch.random.fork_rng(devices=[]),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        torch.device("cpu"),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
