"""`fullshard.Monitor` in Transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ...insight.monitor import Monitor
from ..sharding import unwrapped


class MonitorCallback(TrainerCallback):
    """Reports each step of a `Trainer`: `Trainer(..., callbacks=[hf.MonitorCallback(tokens_per_step=4096)])`.

    Each report shows the loss and the gradient norm that the Trainer logged last.

    Args:
        **settings: arguments of `fullshard.Monitor`, apart from model, optimizer and `start_step`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.monitor: Monitor | None = None
        self._logged: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Create the monitor: now the model is sharded, and its optimizer exists."""
        optimizer = unwrapped(objects["optimizer"])
        self.monitor = Monitor(objects["model"], optimizer, start_step=state.global_step, **self.settings)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **objects: Any) -> None:
        """Remember the logged values for later reports."""
        self._logged |= logs or {}

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Report an optimizer step."""
        if self.monitor is not None:
            self.monitor.step(loss=self._logged.get("loss"), grad_norm=self._logged.get("grad_norm"))

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Close the monitor's files."""
        if self.monitor is not None:
            self.monitor.close()
