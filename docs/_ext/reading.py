"""What a package's source says: every name of every file, what it means, which lines use it. Nothing is imported.

griffe reads definitions, docstrings and imports. One walk over each file's tree adds parameters, variables and uses.
"""

from __future__ import annotations

import ast
import builtins
import gc
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import griffe

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "build", "dist"}
UNLISTED = {"self", "cls", "Any"}
"""Names that every file has and nobody looks up."""
COMMON = {name for kind in (str, bytes, list, dict, set, int, float, BaseException) for name in dir(kind)}
"""Attributes of built-in types: `x.append` leads nowhere, even if one class of the package has an `append`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Entry:
    """A name, as an index lists it.

    Attributes:
        kind: "module", "class", "function", "method", "constant", "attribute", "parameter", "variable", "import", or
            "outside" for a name that the package uses and does not define.
        qualified: the name after those that it is defined in, `Unit.gather.rank`; the whole name of an outside one.
        file: the file that defines it; None for an outside name.
        written: its definition on one line: a signature, an assignment, an import.
        obj: what griffe knows of it, for what is defined in a module or class.
        lines: where it is defined.
        uses: for each file's path the lines that use it; False marks a guess.
    """

    kind: str
    qualified: str
    file: File | None = None
    written: str = ""
    obj: griffe.Object | None = None
    lines: list[int] = field(default_factory=list)
    uses: dict[str, dict[int, bool]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.qualified.rpartition(".")[2]

    def used(self, path: str, line: int, sure: bool = True) -> None:
        lines = self.uses.setdefault(path, {})
        lines[line] = lines.get(line, False) or sure


@dataclass(slots=True)
class File:
    """One source file. Of a file that cannot be parsed only the text and the fault are known.

    Attributes:
        path: with `/`, from the package's own name: `fullshard/runtime/root.py`.
        entries: the names that it defines or imports, and those outside the package that it uses.
        imports: for each file of the package that it imports, the imported names with their lines.
        imported_by: for each file of the package that imports it, what it imports, with its lines.
        links: for the line and byte offset of a name in the text, what it means, and whether that is certain.
    """

    path: str
    module: str
    text: str = ""
    fault: str = ""
    obj: griffe.Module | None = None
    entries: list[Entry] = field(default_factory=list)
    imports: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    imported_by: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    links: dict[tuple[int, int], tuple[Entry, bool]] = field(default_factory=dict)

    @property
    def docstring(self) -> str:
        return self.obj.docstring.value if self.obj is not None and self.obj.docstring is not None else ""

    @property
    def purpose(self) -> str:
        """What the file is for, in one sentence: its docstring's first, or what it holds."""
        top = [
            entry for entry in self.entries if "." not in entry.qualified and entry.kind not in ("variable", "outside")
        ]
        names = [entry.name for entry in top if entry.kind != "import"] or [entry.name for entry in top]
        names.sort(key=lambda name: name.startswith("_"))
        listed = ", ".join(names[:8]) + " and more" * (len(names) > 8)
        verb = "Defines" if any(entry.kind != "import" for entry in top) else "Offers"
        derived = f"{verb} {listed}." if names else "Statements only." if self.text.strip() else "An empty file."
        return "Cannot be parsed." if self.fault else sentence(self.docstring) or derived


