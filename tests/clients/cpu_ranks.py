"""FSDP on CPU ranks, which Accelerate turns into DDP without a word, and Lightning refuses.

Nobody trains so; tests do. Imported by adopted ranks, and by programs that tests start.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from accelerate import state
from accelerate.utils import dataclasses

_plugin_post_init = dataclasses.FullyShardedDataParallelPlugin.__post_init__
_state_init = state.AcceleratorState.__init__


@functools.wraps(_plugin_post_init)
def plugin_post_init(self: Any) -> None:
    """Let version 1's `sync_module_states`, and so efficient loading, work where there is no accelerator."""
    try:
        _plugin_post_init(self)
    except RuntimeError as error:
        # The last thing it looks at: the device on which weights that are on meta are made.
        if not self.sync_module_states or "no available devices" not in str(error):
            raise
        self.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)


@functools.wraps(_state_init)
def state_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Let `AcceleratorState` choose FSDP on CPU ranks as it does on others."""
    first = not state.AcceleratorState._shared_state
    plugin = kwargs.get("fsdp_plugin")
    _state_init(self, *args, **kwargs)
    if not first or plugin is None or self.distributed_type is not state.DistributedType.MULTI_CPU:
        return
    # What it does where it finds an accelerator.
    self.distributed_type = state.DistributedType.FSDP
    if self._mixed_precision != "no":
        plugin.set_mixed_precision(self._mixed_precision)
    self.fsdp_plugin = plugin
    state.PartialState._shared_state["distributed_type"] = self.distributed_type


def choose_fsdp_in_lightning(connector: Any) -> None:
    """Let Fabric's or the Trainer's choice of strategy take FSDP on a CPU."""
    cls = getattr(connector, "_Connector", None) or connector._AcceleratorConnector
    original = cls._check_strategy_and_fallback

    @functools.wraps(original)
    def check(self: Any) -> None:
        flag, device = self._strategy_flag, self._accelerator_flag
        sharded = type(flag) is connector.FSDPStrategy or (isinstance(flag, str) and flag.startswith("fsdp"))
        if sharded and (device == "cpu" or type(device).__name__ == "CPUAccelerator"):
            self._accelerator_flag = "cuda"  # it compares this with the devices it allows, and nothing else
        try:
            original(self)
        finally:
            self._accelerator_flag = device

    cls._check_strategy_and_fallback = check


if not torch.accelerator.is_available():
    dataclasses.FullyShardedDataParallelPlugin.__post_init__ = plugin_post_init
    state.AcceleratorState.__init__ = state_init
    if importlib.util.find_spec("lightning") is not None:
        for name in ("fabric.connector", "pytorch.trainer.connectors.accelerator_connector"):
            choose_fsdp_in_lightning(importlib.import_module(f"lightning.{name}"))
