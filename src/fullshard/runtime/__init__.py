"""When things happen: hooks, schedule, ends of passes."""

from .hooks import UnitHooks
from .memory import MemoryUse, live_bytes, memory_use
from .root import Root
from .schedule import Order

__all__ = ["MemoryUse", "Order", "Root", "UnitHooks", "live_bytes", "memory_use"]
