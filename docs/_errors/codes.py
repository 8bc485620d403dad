"""Every error and warning that the source can raise, read from its syntax tree; and the next free code.

    python docs/_errors/codes.py            all of them, a line each
    python docs/_errors/codes.py --new C    the code for a new ConfigError (L, D, K, P, N, W: see fullshard/errors.py)

`sites` finds them, `faults` says what is wrong with them; tests/test_error_codes.py holds the source to that.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "fullshard"
LETTERS = {
    "ConfigError": "C",
    "LayoutError": "L",
    "DivergenceError": "D",
    "CheckpointError": "K",
    "PhaseError": "P",
    "NonfiniteError": "N",
}
WARNING = "W"
FACTS = ("parameter", "rank", "expected", "got", "remedy")

BY_ANOTHER_NAME = {("api/wrapper/settings.py", "error"): "ConfigError", ("store/ranks.py", "kind"): "CheckpointError"}
"""Calls of a variable that holds one of the classes; the parent that all of those which it can hold have."""

HANDED_ON = {"api/wrapper/optimizer_state.py", "store/ranks.py"}
"""Files that may name a class without calling it: for the variables above."""

MADE_BEFORE = {
    ("api/wrapper/fsdp.py", "note"),
    ("integrations/private.py", "str(error)"),
    ("integrations/held.py", "str(error)"),
}
"""Warnings whose text, with its code, was made elsewhere: by `message`, or as an error that is not raised."""

RETIRED = ("C022", "C135", "C142", "C146", "K117", "W008")
"""Codes that were raised once and are no more; none of them is given again."""

FOUND = "insight/verify/report.py"
"""Makes texts of findings, in the shape of messages. They are a report's lines and are not raised."""


@dataclass(frozen=True)
class Site:
    """One place that makes an error or a warning.

    Attributes:
        code: None where it has none, or one that is no literal.
        kind: the class's name; "warning" for warnings.
        path: of the file, from `src/fullshard`.
        what: the message's first argument, as a template: what is put in at run time stands in braces.
        facts: the other arguments, likewise.
        function: that it is in, with its class.
    """

    code: str | None
    kind: str
    path: str
    line: int
    what: str
    facts: dict[str, str] = field(default_factory=dict)
    function: str = ""


def error_classes() -> dict[str, str]:
    """Each class of the tree with the letter of its codes; the base, which nothing may raise, has none."""
    parents: dict[str, list[str]] = {}
    for node in ast.parse((SOURCE / "errors.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            parents[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    letters = {"FullshardError": ""}
    for name, bases in parents.items():  # parents stand first
        for base in bases:
            if base in letters:
                letters[name] = LETTERS.get(name) or letters[base]
    return letters


def files() -> Iterator[tuple[str, ast.Module]]:
    """Each file of the source but errors.py: its path from `src/fullshard`, and its tree."""
    for path in sorted(SOURCE.rglob("*.py"), key=str):
        name = path.relative_to(SOURCE).as_posix()
        if name != "errors.py":
            yield name, ast.parse(path.read_text())


def sites() -> list[Site]:
    """All of them, in the order of files and lines."""
    letters = error_classes()
    found = []
    for path, tree in files():
        for call, function in sorted(calls_in(tree), key=lambda pair: (pair[0].lineno, pair[0].col_offset)):
            kind = kind_of(path, call, letters)
            names = {keyword.arg for keyword in call.keywords}
            again = None in names and "code" not in names  # another rank's error, with all its facts
            if kind is not None and not again:
                found.append(site_of(path, call, kind, function))
    return found


def calls_in(node: ast.AST, inside: str = "") -> Iterator[tuple[ast.Call, str]]:
    """Each call with the name of the function around it, from the file; empty at its top."""
    if isinstance(node, ast.Call):
        yield node, inside
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = f"{inside}.{node.name}".lstrip(".")
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child, inside)


def kind_of(path: str, call: ast.Call, letters: dict[str, str]) -> str | None:
    """What a call makes: the name of a class, "warning", or nothing of ours."""
    name = name_of(call.func)
    if name in letters:
        return name
    if name == "message":
        return None if path == FOUND else "warning"
    return BY_ANOTHER_NAME.get((path, name))


def site_of(path: str, call: ast.Call, kind: str, function: str) -> Site:
    """A call that makes one."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    code = given.get("code")
    literal = code.value if isinstance(code, ast.Constant) and isinstance(code.value, str) else None
    facts = {name: template(given[name]) for name in FACTS if name in given}
    return Site(literal, kind, path, call.lineno, template(call.args[0]) if call.args else "", facts, function)


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def template(node: ast.expr) -> str:
    """The text that an expression makes; what is known at run time only stands in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value) if isinstance(node.value, ast.Constant) else "{" + brief(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.IfExp):
        yes, no = template(node.body), template(node.orelse)
        return yes if not no or no == "None" else no if not yes else f"{yes} | {no}"
    return "{" + brief(node) + "}"


