"""The scopes of one file: which names each binds, and where names and attributes stand that are to be resolved.

    module scope   Unit, gather, VERBS                   a class's own names are seen in its body, not in its methods
      class scope  Unit.full                             `global` and `nonlocal` lead to the scope that they name
        function   Unit.gather: rank, count              a lambda or comprehension is a scope without a name

One walk over the syntax tree; resolving what the names mean comes after all files were walked (`resolve.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from .facts import Definition, Import

Function = ast.FunctionDef | ast.AsyncFunctionDef
LONG = 60
"""Characters of a constant's value that are shown."""


@dataclass(slots=True, eq=False)
class Scope:
    """What binds names: a module, class, function, lambda or comprehension.

    Attributes:
        bound: for each name its definitions here, in the order of lines.
        members: of a class, what its methods assign to `self`.
        bases: of a class, the expressions; resolved in `outer`.
    """

    kind: str
    qualified: str
    outer: Scope | None
    bound: dict[str, list[Definition]] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    members: dict[str, list[Definition]] = field(default_factory=dict)
    bases: list[ast.expr] = field(default_factory=list)
    own: Definition | None = None
    first: str = ""


@dataclass(slots=True)
class Walked:
    """What one walk finds. Names and attributes with the scope in which they stand.

    Attributes:
        classes: the scope of each class, by its definition.
        hints: for a definition what tells its type: an annotation or value, and where to resolve it.
    """

    path: str
    top: Scope
    definitions: list[Definition] = field(default_factory=list)
    names: list[tuple[ast.Name, Scope]] = field(default_factory=list)
    attributes: list[tuple[ast.Attribute, Scope]] = field(default_factory=list)
    keywords: list[tuple[ast.keyword, ast.Call, Scope]] = field(default_factory=list)
    imports: list[tuple[Import, Definition | None]] = field(default_factory=list)
    classes: dict[Definition, Scope] = field(default_factory=dict)
    hints: dict[Definition, tuple[ast.expr, Scope]] = field(default_factory=dict)
    scopes: list[Scope] = field(default_factory=list)


