"""What all integrations share: sharding a client library's model block by block, and keeping its optimizers in step.

units, precision      shard, unit_classes
optimizers            unwrapped, repoint, steps, explain_step_errors
gradients             accumulating
bytes and progress    serialised, MonitorReports
"""

from __future__ import annotations

import inspect
import io
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..api.functional.fully_shard import fully_shard
from ..api.functional.module import FSDPModule, register_fsdp_forward_method
from ..api.gradient_settings import without_sync
from ..errors import PhaseError, invalid_argument
from ..forms import successor_of
from ..insight.monitor import Monitor
from ..policies import MixedPrecisionPolicy
from ..runtime import runners_in
from . import messages
from .quantised import by_rows

ModelT = TypeVar("ModelT", bound=nn.Module)

Mixin: Any = object
"""The base of mixins for classes of libraries; for type checkers, a class with any attributes."""

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ARGUMENTS = frozenset(inspect.signature(fully_shard).parameters) - {"module", "auto_wrap_policy"} | {"units"}
"""Arguments of `fully_shard` that a program passes through a library; `units` replaces `auto_wrap_policy`."""


def check_sharding(sharding: Any, allowed: Collection[str] = ARGUMENTS | {"mixed_precision"}) -> dict[str, Any]:
    """Check sharding arguments where a program passes them, long before they are used; returns a copy.

    Raises:
        ConfigError: not a dictionary.
        ArgumentTypeError: an unknown argument.
    """
    sharding = sharding or {}
    if not isinstance(sharding, Mapping):
        expected = 'a dictionary of arguments for hf.shard, such as {"reshard_after_forward": True}'
        raise invalid_argument("sharding", sharding, expected)
    for name, value in sharding.items():
        if name not in allowed:
            raise messages.unknown_argument(name, value, allowed)
    return dict(sharding)


def unit_classes(model: nn.Module, names: Iterable[str | type] | None = None) -> set[type[nn.Module]]:
    """The classes of a model's blocks: those that the model says must not be split (`_no_split_modules`).

    Args:
        model: a Transformers model, or a PEFT model around one.
        names: classes, or their names, to use instead of the model's own.

    Returns:
        Classes of modules in `model`; empty if neither the model nor `names` lists any.

    Raises:
        ConfigError: a class in `names` that does not occur in the model.
    """
    classes = {type(module) for module in model.modules() if module is not model}
    if names is None:
        planned = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        return {cls for cls in classes if cls.__name__ in planned}
    wanted = list(names)
    for name in wanted:
        if not any(name in (cls, cls.__name__) for cls in classes):
            raise messages.no_such_class(name, classes)
    return {cls for cls in classes if cls in wanted or cls.__name__ in wanted}


def shard(model: ModelT, *, units: Any = None, mixed_precision: str = "no", **settings: Any) -> ModelT:
    """Shard a Hugging Face model in place: one unit per block, and one for the rest.

    Tied weights stay tied. Build optimizers afterwards. The model's `generate` gathers as its forward does. Ranks whose
    texts end early keep running forwards until all ranks are done: Transformers enables its `synced_gpus` by itself.

    Args:
        model: a Transformers model, or a PEFT model around one; on the CPU, the mesh's device, or meta (call `to_empty`
            afterwards, or use `from_pretrained`).
        units: module classes, or their names; or a policy, as for `fully_shard(auto_wrap_policy=)`. None: the model's
            own plan (`unit_classes`), or else its repeated blocks. Ignored if parts of the model are sharded already:
            then the rest becomes one unit.
        mixed_precision: "no", "bf16" or "fp16", as in `TrainingArguments` and `Accelerator`: gathers and computes in
            16 bits, reduces in float32, and keeps trainable parameters in float32, whatever dtype they were loaded in.
            Frozen weights keep their dtype. Pass `mp_policy` instead for finer control.
        **settings: other arguments of `fullshard.fully_shard`: mesh, reshard_after_forward, layout, offload_policy, ...

    Returns:
        `model` itself.

    Raises:
        ConfigError: units that the model does not have, an invalid mixed_precision, both that and `mp_policy`,
            or anything that `fully_shard` refuses. The model is then unchanged.
    """
    policy, settings = plan_sharding(model, units, mixed_precision, settings)
    by_rows(model)
    fully_shard(model, auto_wrap_policy=policy, **settings)
    finish(model, mixed_precision)
    return model


