"""Where reports go, on the first rank: a line, a file of JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import messages
from .report import Report

STYLES = {r"^step +[\d,]+": "bold", r"loss [^ ]+": "green", r"late: .*": "yellow", r"memory .*?(?=  |$)": "dim"}


class Outputs:
    """The outputs of one monitor. Opened at once, so that an invalid path is found before the first step.

    Args:
        line: print each report.
        jsonl: a file, to which lines are appended.
        tensorboard: the folder of a run.
        is_first: False: check the arguments, and write nothing.

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
        self._writes: list[Callable[[Report], None]] = []
        self._closes: list[Callable[[], None]] = []
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise messages.no_tensorboard(error) from error
        if not is_first:
            return
        if line:
            self._writes.append(_printer())
        if jsonl is not None:
            try:
                Path(jsonl).parent.mkdir(parents=True, exist_ok=True)
                file = Path(jsonl).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by `close`
            except OSError as error:
                raise messages.no_folder("jsonl", jsonl, error) from error
            self._writes.append(lambda report: print(json.dumps(_as_json(asdict(report))), file=file))
            self._closes.append(file.close)
        if tensorboard is not None:
            try:
                writer = SummaryWriter(os.fspath(tensorboard))
            except OSError as error:
                raise messages.no_folder("tensorboard", tensorboard, error) from error

            def write(report: Report) -> None:
                for name, value in _scalars(asdict(report)):
                    writer.add_scalar(f"fullshard/{name}", value, report.step)

            self._writes.append(write)
            self._closes.append(writer.close)

    def write(self, report: Report) -> None:
        """Give a report to all outputs."""
        for write in self._writes:
            write(report)

    def close(self) -> None:
        """Close files."""
        for close in self._closes:
            close()
        self._writes, self._closes = [], []


def _printer() -> Callable[[Report], None]:
    """In colours on a terminal, if rich is installed; plain text elsewhere."""
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
    """As JSON can say it: numbers that are not finite become their names."""
    if isinstance(value, dict):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The known numbers, with names such as `memory/parameters`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", value
