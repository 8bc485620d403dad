"""Writes reports on the first rank: printed lines, a JSON Lines file, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import messages
from .report import Report

STYLES = {r"^step +[\d,]+": "bold", r"loss [^ ]+": "green", r"late: .*": "yellow", r"memory .*?(?=  |$)": "dim"}


class ReportWriter:
    """The outputs of one monitor. Opened at once, so that an invalid path fails before the first step.

    Args:
        line: whether to print each report.
        jsonl: the file to append lines to.
        tensorboard: the run's log directory.
        is_first: whether this is the first rank; others check the arguments and write nothing.

    Raises:
        ConfigError: a path cannot be written, or TensorBoard is not installed.
    """

    def __init__(
        self,
        line: bool,
        jsonl: str | os.PathLike[str] | None,
        tensorboard: str | os.PathLike[str] | None,
        is_first: bool,
    ) -> None:
        self._writes: dict[Callable[[Report], None], object] = {}  # -> the place, in words
        self._open_files = ExitStack()
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise messages.no_tensorboard(error) from error
        if not is_first:
            return
        if line:
            self._writes[_printer()] = "standard output"
        if jsonl is not None:
            try:
                Path(jsonl).parent.mkdir(parents=True, exist_ok=True)
                file = Path(jsonl).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by `close`
            except OSError as error:
                raise messages.cannot_write("jsonl", jsonl, error) from error
            self._writes[lambda report: print(json.dumps(_as_json(asdict(report))), file=file)] = jsonl
            self._open_files.callback(file.close)
        if tensorboard is not None:
            try:
                writer = SummaryWriter(os.fspath(tensorboard))
            except OSError as error:
                raise messages.cannot_write("tensorboard", tensorboard, error) from error

            def write(report: Report) -> None:
                for name, value in _scalars(asdict(report)):
                    writer.add_scalar(f"fullshard/{name}", value, report.step)

            self._writes[write] = tensorboard
            self._open_files.callback(writer.close)

    def write(self, report: Report) -> None:
        """Write a report to all outputs."""
        for write, place in [*self._writes.items()]:
            try:
                write(report)
            except OSError as error:  # a log must not end a training run
                del self._writes[write]
                warnings.warn(f"Monitor: {place} cannot be written from now on: {error}", stacklevel=4)

    def close(self) -> None:
        """Close files."""
        with suppress(OSError):  # closing retries writes that failed before
            self._open_files.close()


def _printer() -> Callable[[Report], None]:
    """Returns a function that prints a report: in color on a terminal if rich is installed, else as plain text."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        return lambda report: print(report, flush=True)
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)

    def show(report: Report) -> None:
        text = Text(str(report))
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)

    return show


def _as_json(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent (infinities, NaN) by their names."""
    if isinstance(value, dict):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers that are not None, with names such as `memory/parameters`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value
