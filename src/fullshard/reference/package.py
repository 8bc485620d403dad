"""A whole package read: every file walked, names resolved over all of them, and who depends on whom."""

from __future__ import annotations

import ast
from collections.abc import Callable

from .facts import Fault, Package, SourceFile
from .find import Place
from .read import read
from .resolve import Resolver, uses, with_paths
from .role import role_of
from .scopes import Walked, Walker

RELATED = 8


def package(place: Place, told: Callable[[str], None] = lambda path: None) -> Package:
    """Read a package. A file that cannot be read or parsed has faults, and its text as far as there is one.

    Args:
        place: where its files are (`find`).
        told: called with each file's path as it is taken up.
    """
    files: dict[str, SourceFile] = {}
    walked: dict[str, Walked] = {}
    lines: dict[str, list[str]] = {}
    for path, file in place.files.items():
        told(path)
        text, nbytes, tree, faults = read(file, path)
        made = files[path] = SourceFile(path, module_of(path, place.around), text, nbytes, faults=faults)
        if tree is not None:
            made.docstring = ast.get_docstring(tree)
            lines[path] = text.split("\n")
            walk(made, tree, lines[path], walked)
        made.role = role_of(made, tree)
    found = Package(place.name, files)
    connect(found, walked, lines)
    return found


def module_of(path: str, around: str = "") -> str:
    """A file's dotted module name, in the package around."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{around}.{name}" if around else name


def walk(file: SourceFile, tree: ast.Module, lines: list[str], walked: dict[str, Walked]) -> None:
    """Walk one file's tree."""
    inside = file.name == "__init__.py"
    walker = Walker(file.path, file.module if inside else file.module.rpartition(".")[0], lines)
    try:
        walker.visit(tree)
    except RecursionError:  # deeper than a walk in Python can follow, though the parser could
        file.faults.append(Fault(file.path, 0, "nested too deeply to analyse"))
        return
    walked[file.path] = walker.found
    file.definitions = sorted(walker.found.definitions, key=lambda made: (made.line, made.column))


def connect(found: Package, walked: dict[str, Walked], lines: dict[str, list[str]]) -> None:
    """Resolve names, and note which file depends on which."""
    resolver = Resolver(found.files, walked)
    depends: dict[str, set[str]] = {path: set() for path in found.files}
    for path, one in walked.items():
        file = found.files[path]
        file.imports = with_paths(one, resolver)
        file.uses = uses(one, resolver, lines)
        depends[path] |= {entry.path for entry in file.imports if entry.path}
        depends[path] |= {use.target.path for use in file.uses if use.target is not None and use.sure}
        depends[path].discard(path)
    found.depends = {path: sorted(others) for path, others in depends.items()}
    dependents: dict[str, list[str]] = {path: [] for path in found.files}
    for path, others in found.depends.items():
        for other in others:
            dependents[other].append(path)
    found.dependents = {path: sorted(others) for path, others in dependents.items()}
    found.related = {path: related(path, found) for path in found.files}


def related(path: str, found: Package) -> list[str]:
    """Other files that a reader of this one may want: those used along with it, its tests, its neighbours.

    A file that depends on both counts 2, one that both depend on 1 (shared by many, it tells little: divided by how
    many), the same folder 1, a test named after it 5. What this file depends on, or what depends on it, is shown apart.
    """
    score: dict[str, float] = dict.fromkeys(found.files, 0.0)
    for other in found.dependents[path]:
        for third in found.depends[other]:
            score[third] += 2 / max(1, len(found.depends[other]))
    for other in found.depends[path]:
        for third in found.dependents[other]:
            score[third] += 1 / max(1, len(found.dependents[other]))
    folder, _, name = path.rpartition("/")
    for other in found.files:
        beside, _, its = other.rpartition("/")
        score[other] += (beside == folder) * 0.5 + (
            its in (f"test_{name}", name.removeprefix("test_")) and its != name
        ) * 5
    shown = {path, *found.depends[path], *found.dependents[path]}
    best = [other for other, points in sorted(score.items(), key=lambda one: (-one[1], one[0])) if points > 0.25]
    return [other for other in best if other not in shown][:RELATED]
