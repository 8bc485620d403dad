"""Accelerate, adopted: FSDP on CPU ranks, which it turns into DDP without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def adjust_plugin(dataclasses: ModuleType, told: Callable[[str], None]) -> None:
    """Let version 1's `sync_module_states`, and so efficient loading, work where there is no accelerator.

    Args:
        dataclasses: `accelerate.utils.dataclasses`.
        told: see `clients.watch`.
    """
    original = dataclasses.FullyShardedDataParallelPlugin.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        try:
            original(self)
        except RuntimeError as error:
            # The last thing it looks at: the device on which weights that are on meta are made.
            if (
                not self.sync_module_states
                or torch.accelerator.is_available()
                or "no available devices" not in str(error)
            ):
                raise
            self.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)

    dataclasses.FullyShardedDataParallelPlugin.__post_init__ = post_init


def adjust_state(state: ModuleType, told: Callable[[str], None]) -> None:
    """Let `AcceleratorState` choose FSDP on CPU ranks as it does on others.

    Args:
        state: `accelerate.state`.
        told: see `clients.watch`.
    """
    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        first = not state.AcceleratorState._shared_state
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and not torch.accelerator.is_available() and dist.is_torchelastic_launched():
            kwargs["cpu"] = True  # its launcher does not say so of FSDP: every rank would train a model of its own
        original(self, *args, **kwargs)
        if not first or plugin is None or self.distributed_type is not state.DistributedType.MULTI_CPU:
            return
        # What it does where it finds an accelerator.
        self.distributed_type = state.DistributedType.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
        state.PartialState._shared_state["distributed_type"] = self.distributed_type
        told("Accelerate: FSDP on CPU ranks, where Accelerate itself would train with DDP")

    state.AcceleratorState.__init__ = init
