"""Accelerate without adopting: an `Accelerator` that shards what it prepares.

    from fullshard.integrations.accelerate import FullshardAccelerator

    accelerator = FullshardAccelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Where `Accelerator` would wrap a model in DDP, this one applies `fully_shard`; the rest of a program stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ..api.functional.module import FSDPModule
from ..api.whole import gathered
from ..errors import CheckpointError, ConfigError
from ..optim import ShardedGradScaler, clip_grad_norm_
from ..store.load import load
from ..store.ranks import Ranks
from ..store.save import save
from .hf.saving import write_weights
from .sharding import (
    check_sharding,
    check_theirs,
    inside,
    is_sharded,
    names_of,
    naming_steps,
    point_optimizers,
    shard,
    stepped_in,
    without_sync,
)

FOLDER = "fullshard"
"""In a folder of `save_state`, where models and their optimizers are; of further models with a number behind."""


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's, whose errors name what cannot step sharded parameters."""

    def step(self, closure: Any = None) -> Any:
        """Accelerate's."""
        if closure is not None:  # it runs the model, too
            return super().step(closure)
        with naming_steps(self.optimizer):
            return super().step()


_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
"""Settings of `Accelerator` by which something else distributes the model."""


class FullshardAccelerator(Accelerator):
    """An `Accelerator` whose models are sharded by `fully_shard`.

    `prepare` shards models, points optimizers that were built before it at the shards, and leaves all else to
    Accelerate. Mixed precision is that of `mixed_precision=`: gathers in 16 bits, what trains is held in float32, and
    forwards under autocast as Accelerate has them. In a program of one process without a process group nothing is
    sharded, and all methods do what they did.

    Args:
        sharding: arguments of `fullshard.integrations.hf.shard` for all models: units, mesh, reshard_after_forward,
            layout, ...
        **settings: of `Accelerator`.

    Raises:
        ConfigError: settings that shard, too (an FSDP or DeepSpeed plugin, ...), or arguments of `sharding` that
            `shard` does not have.
    """

    def __init__(self, *, sharding: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._start_sharding(sharding, [name for name in _PLUGINS if settings.get(name) is not None])

    def _start_sharding(self, sharding: Mapping[str, Any] | None, plugins: Sequence[str] = ()) -> None:
        kind = str(getattr(self.distributed_type, "value", self.distributed_type))  # on the CPU no plugin's
        data_parallel = kind == "NO" or kind.startswith("MULTI_")
        if plugins or not data_parallel or getattr(self, "parallelism_config", None) is not None:
            raise ConfigError(
                "FullshardAccelerator shards in the place of DDP; this one was told to distribute in another way.",
                expected="neither an FSDP, DeepSpeed or Megatron plugin nor a parallelism_config, also in the settings "
                "of accelerate launch",
                got=", ".join([*plugins, f"distributed type {kind}"]),
                remedy="omit it; or keep the FSDP plugin with a plain Accelerator, and start the program by "
                "python -m fullshard adopt",
            )
        self._sharding = check_sharding(sharding)
        if getattr(self, "scaler", None) is not None:
            self.scaler: Any = ShardedGradScaler(self.device.type)

    # Preparing.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As `Accelerator.prepare`; models are sharded, in place, and optimizers given with them follow.

        Raises:
            ConfigError: an optimizer that has state already, of parameters that are sharded here; or that steps none
                of the models, here or prepared before.
        """
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if dist.is_initialized() and (known := [*models, *self._models]):
            check_theirs(optimizers, known)
        for model in models:
            self.shard_model(model, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def shard_model(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Shard a model, in place, unless it is sharded, or there is nobody to share it with.

        Args:
            optimizers: built before it; those of its parameters get the shards in their place.

        Raises:
            ConfigError: one has state already.
        """
        if not self._to_shard(model):
            return
        before = names_of(model)
        words = self.mixed_precision if "mp_policy" not in self._sharding else "no"
        shard(model, **{"mixed_precision": words, **self._sharding})
        point_optimizers(optimizers, before, model)

    def _to_shard(self, model: nn.Module) -> bool:
        return dist.is_initialized() and not is_sharded(model)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As `Accelerator.prepare_model`, sharded also where it is for evaluation alone."""
        self.shard_model(model)
        placed = False if is_sharded(model) else device_placement
        alone = evaluation_mode or is_sharded(model)  # "for evaluation" is what it calls: not in DDP
        return super().prepare_model(model, device_placement=placed, evaluation_mode=alone)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As `Accelerator.prepare_optimizer`; one that cannot step sharded parameters says so at its first step."""
        found = super().prepare_optimizer(optimizer, device_placement)
        if type(found) is AcceleratedOptimizer:
            found.__class__ = _Optimizer
        return found

    # Training.

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without reducing them; what `accumulate` enters between steps."""
        if not isinstance(model, FSDPModule):
            with super().no_sync(model):
                yield
            return
        with without_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """`fullshard.clip_grad_norm_`: exact for shards of every layout, and for plain parameters beside them."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    # Saving and loading.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights of a sharded model in host memory on the first rank, nothing on others. Collective."""
        if is_sharded(model):
            return {} if self._saves_apart else gathered(model, "get_state_dict")
        return super().get_state_dict(model, unwrap)

    _saves_apart = False

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a sharded model's weights as safetensors, tensor by tensor: no rank holds the model. Collective.

        Raises:
            ConfigError: `safe_serialization=False`, which pickles.
        """
        if not is_sharded(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ConfigError(
                "A sharded model is written as safetensors.",
                got="safe_serialization=False",
                remedy="torch.save(accelerator.get_state_dict(model), ...) on the main process, called by all",
            )
        write_weights(model, save_directory, max_shard_size=max_shard_size)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **settings: Any) -> Any:
        """As `Accelerator.save_state`; each rank writes what it owns of models and optimizers, by `fullshard.save`.

        Models and optimizers come first: a save over another that is broken off before they are whole changes nothing.
        Hooks of `register_save_state_pre_hook` get the models, and an empty dict for each in place of weights.
        """
        models, optimizers = list(self._models), list(self._optimizers)
        if not any(map(is_sharded, models)):
            return super().save_state(output_dir, safe_serialization, **settings)
        parts = list(self._apart(models))

        def save_models(_: Any, weights: list[Any], folder: str) -> None:
            weights.clear()
            for name, model, own in parts:
                save(Path(folder) / name, model, own, step=self.step, rng=False, keep_last=1)

        last = self.register_save_state_pre_hook(save_models)
        self._optimizers: list[Any] = []
        self._saves_apart = True
        try:
            found = super().save_state(output_dir, safe_serialization, **settings)
        finally:
            self._optimizers = optimizers
            self._saves_apart = False
            last.remove()
        return found

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **settings: Any) -> None:
        """As `Accelerator.load_state`, from a folder of `save_state`, whose number of ranks may have been another.

        Raises:
            CheckpointError: it holds the state of another number of models; see `fullshard.load`, too.
        """
        models, optimizers = list(self._models), list(self._optimizers)
        if not any(map(is_sharded, models)):
            super().load_state(input_dir, load_kwargs, **settings)
            return
        folders: list[str] = []

        def load_models(given: list[nn.Module], folder: str) -> None:
            _check_count(Path(folder), len(models))
            given.clear()
            folders.append(str(folder))

        last = self.register_load_state_pre_hook(load_models)
        self._optimizers = []
        try:
            super().load_state(input_dir, load_kwargs, **settings)
        finally:
            self._optimizers = optimizers
            last.remove()
        for name, model, own in self._apart(models):
            load(Path(folders[0]) / name, model, own, rng=False)

    def _apart(self, models: list[nn.Module]) -> Iterator[tuple[str, nn.Module, list[torch.optim.Optimizer]]]:
        """Each model with its folder's name and the optimizers of its parameters."""
        plain = [inside(one) for one in self._optimizers]
        for index, model in enumerate(models):
            ours = stepped_in(model)
            own = [one for one in plain if any(id(p) in ours for group in one.param_groups for p in group["params"])]
            yield FOLDER + (f"_{index}" if index else ""), model, own


def _check_count(folder: Path, models: int) -> None:
    """Refuse a folder of `save_state` with the states of fewer or more models. Collective.

    Raises:
        CheckpointError: see above; or there is none.
    """
    with Ranks().step("looking for the states of models"):
        there = [one.name for one in sorted(folder.glob(f"{FOLDER}*")) if one.is_dir()]
        if len(there) != models:
            raise CheckpointError(
                "A state was saved with another number of models than are prepared now; nothing was loaded.",
                expected=f"{models} in {folder}",
                got=", ".join(there) or "none that FullshardAccelerator saved",
                remedy="prepare the same models in the same order before load_state; one model alone: "
                f"fullshard.load({FOLDER!r} in that folder, model, optimizers)",
            )


def take_over(accelerator: Accelerator, sharding: Mapping[str, Any] | None = None) -> FullshardAccelerator:
    """Make an `Accelerator` that a library has built a `FullshardAccelerator`, in place.

    Args:
        accelerator: with nothing prepared yet.
        sharding: see `FullshardAccelerator`.

    Returns:
        `accelerator` itself.

    Raises:
        ConfigError: it is of a class derived from `Accelerator`, was told to distribute in another way, or has
            prepared a model.
    """
    if type(accelerator) is not Accelerator or accelerator._models:
        raise ConfigError(
            "take_over needs an Accelerator as it was made.",
            expected="class Accelerator, nothing prepared",
            got=f"class {type(accelerator).__name__}, {len(accelerator._models)} models prepared",
            remedy="take it over before prepare; derive other classes from FullshardAccelerator",
        )
    accelerator.__class__ = FullshardAccelerator
    accelerator._start_sharding(sharding)
    return accelerator
