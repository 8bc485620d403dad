"""Decides when things happen: phases of a unit, the order of units, ends of passes, agreement between ranks."""

from .copy import copy_module, copy_unsharded, deepcopy_module, pickling_error, without_units
from .hints import explained
from .inputs import Inputs, OtherInput, TensorInput
from .messages import CHANGES, Account, changes_in_words, memory_in_words
from .noticed import apart
from .noticed import install as notice_torch
from .out_of_memory import account, bytes_asked, is_out_of_memory, is_wrapped
from .outputs import shown_part
from .phases import Phase
from .reducer import InFlight
from .root import Root, all_roots
from .runner import Runner
from .step import run, run_method
from .unit_settings import PrefetchSettings, UnitSettings
from .units import (
    RUNNER_KEY,
    find_root,
    is_managed,
    is_unit,
    left_alone,
    left_alone_by_all,
    mark_managed,
    move_buffers,
    name_members,
    own_modules,
    runner_of,
    runners_in,
    take_over_replaced,
    unit_of,
)

__all__ = [
    "CHANGES",
    "RUNNER_KEY",
    "Account",
    "InFlight",
    "Inputs",
    "OtherInput",
    "Phase",
    "PrefetchSettings",
    "Root",
    "Runner",
    "TensorInput",
    "UnitSettings",
    "account",
    "all_roots",
    "apart",
    "bytes_asked",
    "changes_in_words",
    "copy_module",
    "copy_unsharded",
    "deepcopy_module",
    "explained",
    "find_root",
    "is_managed",
    "is_out_of_memory",
    "is_unit",
    "is_wrapped",
    "left_alone",
    "left_alone_by_all",
    "mark_managed",
    "memory_in_words",
    "move_buffers",
    "name_members",
    "notice_torch",
    "own_modules",
    "pickling_error",
    "run",
    "run_method",
    "runner_of",
    "runners_in",
    "shown_part",
    "take_over_replaced",
    "unit_of",
    "without_units",
]
