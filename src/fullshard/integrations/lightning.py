"""Strategies for Lightning's Trainer and for Fabric, as objects or by the name "fullshard".

    import fullshard.integrations.lightning           # registers the name
    trainer = lightning.Trainer(strategy="fullshard", ...)
    fabric = lightning.Fabric(strategy="fullshard", ...)

Both shard a model with `fully_shard`, unless it is sharded already (in `configure_model`, for example), and write
checkpoints with `fullshard.save`: folders that any number of ranks can load.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from ..api.functional.fully_shard import fully_shard
from ..api.functional.module import FSDPModule
from ..checkpoint.functions import get_model_state_dict, set_model_state_dict
from ..errors import CheckpointError, ConfigError
from ..optim import clip_grad_norm_
from ..store.in_place import recover_folder, remove, replace_folder, write_synced
from ..store.load import load
from ..store.ranks import Ranks
from ..store.save import save
from .sharding import ARGUMENTS, check_sharding, without_sync

NAME = "fullshard"
META = "lightning.pt"
"""File in a checkpoint for everything but the model and its optimizers, written by rank 0."""


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Initialise a sharded module on meta with `reset_parameters()` of its submodules; each rank draws its own values.

    Raises:
        ConfigError: a submodule has no such method, or only some parameters are on meta.
    """
    parameters = dict(module.named_parameters())
    real = [name for name, parameter in parameters.items() if not parameter.is_meta]
    if len(real) == len(parameters):
        return
    if real:
        raise ConfigError(
            "Some parameters of the model are on meta, and others have values.",
            parameter=real[0],
            remedy="build the entire model on meta in configure_model(), or none of it",
            topic="weights-on-meta",
        )
    module.to_empty(device=device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(torch.initial_seed() + dist.get_rank())
        for path, part in module.named_modules():
            if not [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                continue
            reset: Any = getattr(part, "reset_parameters", None) or getattr(part, "reset_running_stats", None)
            if reset is None:
                raise ConfigError(
                    f"{type(part).__name__} was built on meta and has no reset_parameters() to initialise it.",
                    parameter=path or "(root)",
                    remedy="write one, or build the module with values",
                    topic="weights-on-meta",
                )
            reset()


def _save(path: Path, model: nn.Module, optimizers: list[Any], step: int, other_state: dict[str, Any]) -> None:
    """Write a checkpoint beside `path`, and move it there once it is complete. Collective.

    Raises:
        CheckpointError: it could not be written, raised on every rank; an earlier checkpoint at `path` is unchanged.
    """
    fresh = path.with_name(f".{path.name}.new")
    ranks = Ranks()
    with ranks.step("making room for a checkpoint"):
        if ranks.is_first:
            remove(fresh)  # left by a save that was killed
    save(fresh, model, optimizers, step=step, rng=False)
    with ranks.step("moving a checkpoint into place"):
        if ranks.is_first:
            data = io.BytesIO()
            torch.save(other_state, data)
            write_synced(fresh / META, data.getvalue())
            replace_folder(fresh, path)


def _load(
    path: Path, model: nn.Module, optimizers: list[Any], strict: bool, required: Collection[str] = ()
) -> dict[str, Any]:
    """Load model and optimizers from a checkpoint, or a model from a file of Lightning's. Collective.

    Args:
        required: names that the checkpoint's other state must have.

    Returns:
        The checkpoint's other state.

    Raises:
        CheckpointError: optimizer state would have to come from a file; or a required name is missing.
    """
    ranks = Ranks()
    with ranks.step("looking for a checkpoint"):
        if ranks.is_first:
            recover_folder(path)
    if required and (path.is_file() or (path / META).is_file()):  # else `load` reports what is missing
        lacking = sorted(set(required) - _other_state(path).keys())
        if lacking:
            raise CheckpointError(
                f"The checkpoint {path} has no {', '.join(map(repr, lacking))}; nothing was loaded.",
                remedy="remove it from the state to load, or load with strict=False",
            )
    if not path.is_file():
        load(path, model, optimizers, strict=strict, rng=False)
        return _other_state(path)
    contents = _other_state(path)
    if optimizers and contents.get("optimizer_states"):
        raise CheckpointError(
            f"{path} is a single file, which stores optimizer state by parameter number.",
            remedy="load only its weights: model.load_state_dict(torch.load(path)['state_dict']) before fit()",
        )
    set_model_state_dict(model, contents["state_dict"])
    return contents


def _other_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state besides the model and its optimizers, or all of a file; executes nothing in it."""
    state: dict[str, Any] = torch.load(path if path.is_file() else path / META, map_location="cpu", weights_only=True)
    return state


class _ShardingStrategy:
    """What both strategies share; comes before Lightning's class among the bases."""

    num_nodes: int
    num_processes: int
    world_size: int
    global_rank: int
    device_mesh: Any
    root_device: torch.device
    _positional: tuple[Any, ...] = ()
    """Positional arguments of Lightning's class."""

    def __init__(self, units: Any = "auto", *, process_group_backend: str | None = None, **settings: Any) -> None:
        timeout = {"timeout": settings.pop("timeout")} if "timeout" in settings else {}
        check_sharding(settings, ARGUMENTS - {"mesh"})
        super().__init__(  # type: ignore[call-arg]
            *self._positional, tensor_parallel_size=1, process_group_backend=process_group_backend, **timeout
        )
        self._units, self._settings = units, settings

    def _shard(self, module: nn.Module) -> None:
        """Shard a module unless it is sharded already, and initialise it if it is on meta."""
        if not isinstance(module, FSDPModule):
            partly = any(isinstance(part, FSDPModule) for part in module.modules())
            policy = None if partly else self._units
            fully_shard(module, mesh=self.device_mesh["data_parallel"], auto_wrap_policy=policy, **self._settings)
        _materialise(module, self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads its own part of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _setup_distributed(self) -> None:
        """Put all ranks in one mesh, which `configure_model` sees as `self.device_mesh`."""
        self._data_parallel_size = self.num_processes * self.num_nodes
        super()._setup_distributed()  # type: ignore[misc]


class FullshardStrategy(_ShardingStrategy, ModelParallelStrategy):
    """Shards a LightningModule over all ranks; `Trainer(strategy="fullshard")` uses it with its defaults.

    Args:
        units: which modules become units, as `fully_shard(auto_wrap_policy=)`: "auto", a policy, or module classes.
            Ignored if `configure_model` shards parts of the model itself.
        process_group_backend, timeout: as in Lightning's other strategies.
        **settings: other arguments of `fully_shard`: `mp_policy`, `reshard_after_forward`, `layout`, ...

    Raises:
        ArgumentTypeError: an unknown argument.
    """

    def setup(self, trainer: Any) -> None:
        """Shard the module, then create its optimizers."""
        self.accelerator.setup(trainer)
        self.model: Any = self.precision_plugin.convert_module(self.lightning_module)
        self._shard(self.model)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _step(self, name: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one of the module's steps as its forward, so that the root unit gathers before and frees after it."""
        with context:
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in a forward of the sharded model."""
        return self._step("training_step", self.precision_plugin.train_step_context(), *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in a forward of the sharded model."""
        return self._step("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in a forward of the sharded model."""
        return self._step("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in a forward of the sharded model."""
        return self._step("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Reduce nothing in this context, which the Trainer enters for all micro-batches but the last."""
        with without_sync(self.model):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, of DTensors."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes optimizer state straight from the shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder with `fullshard.save`, and the Trainer's own state in it."""
        if storage_options is not None:
            raise ConfigError("FullshardStrategy writes checkpoints itself and takes no storage_options.")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        other_state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        step = int(checkpoint.get("global_step", 0))
        _save(Path(self.broadcast(filepath)), self.model, list(optimizers), step, other_state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load the model and its optimizers, on any number of ranks; `weights_only` is ignored, and always True."""
        path = Path(self.broadcast(checkpoint_path))
        return _load(path, self.model, list(self.optimizers), self.lightning_module.strict_loading)


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """See `fabric.no_backward_sync`."""
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"no_backward_sync needs a module that Fabric has set up, got {type(module).__name__}.",
                remedy="pass the module that fabric.setup_module returned",
            )
        return without_sync(module, enabled)


class FullshardFabricStrategy(_ShardingStrategy, FabricParallelStrategy):
    """The same for Fabric, whose `setup_module` shards. Takes the arguments of `FullshardStrategy`."""

    _positional = (lambda module, _: module,)  # parallelize_fn

    def __init__(self, units: Any = "auto", *, process_group_backend: str | None = None, **settings: Any) -> None:
        super().__init__(units, process_group_backend=process_group_backend, **settings)
        self._backward_sync_control = _SyncControl()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module, in place."""
        self._shard(module)
        return module.to(self.root_device)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm over all ranks."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a folder with the model, the optimizers and everything else in `state`, by `fullshard.save`."""
        if storage_options is not None or filter is not None:
            raise ConfigError("FullshardFabricStrategy writes checkpoints itself: no storage_options, no filter.")
        model, optimizers, others = _split(state)
        values = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in others.items()}
        _save(Path(self.broadcast(path)), model, optimizers, 0, values)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load everything in `state`, and replace plain values in it; `weights_only` is ignored, and always True.

        Returns:
            Saved values that `state` does not have.

        Raises:
            CheckpointError: with `strict`, the checkpoint lacks something in `state`. Nothing was loaded.
            ConfigError: `state` has no model, or several.
        """
        model, optimizers, others = _split({"model": state} if isinstance(state, nn.Module) else state or {})
        path = Path(self.broadcast(path))
        saved = _load(path, model, optimizers, strict, others if strict else ())
        for key, value in others.items():
            if key in saved and hasattr(value, "load_state_dict"):
                value.load_state_dict(saved.pop(key))
            elif key in saved:
                state[key] = saved.pop(key)
        return saved


def _split(state: Mapping[str, Any]) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """Split a state into its model, its optimizers and everything else.

    Raises:
        ConfigError: it has no model, or more than one.
    """
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise ConfigError(
            "A checkpoint holds one model and its optimizers.",
            got=f"{len(models)} models",
            remedy='pass {"model": model, "optimizer": optimizer, ...}; save several models to one checkpoint each',
        )
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    others = {k: value for k, value in state.items() if not isinstance(value, (nn.Module, torch.optim.Optimizer))}
    return models[0], optimizers, others


StrategyRegistry.register(NAME, FullshardStrategy, description="Fully sharded, by Fullshard", override=True)
STRATEGY_REGISTRY.register(NAME, FullshardFabricStrategy, description="Fully sharded, by Fullshard", override=True)
