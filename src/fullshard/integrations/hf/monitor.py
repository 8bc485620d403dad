"""`fullshard.Monitor` in Transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ...insight.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Reports what a `Trainer` does: `Trainer(..., callbacks=[hf.MonitorCallback(tokens_per_step=4096)])`.

    The loss and the gradient norm in a report are those that the Trainer logged last.

    Args:
        settings: arguments of `fullshard.Monitor` by name; model, optimizer and `start_step` are the Trainer's.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.monitor: Monitor | None = None
        self._logged: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The optimizer is there, and the model is sharded."""
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])  # Accelerate wraps it
        self.monitor = Monitor(objects["model"], optimizer, start_step=state.global_step, **self.settings)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **objects: Any) -> None:
        """Keep what later reports show."""
        self._logged |= {name: value for name, value in (logs or {}).items() if name in ("loss", "grad_norm")}

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Called once an optimizer step."""
        if self.monitor is not None:
            self.monitor.step(loss=self._logged.get("loss"), grad_norm=self._logged.get("grad_norm"))

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Close files."""
        if self.monitor is not None:
            self.monitor.close()
