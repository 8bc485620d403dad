"""Which test shows which error: the table `tests.tsv`, and what the index quotes of a test.

    pytest --record-errors raised.tsv tests/...       which test raises what (tests/error_recorder.py)
    python docs/_errors/examples.py raised.tsv        for each code the simplest of them, into tests.tsv

A code that has a test keeps it, unless a program of tests/errors shows it now.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import codes

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("tests.tsv")
PROGRAMS = "tests/errors/"
"""Tests that are examples: short, and of one error each."""
LONGEST = 25
"""Lines of an example that the index quotes; of a longer one it gives the name."""


@dataclass(frozen=True)
class Example:
    """A test that raises an error.

    Attributes:
        test: its id.
        line: of the test in its file.
        source: of the test, and of what it runs on ranks; empty if that is long.
    """

    test: str
    line: int
    source: str

    @property
    def path(self) -> str:
        """The test's file, from the project's root."""
        return self.test.partition("::")[0]


def read_table() -> dict[str, str]:
    """Each code with its test's id."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {code: test for code, _, test in (line.partition("\t") for line in lines)}


def function_of(test: str) -> str:
    """The name of a test's function, without its class and its case."""
    return test.partition("[")[0].rpartition("::")[2]


@functools.cache
def functions(path: str) -> dict[str, ast.FunctionDef]:
    """All functions of a file by name, methods too."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def source_of(path: str, function: ast.FunctionDef) -> list[str]:
    """Its lines, with its decorators."""
    first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
    return (ROOT / path).read_text().splitlines()[first - 1 : function.end_lineno]


def example(test: str) -> Example:
    """What there is to show of a test.

    Raises:
        KeyError: there is no such function.
    """
    path = test.partition("::")[0]
    known = functions(path)
    function = known[function_of(test)]
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    helpers = [known[name] for name in sorted(used) if name in known and known[name] is not function]
    lines: list[str] = []
    for one in sorted([*helpers, function], key=lambda node: node.lineno):
        lines += [*([""] if lines else []), *source_of(path, one)]
    indent = min([len(line) - len(line.lstrip()) for line in lines if line])
    source = "\n".join(line[indent:] for line in lines) if len(lines) <= LONGEST else ""
    return Example(test, function.lineno, source)


def shows(test: str, code: str) -> bool:
    """Whether a test is about a code. A program made as an example names its own, and may raise others on the way."""
    path = test.partition("::")[0]
    return not test.startswith(PROGRAMS) or code in ast.unparse(functions(path)[function_of(test)])


def chosen(raised: dict[str, set[str]], known: dict[str, str]) -> dict[str, str]:
    """For each code the test that shows it best: a program made for that, the one before, or the shortest."""
    several: defaultdict[str, int] = defaultdict(int)
    for tests in raised.values():
        for test in tests:
            several[test] += 1

    def rank(code: str, test: str) -> tuple[bool, bool, int, int, int, str]:
        shown = example(test)
        size = len(source_of(shown.path, functions(shown.path)[function_of(test)]))
        program = test.startswith(PROGRAMS)
        return not program, known.get(code) != test, several[test], size, len(test), test

    table = dict(known)
    for code, tests in raised.items():
        table[code] = min(tests, key=lambda test: rank(code, test))
    return dict(sorted(table.items()))


def main() -> None:
    raised: defaultdict[str, set[str]] = defaultdict(set)
    for name in sys.argv[1:]:
        for line in Path(name).read_text().splitlines():
            code, _, test = line.partition("\t")
            if len(code) == 4 and function_of(test) in functions(test.partition("::")[0]) and shows(test, code):
                raised[code].add(test)
    known = {site.code for site in codes.sites()}
    before = {code: test for code, test in read_table().items() if code in known and shows(test, code)}
    table = {code: test for code, test in chosen(raised, before).items() if code in known}
    TABLE.write_text("".join(f"{code}\t{test}\n" for code, test in table.items()))
    print(f"{len(table)} codes have a test")


if __name__ == "__main__":
    main()
