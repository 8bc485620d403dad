"""The user's own function that a command is given: SCRIPT-OR-MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def function_at(target: str) -> Callable[[], Any]:
    """What SCRIPT-OR-MODULE:FUNCTION names.

    Raises:
        ConfigError: there is no such file, module or function.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{target!r} is not SCRIPT-OR-MODULE:FUNCTION, as train.py:check or package.module:check")
    try:
        module = _script(Path(where)) if where.endswith(".py") else _module(where)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"there is no function {name!r} in {where}")
    found: Callable[[], Any] = function
    return found


def _script(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as `python path` would
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())  # as `python -m name` would
    return importlib.import_module(name)
