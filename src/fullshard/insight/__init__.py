"""What the engine holds and does, for people to read."""

from .memory import MemoryUse, live_bytes, memory_use

__all__ = ["MemoryUse", "live_bytes", "memory_use"]
