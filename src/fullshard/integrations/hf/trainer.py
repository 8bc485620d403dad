"""Transformers' `Trainer`, sharded: a mixin in front of it, or of a class derived from it."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import CheckpointError, ConfigError, message
from ...store.hugging_face import load_safetensors
from ...store.load import load
from ...store.lora import is_peft_model
from ...store.ranks import Ranks
from ...store.save import save
from ..sharding import check_sharding, is_sharded
from .saving import save_pretrained

FOLDER, SCHEDULER, ARGUMENTS = "fullshard", "scheduler.pt", "training_args.bin"
"""In a checkpoint: what `fullshard.save` wrote, and Trainer's own."""


class ShardedTrainerMixin:
    """Shards the model of a `Trainer`; name it first.

        class ShardedTrainer(ShardedTrainerMixin, Trainer): ...

        trainer = ShardedTrainer(model, args, train_dataset=data, sharding={"reshard_after_forward": True})

    The model is sharded before the optimizer is built (or at the first evaluation, if that comes first), into units as
    it says itself; an optimizer that was given is pointed at the shards. `bf16`, `max_grad_norm` and
    `gradient_accumulation_steps` of the arguments mean what they mean. A checkpoint holds what `fullshard.save` writes
    in place of whole weights and optimizer, and resumes on any number of ranks; `save_model`, and checkpoints with
    `save_only_model`, hold what `from_pretrained` loads. Without a process group (no torchrun) it is the plain Trainer.

    Args:
        sharding: arguments of `fullshard.integrations.hf.shard`: units, mesh, reshard_after_forward, layout, ...

    Raises:
        ConfigError: arguments that shard by `fsdp` or `deepspeed`, too; a class that names the mixin after the Trainer;
            arguments of `sharding` that `shard` does not have.
    """

    model: Any
    accelerator: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        before = cls.__mro__[: cls.__mro__.index(ShardedTrainerMixin)]
        if any(base.__module__.startswith("transformers.") for base in before):
            raise ConfigError(
                f"{cls.__name__} names ShardedTrainerMixin after the Trainer, whose methods then run in its place.",
                got=" before ".join(base.__name__ for base in cls.__bases__),
                remedy=f"class {cls.__name__}(ShardedTrainerMixin, ...)",
            )

    def __init__(self, *args: Any, sharding: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._sharding = check_sharding(sharding)
        super().__init__(*args, **settings)

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's, with an accelerator that shards."""
        from ..accelerate import take_over

        if self.args.fsdp or self.args.deepspeed:
            raise ConfigError(
                "ShardedTrainerMixin shards the model; the arguments say that something else does, too.",
                got="fsdp" if self.args.fsdp else "deepspeed",
                remedy="omit it; or keep it with a plain Trainer, and run python -m fullshard adopt",
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        take_over(self.accelerator, self._sharding)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not dist.is_initialized():  # else sharding moves it, each rank what it owns
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        """Trainer's; `resume_from_checkpoint=True` takes the last checkpoint that was finished."""
        if resume_from_checkpoint is True and self.args.output_dir is not None:
            resume_from_checkpoint = last_whole(self.args.output_dir) or True  # which Trainer refuses
        return super().train(resume_from_checkpoint, *args, **settings)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **settings: Any) -> torch.optim.Optimizer:
        """Trainer's, once the model is sharded."""
        self.accelerator.shard_model(self.model, [] if self.optimizer is None else [self.optimizer])
        return super().create_optimizer(*args, **settings)  # type: ignore[misc]

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # clipping is ours, for any mesh

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what plain `from_pretrained(output_dir)` loads. Collective; see `hf.save_pretrained`."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        weights = not _internal_call or self.args.save_only_model
        if weights:
            save_pretrained(self.model, folder)  # and their configuration
        with Ranks().step("save_model", files=True):  # no rank returns before all files are there
            if self.args.should_save:
                self._save_beside(folder)
                if not weights and not self._has_adapter and hasattr(self.model, "config"):
                    self.model.config.save_pretrained(str(folder))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_beside(self, folder: Path) -> None:
        """What Trainer saves with a model: tokenizer, arguments."""
        folder.mkdir(parents=True, exist_ok=True)
        own: Any = self
        processing = own.processing_class or getattr(own.data_collator, "tokenizer", None)
        if processing is not None and hasattr(processing, "save_pretrained"):
            processing.save_pretrained(str(folder))
        torch.save(self.args, folder / ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        folder = Path(output_dir)
        save(folder / FOLDER, self.model, self._optimizers(), step=self.state.global_step, rng=False, keep_last=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [getattr(self.optimizer, "optimizer", self.optimizer)]  # inside Accelerate's

    # Loading.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if (Path(resume_from_checkpoint) / FOLDER).is_dir():
            return  # with the optimizer, below: that comes once the model is sharded
        if not is_sharded(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        self._load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or not (is_sharded(self.model) or (folder / FOLDER).is_dir()):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if (folder / FOLDER).is_dir():
            load(folder / FOLDER, self.model, self._optimizers(), rng=False)
        elif (folder / "optimizer.pt").exists():
            raise CheckpointError(
                "A checkpoint of an unsharded Trainer holds whole optimizer state by number, not by parameters' names.",
                got=str(folder / "optimizer.pt"),
                remedy="take its weights alone: from_pretrained(checkpoint), and train without resume_from_checkpoint",
            )
        if (folder / SCHEDULER).exists():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if (folder / FOLDER).is_dir():
            load(folder / FOLDER, self.model, rng=False)
        elif is_sharded(self.model):
            self._load_weights(str(folder))
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _load_weights(self, folder: str) -> None:
        load_safetensors(self.model, folder, adapter=self._has_adapter)

    @property
    def _has_adapter(self) -> bool:
        """Whether PEFT made the model: its files are the adapter's, and a config.json would hide that."""
        return any(is_peft_model(module) for module in self.model.modules())


STATE = "trainer_state.json"
"""What Trainer writes into a checkpoint last, once all ranks have written their parts."""


def last_whole(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint with the highest step among those that were finished; others after it are warned of.

    Args:
        folder: a Trainer's `output_dir`.
    """
    named = [(re.fullmatch(r"checkpoint-(\d+)", one.name), one) for one in Path(folder).glob("checkpoint-*")]
    for _, checkpoint in sorted([(int(found[1]), one) for found, one in named if found is not None], reverse=True):
        if _is_whole(checkpoint):
            return str(checkpoint)
        warnings.warn(
            message(
                "A checkpoint was not finished, and is passed over: the run was broken off while it was written.",
                expected=f"{STATE}, which is written last",
                got=str(checkpoint),
                remedy="remove it",
            ),
            stacklevel=3,
        )
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / STATE).read_text()), dict)
    except (OSError, ValueError):
        return False