def plan_sharding(
    model: nn.Module, units: Any, mixed_precision: str, settings: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Translate `shard`'s arguments into `fully_shard`'s: the wrapping policy, and the other arguments.

    Raises:
        ConfigError: see `shard`.
    """
    settings = check_sharding(settings)
    if mixed_precision not in _DTYPES:
        raise invalid_argument("mixed_precision", mixed_precision, " or ".join(map(repr, _DTYPES)))
    if (dtype := _DTYPES[mixed_precision]) is not None:
        if "mp_policy" in settings:
            raise messages.two_precisions(mixed_precision, settings["mp_policy"])
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if is_sharded(model):
        return None, settings
    if isinstance(units, type) or (isinstance(units, str) and units != "auto"):
        units = [units]
    if units is None or isinstance(units, (set, frozenset, tuple, list)):
        units = unit_classes(model, units) or "auto"
    return units, settings


def finish(model: nn.Module, mixed_precision: str) -> None:
    """Keep trainable parameters in float32, so that small updates are not lost; make `generate` gather as a forward.

    Args:
        model: already sharded, so only this rank's shards grow.
        mixed_precision: see `shard`; "no" leaves dtypes alone.
    """
    with torch.no_grad():
        for parameter in model.parameters() if mixed_precision != "no" else ():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
    if callable(getattr(model, "generate", None)) and isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "generate")  # PEFT's calls the inner model, bypassing the root unit


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` or `FullyShardedDataParallel` has sharded any part of the model."""
    return bool(runners_in(model))


def accumulating(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Context in which gradients accumulate, if `enabled`; units on a hybrid mesh reduce over their shard axis."""
    return without_sync(runners_in(model), shards_of_hybrid=True) if enabled else nullcontext()


# Optimizers: built before the model was sharded, for another model, or unable to step shards.


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's or Lightning's wrapper, or `optimizer` itself."""
    return getattr(optimizer, "optimizer", optimizer)


def repoint(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's parameters that have been sharded since it was built by their shards.

    Raises:
        ConfigError: it has state for such a parameter, whose shape has changed.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if successor_of(parameter) is not parameter and optimizer.state.get(parameter):
                raise messages.stepped_before(optimizer, successor_of(parameter))
        group["params"] = [successor_of(parameter) for parameter in group["params"]]


def steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has parameters of a model, from before or after sharding, or views of them."""
    views = [tensor for runner in runners_in(model) for tensor, *_ in runner.unit.optimizer_views()]
    steppable = {id(tensor) for tensor in (*model.parameters(), *views)}
    return any(id(successor_of(p)) in steppable for group in optimizer.param_groups for p in group["params"])


@contextmanager
def explain_step_errors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run one optimizer step; if the optimizer cannot handle sharded parameters, raise an error that says so.

    Raises:
        ConfigError: replaces the error of the operation that a DTensor or flat shard refused.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is a RuntimeError
        refused = isinstance(error, PhaseError) and error.topic == "used-while-freed"
        *_, last = traceback.extract_tb(error.__traceback__)
        if not refused and "DTensor" not in str(error) and "/torch/distributed/tensor/" not in last.filename:
            raise
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        begun = [p for p in stepped if optimizer.state.get(p)] or stepped  # optimizers step in order
        raise messages.cannot_step_shards(optimizer, begun[-1] if begun else None, error) from error


def serialised(value: Any) -> bytes:
    """What `torch.save` writes of a value."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


class MonitorReports:
    """The steps of a library's Trainer as reports of a `fullshard.Monitor`, which exists while it trains."""

    monitor: Monitor | None = None

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def start(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Create the monitor, once the model is sharded and its optimizer exists; `step` steps were taken before."""
        self.monitor = Monitor(model, unwrapped(optimizer), start_step=step, **self.settings)

    def report(self, **values: Any) -> None:
        """Report an optimizer step; see `Monitor.step`."""
        if self.monitor is not None:
            self.monitor.step(**values)

    def close(self) -> None:
        """Close the monitor's files."""
        if self.monitor is not None:
            self.monitor.close()
