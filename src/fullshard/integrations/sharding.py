"""What all integrations do with a client library's model: shard it by its blocks, and let its optimizers follow.

units, precision      shard, unit_classes
optimizers            names_of, point_optimizers, check_theirs, naming_steps
gradients             without_sync
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from ..api.functional.fully_shard import fully_shard
from ..api.functional.module import FSDPModule, register_fsdp_forward_method
from ..checkpoint import values
from ..errors import PhaseError
from ..forms import owner_of
from ..policies import MixedPrecisionPolicy
from ..runtime import runners_in
from . import messages
from .quantised import by_rows

ModelT = TypeVar("ModelT", bound=nn.Module)

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ARGUMENTS = frozenset(inspect.signature(fully_shard).parameters) - {"module", "auto_wrap_policy"} | {"units"}
"""Of `fully_shard`, as programs hand them on through a library: `units` takes the place of `auto_wrap_policy`."""


def check_sharding(sharding: Any, known: Collection[str] = ARGUMENTS | {"mixed_precision"}) -> dict[str, Any]:
    """A copy of the arguments that a program hands on, looked at where it gives them.

    Raises:
        ConfigError: no dictionary.
        ArgumentTypeError: an unknown argument.
    """
    if not isinstance(sharding or {}, Mapping):
        raise messages.no_dictionary(sharding)
    if unknown := [name for name in sharding or {} if name not in known]:
        raise messages.unknown_argument(unknown[0], sharding[unknown[0]], known)
    return dict(sharding or {})


def unit_classes(model: nn.Module, names: Iterable[str | type] | None = None) -> set[type[nn.Module]]:
    """The classes of a model's blocks: those that it says must not be split (`_no_split_modules`).

    Args:
        model: a model of transformers, or one that PEFT made around it.
        names: classes, or their names, to take in place of the model's own.

    Returns:
        Classes of modules in `model`; empty if neither the model nor `names` says any.

    Raises:
        ConfigError: a name in `names` that no module's class has.
    """
    inside = {type(module) for module in model.modules() if module is not model}
    if names is None:
        planned = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        return {cls for cls in inside if cls.__name__ in planned}
    wanted = list(names)
    for one in wanted:
        if not any(one in (cls, cls.__name__) for cls in inside):
            raise messages.no_such_class(one, inside)
    return {cls for cls in inside if cls in wanted or cls.__name__ in wanted}


def shard(model: ModelT, *, units: Any = None, mixed_precision: str = "no", **settings: Any) -> ModelT:
    """Shard a Hugging Face model, in place: a unit of each of its blocks, and one of the rest.

    Shared weights stay shared. Build optimizers after it. The model's own `generate` gathers as its forward does, so
    that ranks whose texts end earlier go on in step (transformers' `synced_gpus`, which it sets by itself).

    Args:
        model: of transformers, or made by PEFT around one; on the CPU, the mesh's device, or meta (then `to_empty`, or
            see `from_pretrained`).
        units: classes of modules, or their names; or a policy, as `fully_shard(auto_wrap_policy=)` takes it. None: as
            the model says (`unit_classes`), else the blocks that it repeats.
        mixed_precision: "no", "bf16" or "fp16", as `TrainingArguments` and `Accelerator` say it: gathers and computes
            in 16 bits, reduces in float32, and holds what trains in float32, whatever it was loaded in. Frozen weights
            stay as they are. `mp_policy=` in its place says more.
        **settings: of `fullshard.fully_shard`: mesh, reshard_after_forward, layout, offload_policy, ...

    Returns:
        `model` itself.

    Raises:
        ConfigError: units that the model does not have, an unknown word for mixed_precision, both that and `mp_policy`,
            and whatever `fully_shard` refuses. Nothing has changed then.
    """
    policy, settings = plan_sharding(model, {"units": units, "mixed_precision": mixed_precision, **settings})
    by_rows(model)
    fully_shard(model, auto_wrap_policy=policy, **settings)
    finish(model, mixed_precision)
    return model


def plan_sharding(model: nn.Module, sharding: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`shard`'s arguments as `fully_shard` takes them: its policy, and the others.

    Raises:
        ConfigError: see `shard`.
    """
    settings = check_sharding(sharding)
    units, word = settings.pop("units", None), settings.pop("mixed_precision", "no")
    if word not in _DTYPES:
        raise messages.unknown_precision(word, _DTYPES)
    if word != "no":
        if "mp_policy" in settings:
            raise messages.two_precisions(word, settings["mp_policy"])
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=_DTYPES[word], reduce_dtype=torch.float32)
    if isinstance(units, (str, type)) and units != "auto":
        units = [units]
    if units is None or isinstance(units, (set, frozenset, tuple, list)):
        return unit_classes(model, units) or "auto", settings
    return units, settings