class Package:
    """All files of a package, read.

    Args:
        name: what the package is called.
        sources: the files, by their paths in the package.
        around: the dotted name of the package that it lies in; "" if it lies in none.
    """

    def __init__(self, name: str, sources: dict[str, Path], around: str = "") -> None:
        self.name = name
        self.collection = griffe.ModulesCollection()
        self.modules: dict[str, griffe.Module] = {}
        self.entries: dict[str, Entry] = {}
        self.files = {path: File(path, module_name(path, around)) for path in sources}
        self.by_module = {file.module: file for file in self.files.values()}
        self._resolved: dict[str, Entry | None] = {}
        gc.disable()  # many objects are created here and all stay: garbage collection would take half of the time
        try:
            self.read_all(sources)
        finally:
            gc.freeze()
            gc.enable()

    def read_all(self, sources: dict[str, Path]) -> None:
        """Read every file, then say of every use what it means."""
        trees = [(self.files[path], self.read(self.files[path], source)) for path, source in sources.items()]
        loader = griffe.GriffeLoader(modules_collection=self.collection, allow_inspection=False)
        for module in list(self.collection.members.values()):
            loader.expand_wildcards(module, external=False)
        walks = [Walk(self, file, tree) for file, tree in trees if tree is not None]
        members = [entry for entry in self.entries.values() if entry.kind in ("method", "attribute")]
        times = Counter(entry.name for entry in members)
        self.only = {entry.name: entry for entry in members if times[entry.name] == 1 and entry.name not in COMMON}
        for walk in walks:
            walk.resolve()
        for file in self.files.values():
            for path, names in file.imports.items():
                self.files[path].imported_by[file.path] = names

    def read(self, file: File, source: Path) -> ast.Module | None:
        """Read one file's text, tree and definitions; None where it cannot be parsed."""
        self.entries[file.module] = Entry("module", "", file)
        try:
            with tokenize.open(source) as stream:
                file.text = stream.read()
            tree = ast.parse(file.text)
            around, _, last = file.module.rpartition(".")
            parent = self.folder(around) if around else None
            file.obj = griffe.visit(last, source, file.text, parent=parent, modules_collection=self.collection)
        except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            file.fault = f"{file.path}{f':{line}' if line else ''}: {getattr(error, 'msg', None) or error}"
            file.text = file.text or (source.read_text(errors="replace") if source.is_file() else "")
            return None
        self.add(file.obj)
        return tree

    def folder(self, dotted: str) -> griffe.Module:
        """A folder's module; an empty one where the folder has no `__init__`."""
        if dotted not in self.modules:
            around, _, last = dotted.rpartition(".")
            parent = self.folder(around) if around else None
            self.add(griffe.Module(last, parent=parent, modules_collection=self.collection))
        return self.modules[dotted]

    def add(self, module: griffe.Module) -> None:
        """Put a module in its folder's; there a name that `__init__` imports comes before a file of that name."""
        self.modules[module.path] = module
        place = module.parent or self.collection
        if module.name not in place.members:
            place.set_member(module.name, module)

    def find(self, dotted: str) -> Entry | None:
        """What a whole name means, through imports and base classes; None: nothing in this package."""
        if dotted not in self._resolved:
            entry = self.entries.get(dotted)
            if entry is None or entry.kind in ("import", "module"):
                try:
                    obj = self.collection[dotted]
                    entry = self.entries.get((obj.final_target if obj.is_alias else obj).path, entry)
                except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
                    entry = None if entry is not None and entry.kind == "import" else entry
            self._resolved[dotted] = entry
        return self._resolved[dotted]


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class or function: its whole name, and what the names in it mean.

    Attributes:
        names: for each name bound here its whole name, or that of what was imported.
        hints: for a variable its annotation or value.
        first: the name of a method's own object.
    """

    kind: str
    dotted: str
    obj: griffe.Object
    outer: Scope | None = None
    first: str = ""
    names: dict[str, str] = field(default_factory=dict)
    hints: dict[str, ast.expr] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)


class Walk(ast.NodeVisitor):
    """Finds every name of one file: definitions at once, uses by `resolve`, once all files were walked."""

    def __init__(self, package: Package, file: File, tree: ast.Module) -> None:
        assert file.obj is not None
        self.package, self.file, self.lines = package, file, file.text.split("\n")
        wildcards = {name: member.target_path for name, member in file.obj.members.items() if member.is_alias}
        self.scope = Scope("module", file.module, file.obj, names=wildcards)
        self.pending: list[tuple[ast.Name | ast.Attribute, Scope]] = []
        self.generic_visit(tree)

    # -- definitions

    def define(self, name: str, node: ast.AST, kind: str, written: str = "", scope: Scope | None = None) -> Entry:
        """Bind a name in a scope; a variable that is bound again is used."""
        scope = scope or self.scope
        dotted, line = f"{scope.dotted}.{name}", node.lineno  # type: ignore[attr-defined]
        entry = self.package.entries.get(dotted)
        if entry is None or entry.kind == "module":
            written = written or re.sub(r"\bself\.", "", self.lines[line - 1].strip())
            written += "…" * written.endswith(("(", "[", "{", ","))
            entry = Entry(kind, dotted.removeprefix(f"{self.file.module}."), self.file, written)
            member = scope.obj.members.get(name) if scope.kind != "function" else None
            entry.obj = None if member is None or member.is_alias or member.is_module else member
            self.package.entries[dotted] = entry
            self.file.entries += [entry] * (name not in UNLISTED)
        elif kind in ("variable", "attribute", "constant"):
            entry.used(self.file.path, line)
            return entry
        scope.names[name] = dotted
        entry.lines.append(line)
        return entry

    def assign(self, name: str, node: ast.AST) -> None:
        """Bind a variable, in another scope where `global` or `nonlocal` says so."""
        scope = self.scope
        while name in scope.elsewhere and scope.outer is not None:
            scope = scope.outer
        named = "attribute" if scope.kind == "class" else "variable"
        self.define(name, node, "constant" if name.isupper() and scope.kind == "module" else named, scope=scope)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(child)
        keywords = [f"{keyword.arg}={self.cut(keyword.value)}" for keyword in node.keywords]
        bases = ", ".join([*map(self.cut, node.bases), *keywords])
        entry = self.define(node.name, node, "class", f"class {node.name}" + f"({bases})" * bool(bases))
        obj = entry.obj if isinstance(entry.obj, griffe.Class) else griffe.Class(node.name, parent=self.file.obj)
        self.inside(Scope("class", f"{self.scope.dotted}.{node.name}", obj, self.scope), node.body)

    def visit_FunctionDef(self, node: Function) -> None:
        for child in [*node.decorator_list, *filter(None, [node.returns])]:
            self.visit(child)
        arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
        returns = f" -> {self.cut(node.returns)}" if node.returns else ""
        method = self.scope.kind == "class"
        self.define(node.name, node, "method" if method else "function", f"{node.name}({arguments}){returns}")
        static = any(isinstance(child, ast.Name) and child.id == "staticmethod" for child in node.decorator_list)
        scope = Scope("function", f"{self.scope.dotted}.{node.name}", self.scope.obj, self.scope)
        self.parameters(node.args, scope, method and not static)
        self.inside(scope, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        scope = Scope("function", f"{self.scope.dotted}.<lambda>", self.scope.obj, self.scope)
        self.parameters(node.args, scope)
        self.inside(scope, [node.body])

    def parameters(self, arguments: ast.arguments, scope: Scope, method: bool = False) -> None:
        """Define parameters; defaults and annotations belong to the scope around."""
        starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]
        for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
            self.visit(default)
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = dict(zip(positional[::-1], arguments.defaults[::-1], strict=False))
        defaults |= zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if method and parameters:
            scope.first = parameters.pop(0).arg
        for parameter in parameters:
            default = f" = {self.cut(value)}" if (value := defaults.get(parameter)) is not None else ""
            self.define(parameter.arg, parameter, "parameter", self.cut(parameter) + default, scope)
            if parameter.annotation is not None:
                self.visit(parameter.annotation)
                scope.hints[parameter.arg] = parameter.annotation

    def inside(self, scope: Scope, nodes: list[ast.AST]) -> None:
        """Visit nodes in a scope of their own."""
        before, self.scope = self.scope, scope
        for node in nodes:
            self.visit(node)
        self.scope = before

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        hint = node.annotation if isinstance(node, ast.AnnAssign) else node.value
        for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
            if isinstance(target, ast.Name):
                self.scope.hints.setdefault(target.id, hint)
            elif isinstance(target, ast.Attribute) and (owner := self.owner(target.value, self.scope)) is not None:
                member = owner.obj.members[target.attr]
                if isinstance(member, griffe.Attribute) and member.lineno == node.lineno and member.annotation is None:
                    member.annotation = griffe.safe_get_annotation(hint, parent=owner.obj, log_level=None)

    visit_AnnAssign = visit_Assign

    def owner(self, value: ast.expr, scope: Scope | None) -> Scope | None:
        """The class of whose methods an expression is the first parameter."""
        while scope is not None and isinstance(value, ast.Name) and value.id not in scope.names:
            if scope.first == value.id:
                return scope.outer
            scope = scope.outer
        return None

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.assign(node.id, node)
        else:
            self.pending.append((node, self.scope))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        owner = self.owner(node.value, self.scope) if isinstance(node.ctx, ast.Store) else None
        if owner is None:
            self.pending.append((node, self.scope))
            return
        if node.attr not in owner.obj.members:  # griffe takes attributes from `__init__` alone
            owner.obj.set_member(node.attr, griffe.Attribute(node.attr, lineno=node.lineno))
        self.define(node.attr, node, "attribute", scope=owner)

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.assign(node.name, node)
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_ExceptHandler

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.scope.elsewhere |= set(node.names)

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        assert self.file.obj is not None
        for alias in node.names:
            target, name = alias.name, alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                target, name = griffe.relative_to_absolute(node, alias, self.file.obj), alias.asname or alias.name
            file = self.package.by_module.get(target) or self.package.by_module.get(target.rpartition(".")[0])
            if file is not None and file is not self.file:
                self.file.imports.setdefault(file.path, []).append((alias.asname or alias.name, node.lineno))
            if name != "*":
                self.define(name, alias, "import", target)
                whole = isinstance(node, ast.ImportFrom) or alias.asname
                self.scope.names[name] = target if whole else name

    visit_ImportFrom = visit_Import

    def cut(self, node: ast.expr | ast.arg) -> str:
        """A node's text, on one line."""
        if node.lineno == node.end_lineno:
            return self.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
        return " ".join(ast.unparse(node).split())

    # -- uses

    def resolve(self) -> None:
        """Record what every use means; what no file of the package defines becomes an entry of this file."""
        outside: dict[str, Entry] = {}
        for node, scope in self.pending:
            line, column, sure = node.lineno, node.col_offset, True
            dotted = self.dotted(node, scope)
            entry = self.package.find(dotted) if dotted else None
            if isinstance(node, ast.Attribute):
                name, line = node.attr, node.end_lineno or line
                column = (node.end_col_offset or 0) - len(name)
                if entry is None and dotted is None:
                    entry, sure = self.package.only.get(name), False
            else:
                name, at = node.id, self.binding(node.id, scope)
                here = self.package.entries.get(f"{at.dotted}.{name}") if at is not None else None
                if here is not None and here.kind == "import" and here is not entry:
                    here.used(self.file.path, line)
                    entry = entry or here
            if entry is not None:
                entry.used(self.file.path, line, sure)
                self.file.links[line, column] = (entry, sure)
            elif name not in UNLISTED and not hasattr(builtins, name) and self.owner(node, scope) is None:
                entry = outside.setdefault(dotted or name, Entry("outside", dotted or name, None, self.cut(node)))
                entry.used(self.file.path, line)
        self.file.entries += outside.values()

    def binding(self, name: str, scope: Scope) -> Scope | None:
        """The scope in which a name is bound."""
        at: Scope | None = scope
        while at is not None and (name not in at.names or (at.kind == "class" and at is not scope)):
            at = at.outer
        return at

    def dotted(self, node: ast.expr, scope: Scope) -> str | None:
        """The whole name of what an expression names; None where that is not known."""
        if isinstance(node, ast.Name):
            at = self.binding(node.id, scope)
            return at.names[node.id] if at is not None else None
        if not isinstance(node, ast.Attribute):
            return None
        base = self.dotted(node.value, scope)
        entry = self.package.find(base) if base else None
        if base is None or (entry is not None and entry.kind not in ("class", "module")):
            base = self.type_of(node.value, scope)
        return f"{base}.{node.attr}" if base else None

    def type_of(self, node: ast.expr, scope: Scope) -> str | None:
        """The class of the package that a value has, by annotations, calls and methods' first parameter."""
        called = isinstance(node, ast.Call)
        if (owner := self.owner(node, scope)) is not None:
            return owner.dotted
        at = self.binding(node.id, scope) if isinstance(node, ast.Name) else None
        if at is not None and isinstance(node, ast.Name) and node.id in at.hints:
            return self.class_of(griffe.safe_get_annotation(at.hints[node.id], parent=at.obj, log_level=None))
        dotted = self.dotted(node.func if isinstance(node, ast.Call) else node, scope)
        entry = self.package.find(dotted) if dotted else None
        if entry is None or entry.kind == "class":
            return dotted if entry is not None and called else None
        return self.class_of(getattr(entry.obj, "returns" if called else "annotation", None))

    def class_of(self, hint: griffe.Expr | str | None) -> str | None:
        """The class of the package that an annotation or a call names: of `A | None` and `Optional[A]` it is A."""
        if isinstance(hint, griffe.ExprBinOp):
            return self.class_of(hint.left) or self.class_of(hint.right)
        if isinstance(hint, griffe.ExprSubscript) and hint.canonical_path == "typing.Optional":
            return self.class_of(hint.slice)
        named = hint.function if isinstance(hint, griffe.ExprCall) else hint
        entry = self.package.find(named.canonical_path) if isinstance(named, griffe.Expr) else None
        return entry.obj.path if entry is not None and entry.kind == "class" and entry.obj is not None else None


