"""Host memory for sharded state."""

from .policy import CPUOffloadPolicy, OffloadPolicy

__all__ = ["CPUOffloadPolicy", "OffloadPolicy"]