class Walker(ast.NodeVisitor):
    """Walks a file's tree once and fills a `Walked`.

    Args:
        path: the file, as definitions name it.
        package: the dotted package that relative imports start from.
        lines: the file's lines, to turn the tree's byte offsets into characters.
    """

    def __init__(self, path: str, package: str, lines: list[str]) -> None:
        self.path, self.package, self.lines = path, package, lines
        self.scope = Scope("module", "", None)
        self.found = Walked(path, self.scope, scopes=[self.scope])
        self.counts: dict[str, int] = {}
        self.where: list[str] = []

    # -- definitions

    def column(self, line: int, offset: int) -> int:
        """A byte offset in a line as one in characters."""
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        return offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))

    def define(
        self, kind: str, name: str, node: ast.AST, *, offset: int = 0, scope: Scope | None = None, **more: object
    ) -> Definition:
        """Bind a name in the scope that it belongs to, or in the one given."""
        scope = scope or self._home(name)
        outer = scope.qualified
        qualified = f"{outer}.{name}" if outer else name
        number = self.counts[qualified] = self.counts.get(qualified, 0) + 1
        line = getattr(node, "lineno", 1)
        column = self.column(line, getattr(node, "col_offset", 0)) + offset
        end = getattr(node, "end_lineno", None) or line
        more["local"] = any(one.kind == "function" for one in around(scope))
        made = Definition(kind, name, qualified, self.path, line, column, end, number, **more)  # type: ignore[arg-type]
        scope.bound.setdefault(name, []).append(made)
        self.found.definitions.append(made)
        return made

    def _home(self, name: str) -> Scope:
        """The scope in which a name is bound that is assigned to here."""
        scope, wanted = self.scope, self.scope.elsewhere.get(name)
        if wanted == "global":
            return self.found.top
        while scope.outer is not None and (wanted == "nonlocal" or scope.kind == "comprehension"):
            scope = scope.outer
            if scope.kind == "function" and name in scope.bound:
                break
        return scope

    def assign(self, target: ast.expr, value: ast.expr | None, annotation: ast.expr | None = None) -> None:
        """Bind what an assignment's target names; what is bound in the same scope already is only used again."""
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.assign(one, None)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, None)
        elif isinstance(target, ast.Name):
            self._assign_name(target, value, annotation)
        elif isinstance(target, ast.Attribute) and self._of_self(target):
            self._assign_member(target, value, annotation)
            self.visit(target.value)
        else:
            self.visit(target)

    def _assign_name(self, target: ast.Name, value: ast.expr | None, annotation: ast.expr | None) -> None:
        if target.id in self._home(target.id).bound:
            self.found.names.append((target, self.scope))
            return
        kind = "attribute" if self._home(target.id).kind == "class" else "variable"
        if target.id.isupper() and self._home(target.id).kind != "function" and len(target.id) > 1:
            kind = "constant"
        made = self.define(kind, target.id, target, signature=shown(value, annotation, kind))
        self.hint(made, annotation or value, self.scope)

    def _of_self(self, target: ast.Attribute) -> bool:
        scope = self._method()
        return scope is not None and isinstance(target.value, ast.Name) and target.value.id == scope.first != ""

    def _method(self) -> Scope | None:
        """The method that is walked, or the one around the function that is."""
        scope: Scope | None = self.scope
        while scope is not None and not (scope.kind == "function" and scope.first):
            scope = scope.outer
        return scope

    def _assign_member(self, target: ast.Attribute, value: ast.expr | None, annotation: ast.expr | None) -> None:
        method = self._method()
        assert method is not None and method.outer is not None
        owner, name = method.outer, target.attr
        if name in owner.members or name in owner.bound:
            self.found.attributes.append((target, self.scope))
            return
        qualified = f"{owner.qualified}.{name}"
        number = self.counts[qualified] = self.counts.get(qualified, 0) + 1
        line = target.end_lineno or target.lineno
        column = self.column(line, target.end_col_offset or 0) - len(name)
        text = shown(value, annotation, "attribute")
        made = Definition("attribute", name, qualified, self.path, line, column, line, number, text)
        owner.members[name] = [made]
        self.found.definitions.append(made)
        self.hint(made, annotation or value, self.scope)

    def hint(self, made: Definition, expression: ast.expr | None, scope: Scope) -> None:
        """Note what tells a definition's type."""
        if expression is not None:
            self.found.hints[made] = (expression, scope)

    # -- what makes scopes

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def _body(self, body: Iterable[ast.stmt]) -> None:
        for one in body:
            self.visit(one)

    def enter(self, kind: str, own: Definition | None, part: str = "") -> Scope:
        """Begin a scope; the caller puts back the one it gets."""
        before = self.scope
        qualified = own.qualified if own else before.qualified + part
        self.scope = Scope(kind, qualified, before, own=own)
        self.found.scopes.append(self.scope)
        return before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for one in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
            self.visit(one)
        given = [*map(ast.unparse, node.bases), *[f"{k.arg or '**'}={ast.unparse(k.value)}" for k in node.keywords]]
        made = self.define(
            "class",
            node.name,
            node,
            offset=len("class "),
            signature=f"({', '.join(given)})" if given else "",
            docstring=ast.get_docstring(node),
            decorators=tuple(map(ast.unparse, node.decorator_list)),
        )
        before = self.enter("class", made)
        self.scope.bases = node.bases
        self.found.classes[made] = self.scope
        self._body(node.body)
        self.scope = before

    def visit_FunctionDef(self, node: Function) -> None:
        outside = [*node.decorator_list, *node.args.defaults, *[d for d in node.args.kw_defaults if d is not None]]
        annotations = [arg.annotation for arg in arguments(node.args) if arg.annotation is not None]
        for one in [*outside, *annotations, *([node.returns] if node.returns else [])]:
            self.visit(one)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        decorators = tuple(map(ast.unparse, node.decorator_list))
        method = self.scope.kind == "class"
        made = self.define(
            "method" if method else "function",
            node.name,
            node,
            offset=len("async def ") if isinstance(node, ast.AsyncFunctionDef) else len("def "),
            signature=f"({ast.unparse(node.args)}){returns}",
            docstring=ast.get_docstring(node),
            decorators=decorators,
        )
        self.hint(made, node.returns, self.scope)
        before = self.enter("function", made)
        given = arguments(node.args)
        if method and given and "staticmethod" not in decorators and node.args.kwonlyargs[:1] != given[:1]:
            self.scope.first = given[0].arg
        self.where.append("function")
        self.parameters(node.args, before)
        self._body(node.body)
        self.where.pop()
        self.scope = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def parameters(self, given: ast.arguments, outside: Scope) -> None:
        """Bind a function's parameters."""
        for one in arguments(given):
            text = f": {ast.unparse(one.annotation)}" if one.annotation else ""
            made = self.define("parameter", one.arg, one, signature=text)
            self.hint(made, one.annotation, outside)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for one in [*node.args.defaults, *[d for d in node.args.kw_defaults if d is not None]]:
            self.visit(one)
        before = self.enter("function", None, ".<lambda>" if self.scope.qualified else "<lambda>")
        self.parameters(node.args, before)
        self.visit(node.body)
        self.scope = before

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        before = self.enter("comprehension", None)
        for i, one in enumerate(node.generators):
            if i:
                self.visit(one.iter)
            self._bind_here(one.target)
            for test in one.ifs:
                self.visit(test)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(value)
        self.scope = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _bind_here(self, target: ast.expr) -> None:
        """A comprehension's own names are bound in it alone, whatever is around."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if node.id not in self.scope.bound:
                    self.define("variable", node.id, node, scope=self.scope)
            elif isinstance(node, ast.Attribute | ast.Subscript):
                self.visit(node)

    # -- what binds or uses names

    def visit_Global(self, node: ast.Global) -> None:
        self.scope.elsewhere |= dict.fromkeys(node.names, "global")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.scope.elsewhere |= dict.fromkeys(node.names, "nonlocal")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
        self.assign(node.target, node.value, node.annotation)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):  # a loop, with, walrus, augmented assignment
            self.assign(node, None)
        else:
            self.found.names.append((node, self.scope))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and self._of_self(node):
            self.assign(node, None)
            return
        self.visit(node.value)
        self.found.attributes.append((node, self.scope))

    def visit_Call(self, node: ast.Call) -> None:
        self.found.keywords += [(keyword, node, self.scope) for keyword in node.keywords if keyword.arg]
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name and node.type is not None and node.name not in self._home(node.name).bound:
            made = self.define("variable", node.name, node.type)
            text = self.lines[made.line - 1] if node.type.lineno == node.type.end_lineno else ""
            column = text.find(f" as {node.name}", made.column) + len(" as ")
            self._moved(made, column)
        self._body(node.body)

    def _moved(self, made: Definition, column: int) -> None:
        """A definition's column, where the tree tells only where its statement begins."""
        bound = self._home(made.name).bound[made.name]
        self.found.definitions[-1] = bound[-1] = replace(made, column=column)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name and node.name not in self._home(node.name).bound:
            made = self.define("variable", node.name, node)
            if node.lineno == node.end_lineno:
                self._moved(made, self.column(node.lineno, node.end_col_offset or 0) - len(node.name))
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_If(self, node: ast.If) -> None:
        typing = ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        self.visit(node.test)
        self.where += ["type checking"] if typing else []
        self._body(node.body)
        del self.where[len(self.where) - typing :]
        self._body(node.orelse)

    # -- imports

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            name = one.asname or one.name.partition(".")[0]
            made = self.define("import", name, one, offset=0, signature=one.name)
            self._imported(
                Import(one.name, "", one.asname or "", node.lineno, where=self.where[-1] if self.where else ""), made
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for one in node.names:
            where = self.where[-1] if self.where else ""
            entry = Import(module, one.name, one.asname or "", node.lineno, where=where)
            made = None
            if one.name != "*":
                made = self.define("import", one.asname or one.name, one, signature=f"{module}.{one.name}")
            self._imported(entry, made)

    def _imported(self, entry: Import, made: Definition | None) -> None:
        self.found.imports.append((entry, made))


def around(scope: Scope) -> Iterator[Scope]:
    """A scope and those around it."""
    at: Scope | None = scope
    while at is not None:
        yield at
        at = at.outer


def arguments(given: ast.arguments) -> list[ast.arg]:
    """All parameters, in the order in which they are written."""
    star = [given.vararg] if given.vararg else []
    rest = [given.kwarg] if given.kwarg else []
    return [*given.posonlyargs, *given.args, *star, *given.kwonlyargs, *rest]


def shown(value: ast.expr | None, annotation: ast.expr | None, kind: str) -> str:
    """What a reader is told of a name's value: its annotation, and a constant's value as far as it is short."""
    told = f": {ast.unparse(annotation)}" if annotation is not None else ""
    if value is None or kind not in ("constant", "attribute"):
        return told
    text = " ".join(ast.unparse(value).split())
    return f"{told} = {text if len(text) <= LONG else text[: LONG - 1] + '…'}"
