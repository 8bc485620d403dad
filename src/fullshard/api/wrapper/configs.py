"""Settings of the wrapper front-end: the classes that `FullyShardedDataParallel` and its state dict methods accept.

Names, fields, order and defaults are those of `torch.distributed.fsdp`. Fields can be assigned to, as there; every
assignment is checked, at construction and later. `accept` translates PyTorch's own instances to these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn

from ...errors import ConfigError, invalid_argument
from ...policies import check_reduce_dtype
from . import messages

T = TypeVar("T")


class ShardingStrategy(Enum):
    """What is split over ranks, and when gathered parameters are freed.

    Attributes:
        FULL_SHARD: parameters, gradients and optimizer state are sharded; parameters are gathered before forward,
            freed after it, gathered again for backward and freed after that. The default.
        SHARD_GRAD_OP: as FULL_SHARD, but parameters stay gathered from forward to backward.
        NO_SHARD: everything is whole on every rank; gradients are all-reduced.
        HYBRID_SHARD: FULL_SHARD inside a group of ranks (a node by default), replicated over such groups.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a group of ranks, replicated over such groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class TrainingState(Enum):
    """What an instance is doing, as reported by `FullyShardedDataParallel.training_state`."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class BackwardPrefetch(Enum):
    """When backward gathers the next unit's parameters; the front-end's argument may also be None: never ahead.

    Attributes:
        BACKWARD_PRE: before the current unit's gradients are computed: most overlap; two units are gathered at a time.
        BACKWARD_POST: after they are computed and the current unit is freed: less overlap, less memory.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """The form of the values in a state dict.

    Attributes:
        FULL_STATE_DICT: whole tensors, under the names of the model as it was before sharding. The default.
        LOCAL_STATE_DICT: this rank's own memory, in its layout; can only be loaded by the same model, wrapped the same
            way, on the same number of ranks.
        SHARDED_STATE_DICT: sharded tensors (`DTensor` or `ShardedTensor`), loadable on any number of ranks.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """The keys that an optimizer state dict uses for parameters.

    Attributes:
        PARAM_NAME: the names of the model's parameters.
        PARAM_ID: their indices in the optimizer.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
}
"""Dtype names in configuration files -> their names in torch."""


class _Checked:
    """Base class that checks a field whenever it is assigned to, including at construction."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, self._check(name, value))

    def _check(self, name: str, value: Any) -> Any:
        """Return the value to store, or raise. By default every field is a bool."""
        return self._expect(name, value, isinstance(value, bool), "True or False")

    def _expect(self, name: str, value: Any, fits: bool, expected: str) -> Any:
        if name not in self.__dataclass_fields__:  # type: ignore[attr-defined]
            raise messages.unknown_field(type(self).__name__, name)
        if not fits:
            dtype = _DTYPES.get(value, "") if isinstance(value, str) else ""
            remedy = f"pass torch.{dtype}" if dtype else None
            raise invalid_argument(f"{type(self).__name__}.{name}", value, expected, remedy)
        return value


@dataclass
class MixedPrecision(_Checked):
    """Dtypes of computation, reduction and buffers. Sharded parameters and checkpoints keep their own dtype.

    Only floating-point tensors are cast. Not hashable, as PyTorch's.

    Attributes:
        param_dtype: dtype of gathered parameters, so of forward and backward. None: the parameters' own. Default None.
        reduce_dtype: dtype in which gradients are reduced. None: `param_dtype` if set, else the gradients' own.
            Default None.
        buffer_dtype: dtype that buffers are cast to in the first forward and keep. None: their own. Default None.
        keep_low_precision_grads: leave gradients in `param_dtype` rather than the parameter's own dtype, for optimizers
            that can use them. Default False.
        cast_forward_inputs: cast this instance's forward arguments to `param_dtype`. Default False.
        cast_root_forward_inputs: cast the root instance's forward arguments to `param_dtype`, regardless of
            `cast_forward_inputs`; no effect on other instances. Default True.
        _module_classes_to_ignore: with an `auto_wrap_policy`, modules of these classes become separate instances,
            without mixed precision. Default: batch norms.

    Raises:
        ConfigError: a dtype that is not floating-point, a `reduce_dtype` of 8 bits, a switch that is not a bool, an
            entry that is not a module class.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)

    def _check(self, name: str, value: Any) -> Any:
        if name.endswith("_dtype"):
            fits = value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
            self._expect(name, value, fits, "a floating-point torch.dtype or None")
            if name == "reduce_dtype":
                check_reduce_dtype("MixedPrecision.reduce_dtype", value)
            return value
        if name == "_module_classes_to_ignore":
            fits = isinstance(value, Sequence) and all(isinstance(c, type) and issubclass(c, nn.Module) for c in value)
            return self._expect(name, value, fits, "a sequence of nn.Module classes")
        return super()._check(name, value)


