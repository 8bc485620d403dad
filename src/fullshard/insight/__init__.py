"""What a model costs: reads layouts, events and units from outside, and changes no running unit."""

from .memory import MemoryUse, live_bytes, memory_use

__all__ = ["MemoryUse", "live_bytes", "memory_use"]
