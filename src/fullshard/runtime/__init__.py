"""When things happen: hooks, schedule, ends of passes."""

from .clone import clone_hooks, clone_prefetches
from .hooks import UnitHooks
from .root import Root
from .schedule import Order
from .units import HOOKS_KEY, hooks_of, is_unit, unit_of

__all__ = [
    "HOOKS_KEY",
    "Order",
    "Root",
    "UnitHooks",
    "clone_hooks",
    "clone_prefetches",
    "hooks_of",
    "is_unit",
    "unit_of",
]
