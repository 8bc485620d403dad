"""When things happen: hooks, schedule, ends of passes."""

from .clone import clone_hooks, clone_prefetches
from .hooks import UnitHooks
from .memory import MemoryUse, live_bytes, memory_use
from .root import Root
from .schedule import Order

__all__ = ["MemoryUse", "Order", "Root", "UnitHooks", "clone_hooks", "clone_prefetches", "live_bytes", "memory_use"]
