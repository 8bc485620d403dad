"""Where sharded state lives between uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: sharded parameters, gradients and optimizer state stay on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state live in host memory; gathers go through the device.

    Attributes:
        pin_memory: whether the host memory is page-locked, which makes copies faster and asynchronous.
    """

    pin_memory: bool = True