def module_name(path: str, around: str) -> str:
    """A file's dotted name, in the package around."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{around}.{name}" if around else name


def sentence(text: str) -> str:
    """The first sentence of a text, on one line."""
    first = " ".join(re.split(r"\n\s*\n|\n\s*[-*] ", text.strip(), maxsplit=1)[0].split())
    return re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`(])", first, maxsplit=1)[0]


def sources(folder: Path) -> dict[str, Path]:
    """The Python files below a folder, by their paths with its name first; hidden and built ones are left out."""
    paths = {path.relative_to(folder.parent).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    base = len(folder.parts)
    return {
        name: path
        for name, path in paths.items()
        if not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.parts[base:])
    }


def locate(target: str) -> Package:
    """Read the package that a folder, a Python file or the name of an installed package means.

    Raises:
        FileNotFoundError: there is no such path or package, or no Python file in it.
    """
    path = Path(target)
    if not path.exists() and target.replace(".", "").isidentifier():
        folders = [Path(place, *target.split(".")) for place in sys.path]
        files = [folder.with_suffix(".py") for folder in folders]
        path = next((place for place in [*folders, *files] if place.exists()), path)
    path = path.resolve()
    paths = sources(path) if path.is_dir() else {path.name: path} if path.suffix == ".py" and path.exists() else {}
    if not paths:
        raise FileNotFoundError(
            f"{target!r} is neither a folder with Python files, a .py file nor an installed package"
        )
    name, around = path.stem, []
    while (path := path.parent).joinpath("__init__.py").is_file():
        around.insert(0, path.name)
    return Package(name, paths, ".".join(around))
