"""The user's function that a command calls: SCRIPT-OR-MODULE:FUNCTION, and the arguments that its program sees."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigError


def function_at(target: str) -> Callable[..., Any]:
    """Import the function at SCRIPT-OR-MODULE:FUNCTION.

    Raises:
        ConfigError: the file, module or function does not exist.
    """
    source, _, name = target.rpartition(":")
    if not source or not name:
        if "/" in target or target.endswith(".py"):
            missing = f"{target} names no function" if Path(target).is_file() else f"there is no {target}"
            raise ConfigError(missing, expected="FILE.py:FUNCTION, or a file or folder that exists")
        raise ConfigError(f"{target!r} is not SCRIPT-OR-MODULE:FUNCTION, like train.py:check or package.module:check")
    try:
        module = _script(Path(source)) if source.endswith(".py") else _module(source)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"there is no function {name!r} in {source}")
    return function


@contextmanager
def program_arguments(target: str, arguments: list[str]) -> Iterator[None]:
    """A context in which the program of `target` finds itself and these arguments in `sys.argv`.

    Raises:
        ConfigError: a parser of `argparse` does not accept them.
    """

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ConfigError(f"{target} does not accept its program's arguments (after --): {message}")

    before, sys.argv = sys.argv, [target.rpartition(":")[0], *arguments]
    original, argparse.ArgumentParser.error = argparse.ArgumentParser.error, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        sys.argv, argparse.ArgumentParser.error = before, original  # type: ignore[method-assign]


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
