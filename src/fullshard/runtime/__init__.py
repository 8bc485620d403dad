"""When things happen: phases of a unit, the order of units, ends of passes, agreement between ranks."""

from .copy import deepcopy_module
from .managed import is_managed, mark_managed
from .module_call import run, run_method
from .noticed import install as notice_torch
from .phases import Phase
from .reducer import InFlight
from .root import ROOTS, Root
from .runner import Runner
from .schedule import Order
from .settings import PrefetchSettings, ReduceSettings, UnitSettings
from .units import (
    RUNNER_KEY,
    find_root,
    is_unit,
    left_alone,
    left_alone_by_all,
    move_buffers,
    own_modules,
    runner_of,
    runners_in,
    unit_of,
)

__all__ = [
    "ROOTS",
    "RUNNER_KEY",
    "InFlight",
    "Order",
    "Phase",
    "PrefetchSettings",
    "ReduceSettings",
    "Root",
    "Runner",
    "UnitSettings",
    "deepcopy_module",
    "find_root",
    "is_managed",
    "is_unit",
    "left_alone",
    "left_alone_by_all",
    "mark_managed",
    "move_buffers",
    "notice_torch",
    "own_modules",
    "run",
    "run_method",
    "runner_of",
    "runners_in",
    "unit_of",
]
