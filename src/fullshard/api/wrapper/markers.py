"""Private attributes of PyTorch's FSDP1 that libraries read on instances of the wrapper, and their meaning here.

Accelerate (`Accelerator.prepare` with mixed precision) upcasts weights that were loaded in 16 bits to float32: for each
instance that `_has_params` it reads the dtype, device, `requires_grad` and `_fqns` of `_flat_param`, sets its `.data`
to a cast tensor, and records this in `_handle._orig_param_dtype = torch.float32`. verl moves a model to the host and
back by `flat_param_to` of `_all_handles`, and resets `_is_root` on parts of a model that it summoned. Lightning looks
for `_fsdp_flattened` on an optimizer's parameters, which `FlatParameter`s have (`forms/flat_parameter.py`).
Transformers and dynamo look for `_is_fsdp_managed_module` on wrapped modules (`runtime/units.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...forms import FlatParamShardMetadata, Owner, shard_metadata
from ...runtime import RUNNER_KEY, Runner, mark_managed, own_modules, runners_in
from ...shard import Bucket, Unit
from ...text import WRAPPED
from . import messages
from .configs import StateDictSettings, StateDictType, TrainingState
from .instances import flat_of

WRAPPER_KEY = "_fullshard_wrapper"
"""The key in a wrapped module's `__dict__` of a weak reference to its instance."""


def mark_wrapped(instance: Any, module: nn.Module, ignored: Iterable[nn.Module]) -> None:
    """Register `module` on its instance, give it a reference back, and mark the modules in it as managed."""
    instance._modules[WRAPPED] = module
    mark_managed(own_modules(module, ignored), instance.use_orig_params)
    module.__dict__[WRAPPER_KEY] = Owner(instance)


def wrapper_of(module: nn.Module) -> Any:
    """The instance that wraps `module`, or None. A copy of a wrapped module has none."""
    reference = module.__dict__.get(WRAPPER_KEY)
    instance = reference() if reference else None
    return instance if instance is not None and instance.module is module else None


class Handle:
    """An instance's parameters, with the interface of PyTorch's `_handle`."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the sharded parameters. Setting it casts those that train."""
        return _shown(self._unit).storage_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        unit = self._unit
        unit.refresh()  # takes over the `.data` of a FlatParameter
        cast, finish = unit.apply(lambda tensor: tensor.to(dtype))
        for bucket in unit.buckets:
            if bucket.storage_dtype != dtype and _may_be_cast(bucket):
                cast(bucket.members[0].sharded)
        finish()

    @property
    def _offload_params(self) -> bool:
        """Whether the parameters live in host memory."""
        return any([bucket.home is not None for bucket in self._unit.buckets])

    @property
    def flat_param(self) -> Any:
        """The instance's `FlatParameter`."""
        return flat_of(_shown(self._unit))

    def flat_param_to(self, device: torch.device, non_blocking: bool = False) -> None:
        """Move the shards to a device, shown in the same `FlatParameter`; gradients stay where they are.

        Call it between steps, and move them back before the next one. `fullshard.park` moves gradients and optimizer
        state too.
        """
        unit = self._unit
        unit.refresh()
        unit.reshard()
        move, finish = unit.apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        for bucket in unit.buckets:
            move(bucket.members[0].sharded)
        finish()

    def shard_metadata(self) -> FlatParamShardMetadata:
        """This rank's parts of the instance's parameters: names, shapes, strides, sizes, first and last element."""
        bucket = _shown(self._unit)
        return shard_metadata(bucket.layout, bucket.axes.shard.rank)


class Markers:
    """The mixin that gives instances these attributes."""

    def _runner(self) -> Runner:
        runner: Runner = self.__dict__[RUNNER_KEY]
        return runner

    @property
    def _handle(self) -> Handle | None:
        """The instance's parameters; None if it has none of its own."""
        unit = self._runner().unit
        return Handle(unit) if unit.buckets else None

    @property
    def _has_params(self) -> bool:
        """Whether the instance has parameters of its own."""
        return bool(self._runner().unit.buckets)

    @property
    def _flat_param(self) -> Any:
        """The instance's `FlatParameter` (with `use_orig_params=True`, a new one over the same memory), or None."""
        unit = self._runner().unit
        return flat_of(_shown(unit)) if unit.buckets else None

    @property
    def _is_root(self) -> bool | None:
        """Whether the instance's forward is called from outside; None until the first forward decides."""
        runner = self._runner()
        return None if runner.root is None else runner.is_top

    @_is_root.setter
    def _is_root(self, value: bool) -> None:
        """Accept False, which changes nothing: summoning a part of a model does not make it a root here.

        Raises:
            UsageError: the value is True, and the instance is not a root.
        """
        if value and not self._is_root:
            raise messages.root_not_settable()

    @property
    def _all_handles(self) -> list[Handle]:
        """The handles of all instances with parameters of their own: this instance and those below it."""
        return [Handle(runner.unit) for runner in runners_in(self) if runner.unit.buckets]  # type: ignore[arg-type]

    @property
    def _use_orig_params(self) -> bool:
        """Whether the instance was built with `use_orig_params=True`."""
        use_orig_params: bool = self.use_orig_params  # type: ignore[attr-defined]
        return use_orig_params

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        """`device_mesh`, or its data-parallel part; None without one."""
        arguments: Any = self._arguments  # type: ignore[attr-defined]
        return arguments.axes.mesh if arguments.mesh_given else None

    @property
    def _state_dict_type(self) -> StateDictType:
        """The `StateDictType` that `set_state_dict_type` set."""
        settings: StateDictSettings = self._fullshard_settings  # type: ignore[attr-defined]
        return settings.state_dict_type

    @property
    def training_state(self) -> TrainingState:
        """The instance's current activity."""
        runner = self._runner()
        if runner.unit.showing.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if runner.is_running else TrainingState.IDLE


def _may_be_cast(bucket: Bucket) -> bool:
    trains = any([member.sharded.requires_grad for member in bucket.members])
    return trains and bucket.storage_dtype.is_floating_point


def _shown(unit: Unit) -> Bucket:
    """The bucket that represents the unit: the narrowest dtype that a library would upcast, else the first bucket."""
    castable = sorted(filter(_may_be_cast, unit.buckets), key=lambda bucket: bucket.storage_dtype.itemsize)
    return (castable or unit.buckets)[0]
