"""Check every optimizer before its first step, and notify units of every step, so that they know of new values.

Optimizers built before `fully_shard` or while a unit was gathered raise an error, and so do those that need whole
tensors but have flat runs of elements: they would train nothing, or incorrectly. A warning is issued for optimizers
that step sharded parameters and others in no unit: usually `fully_shard` was applied to a model's blocks but not to the
model, so that each rank trains the embedding, norm and head on its own data only.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress, repeat
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..containers import NONES
from ..errors import ConfigError, message
from ..forms import (
    NAME_KEY,
    PART_KEY,
    SUCCESSOR_KEY,
    WHOLE_KEY,
    FlatShard,
    RowShard,
    note_change,
    owner_of,
    successor_of,
)
from ..readers import wait_for_readers
from ..runtime import apart, left_alone_by_all
from ..shard import Unit, all_ranks_hold, before_step
from ..torch_private.local_tensor import plain_access, read_grad
from ..torch_private.step_hooks import hook_around_all
from .clip import STEPPED_KEY
from .owner_optimizer import OwnerOptimizer
from .plain_step import after_step, on_plain_tensors
from .probe import COUPLED, names_of, treats_elements

FAIL_ON_DTENSORS = {
    "torch": {"Adafactor", "Rprop"},
    "transformers": {"Adafactor"},
    "came_pytorch": {"CAME"},
    "apollo_torch": {"AdamW"},
    "soap": {"SOAP"},
    "pytorch_optimizer": {
        *("A2Grad", "AdaFactor", "Adalite", "AdamP", "AdaNorm", "Alice", "CAME", "EmoFact", "FAdam", "Kron", "Lamb"),
        *("RACS", "SGDP", "SM3", "SOAP", "SPAM", "ScalableShampoo", "Shampoo", "StableAdamW", "StableSPAM", "SWATS"),
        *("NovoGrad",),
    },
}
"""By package: classes whose step raises errors of torch on `DTensor`s, whatever their settings."""
FAIL_IN_LISTS = {
    "pytorch_optimizer": {"Adan", "ADOPT", "AdaSmooth", "DiffGrad", "FTRL", "LARS", "MADGRAD", "MARS", "SRMM"},
}
"""By package: classes whose step raises errors of torch on `DTensor`s unless `foreach=False`."""

FAIL_ON_RUNS = {
    "torch": {"Adafactor", "Muon", "Rprop"},
    "transformers": {"Adafactor"},
    "came_pytorch": {"CAME"},
    "apollo_torch": {"AdamW"},
    "pytorch_optimizer": {"Adalite", "CAME", "Conda", "Kron", "Shampoo", "SOAP"},
}
"""By package: classes whose step needs more of a `FlatShard` than elements and sums, whatever their settings."""

TAKE_PLAIN_TENSORS = {
    "bitsandbytes": {"Optimizer8bit"},
    "deepspeed": {"DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"},
}
"""By package: classes that step by kernels of their own, which read a tensor's memory: DeepSpeed's end the process on
tensor subclasses, which have none (SIGSEGV, deepspeed 0.19.8)."""

ORTHOGONALIZE_SHARDS = {"muonium": {"Muon"}}
"""By package: classes that orthogonalize the rows of a rank, not the matrix (README of muonium 0.2.0, "fast path")."""

_checked: weakref.WeakKeyDictionary[Optimizer, Checked] = weakref.WeakKeyDictionary()
_warned: set[str] = set()


@cache
def install() -> None:
    """Check every optimizer of this process at its first step, and again when it gains parameters."""
    # Dynamo cannot trace the hook, and a compiled step must not skip it: this breaks the graph.
    check = apart(_check)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        check(optimizer, args, kwargs)
        return on_plain_tensors(optimizer, args, kwargs)

    # One hook, the last of those of all optimizers: a check may take the table of hooks apart, to try an optimizer.
    hook_around_all(before_step, after_step)


@dataclass(slots=True)
class Checked:
    """An optimizer that was checked.

    Attributes:
        count: number of its parameters at the check.
        units: the units whose parameters it steps, the same on every rank.
        settings, number, words: settings of its groups at the last step: as values, as a checksum, and as text.
    """

    count: int
    units: list[weakref.ref[Any]]
    settings: tuple[Any, ...] = ()
    number: int = 0
    words: str = ""

    def step(self, optimizer: Optimizer) -> None:
        """Notify the units of a step. Ranks compare their steps at the end of the next backward."""
        groups = optimizer.param_groups
        settings = *[tuple([v for v in group.values() if type(v) in _PLAIN]) for group in groups], _clipping(optimizer)
        if settings != self.settings or not self.words:
            self.settings, self.words = settings, _described(optimizer)
            self.number = zlib.crc32(self.words.encode())
        units = [unit for reference in self.units if (unit := reference()) is not None]
        before_step(units)
        for unit in units:
            unit.touched.step(self.number, self.words)


def stepping(units: Iterable[Unit]) -> list[Optimizer]:
    """The optimizers that began to step parameters of these units, or views over them, at least once."""
    mine = set(map(id, units))
    return [
        optimizer
        for optimizer in _checked
        if any(id(owner_of(p)) in mine for group in optimizer.param_groups for p in group["params"])
    ]


_PLAIN = (int, float, bool, str, tuple, type(None))


def _clipping(optimizer: Optimizer) -> str:
    """How gradients are clipped if the optimizer steps in the backward; else empty."""
    steps = optimizer.__dict__.get(STEPPED_KEY)
    return "" if steps is None or steps.max_norm is None else f", max_norm={steps.max_norm!r}, clip={steps.clip!r}"


def _described(optimizer: Optimizer) -> str:
    groups = []
    for group in optimizer.param_groups:
        settings = [f"{key}={group[key]!r}" for key in sorted(group) if key != "params" and type(group[key]) in _PLAIN]
        groups.append(", ".join(settings))
    return f"{type(optimizer).__name__}({'; '.join(dict.fromkeys(groups))}{_clipping(optimizer)})"


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    wait_for_readers()
    groups = optimizer.param_groups
    listed = [*chain.from_iterable([group["params"] for group in groups])]
    parameters: list[torch.Tensor] = [*compress(listed, map(isinstance, listed, repeat(torch.Tensor)))]
    checked = _checked.get(optimizer)
    if checked is None or checked.count != len(parameters):
        check_parameters(optimizer)
        checked = _checked[optimizer] = Checked(len(parameters), _stepped_by(groups))
        _warn_of_outside(groups)
    if checked.units:
        checked.step(optimizer)
    with plain_access():
        note_change([*compress(parameters, map(is_not, map(read_grad, parameters), NONES))])


def _stepped_by(groups: Sequence[dict[str, Any]]) -> list[weakref.ref[Any]]:
    """The units whose parameters an optimizer steps, except those for which some rank may have no gradient at all.

    For example, an optimizer of one parameter may not be stepped on ranks that hold no elements of it.
    """
    owned: dict[Any, list[torch.Tensor]] = {}
    for parameter in [p for group in groups for p in group["params"]]:
        if isinstance(parameter, torch.Tensor) and (unit := owner_of(parameter)) is not None:
            owned.setdefault(unit, []).append(parameter)
    return [weakref.ref(unit) for unit, parameters in owned.items() if all_ranks_hold(unit, parameters)]


def _warn_of_outside(groups: Sequence[dict[str, Any]]) -> None:
    """Warn, once per process, if an optimizer of sharded parameters also steps some whose gradients nothing averages.

    Ignored parameters, parameters with hooks on their gradients, and `DTensor`s, which something else distributes, are
    exempt.
    """
    named = [(name, p) for group in groups for name, p in _named(group) if isinstance(p, torch.Tensor)]
    units = {unit for _, parameter in named if (unit := owner_of(parameter)) is not None}
    if "outside" in _warned or all([bucket.axes.world == 1 for unit in units for bucket in unit.buckets]):
        return
    ignored = left_alone_by_all()
    names = [name for name, p in named if owner_of(p) is None and id(p) not in ignored and _is_local(p)]
    if names:
        _warned.add("outside")
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
        warnings.warn(
            message(
                "An optimizer steps parameters that no unit holds, beside sharded ones: nothing averages their "
                "gradients over ranks, so ranks drift apart.",
                parameter=shown,
                expected="every trained parameter in a unit",
                remedy="call fully_shard(model) on the whole model after its blocks (or wrap it whole): it takes what "
                "no block took. Where something else averages these gradients (DDP, say), name them in ignored_params= "
                "(ignored_states= of the wrapper). (Shown once per process.)",
                topic="root-forgotten",
            ),
            stacklevel=4,
        )


_SHOWN = 5  # names in a warning


def _named(group: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """A group's parameters with their names, or with their shapes if the optimizer has no names."""
    names = group.get("param_names") or [f"of shape {tuple(getattr(p, 'shape', ()))}" for p in group["params"]]
    return zip(names, group["params"], strict=True)