def finish(model: nn.Module, mixed_precision: str) -> None:
    """Hold what trains in float32, so that small steps are not lost; and let `generate` gather as a forward does.

    Args:
        model: sharded; of what grows, this rank holds its part alone. PEFT's `generate` calls the model inside, past
            the unit.
        mixed_precision: see `shard`; "no" leaves dtypes as they are.
    """
    with torch.no_grad():
        for parameter in model.parameters() if mixed_precision != "no" else ():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
    if callable(getattr(model, "generate", None)) and isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "generate")


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` or `FullyShardedDataParallel` holds any of its parameters."""
    return bool(runners_in(model))


@contextmanager
def without_sync(model: FSDPModule, enabled: bool = True) -> Iterator[None]:
    """A context whose backwards reduce nothing, unless it is not `enabled`; the next one after it reduces all."""
    model.set_requires_gradient_sync(not enabled)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


# Optimizers: built before a model was sharded, of another model, or not made for shards.


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """A model's parameters, which may not be sharded yet, and a name of each."""
    return {parameter: name for name, parameter in model.named_parameters()}


def point_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], before: Mapping[nn.Parameter, str], model: nn.Module
) -> None:
    """Put a model's parameters where optimizers hold those that it had before.

    Args:
        optimizers: of any models.
        before: what `names_of` said then.
        model: sharded since.

    Raises:
        ConfigError: an optimizer has state of a parameter, which is of another shape now.
    """
    now = dict(model.named_parameters())
    for optimizer in map(inside, optimizers):
        for group in optimizer.param_groups:
            stepped = [before[one] for one in group["params"] if one in before and optimizer.state.get(one)]
            if stepped:
                raise messages.stepped_before(optimizer, stepped[0])
            group["params"] = [now[before[one]] if one in before else one for one in group["params"]]


def inside(optimizer: Any) -> Any:
    """The optimizer itself, of one that Accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def check_theirs(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """Refuse an optimizer that steps none of the models.

    Args:
        optimizers: about to be prepared.
        models: prepared, or about to be.

    Raises:
        ConfigError: one has parameters, and none is any model's.
    """
    known = set().union(*map(stepped_in, models))
    for optimizer in map(inside, optimizers):
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if parameters and not any(id(one) in known for one in parameters):
            raise messages.of_no_model(optimizer, parameters)


def stepped_in(model: nn.Module) -> set[int]:
    """Ids of what an optimizer of this model may hold: its parameters, and views of them (`optimizer_view`)."""
    views = [tensor for runner in runners_in(model) for tensor, *_ in values.views_of(runner.unit)]
    return {id(tensor) for tensor in (*model.parameters(), *views)}


@contextmanager
def naming_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context of one step: an optimizer that cannot compute with sharded parameters is named, and what to do.

    Raises:
        ConfigError: in place of what DTensors or flat shards say of an operation.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is the former
        ours = isinstance(error, PhaseError) and error.topic == "used-while-freed"
        *_, last = traceback.extract_tb(error.__traceback__)
        if not ours and "DTensor" not in str(error) and "/torch/distributed/tensor/" not in last.filename:
            raise
        stepped = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        begun = [one for one in stepped if optimizer.state.get(one)] or stepped  # it goes from one to the next
        unit = owner_of(begun[-1]) if begun else None
        names = [] if unit is None else [member.name for member in unit.members if member.sharded is begun[-1]]
        raise messages.not_for_shards(optimizer, begun[-1:], names, error) from error
