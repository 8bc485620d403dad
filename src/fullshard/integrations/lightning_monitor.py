"""`fullshard.Monitor` in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ..insight.monitor import Monitor
from .sharding import unwrapped


class MonitorCallback(Callback):
    """Reports each step of a Trainer: `lightning.Trainer(..., callbacks=[MonitorCallback(tokens_per_step=4096)])`.

    Each report shows the loss of the step's last micro-batch. With several optimizers, each optimizer's steps count.

    Args:
        **settings: arguments of `fullshard.Monitor`, apart from model, optimizer (the first) and `start_step`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.monitor: Monitor | None = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor: now the model is sharded, and its optimizers exist."""
        self._steps = trainer.global_step
        self.monitor = Monitor(pl_module, unwrapped(trainer.optimizers[0]), start_step=self._steps, **self.settings)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report new optimizer steps; only the last micro-batch of a step makes any."""
        if self.monitor is None or self._steps == trainer.global_step:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided the loss by the number of micro-batches.
        loss = loss * trainer.accumulate_grad_batches if isinstance(loss, torch.Tensor) else None
        while self._steps < trainer.global_step:
            self._steps += 1
            self.monitor.step(loss=loss)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the monitor's files, also after an exception."""
        if self.monitor is not None:
            self.monitor.close()
