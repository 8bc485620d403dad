"""What is known about a package's source: frozen records that reading makes and that pages are written from.

    Package
      SourceFile (one a file, also one that cannot be parsed)
        Definition   a class, function, method, constant, parameter, attribute, variable, or imported name
        Use          a place where a name stands, and the definition it means, if that is known
        Import       a line of an import, and the file of this package that it leads to
        Fault        what could not be read, and where

Lines count from 1, columns from 0 and in characters. Paths are written with `/` and begin with the package's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("class", "function", "method", "constant", "parameter", "attribute", "variable", "import")
"""The kinds of definitions, in the order in which an index groups them."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A place where a name gets its meaning.

    Attributes:
        qualified: the name with what it is defined in, within its file: `Unit.gather`, `Unit.gather.rank`.
        number: 1; more if the file defines the same qualified name before it (overloads, branches).
        line, column: where the name stands; a decorated function's own line, not its decorator's.
        end: the last line of the definition.
        signature: what follows the name: parameters and result, bases of a class, the value of a constant.
        local: within a function, where nothing outside can name it.
    """

    kind: str
    name: str
    qualified: str
    path: str
    line: int
    column: int
    end: int
    number: int = 1
    signature: str = ""
    docstring: str | None = None
    decorators: tuple[str, ...] = ()
    local: bool = False

    @property
    def anchor(self) -> str:
        """Names the definition within its file's page; nothing else on the page has it."""
        return self.qualified if self.number == 1 else f"{self.qualified}-{self.number}"

    @property
    def parent(self) -> str:
        """The qualified name of what it is defined in; "" for what a module defines itself."""
        return self.qualified.rpartition(".")[0]

    @property
    def public(self) -> bool:
        """Whether no part of its qualified name is private; `__init__` and the like are not."""
        return not any(
            part.startswith("_") and not part.endswith("__") for part in self.qualified.replace("<", "_<").split(".")
        )


@dataclass(frozen=True, slots=True)
class Use:
    """A name in the source that is not a definition.

    Attributes:
        target: what it means, in this file or another of the package; None: not known, or not of this package.
        sure: False where the target was chosen because the package defines one attribute of that name only.
    """

    name: str
    line: int
    column: int
    target: Definition | None = None
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name or module.

    Attributes:
        module: absolute, dotted; of a relative import what it means.
        name: what is taken from the module; "" for `import module`, "*" for all.
        path: the file of this package that it leads to; None: another package, or nothing that is there.
        where: "" at the top, "function" inside one, "type checking" under `if TYPE_CHECKING`.
    """

    module: str
    name: str
    alias: str
    line: int
    path: str | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a file, or a part of it, could not be read."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}" if self.line else f"{self.path}: {self.what}"


@dataclass(slots=True)
class SourceFile:
    """One file. Of one that cannot be parsed, text and faults are known, and nothing else.

    Attributes:
        path: with the package's name first: `fullshard/runtime/root.py`.
        module: dotted; a package's `__init__` is the package.
        nbytes: its size on disk.
        role: what it is in the package, in a few words.
    """

    path: str
    module: str
    text: str
    nbytes: int
    role: str = ""
    docstring: str | None = None
    definitions: list[Definition] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n")) if self.text else 0

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring, on one line; "" if it has none."""
        return " ".join((self.docstring or "").strip().split("\n\n")[0].split())


@dataclass(slots=True)
class Package:
    """All files of one package, and how they hang together.

    Attributes:
        depends: for each file the files of the package that it imports or whose names it uses.
        dependents: the other way round.
        related: for each file others that a reader of it may want, best first.
    """

    name: str
    files: dict[str, SourceFile]
    depends: dict[str, list[str]] = field(default_factory=dict)
    dependents: dict[str, list[str]] = field(default_factory=dict)
    related: dict[str, list[str]] = field(default_factory=dict)

    @property
    def folders(self) -> list[str]:
        """Every folder that holds a file of the package, itself or in a folder below it; of a single file none."""
        found = set()
        for file in self.files.values():
            parts = file.folder.split("/") if file.folder else []
            found |= {"/".join(parts[: i + 1]) for i in range(len(parts))}
        return sorted(found)

    @property
    def faults(self) -> list[Fault]:
        return [fault for file in self.files.values() for fault in file.faults]
