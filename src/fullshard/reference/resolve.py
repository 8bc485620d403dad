"""What names mean, over all files of a package: through scopes, imports, bases, annotations and constructor calls.

A name leads to its definition as Python would find it. An attribute leads to one where the type of what stands before
the dot is known: a module, a class, `self`, a parameter with an annotation, the result of a call. Where it is not, and
the package defines just one attribute or method of that name, that one is taken, and said not to be sure.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from dataclasses import replace

from .facts import Definition, Import, SourceFile, Use
from .scopes import Scope, Walked

DEEP = 12
"""Steps from one expression to another before its type is given up: chains of calls, circles of imports."""

KNOWN = {name for kind in (str, bytes, dict, list, set, int, float, tuple, object, type(None)) for name in dir(kind)}
"""Attributes of Python's own types: no guess is made of them."""

Meaning = Definition | SourceFile | None


class Resolver:
    """Answers what names mean.

    Args:
        files: every file of the package, by its path.
        walked: what the walk of each of those found that can be parsed.
    """

    def __init__(self, files: dict[str, SourceFile], walked: dict[str, Walked]) -> None:
        self.files, self.walked = files, walked
        self.modules = {file.module: file for file in files.values()}
        self.entries = {made: entry for one in walked.values() for entry, made in one.imports if made is not None}
        self.single = self._single()

    def _single(self) -> dict[str, Definition]:
        """Members of classes whose name no other class's member has."""
        found: dict[str, Definition | None] = {}
        for one in self.walked.values():
            for scope in one.classes.values():
                for name, made in [*scope.bound.items(), *scope.members.items()]:
                    found[name] = None if name in found else made[0]
        return {name: made for name, made in found.items() if made is not None and name not in KNOWN}

    # -- modules

    def module(self, dotted: str) -> SourceFile | None:
        """The package's file for an absolute module name."""
        return self.modules.get(dotted)

    def entry(self, found: Import) -> Meaning:
        """What an import leads to."""
        if found.name in ("", "*"):
            return self.module(found.module if found.alias or found.name else found.module.partition(".")[0])
        inside = self.module(f"{found.module}.{found.name}")
        file = self.module(found.module)
        return (self.exported(file, found.name, 0) if file is not None else None) or inside

    def exported(self, file: SourceFile, name: str, depth: int) -> Meaning:
        """What a module's attribute is: its own name, what it imports, or a module below it."""
        one = self.walked.get(file.path)
        if depth > DEEP:
            return None
        if one is not None:
            if name in one.top.bound:
                return self.followed(one.top.bound[name][-1], depth + 1)
            for entry, _ in one.imports:
                source = self.module(entry.module) if entry.name == "*" else None
                if source is not None and source is not file and (found := self.exported(source, name, depth + 1)):
                    return found
        return self.module(f"{file.module}.{name}")

    def followed(self, made: Definition, depth: int) -> Meaning:
        """An imported name's own definition; any other definition itself."""
        entry = self.entries.get(made)
        if entry is None:
            return made
        if depth > DEEP:
            return None
        if entry.name in ("", "*"):
            return self.entry(entry)
        file = self.module(entry.module)
        found = self.exported(file, entry.name, depth + 1) if file is not None else None
        return found or self.module(f"{entry.module}.{entry.name}")

    # -- names and types

    def lookup(self, name: str, scope: Scope, line: int, walked: Walked) -> Definition | None:
        """A name's definition in its scope or the ones around it; of several the last before `line`."""
        at: Scope | None = scope
        if scope.elsewhere.get(name) == "global":
            at = walked.top
        inner = True
        while at is not None:
            if name in at.bound and (inner or at.kind != "class"):
                made = at.bound[name]
                before = [one for one in made if one.line <= line]
                return before[-1] if before and at is scope else made[-1] if not before else before[-1]
            inner = inner and at.kind == "comprehension"
            at = at.outer
        return None

    def meaning(self, node: ast.expr, scope: Scope, walked: Walked, depth: int = 0) -> Meaning:
        """The definition or module that an expression names."""
        if depth > DEEP:
            return None
        if isinstance(node, ast.Name):
            made = self.lookup(node.id, scope, node.lineno, walked)
            if made is not None:
                return self.followed(made, depth)
            return self._starred(node.id, walked, depth)
        if isinstance(node, ast.Attribute):
            return self.attribute(node, scope, walked, depth + 1)
        return None

    def _starred(self, name: str, walked: Walked, depth: int) -> Meaning:
        """A name that came by `from module import *`."""
        for entry, _ in walked.imports:
            file = self.module(entry.module) if entry.name == "*" else None
            if file is not None and file.path != walked.path and (found := self.exported(file, name, depth + 1)):
                return found
        return None

    def attribute(self, node: ast.Attribute, scope: Scope, walked: Walked, depth: int = 0) -> Meaning:
        """What an attribute names, where the type of what stands before it is known."""
        base = self.meaning(node.value, scope, walked, depth + 1)
        if isinstance(base, SourceFile):
            return self.exported(base, node.attr, depth + 1)
        if base is not None and base.kind == "class":
            return self.member(base, node.attr, depth + 1)
        kind = self.type_of(node.value, scope, walked, depth + 1)
        return self.member(kind, node.attr, depth + 1) if kind is not None else None

    def member(self, of: Definition, name: str, depth: int) -> Meaning:
        """A class's method or attribute, its own or one of its bases'."""
        walked = self.walked[of.path]
        scope = walked.classes.get(of)
        if scope is None or depth > DEEP:
            return None
        if name in scope.bound:
            return self.followed(scope.bound[name][-1], depth + 1)
        if name in scope.members:
            return scope.members[name][-1]
        for base in scope.bases:
            found = self.meaning(base, scope.outer or scope, walked, depth + 1)
            if isinstance(found, Definition) and found is not of and (made := self.member(found, name, depth + 1)):
                return made
        return None

    def type_of(self, node: ast.expr, scope: Scope, walked: Walked, depth: int) -> Definition | None:
        """The class of this package that an expression's value is of; None: not known."""
        if depth > DEEP:
            return None
        if isinstance(node, ast.Name) and (own := self._own_class(node.id, scope)) is not None:
            return own
        if isinstance(node, ast.Call):
            called = self.meaning(node.func, scope, walked, depth + 1)
            return self._result(called, depth) if isinstance(called, Definition) else None
        if isinstance(node, ast.Await):
            return self.type_of(node.value, scope, walked, depth + 1)
        found = self.meaning(node, scope, walked, depth + 1)
        return self._value_type(found, depth) if isinstance(found, Definition) else None

    def _value_type(self, found: Definition, depth: int) -> Definition | None:
        """The type of a name's value: of a property that of its result; a class or function is no instance."""
        if found.kind in ("method", "function") and not any("property" in one for one in found.decorators):
            return None
        return None if found.kind == "class" else self.hinted(found, depth + 1)

    def _result(self, called: Definition, depth: int) -> Definition | None:
        """The type of what a call gives."""
        return called if called.kind == "class" else self.hinted(called, depth + 1)

    def _own_class(self, name: str, scope: Scope) -> Definition | None:
        at: Scope | None = scope
        while at is not None:
            if at.kind == "function" and name in at.bound:
                return at.outer.own if at.first == name and at.outer is not None else None
            at = at.outer
        return None

    def hinted(self, made: Definition, depth: int) -> Definition | None:
        """The class that a definition's annotation or value tells."""
        hint = self.walked[made.path].hints.get(made)
        if hint is None or depth > DEEP:
            return None
        expression, scope = hint
        for one in choices(expression):
            found = self.meaning(one, scope, self.walked[made.path], depth + 1)
            if isinstance(found, Definition) and found.kind == "class":
                return found
        return None if made.kind in ("method", "function") else self._of_value(made, expression, scope, depth)

    def _of_value(self, made: Definition, value: ast.expr, scope: Scope, depth: int) -> Definition | None:
        return self.type_of(value, scope, self.walked[made.path], depth + 1)


