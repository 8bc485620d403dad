"""`FullshardStrategy` for Lightning's Trainer and for Fabric, by object or by the name "fullshard".

    import fullshard.integrations.lightning           # registers the name
    trainer = lightning.Trainer(strategy="fullshard", ...)
    fabric = lightning.Fabric(strategy="fullshard", ...)

Both shard a model by `fully_shard`, unless it is sharded already (in `configure_model`, say), and keep checkpoints by
`fullshard.save`: a folder that any number of ranks loads.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
"""What a checkpoint holds besides tensors of the model and its optimizers, written by the first rank."""


@dataclass(frozen=True)
class _Sharding:
    """How models are sharded: what `fully_shard` takes."""

    units: Any = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, module: nn.Module, mesh: Any, device: torch.device) -> None:
        """Shard a module that is not yet, and give values to what is on meta."""
        if not isinstance(module, FSDPModule):
            inside = any(isinstance(part, FSDPModule) for part in module.modules())
            policy = None if inside else self.units
            fully_shard(module, mesh=mesh, auto_wrap_policy=policy, **self.settings)
        _materialise(module, device)


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give values to a sharded module on meta, by `reset_parameters()` of its parts; ranks draw different ones.

    Raises:
        ConfigError: a part has no such method, or only some parameters are on meta.
    """
    on_meta = {name for name, parameter in module.named_parameters() if parameter.is_meta}
    if not on_meta:
        return
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise ConfigError(
            "Some parameters of the model are on meta, and others have values.",
            parameter=real[0],
            remedy="make the whole model on meta in configure_model(), or all of it with values",
            topic="weights-on-meta",
        )
    module.to_empty(device=device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(torch.initial_seed() + dist.get_rank())
        for path, part in module.named_modules():
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            reset: Any = getattr(part, "reset_parameters", None) or getattr(part, "reset_running_stats", None)
            if own and reset is None:
                raise ConfigError(
                    f"{type(part).__name__} was made on meta and has no reset_parameters() to give it values.",
                    parameter=path or "(root)",
                    remedy="write one, or make the module with values",
                    topic="weights-on-meta",
                )
            if own:
                reset()


def _save(path: Path, model: nn.Module, optimizers: list[Any], step: int, rest: dict[str, Any]) -> None:
    """Write a checkpoint beside what is there, and put it in its place once it is whole. Collective.

    Raises:
        CheckpointError: it could not be written, on every rank; what was there is as it was.
    """
    fresh = path.with_name(f".{path.name}.new")
    ranks = Ranks()
    with ranks.step("making room for a checkpoint"):
        if ranks.is_first:
            remove(fresh)  # of a save that was killed
    save(fresh, model, optimizers, step=step, rng=False)
    with ranks.step("putting a checkpoint in its place"):
        if ranks.is_first:
            data = io.BytesIO()
            torch.save(rest, data)
            write_synced(fresh / META, data.getvalue())
            replace_folder(fresh, path)


def _load(path: Path, model: nn.Module, optimizers: list[Any], strict: bool) -> dict[str, Any]:
    """Fill a model and optimizers from a checkpoint, or a model from a file of Lightning's; the rest. Collective.

    Raises:
        CheckpointError: optimizers are to be filled from a file.
    """
    ranks = Ranks()
    with ranks.step("looking for a checkpoint"):
        if ranks.is_first:
            recover_folder(path)
    if path.is_file():
        found = _rest(path)
        if optimizers and found.get("optimizer_states"):
            raise CheckpointError(
                f"{path} is one file, whose optimizer state is by the numbers of parameters.",
                remedy="load weights alone from it: model.load_state_dict(torch.load(path)['state_dict']) before fit()",
            )
        set_model_state_dict(model, found["state_dict"])
        return found
    load(path, model, optimizers, strict=strict, rng=False)
    return _rest(path)


def _rest(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides the model and its optimizers; nothing in it is executed."""
    file = path if path.is_file() else path / META
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found


class _OnAllRanks:
    """What both strategies are made of, in front of Lightning's class."""

    num_nodes: int
    num_processes: int
    world_size: int
    global_rank: int
    _lightnings: tuple[Any, ...] = ()
    """What Lightning's class takes first."""

    def __init__(self, units: Any = "auto", *, process_group_backend: str | None = None, **settings: Any) -> None:
        timeout = {"timeout": settings.pop("timeout")} if "timeout" in settings else {}
        check_sharding(settings, ARGUMENTS - {"mesh"})
        super().__init__(  # type: ignore[call-arg]
            *self._lightnings, tensor_parallel_size=1, process_group_backend=process_group_backend, **timeout
        )
        self._sharding = _Sharding(units, settings)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank has data of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _setup_distributed(self) -> None:
        """All ranks are one mesh, which `configure_model` finds as `self.device_mesh`."""
        self._data_parallel_size = self.num_processes * self.num_nodes
        super()._setup_distributed()  # type: ignore[misc]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Under "fullshard"."""
        strategy_registry.register(NAME, cls, description="Fully sharded, by Fullshard", override=True)


class FullshardStrategy(_OnAllRanks, ModelParallelStrategy):
    """Shards a LightningModule over all ranks; `Trainer(strategy="fullshard")` is this with defaults.

    Args:
        units: what becomes a unit of its own, as `fully_shard(auto_wrap_policy=)`: "auto", a policy, or module classes.
            Not used where `configure_model` shards parts of the model itself.
        process_group_backend, timeout: as of Lightning's other strategies.
        settings: further arguments of `fully_shard`: `mp_policy`, `reshard_after_forward`, `layout`, ...

    Raises:
        ArgumentTypeError: an argument that there is not.
    """

    def setup(self, trainer: Any) -> None:
        """Shard the module, then make its optimizers."""
        self.accelerator.setup(trainer)
        self.model: Any = self.precision_plugin.convert_module(self.lightning_module)
        self._sharding.apply(self.model, self.device_mesh["data_parallel"], self.root_device)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        if clip_val > 0:
            clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    def _step(self, name: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        """One of the module's steps, as its forward: gathered before it, freed after it."""
        with context:
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._step("training_step", self.precision_plugin.train_step_context(), *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._step("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._step("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._step("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards in here reduce nothing: the Trainer enters it for micro-batches but the last."""
        with without_sync(self.model):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """DTensors, this rank's parts of them."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes it from where it is."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder: `fullshard.save`, and the Trainer's own state beside it."""
        if storage_options is not None:
            raise ConfigError("FullshardStrategy writes checkpoints itself and takes no storage_options")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        step = int(checkpoint.get("global_step", 0))
        _save(Path(self.broadcast(filepath)), self.model, list(optimizers), step, rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Fill the model and its optimizers, on any number of ranks; `weights_only` is True, whatever is given."""
        strict = self.lightning_module.strict_loading
        path = Path(self.broadcast(checkpoint_path))
        return _load(path, self.model, list(self.optimizers), strict)


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """See `fabric.no_backward_sync`."""
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"no_backward_sync takes a module that was set up by Fabric, got {type(module).__name__}",
                remedy="pass what fabric.setup_module returned",
            )
        return without_sync(module, enabled)


class FullshardFabricStrategy(_OnAllRanks, FabricParallelStrategy):
    """The same for Fabric: `setup_module` shards. Arguments as of `FullshardStrategy`."""

    _lightnings = (lambda module, _: module,)  # what would parallelise a module

    def __init__(self, units: Any = "auto", *, process_group_backend: str | None = None, **settings: Any) -> None:
        super().__init__(units, process_group_backend=process_group_backend, **settings)
        self._backward_sync_control = _SyncControl()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module, in place."""
        self._sharding.apply(module, self.device_mesh["data_parallel"], self.root_device)
        return module.to(self.root_device)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """By the norm over all ranks."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a folder: `fullshard.save` of the model and the optimizers in `state`, and what else is in it."""
        if storage_options is not None or filter is not None:
            raise ConfigError("FullshardFabricStrategy writes checkpoints itself: no storage_options, no filter")
        model, optimizers, rest = _parts(state)
        values = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in rest.items()}
        _save(Path(self.broadcast(path)), model, optimizers, 0, values)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill what `state` holds; values in it become those saved. `weights_only` is True, whatever is given.

        Returns:
            What was saved besides.

        Raises:
            CheckpointError: with `strict`, something in `state` is not in the checkpoint. Nothing was loaded then.
            ConfigError: there is not one model in `state`.
        """
        given = {"model": state} if isinstance(state, nn.Module) else dict(state or {})
        model, optimizers, rest = _parts(given)
        path = Path(self.broadcast(path))
        lacking = sorted(rest.keys() - _rest(path).keys()) if strict else []
        if lacking:
            raise CheckpointError(
                f"The checkpoint {path} has no {', '.join(map(repr, lacking))}; nothing was loaded.",
                remedy="leave it out of what is to be filled, or load with strict=False",
            )
        found = dict(_load(path, model, optimizers, strict))
        for key, one in rest.items():
            if key in found and hasattr(one, "load_state_dict"):
                one.load_state_dict(found.pop(key))
            elif key in found:
                state[key] = found.pop(key)
        return found


def _parts(state: Mapping[str, Any]) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """The model, its optimizers and everything else.

    Raises:
        ConfigError: there is no model in it, or more than one.
    """
    models = [one for one in state.values() if isinstance(one, nn.Module)]
    if len(models) != 1:
        raise ConfigError(
            "A checkpoint holds one model and its optimizers.",
            got=f"{len(models)} models",
            remedy='pass {"model": model, "optimizer": optimizer, ...}; several models: a checkpoint each',
        )
    optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
    apart = {id(one) for one in (*models, *optimizers)}
    return models[0], optimizers, {key: one for key, one in state.items() if id(one) not in apart}


FullshardStrategy.register_strategies(StrategyRegistry)
FullshardFabricStrategy.register_strategies(STRATEGY_REGISTRY)
