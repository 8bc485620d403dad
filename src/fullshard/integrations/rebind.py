"""Replacing what modules took from each other when they were imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def rebind(original: Any, replacement: Any) -> None:
    """Put `replacement` where `original` is a global of any imported module."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is original:
                    vars(module)[name] = replacement
