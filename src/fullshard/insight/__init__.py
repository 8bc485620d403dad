"""What a model costs and holds: consumes layouts and events, touches no running unit."""

from .memory import MemoryUse, live_bytes, memory_use

__all__ = ["MemoryUse", "live_bytes", "memory_use"]
