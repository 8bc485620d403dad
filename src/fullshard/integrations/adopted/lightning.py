"""Lightning, adopted: its FSDP strategies on CPU ranks, which it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def adjust_connector(connector: ModuleType, told: Callable[[str], None]) -> None:
    """Let Fabric's or the Trainer's choice of strategy take FSDP on a CPU.

    Args:
        connector: `lightning.fabric.connector` or `lightning.pytorch.trainer.connectors.accelerator_connector`.
        told: see `clients.watch`.
    """
    cls = getattr(connector, "_Connector", None) or connector._AcceleratorConnector
    original = cls._check_strategy_and_fallback

    @functools.wraps(original)
    def check(self: Any) -> None:
        flag = self._strategy_flag
        sharded = type(flag) is connector.FSDPStrategy or (isinstance(flag, str) and flag.startswith("fsdp"))
        device = self._accelerator_flag
        if not sharded or not (device == "cpu" or type(device).__name__ == "CPUAccelerator"):
            original(self)
            return
        self._accelerator_flag = "cuda"  # it compares this with the devices it allows, and nothing else
        try:
            original(self)
        finally:
            self._accelerator_flag = device
        told("Lightning: FSDP on CPU ranks, which Lightning itself refuses")

    cls._check_strategy_and_fallback = check
