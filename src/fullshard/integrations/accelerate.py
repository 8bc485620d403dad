"""Accelerate without adopting: an `Accelerator` that shards the models that it prepares.

    from fullshard.integrations.accelerate import FullshardAccelerator

    accelerator = FullshardAccelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Where `Accelerator` would wrap a model in DDP, this one applies `fully_shard`. The rest of the program stays the same.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ..api.functional.module import FSDPModule
from ..api.save_pretrained import gathered
from ..errors import CheckpointError, ConfigError
from ..optim import ShardedGradScaler, clip_grad_norm_
from ..store.load import load
from ..store.ranks import Ranks
from ..store.save import save
from . import messages
from .hf.saving import write_weights
from .sharding import (
    accumulating,
    check_sharding,
    explain_step_errors,
    is_sharded,
    repoint,
    shard,
    steps,
    unwrapped,
)

FOLDER = "fullshard"
"""Where `save_state` puts the first model and its optimizers; the others' folders have a number appended."""


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's, whose first step reports an optimizer that cannot step sharded parameters."""

    def step(self, closure: Any = None) -> Any:
        """Like `AcceleratedOptimizer.step`."""
        # A closure also runs the model, whose errors are not the optimizer's.
        with explain_step_errors(self.optimizer) if closure is None else nullcontext():
            return super().step(closure)


_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
"""Settings of `Accelerator` that let something else distribute the model."""