@dataclass
class CPUOffload(_Checked):
    """Whether sharded state lives in host memory.

    Attributes:
        offload_params: keep sharded parameters in host memory while not in use; gradients and optimizer state then
            live there too, so the optimizer steps on the CPU. Default False.

    Raises:
        ConfigError: not a bool.
    """

    offload_params: bool = False


@dataclass
class StateDictConfig(_Checked):
    """Base of the settings of a model's state dict; use the subclass that belongs to the `StateDictType`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default False.

    Raises:
        ConfigError: not a bool.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Settings for `StateDictType.FULL_STATE_DICT`. Both switches together need the least memory.

    Attributes:
        offload_to_cpu: copy values to host memory, one parameter at a time. Default False.
        rank0_only: only rank 0 gets the state dict; other ranks get an empty dict. Default False.

    Raises:
        ConfigError: not a bool.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Settings for `StateDictType.LOCAL_STATE_DICT`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default False.

    Raises:
        ConfigError: not a bool.
    """


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Settings for `StateDictType.SHARDED_STATE_DICT`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default False.
        _use_dtensor: values are `DTensor`s rather than `ShardedTensor`s; set by the front-end if it has a device mesh.
            Default False.

    Raises:
        ConfigError: not a bool.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig(_Checked):
    """Base of the settings of an optimizer's state dict; use the subclass that belongs to the `StateDictType`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default True.

    Raises:
        ConfigError: not a bool.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state dict for `StateDictType.FULL_STATE_DICT`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default True.
        rank0_only: only rank 0 gets the state dict; other ranks get an empty dict. Default False.

    Raises:
        ConfigError: not a bool.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state dict for `StateDictType.LOCAL_STATE_DICT`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default False, unlike its base's.

    Raises:
        ConfigError: not a bool.
    """

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Settings of the optimizer's state dict for `StateDictType.SHARDED_STATE_DICT`.

    Attributes:
        offload_to_cpu: copy values to host memory. Default True.
        _use_dtensor: values are `DTensor`s rather than `ShardedTensor`s; set by the front-end if it has a device mesh.
            Default False.

    Raises:
        ConfigError: not a bool.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings(_Checked):
    """The settings of a model's state dicts, as returned by `get_state_dict_type`.

    Attributes:
        state_dict_type: the form of the values.
        state_dict_config: settings of the model's state dict.
        optim_state_dict_config: settings of the optimizer's state dict.

    Raises:
        ConfigError: a field of a wrong type (PyTorch's own classes are accepted).
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def _check(self, name: str, value: Any) -> Any:
        kinds = {
            "state_dict_type": StateDictType,
            "state_dict_config": StateDictConfig,
            "optim_state_dict_config": OptimStateDictConfig,
        }
        if name not in kinds:
            return self._expect(name, value, False, "nothing")
        return accept(value, kinds[name], f"StateDictSettings.{name}")


def accept(value: Any, kind: type[T], argument: str, error: type[ConfigError] = ConfigError) -> T:
    """Convert `value` to a class of this module; PyTorch's instances are translated by class name and field names.

    Args:
        value: an instance of `kind`, of a subclass, or of a class or enumeration with the same name elsewhere.
        kind: a class of this module.
        argument: the name of the argument, for the error.
        error: the class to raise for an invalid value.

    Returns:
        `value` itself if it is an instance of `kind`, else a new instance of `kind` or of its subclass of that name.

    Raises:
        ConfigError: `value` is neither, or a field is missing or invalid.
    """
    if isinstance(value, kind):
        return value
    name = type(value).__name__
    if issubclass(kind, Enum):
        if isinstance(value, Enum) and name == kind.__name__ and value.name in kind.__members__:
            return kind[value.name]
    else:
        for cls in (kind, *kind.__subclasses__()):
            names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
            if cls.__name__ == name and all(hasattr(value, field) for field in names):
                return cls(**{field: getattr(value, field) for field in names})
    raise invalid_argument(argument, value, f"fullshard.{kind.__name__}", _remedy(kind, value), error)


def _remedy(kind: type[Any], value: Any) -> str:
    if not issubclass(kind, Enum):
        return f"from fullshard import {kind.__name__}, and build it from that class"
    name = value.upper() if isinstance(value, str) else ""
    return f"pass {kind.__name__}.{name if name in kind.__members__ else next(iter(kind.__members__))}"
