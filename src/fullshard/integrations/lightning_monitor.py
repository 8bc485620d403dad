"""`fullshard.Monitor` in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ..insight.monitor import Monitor


class MonitorCallback(Callback):
    """Reports what a Trainer does: `lightning.Trainer(..., callbacks=[MonitorCallback(tokens_per_step=4096)])`.

    The loss in a report is that of the step's last micro-batch. With several optimizers each of their steps counts.

    Args:
        settings: arguments of `fullshard.Monitor` by name; model, the first optimizer and `start_step` are the
            Trainer's.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.monitor: Monitor | None = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are there, and the model is sharded."""
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
        self._steps = trainer.global_step
        self.monitor = Monitor(pl_module, optimizer, start_step=self._steps, **self.settings)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called for each micro-batch; those but the last step no optimizer."""
        if self.monitor is None or self._steps == trainer.global_step:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and trainer.accumulate_grad_batches > 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
        while self._steps < trainer.global_step:
            self._steps += 1
            self.monitor.step(loss=loss if isinstance(loss, torch.Tensor) else None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close files, also after an exception."""
        if self.monitor is not None:
            self.monitor.close()
