"""Strategies for Lightning's Trainer and for Fabric, as objects or by the name "fullshard".

    import fullshard.integrations.lightning           # registers the name
    trainer = lightning.Trainer(strategy="fullshard", ...)
    fabric = lightning.Fabric(strategy="fullshard", ...)

Both shard a model with `fully_shard`, unless it is sharded already (in `configure_model`, for example), and write
checkpoints with `fullshard.save`: folders that any number of ranks can load.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
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

from ..api.functional.module import FSDPModule, register_fsdp_forward_method
from ..checkpoint.functions import get_model_state_dict, set_model_state_dict
from ..errors import CheckpointError, ConfigError
from ..optim import clip_grad_norm_
from ..store.load import load
from ..store.ranks import Ranks
from ..store.save import save
from .sharding import ARGUMENTS, Mixin, accumulating, check_sharding, serialised, shard

NAME = "fullshard"
STATE = "lightning"
"""Name in a checkpoint of everything but the model and its optimizers: what `torch.save` writes on rank 0."""
OPTIONS = ("process_group_backend", "timeout", "parallelize_fn")
"""Arguments of Lightning's own strategies."""


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Initialise a sharded module on meta with `reset_parameters()` of its submodules; each rank draws its own values.

    Raises:
        ConfigError: a submodule has no such method, or only some parameters are on meta.
    """
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if len(real) == len(list(module.parameters())):
        return
    if real:
        raise ConfigError(
            "Some parameters of the model are on meta, and others have values.",
            parameter=real[0],
            remedy="build the entire model on meta in configure_model(), or none of it",
            topic="weights-on-meta",
        )
    initialised: list[Any] = []
    for path, part in module.named_modules():
        if not [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            continue
        if not hasattr(part, "reset_parameters"):
            raise ConfigError(
                f"{type(part).__name__} was built on meta and has no reset_parameters() to initialise it.",
                parameter=path or "(root)",
                remedy="write one, or build the module with values",
                topic="weights-on-meta",
            )
        initialised.append(part)
    module.to_empty(device=device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(torch.initial_seed() + dist.get_rank())
        for part in initialised:
            part.reset_parameters()


def _save(path: Path, model: nn.Module, optimizers: Sequence[Any], step: int, other_state: dict[str, Any]) -> None:
    """Write a checkpoint to `path`, in place of the one there. Collective.

    Raises:
        CheckpointError: it could not be written, raised on every rank; an earlier checkpoint at `path` is unchanged.
    """
    state = {STATE: Ranks().first("saving Lightning's state", lambda: serialised(other_state))}
    save(path, model, optimizers, step=step, state=state, rng=False, keep_last=1)


def _load(
    path: Path, model: nn.Module, optimizers: Sequence[Any], strict: bool, required: Collection[str] = ()
) -> dict[str, Any]:
    """Load model and optimizers from a checkpoint, or a model from a file of Lightning's. Collective.

    Args:
        required: names that the checkpoint's other state must have.

    Returns:
        The checkpoint's other state, or all of a file; nothing in it is executed.

    Raises:
        CheckpointError: optimizer state would have to come from a file; or a required name is missing.
    """
    source: Any = path
    if not path.is_file():
        data = load(path, nn.Module(), strict=False, rng=False).state.get(STATE)
        source = data and io.BytesIO(data)
    try:
        state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True) if source else {}
    except Exception as error:  # damaged bytes can raise any class of error
        raise CheckpointError(
            f"{path} is not a checkpoint, or is damaged: {type(error).__name__}: {error}",
            expected="a folder that fullshard.save wrote, or a file of torch.save",
            remedy="pass a different checkpoint; nothing was loaded",
        ) from error
    if lacking := sorted(set(required) - state.keys()):
        raise CheckpointError(
            f"The checkpoint {path} has no {', '.join(map(repr, lacking))}; nothing was loaded.",
            remedy="in Fabric, remove it from the state to load, or load with strict=False; load a folder that "
            "fullshard.save wrote with fullshard.load",
        )
    if source is not path:
        load(path, model, optimizers, strict=strict, rng=False)
    elif optimizers and state.get("optimizer_states"):
        raise CheckpointError(
            f"{path} is a single file, which stores optimizer state by parameter number.",
            remedy="load only its weights: model.load_state_dict(torch.load(path)['state_dict']) before fit()",
        )
    else:
        set_model_state_dict(model, state["state_dict"])
    return state


class _ShardingStrategy(Mixin):
    """The base that both strategies share; comes before Lightning's class among the bases."""

    def __init__(self, units: Any = "auto", **settings: Any) -> None:
        options = {name: settings.pop(name) for name in OPTIONS if name in settings}
        self._settings = {"units": units, **check_sharding(settings, ARGUMENTS - {"mesh"})}
        super().__init__(tensor_parallel_size=1, **options)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Shard a module unless it is sharded already, and initialise it if it is on meta."""
        if not isinstance(module, FSDPModule):
            shard(module, mesh=self.device_mesh["data_parallel"], **self._settings)
        _materialise(module, self.root_device)
        return module.to(self.root_device)

    def _place(self, path: Any, **options: Any) -> Path:
        """Rank 0's path of a checkpoint to write.

        Raises:
            ConfigError: an option that is not supported.
        """
        if unsupported := [name for name, value in options.items() if value is not None]:
            raise ConfigError(
                f"{type(self).__name__} writes checkpoints itself and takes no {' and no '.join(unsupported)}."
            )
        return Path(self.broadcast(path))

    def _setup_distributed(self) -> None:
        """Put all ranks in one mesh, which `configure_model` sees as `self.device_mesh`."""
        self._data_parallel_size = self.num_processes * self.num_nodes
        super()._setup_distributed()


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
        self.model: Any = self._shard(self.precision_plugin.convert_module(self.lightning_module))
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            register_fsdp_forward_method(self.model, name)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Reduce nothing in this context, which the Trainer enters for all micro-batches but the last."""
        return accumulating(self.model)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, of DTensors."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes optimizer state straight from the shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder with `fullshard.save`, and the Trainer's own state in it."""
        path = self._place(filepath, storage_options=storage_options)
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        other_state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        _save(path, self.model, optimizers, int(checkpoint.get("global_step", 0)), other_state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load the model and its optimizers, on any number of ranks; `weights_only` is ignored, and always True."""
        path = Path(self.broadcast(checkpoint_path))
        return _load(path, self.model, self.optimizers, self.lightning_module.strict_loading, ["global_step"])


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """See `fabric.no_backward_sync`."""
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"no_backward_sync needs a module that Fabric has set up, got {type(module).__name__}.",
                remedy="pass the module that fabric.setup_module returned",
            )
        return accumulating(module, enabled)


class FullshardFabricStrategy(_ShardingStrategy, FabricParallelStrategy):
    """The same for Fabric, whose `setup_module` shards. Takes the arguments of `FullshardStrategy`."""

    def __init__(self, units: Any = "auto", **settings: Any) -> None:
        super().__init__(units, parallelize_fn=lambda module, _: self._shard(module), **settings)
        self._backward_sync_control = _SyncControl()

    def clip_gradients_norm(self, module: nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip by the norm over all ranks; takes further arguments of `fullshard.clip_grad_norm_`."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), *args, **kwargs)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a folder with the model, the optimizers and everything else in `state`, by `fullshard.save`."""
        path = self._place(path, storage_options=storage_options, filter=filter)
        model, optimizers, others = _split(state)
        values = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in others.items()}
        _save(path, model, optimizers, 0, values)

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