def choices(annotation: ast.expr) -> Iterable[ast.expr]:
    """The classes that an annotation may mean: of `A | None` and `Optional[A]` it is A. A plain value is itself."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [*choices(annotation.left), *choices(annotation.right)]
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] == "Optional":
        return choices(annotation.slice)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return choices(ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return []
    return [annotation] if isinstance(annotation, ast.Name | ast.Attribute) else []


def uses(walked: Walked, resolver: Resolver, column: dict[str, list[str]]) -> list[Use]:
    """Every name in a file that is not a definition, with what it means.

    Args:
        column: the lines of each file, to count columns in characters.
    """
    lines = column[walked.path]
    found = []
    for name, scope in walked.names:
        meant = resolver.meaning(name, scope, walked)
        if meant is not None or not hasattr(builtins, name.id):
            found.append(Use(name.id, name.lineno, characters(lines, name.lineno, name.col_offset), _definition(meant)))
    for node, scope in walked.attributes:
        line = node.end_lineno or node.lineno
        at = characters(lines, line, node.end_col_offset or 0) - len(node.attr)
        meant = resolver.attribute(node, scope, walked)
        made = _definition(meant)
        sure = True
        if made is None and meant is None and (guess := resolver.single.get(node.attr)) is not None:
            made, sure = guess, False
        found.append(Use(node.attr, line, at, made, sure))
    for keyword, call, scope in walked.keywords:
        called = resolver.meaning(call.func, scope, walked)
        parameter = _parameter(resolver, called, keyword.arg or "")
        if parameter is not None:
            at = characters(lines, keyword.lineno, keyword.col_offset)
            found.append(Use(keyword.arg or "", keyword.lineno, at, parameter))
    for entry, made in walked.imports:
        if made is not None and entry.name:
            found.append(Use(entry.name, made.line, made.column, _definition(resolver.entry(entry))))
    return sorted(found, key=lambda use: (use.line, use.column))


def _parameter(resolver: Resolver, called: Meaning, name: str) -> Definition | None:
    """The parameter that a keyword argument fills; of a class that of `__init__`, or its field."""
    if not isinstance(called, Definition):
        return None
    walked = resolver.walked[called.path]
    if called.kind == "class":
        made = resolver.member(called, "__init__", 0)
        field = resolver.member(called, name, 0)
        if isinstance(made, Definition):
            called, walked = made, resolver.walked[made.path]
        else:
            return field if isinstance(field, Definition) else None
    for scope in walked.scopes:
        if scope.own is called:
            return next((one for one in scope.bound.get(name, []) if one.kind == "parameter"), None)
    return None


def _definition(meant: Meaning) -> Definition | None:
    """What a link leads to: a module's file is the beginning of it."""
    if isinstance(meant, SourceFile):
        return Definition("module", meant.module.rpartition(".")[2], "", meant.path, 1, 0, 1)
    return meant


def characters(lines: list[str], line: int, offset: int) -> int:
    """A byte offset in a line as one in characters."""
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))


def with_paths(walked: Walked, resolver: Resolver) -> list[Import]:
    """A file's imports, each with the file of the package that it leads to."""
    found = []
    for entry, _ in walked.imports:
        whole = resolver.module(f"{entry.module}.{entry.name}") if entry.name not in ("", "*") else None
        file = whole or resolver.module(entry.module)
        found.append(replace(entry, path=file.path if file is not None else None))
    return found
