"""What a file is in its package, in a few words, from its name and from what its module's top level holds."""

from __future__ import annotations

import ast
from collections import Counter

from .facts import Definition, SourceFile

NAMES = {
    "__main__.py": "entry point: what `python -m` runs",
    "conftest.py": "fixtures of pytest",
}


def role_of(file: SourceFile, tree: ast.Module | None) -> str:
    """A few words; of a file that cannot be parsed that it is broken."""
    if tree is None:
        return "cannot be parsed"
    if file.name in NAMES:
        return NAMES[file.name]
    if not tree.body:
        return "empty: makes its folder a package" if file.name == "__init__.py" else "empty"
    made = [one for one in file.definitions if not one.parent]
    kinds = Counter(one.kind for one in made)
    own = kinds["class"] + kinds["function"]
    if file.name.startswith("test_") or file.name.endswith("_test.py"):
        told = f"tests: {counted(kinds['function'], 'function')}"
    elif file.name == "__init__.py":
        told = f"face of a package, with {contents(kinds)}" if own else "face of a package: names what it offers"
    elif any(isinstance(one, ast.If) and "__main__" in ast.unparse(one.test) for one in tree.body):
        told = f"program, with {contents(kinds)}" if own else "program"
    elif own == 0:
        told = "constants" if kinds["constant"] else "names only" if kinds["import"] else "statements only"
    else:
        told = of_classes([one for one in made if one.kind == "class"], kinds) or contents(kinds)
    return told


def of_classes(classes: list[Definition], kinds: Counter[str]) -> str:
    """What a file of classes alone is, where all are of one sort; "" else."""
    if not classes or kinds["function"]:
        return ""
    if all(one.signature.endswith(("Error)", "Exception)", "Warning)")) for one in classes):
        return f"exceptions: {counted(len(classes), 'class')}"
    if all("dataclass" in " ".join(one.decorators) or "Protocol" in one.signature for one in classes):
        return f"records and protocols: {counted(len(classes), 'class')}"
    return ""


def contents(kinds: Counter[str]) -> str:
    """`2 classes, 3 functions`."""
    told = [counted(kinds[kind], kind) for kind in ("class", "function", "constant") if kinds[kind]]
    return ", ".join(told)


def counted(number: int, word: str) -> str:
    """`1 class`, `2 classes`."""
    return f"{number} {word if number == 1 else word + ('es' if word.endswith('s') else 's')}"
