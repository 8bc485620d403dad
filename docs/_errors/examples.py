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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import codes

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("tests.tsv")
PROGRAMS = ("tests/errors/", "tests/clients/test_errors_of_")
"""Tests that are examples: short, and of one error each."""
LONGEST = 32
"""Lines of an example that the index quotes; of a longer one it gives the name."""
Top = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Example:
    """A test that raises an error.

    Attributes:
        test: its id.
        line: of the test in its file, or of the program that it runs on ranks.
        source: of the test or program, and of what it uses of its file; empty if that is long.
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


def case_of(test: str) -> str:
    """What stands in brackets behind it; empty for most."""
    return test.partition("[")[2].removesuffix("]")


@functools.cache
def functions(path: str) -> dict[str, ast.FunctionDef]:
    """All functions of a file by name, methods too; of one that is not there, none."""
    if not (ROOT / path).is_file():
        return {}
    tree = ast.parse((ROOT / path).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@functools.cache
def tops(path: str) -> dict[str, Top]:
    """What is defined at the top of a file, by name: functions, classes, constants."""
    found: dict[str, Top] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                found[target.id] = node
    return found


def program_of(path: str, code: str) -> ast.FunctionDef | None:
    """The program of a file that is registered for a code: `@PROGRAMS.raise_("D007")`."""
    for node in tops(path).values():
        for one in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(one, ast.Call) and one.args and ast.unparse(one.args[0]) == repr(code):
                return node
    return None


def entry_of(node: ast.AST, code: str) -> ast.Dict | None:
    """Of a table by codes the part that is about one; None for what is no such table."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    keys = [key.value for key in value.keys if isinstance(key, ast.Constant)] if isinstance(value, ast.Dict) else []
    if not isinstance(value, ast.Dict) or code not in keys:
        return None
    return ast.Dict([value.keys[keys.index(code)]], [value.values[keys.index(code)]])


def used_by(main: Top, path: str, code: str) -> list[Top]:
    """What `main` uses of what its file defines, and what that uses; in the file's order, with `main`."""
    known, found, left = tops(path), {id(main): main}, [main]
    while left:
        node = left.pop()
        inside = entry_of(node, code) or node
        for name in names_in(inside):
            other = known.get(name)
            if other is not None and id(other) not in found and not ast.unparse(other).endswith("Programs()"):
                found[id(other)] = other
                left.append(other)
    return sorted(found.values(), key=lambda node: node.lineno)


def names_in(node: ast.AST) -> Iterator[str]:
    """The names that a program uses when it runs: those of annotations are left out."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Name) and field not in ("annotation", "returns"):
                yield child.id
            if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                yield from names_in(child)


def source_of(path: str, node: Top, code: str = "") -> list[str]:
    """Its lines, with its decorators; of a table by codes those about `code` alone."""
    lines = (ROOT / path).read_text().splitlines()
    entry = entry_of(node, code) if code else None
    if entry is not None:
        key, value = entry.keys[0], entry.values[0]
        assert key is not None
        inside = lines[key.lineno - 1 : value.end_lineno]
        return [lines[node.lineno - 1], *inside, lines[(node.end_lineno or 0) - 1]]
    decorators = [] if isinstance(node, ast.Assign | ast.AnnAssign) else node.decorator_list
    first = min([node.lineno, *(one.lineno for one in decorators)])
    return lines[first - 1 : node.end_lineno]


def example(test: str, code: str = "") -> Example:
    """What there is to show of a test that raises `code`.

    Raises:
        KeyError: there is no such function.
    """
    path = test.partition("::")[0]
    function = functions(path)[function_of(test)]
    main = (program_of(path, code) if case_of(test) in (code, "") else None) or function
    lines: list[str] = []
    after_constant = True
    for node in used_by(main, path, code):
        constant = isinstance(node, ast.Assign | ast.AnnAssign)
        lines += [] if not lines or (constant and after_constant) else ["", ""]
        lines += source_of(path, node, code)
        after_constant = constant
    indent = min([len(line) - len(line.lstrip()) for line in lines if line])
    source = "\n".join(line[indent:] for line in lines) if len(lines) <= LONGEST else ""
    return Example(test, main.lineno, source)


def shows(test: str, code: str) -> bool:
    """Whether a test is about a code. A program made as an example names its own, and may raise others on the way."""
    path, name = test.partition("::")[0], function_of(test)
    if name not in functions(path):
        return False
    own = case_of(test) == code or code in ast.unparse(functions(path)[name])
    return own or not test.startswith(PROGRAMS)


def chosen(raised: dict[str, set[str]], known: dict[str, str]) -> dict[str, str]:
    """For each code the test that shows it best: a program made for that, the one before, or the shortest."""
    several: defaultdict[str, int] = defaultdict(int)
    for tests in raised.values():
        for test in tests:
            several[test] += 1

    def rank(code: str, test: str) -> tuple[bool, bool, int, int, int, str]:
        shown = example(test, code)
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