class FullshardAccelerator(Accelerator):
    """An `Accelerator` whose models are sharded by `fully_shard`.

    `prepare` shards models, points optimizers that were built earlier at the shards, and leaves everything else to
    Accelerate. With `mixed_precision=` a model gathers in 16 bits, keeps trainable parameters in float32, and runs
    its forwards under Accelerate's autocast. Without a process group nothing is sharded, and all methods are
    Accelerate's.

    Args:
        sharding: arguments of `fullshard.integrations.hf.shard` for all models: units, mesh, reshard_after_forward,
            layout, ...
        **settings: arguments of `Accelerator`.

    Raises:
        ConfigError: settings that shard as well (an FSDP or DeepSpeed plugin, ...), or unknown arguments in `sharding`.
    """

    def __init__(self, *, sharding: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._start_sharding(sharding, [name for name in _PLUGINS if settings.get(name) is not None])

    def _start_sharding(self, sharding: Mapping[str, Any] | None, plugins: Sequence[str] = ()) -> None:
        kind = self.distributed_type.value  # on CPUs plugins do not show in it
        if plugins or not (kind == "NO" or kind.startswith("MULTI_")) or self.parallelism_config is not None:
            raise ConfigError(
                "FullshardAccelerator and ShardedTrainerMixin shard in place of DDP; the settings let something else "
                "distribute the model.",
                expected="no FSDP, DeepSpeed or Megatron plugin and no parallelism_config, also in training arguments "
                "and in the configuration of accelerate launch",
                got=", ".join([*plugins, f"distributed type {kind}"]),
                remedy="omit it; or keep the FSDP plugin with a plain Accelerator or Trainer, and start the program "
                "with python -m fullshard adopt",
            )
        self._sharding = check_sharding(sharding)
        if self.scaler is not None:
            self.scaler: Any = ShardedGradScaler(self.device.type)

    # Preparing.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like `Accelerator.prepare`; shards models in place, and points the optimizers among `args` at the shards.

        Raises:
            ConfigError: an optimizer already has state for parameters that are sharded here, or steps none
                of the models in `args` or prepared before.
        """
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        if dist.is_initialized() and (all_models := [*models, *self._models]):
            for optimizer in [unwrapped(arg) for arg in args if isinstance(arg, torch.optim.Optimizer)]:
                if any(group["params"] for group in optimizer.param_groups) and not any(
                    steps(optimizer, model) for model in all_models
                ):
                    raise messages.unrelated_optimizer(optimizer)
        for model in models:
            self.shard_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def shard_model(self, model: nn.Module) -> None:
        """Shard a model in place, unless it is sharded already or there is no process group.

        Raises:
            ConfigError: Accelerate does not see the other ranks, as on a CPU without `cpu=True`.
        """
        if dist.is_initialized() and not is_sharded(model):
            if dist.get_world_size() != self.num_processes:
                raise messages.accelerate_is_alone(dist.get_world_size(), self.num_processes)
            precision = "no" if "mp_policy" in self._sharding else self.mixed_precision
            shard(model, **{"mixed_precision": precision, **self._sharding})

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Like `Accelerator.prepare_model`; shards the model even if it is only for evaluation."""
        self.shard_model(model)
        if is_sharded(model):
            device_placement, evaluation_mode = False, True  # evaluation mode skips DDP
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Like `Accelerator.prepare_optimizer`, for shards; the first step reports if it cannot step these."""
        repoint(unwrapped(optimizer))
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = _Optimizer
        return prepared

    # Training.

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them; `accumulate` enters it between steps."""
        return accumulating(model) if isinstance(model, FSDPModule) else super().no_sync(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """`fullshard.clip_grad_norm_`: exact for shards of every layout, mixed with plain parameters or not."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    # Saving and loading.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Full weights of a sharded model, in host memory, on rank 0; an empty dict on other ranks. Collective."""
        if is_sharded(model):
            return {} if self._saves_apart else gathered(model, "get_state_dict")
        return super().get_state_dict(model, unwrap)

    _saves_apart = False

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write a sharded model's weights as safetensors, tensor by tensor: no rank holds the full model. Collective.

        With `safe_serialization=False` rank 0 gathers the full model, and pickles it.
        """
        if not safe_serialization or not is_sharded(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        write_weights(model, save_directory, max_shard_size=max_shard_size)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **settings: Any) -> Any:
        """Like `Accelerator.save_state`, but each rank writes its part of models and optimizers, with `fullshard.save`.

        Models and optimizers are written first: a save that is interrupted before they are complete leaves an earlier
        state in the folder intact. Hooks of `register_save_state_pre_hook` get the models, and an empty dict for each
        model's weights.
        """

        def save_parts(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights.clear()
            for name, model, optimizers in parts:
                save(Path(folder) / name, model, optimizers, step=self.step, rng=False, keep_last=1)
            Ranks().first("removing models of an earlier state", lambda: _keep(Path(folder), parts))

        with self._apart(self.register_save_state_pre_hook, save_parts) as parts:
            return super().save_state(output_dir, safe_serialization, **settings)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **settings: Any) -> None:
        """Like `Accelerator.load_state`, from a folder that `save_state` wrote on any number of ranks.

        Raises:
            CheckpointError: the folder holds a different number of models; or see `fullshard.load`.
        """

        def load_parts(models: list[nn.Module], folder: str) -> None:
            models.clear()
            Ranks().together("looking for saved models", lambda: _check_count(Path(folder), len(parts)))
            for name, model, optimizers in parts:
                load(Path(folder) / name, model, optimizers, rng=False)

        with self._apart(self.register_load_state_pre_hook, load_parts) as parts:
            super().load_state(input_dir, load_kwargs, **settings)

    @contextmanager
    def _apart(self, register: Callable[..., Any], hook: Callable[..., None]) -> Iterator[list[Any]]:
        """Context in which Accelerate saves or loads all but models and optimizers, and calls `hook` for these.

        Yields:
            Each model with the name of its folder and the optimizers that step it; nothing if no model is sharded.
        """
        if not any(map(is_sharded, self._models)):
            yield []
            return
        optimizers = self._optimizers
        plain = [unwrapped(optimizer) for optimizer in optimizers]
        handle = register(hook)
        self._optimizers: list[Any] = []
        self._saves_apart = True
        try:
            yield [
                (FOLDER + (f"_{index}" if index else ""), model, [o for o in plain if steps(o, model)])
                for index, model in enumerate(self._models)
            ]
        finally:
            handle.remove()
            self._optimizers = optimizers
            self._saves_apart = False


def _saved_in(folder: Path) -> list[Path]:
    """The folders of models in a folder of `save_state`."""
    paths = sorted(folder.glob(f"{FOLDER}*"))
    return [path for path in paths if re.fullmatch(rf"{FOLDER}(_\d+)?", path.name) and path.is_dir()]


def _keep(folder: Path, parts: list[Any]) -> None:
    """Remove what an earlier `save_state` of more models left in a folder."""
    names = [name for name, *_ in parts]
    for path in _saved_in(folder):
        if path.name not in names:
            shutil.rmtree(path)


def _check_count(folder: Path, models: int) -> None:
    """Refuse a folder of `save_state` that holds a different number of models, or none."""
    saved = [path.name for path in _saved_in(folder)]
    if len(saved) != models:
        raise CheckpointError(
            "The state was saved with a different number of models than are prepared now; nothing was loaded.",
            expected=f"{models} in {folder}",
            got=", ".join(saved) or "none that FullshardAccelerator saved",
            remedy="prepare the same models in the same order before load_state; to load a single model: "
            f"fullshard.load({FOLDER!r} in that folder, model, optimizers)",
        )


def take_over(
    accelerator: Accelerator, sharding: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()
) -> FullshardAccelerator:
    """Turn an `Accelerator` that a library has built into a `FullshardAccelerator`, in place.

    Args:
        accelerator: with nothing prepared yet.
        sharding: see `FullshardAccelerator`.
        plugins: the library's settings that let something else distribute the model; refused.

    Returns:
        `accelerator` itself.

    Raises:
        ConfigError: it is an instance of a subclass, has another way of distributing configured, or has already
            prepared a model.
    """
    if type(accelerator) is not Accelerator or accelerator._models:
        raise ConfigError(
            "take_over needs a plain Accelerator that has prepared nothing.",
            expected="class Accelerator, nothing prepared",
            got=f"class {type(accelerator).__name__}, {len(accelerator._models)} models prepared",
            remedy="call it before prepare; derive subclasses from FullshardAccelerator",
        )
    accelerator.__class__ = FullshardAccelerator
    accelerator._start_sharding(sharding, plugins)
    return accelerator
