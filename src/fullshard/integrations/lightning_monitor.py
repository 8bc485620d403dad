"""`fullshard.Monitor` in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from .sharding import MonitorReports


class MonitorCallback(MonitorReports, Callback):
    """Reports each step of a Trainer: `lightning.Trainer(..., callbacks=[MonitorCallback(tokens_per_step=4096)])`.

    Each report shows the loss of the step's last micro-batch. With several optimizers, each optimizer's steps count.

    Args:
        **settings: arguments of `fullshard.Monitor`, apart from model, optimizer (the first) and `start_step`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor."""
        self._steps = trainer.global_step
        self.start(pl_module, trainer.optimizers[0], self._steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report new optimizer steps; only the last micro-batch of a step makes any."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided the loss by the number of micro-batches.
        loss = loss * trainer.accumulate_grad_batches if isinstance(loss, torch.Tensor) else None
        while self._steps < trainer.global_step:
            self._steps += 1
            self.report(loss=loss)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the monitor's files, also after an exception."""
        self.close()
