"""A mixin that shards Transformers' `Trainer`, or a class derived from it; and its callback for `fullshard.Monitor`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from ...errors import CheckpointError, ConfigError, message
from ...store.hugging_face import load_safetensors
from ...store.in_place import replace_file
from ...store.load import load
from ...store.ranks import Ranks
from ...store.save import save
from ..sharding import Mixin, MonitorReports, check_sharding, is_sharded, serialised, unwrapped
from .saving import has_adapter, save_pretrained

FOLDER, SCHEDULER, ARGUMENTS = "fullshard", "scheduler.pt", "training_args.bin"
"""Parts of a checkpoint: the folder that `fullshard.save` writes, and two of Trainer's files."""


class ShardedTrainerMixin(Mixin):
    """Shards the model of a `Trainer`; it must be the first base class.

        class ShardedTrainer(ShardedTrainerMixin, Trainer): ...

        trainer = ShardedTrainer(model, args, train_dataset=data, sharding={"reshard_after_forward": True})

    The model is sharded before the optimizer is built (or at the first evaluation, if that comes first), into the
    model's own units; an optimizer passed to the Trainer is pointed at the shards. The training arguments `bf16`,
    `max_grad_norm` and `gradient_accumulation_steps` work as usual. A checkpoint contains what `fullshard.save` writes
    instead of full weights and optimizer state, and resumes on any number of ranks; `save_model`, and checkpoints with
    `save_only_model`, contain what `from_pretrained` loads. Without a process group (no torchrun) this is the plain
    Trainer.

    Args:
        sharding: arguments of `fullshard.integrations.hf.shard`: units, mesh, reshard_after_forward, layout, ...

    Raises:
        ConfigError: training arguments that also shard, by `fsdp` or `deepspeed`; a class that lists the mixin after
            the Trainer; unknown arguments in `sharding`.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        overriding = cls.__mro__[: cls.__mro__.index(ShardedTrainerMixin)]
        if any(base.__module__.startswith("transformers.") for base in overriding):
            raise ConfigError(
                f"{cls.__name__} lists ShardedTrainerMixin after the Trainer, whose methods then override it.",
                got=" before ".join(base.__name__ for base in cls.__bases__),
                remedy=f"class {cls.__name__}(ShardedTrainerMixin, ...)",
            )

    def __init__(self, *args: Any, sharding: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._sharding = check_sharding(sharding)
        super().__init__(*args, **settings)

    def create_accelerator_and_postprocess(self) -> None:
        """Like `Trainer.create_accelerator_and_postprocess`, with an accelerator that shards."""
        from ..accelerate import take_over

        super().create_accelerator_and_postprocess()
        plugins = [name for name in ("fsdp", "deepspeed") if getattr(self.args, name)]
        take_over(self.accelerator, self._sharding, plugins)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not dist.is_initialized():  # otherwise sharding moves each rank's part
            super()._move_model_to_device(model, device)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        """Like `Trainer.train`; `resume_from_checkpoint=True` resumes from the last complete checkpoint."""
        if resume_from_checkpoint is True and self.args.output_dir is not None:
            resume_from_checkpoint = last_complete(self.args.output_dir) or True  # which Trainer refuses
        return super().train(resume_from_checkpoint, *args, **settings)

    def create_optimizer(self, *args: Any, **settings: Any) -> torch.optim.Optimizer:
        """Like `Trainer.create_optimizer`, after sharding the model."""
        self.accelerator.shard_model(self.model)
        return super().create_optimizer(*args, **settings)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # Fullshard's clipping handles any mesh

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write files that plain `from_pretrained(output_dir)` loads. Collective; see `hf.save_pretrained`."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        weights = not _internal_call or self.args.save_only_model
        if weights:
            save_pretrained(self.model, folder)  # and their configuration

        def save_others() -> None:
            if not self.args.should_save:
                return
            folder.mkdir(parents=True, exist_ok=True)
            parts: list[Any] = [self.processing_class or getattr(self.data_collator, "tokenizer", None)]
            if not weights and not has_adapter(self.model):
                parts.append(getattr(self.model, "config", None))
            for part in parts:
                if hasattr(part, "save_pretrained"):
                    part.save_pretrained(str(folder))
            replace_file(folder / ARGUMENTS, serialised(self.args))  # a full disk leaves the old file

        Ranks().together("save_model", save_others)  # no rank returns before all files are written
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder, optimizer = Path(output_dir), unwrapped(self.optimizer)
        save(folder / FOLDER, self.model, optimizer, step=self.state.global_step, rng=False, keep_last=1)
        if self.args.should_save:
            replace_file(folder / SCHEDULER, serialised(self.lr_scheduler.state_dict()))

    # Loading.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if (Path(resume_from_checkpoint) / FOLDER).is_dir():
            return  # `_load_optimizer_and_scheduler` loads weights too, once the model is sharded
        if is_sharded(self.model):
            load_safetensors(self.model, resume_from_checkpoint, adapter=has_adapter(self.model))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / FOLDER).is_dir():
            load(folder / FOLDER, self.model, unwrapped(self.optimizer), rng=False)
        elif not is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        elif (folder / "optimizer.pt").exists():
            raise CheckpointError(
                "A checkpoint of an unsharded Trainer stores optimizer state by parameter number, not by name.",
                got=str(folder / "optimizer.pt"),
                remedy="load only its weights: from_pretrained(checkpoint), and train without resume_from_checkpoint",
            )
        if (folder / SCHEDULER).exists():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if (folder / FOLDER).is_dir():
            load(folder / FOLDER, self.model, rng=False)
        elif is_sharded(self.model):
            self._load_from_checkpoint(str(folder))
        else:
            super()._load_best_model()


STATE = "trainer_state.json"
"""Trainer writes it into a checkpoint last, after all ranks have written their parts."""


def last_complete(folder: str | os.PathLike[str]) -> str | None:
    """The complete checkpoint with the highest step; warns of incomplete ones after it.

    Args:
        folder: a Trainer's `output_dir`.
    """
    numbered = {path.name.removeprefix("checkpoint-"): path for path in Path(folder).glob("checkpoint-*")}
    for step in sorted(filter(str.isdecimal, numbered), key=int, reverse=True):
        checkpoint = numbered[step]
        try:
            json.loads((checkpoint / STATE).read_text())
            return str(checkpoint)
        except (OSError, ValueError):
            warnings.warn(
                message(
                    "Skipping an incomplete checkpoint: the run was interrupted while writing it.",
                    expected=f"{STATE}, which is written last",
                    got=str(checkpoint),
                    remedy="remove it",
                ),
                stacklevel=3,
            )
    return None


class MonitorCallback(MonitorReports, TrainerCallback):
    """Reports each step of a `Trainer`: `Trainer(..., callbacks=[hf.MonitorCallback(tokens_per_step=4096)])`.

    Each report shows the loss and the gradient norm that the Trainer logged last.

    Args:
        **settings: arguments of `fullshard.Monitor`, apart from model, optimizer and `start_step`.
    """

    _logged: Mapping[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Create the monitor."""
        self.start(objects["model"], objects["optimizer"], state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **objects: Any) -> None:
        """Remember the logged values for later reports."""
        self._logged = {**self._logged, **(logs or {})}

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Report an optimizer step."""
        self.report(loss=self._logged.get("loss"), grad_norm=self._logged.get("grad_norm"))

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Close the monitor's files."""
        self.close()
