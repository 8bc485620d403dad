"""Corners that are still open: cases of these tests that fail today, by name and reason, in `open.txt`.

A case that is listed is not run, so that one which hangs does not hold up the rest; `pytest tests/corners --open` runs
them all. Whoever mends one takes its line away.
"""

from __future__ import annotations

from pathlib import Path

import pytest

OPEN = Path(__file__).with_name("open.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--open", action="store_true", help="run the corners that are known to be open, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--open", default=False):
        return
    listed = {line.split("  # ")[0].strip() for line in OPEN.read_text().splitlines() if not line.startswith("#")}
    for item in items:
        name = item.nodeid.split("tests/corners/")[-1]
        if name in listed or name.split("[")[0] in listed:
            item.add_marker(pytest.mark.xfail(reason="open: listed in tests/corners/open.txt", run=False))
