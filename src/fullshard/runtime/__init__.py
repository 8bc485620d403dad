"""When things happen: hooks, schedule, ends of passes."""

from .hooks import UnitHooks
from .root import Root
from .schedule import Order

__all__ = ["Order", "Root", "UnitHooks"]
