"""Which test raises which of Fullshard's errors: `pytest --record-errors FILE` adds lines `code TAB test` to FILE.

    test process      install(notes)                       every error made, every warning: its code into `notes`
    rank processes    install(notes), of the pools         the same file: O_APPEND, a line at once
    after each test   its lines of `notes` are its own: tests run one after another in a process, and pools belong to it

Processes that tests start on their own are not seen. The table that the error index is made from comes from such runs
(`docs/_errors/examples.py`).
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

_CODE = re.compile(r"^  code:      (\w+)\Z", re.MULTILINE)
_QUOTED = re.compile(r"^  code:      (\w+)$", re.MULTILINE)  # of the process that writes checkpoints


def install(notes: Path) -> None:
    """From now on, in this process and those forked from it, write the code of what is raised or warned of."""
    from fullshard import errors

    plain_init, plain_warn = errors.FullshardError.__init__, warnings.warn

    def init(self: Any, *args: Any, code: str | None = None, **facts: Any) -> None:
        plain_init(self, *args, code=code, **facts)
        if code is not None:  # not of one that comes from another process
            for one in {code, *_QUOTED.findall(str(facts.get("got")))}:
                note(one)

    def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **options: Any) -> None:
        if (told := _CODE.search(str(message))) is not None:
            note(told[1])
        plain_warn(message, category, stacklevel + 1, *args, **options)

    def note(code: str) -> None:
        descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, f"{code}\n".encode())
        finally:
            os.close(descriptor)

    errors.FullshardError.__init__ = init  # type: ignore[method-assign]
    warnings.warn = warn  # type: ignore[assignment]


TABLE = Path(__file__).parents[1] / "docs" / "_errors" / "tests.tsv"
"""For each code one test that raises it, the simplest; of a program that shows it, where there is one."""


def read_table() -> dict[str, str]:
    """Each code with its test's id."""
    lines: Any = [line.split("\t") for line in TABLE.read_text().splitlines() if line] if TABLE.exists() else []
    return dict(lines)


class Recorder:
    """What one process of pytest's writes down.

    Args:
        result: the file that lines are added to.
        notes: this process's, of the test that runs.
    """

    def __init__(self, result: Path, notes: Path) -> None:
        self.result, self.notes = result, notes
        self._read = 0
        self._table = read_table()
        install(notes)

    def codes_since(self) -> list[str]:
        """The codes noted since this was last asked."""
        text = self.notes.read_text()[self._read :] if self.notes.exists() else ""
        self._read += len(text)
        return sorted(set(text.split()))

    def promised(self, test: str) -> set[str]:
        """The codes for which the error index names this test."""
        return {code for code, named in self._table.items() if named == test}

    def write(self, test: str, codes: list[str]) -> None:
        """Note that a test raises these."""
        with self.result.open("a") as file:
            file.write("".join(f"{code}\t{test}\n" for code in codes))