def brief(node: ast.expr) -> str:
    """An expression in a word or two: the name it is about."""
    if isinstance(node, ast.Attribute):
        return f"type({brief(node.value.args[0])})" if _is_type(node.value) else f"{brief(node.value)}.{node.attr}"
    if isinstance(node, ast.Constant):
        return str(node.value).strip(" ,;'") or "..."
    about: ast.expr | None = None
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        about = next(iter([*node.args, *owner]), node.func)
    elif isinstance(node, ast.Subscript):
        about = node.value
    elif isinstance(node, ast.BoolOp):
        about = node.values[0]
    elif isinstance(node, ast.IfExp):
        about = node.body
    elif isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        about = node.elt
    return ast.unparse(node) if about is None else brief(about)


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) in ("type", "plain_class") and len(node.args) == 1


def faults() -> list[str]:
    """What is wrong with the codes, a line each; empty if nothing is."""
    letters = error_classes()
    told: list[str] = []
    texts: dict[str, tuple[str, str]] = {}
    for site in sites():
        where = f"{site.path}:{site.line}"
        letter = WARNING if site.kind == "warning" else letters[site.kind]
        if site.code is None or not re.fullmatch(rf"{letter}\d{{3}}", site.code) or not letter:
            told.append(f'{where}: {site.kind} wants code="{letter}..." (a literal), and has {site.code!r}')
        elif site.code in RETIRED:
            told.append(f"{where}: {site.code} was another's, which is raised no more")
        elif texts.setdefault(site.code, (site.what, where))[0] != site.what:
            told.append(f"{where}: {site.code} is another text's already, at {texts[site.code][1]}")
    for path, tree in files():
        told += [f"{path}:{line}: {why}" for line, why in sorted(hidden(path, tree, letters))]
    return told


def hidden(path: str, tree: ast.Module, letters: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Ways in which a file could make errors or warnings that `sites` does not see."""
    seen = {id(node) for node in plain_uses(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in letters and id(node) not in seen and path not in HANDED_ON:
            yield node.lineno, f"{node.id} is neither called nor caught: whoever calls it needs a code"
        elif isinstance(node, ast.ClassDef) and any(name_of(base) in letters for base in node.bases):
            yield node.lineno, f"{node.name}: the tree of errors is in errors.py"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warnings.warn"):
            text = node.args[0]
            made = isinstance(text, ast.Call) and name_of(text.func) in {"message", *worded()}
            if not made and (path, ast.unparse(text)) not in MADE_BEFORE:
                yield node.lineno, 'a warning\'s text is made by errors.message(..., code="W...")'


@functools.cache
def worded() -> frozenset[str]:
    """Functions of the packages' messages that return a warning's text."""
    trees = [ast.parse(path.read_text()) for path in SOURCE.glob("**/messages.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return frozenset(
        node.name
        for node in functions
        if isinstance(last := node.body[-1], ast.Return)
        and isinstance(last.value, ast.Call)
        and name_of(last.value.func) == "message"
    )


def plain_uses(tree: ast.Module) -> Iterator[ast.AST]:
    """Names of classes that are called, caught, asked for by isinstance, or stand in an annotation."""
    for node in ast.walk(tree):
        found: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.Call):
            asks = name_of(node.func) in ("isinstance", "issubclass", "suppress")
            found = [node.func, *(node.args if asks else ())]
        elif isinstance(node, ast.ExceptHandler):
            found = [node.type]
        elif isinstance(node, ast.AnnAssign | ast.arg):
            found = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            found = [node.returns, *node.args.defaults]
        for one in found:
            if one is not None:
                yield from ast.walk(one) if not isinstance(one, ast.Call) else ()


def builtin_raises() -> list[str]:
    """Where an error of Python's own is raised, as path:line and its class."""
    found = []
    for path, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = name_of(node.exc.func)
                if isinstance(getattr(builtins, name, None), type):
                    found.append(f"{path}:{node.lineno}: {name}")
    return found


def next_free(letter: str) -> str:
    """The code after the highest of this letter."""
    known = {*RETIRED, *(site.code for site in sites() if site.code is not None)}
    used = [int(code[1:]) for code in known if code.startswith(letter)]
    return f"{letter}{max(used, default=0) + 1:03d}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", metavar="LETTER", choices=sorted({*LETTERS.values(), WARNING}))
    letter = parser.parse_args().new
    if letter is not None:
        print(next_free(letter))
        return
    for site in sorted(sites(), key=lambda one: one.code or ""):
        print(f"{site.code}  {site.kind:<24}{site.path}:{site.line}  {site.what.splitlines()[0][:90]}")


if __name__ == "__main__":
    main()