def _is_local(parameter: torch.Tensor) -> bool:
    """Whether a parameter is local to this rank and has a gradient that no hook has processed."""
    return (
        isinstance(parameter, nn.Parameter)
        and not isinstance(parameter, DTensor)
        and parameter.grad is not None
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def check_parameters(optimizer: Optimizer) -> None:
    """Raise, or warn, if this optimizer must not be given its parameters.

    Raises:
        ConfigError: the parameters are not those that train, or the optimizer cannot step such parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, torch.Tensor):
                _check_parameter(optimizer, group, parameter)


def _check_parameter(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Raise, or warn, if this optimizer must not be given `parameter`."""
    attributes = parameter.__dict__
    if SUCCESSOR_KEY in attributes:
        raise ConfigError(
            f"This {type(optimizer).__name__} was built before its model was sharded: it holds "
            "parameters that were replaced since, and would train nothing.",
            parameter=successor_of(parameter).__dict__.get(NAME_KEY, "?"),
            expected="an optimizer built from model.parameters() once the model is sharded",
            remedy="build the optimizer after fully_shard (or wrapping), from model.parameters(); or wrap "
            "the model with use_orig_params=True, which keeps Parameter objects",
            topic="optimizer-built-early",
        )
    if WHOLE_KEY in attributes:
        raise ConfigError(
            f"This {type(optimizer).__name__} was built while a unit was gathered: it holds the gathered parameters, "
            "which are freed after use, and would train nothing.",
            parameter=attributes[WHOLE_KEY],
            expected="an optimizer built from the sharded parameters",
            got="one built between unshard() and reshard(), or inside a forward",
            remedy="build the optimizer from model.parameters() before unshard(), or after reshard()",
            topic="optimizer-built-early",
        )
    if isinstance(parameter, (RowShard, FlatShard)):
        _check_class(optimizer, group, parameter)
    if (part := attributes.get(PART_KEY)) is None or isinstance(optimizer, OwnerOptimizer):
        return  # OwnerOptimizer has tried its optimizer itself
    name, verdict = type(optimizer).__name__, treats_elements(optimizer)
    if verdict is False:
        raise ConfigError(
            f"{name} needs whole tensors, and was given runs of elements in one dim: results would be wrong.",
            parameter=attributes.get(NAME_KEY) or ", ".join(attributes.get("_fqns", ())) or "?",
            expected="an element-wise optimizer (SGD, Adam, AdamW, ...), or parameters of fully_shard",
            got=f"{name} with {part}",
            remedy=f"shard the model with fully_shard, and build {name} from model.parameters(), which some can step"
            + (
                f", or run it on owners, fullshard.OwnerOptimizer(model.parameters(), {name}, ...)"
                if name != "LBFGS"
                else ""
            )
            + "; or take an element-wise optimizer",
            topic="optimizer-on-shards",
        )
    if verdict is None and name not in _warned:
        _warned.add(name)
        warnings.warn(
            message(
                f"{name} was given runs of elements in one dim, which only element-wise optimizers can step; it cannot "
                f"be determined whether {name} is one.",
                got=f"{name} with {part}",
                remedy="ignore this warning if each element's step depends only on that element's gradient and state; "
                "else build it from model.parameters() of fully_shard. (Shown once per class.)",
                topic="optimizer-on-shards",
            ),
            stacklevel=4,
        )


def _is_uneven(parameter: Any) -> bool:
    """Whether ranks have different numbers of a parameter's rows, which DTensor cannot flatten."""
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(placement.is_shard() and parameter.shape[placement.dim] % size for placement, size in sizes)


def _is_split(parameter: RowShard | FlatShard) -> bool:
    """Whether a parameter is on more than one rank."""
    return (parameter._run.axis.size if isinstance(parameter, FlatShard) else parameter.device_mesh.size()) > 1


def _check_class(optimizer: Optimizer, group: dict[str, Any], parameter: RowShard | FlatShard) -> None:
    """Refuse optimizers that cannot step this class of tensors: their step would raise errors of torch, or crash."""
    name, kind = type(optimizer).__name__, "DTensor" if isinstance(parameter, DTensor) else "FlatShard"
    bases = [(base.__module__.split(".")[0], base.__name__) for base in type(optimizer).__mro__]

    def is_among(classes: Mapping[str, set[str]]) -> bool:
        return any(base in classes.get(package, ()) for package, base in bases)

    owners = f"fullshard.OwnerOptimizer(model.parameters(), {name}, ...), which gives it whole tensors"
    if is_among(ORTHOGONALIZE_SHARDS) and _is_split(parameter):
        raise ConfigError(
            f"{name} orthogonalizes the part of a matrix that each rank has, not the matrix: results would be wrong.",
            parameter=parameter.__dict__.get(NAME_KEY, "?"),
            expected="an optimizer that assembles matrices",
            got=f"{type(optimizer).__module__}.{name}",
            remedy=f"fullshard.Muon; or {owners}",
            topic="optimizer-on-shards",
        )
    is_flat = isinstance(parameter, FlatShard)
    projects = is_flat and is_among({"galore_torch": {"AdamW", "Adafactor"}}) and "rank" in group  # GaLore's groups
    if names_of(type(optimizer)) & COUPLED and _is_split(parameter):
        remedy = "use a different optimizer: this one computes a number from all parameters"
    elif not is_flat and is_among(FAIL_IN_LISTS) and group.get("foreach") is not False:
        remedy = f"{name}(..., foreach=False); or optimizer_view(model) for element-wise optimizers"
    elif not is_flat and ("torch", "LBFGS") in bases and _is_uneven(parameter):
        remedy = "take a number of ranks that divides all first dims, or an element-wise optimizer"
    elif projects or is_among(TAKE_PLAIN_TENSORS) or is_among(FAIL_ON_RUNS if is_flat else FAIL_ON_DTENSORS):
        remedy = f"{name}(optimizer_view(model), ...)" if treats_elements(optimizer) else owners
    else:
        return
    raise ConfigError(
        f"{name} computes with operations that do not exist for {kind}s, which sharded parameters are here.",
        parameter=parameter.__dict__.get(NAME_KEY, "?"),
        expected="an optimizer that steps such tensors; or plain or whole tensors",
        got=f"{type(optimizer).__module__}.{name}",
        remedy=remedy,
        topic="optimizer-on-shards",
    )
