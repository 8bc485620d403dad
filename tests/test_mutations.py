"""The list of faults in `mutations/faults.py` fits the source and the tests that there are."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "fullshard"


def faults() -> list[Any]:
    spec = importlib.util.spec_from_file_location("mutations_faults", TESTS / "mutations" / "faults.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.FAULTS)


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault: Any) -> None:
    text = (PACKAGE / fault.file).read_text()
    assert text.count(fault.old) == 1, "the source has changed: change the fault with it"
    ast.parse(text.replace(fault.old, fault.new))
    for test in filter(None, (fault.test, fault.besides)):
        assert (TESTS.parent / test.split("::")[0].split()[0]).exists(), test


def test_names_are_unique() -> None:
    names = [fault.name for fault in faults()]
    assert len(set(names)) == len(names)
