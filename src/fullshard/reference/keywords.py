"""The index of every identifier: where it is defined, and every line on which it is used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .facts import KINDS, Definition, Package, Use

GROUPS = {
    "class": "Classes", "function": "Functions", "method": "Methods", "constant": "Constants",
    "parameter": "Parameters", "attribute": "Attributes", "variable": "Variables", "import": "Imported names",
    "elsewhere": "Names defined elsewhere",
}  # fmt: skip
"""The groups of an index, in order: for each kind of definition its title."""


@dataclass(slots=True)
class Entry:
    """A name in a file's index.

    Attributes:
        definition: where it is defined; None: in no file of the package.
        here: lines of this file that use it.
        others: for each other file that uses it the lines.
    """

    name: str
    definition: Definition | None
    here: list[int] = field(default_factory=list)
    others: dict[str, list[int]] = field(default_factory=dict)


class Keywords:
    """All names of a package, by file and over all of it."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.used: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.tops: dict[str, Definition | None] = {}
        for path, file in package.files.items():
            for use in file.uses:
                if use.target is not None:
                    self.used[use.target.path, use.target.anchor][path].append(use.line)
            for made in file.definitions:
                if made.kind in ("class", "function", "method") and not made.local:
                    self.tops[made.qualified] = None if made.qualified in self.tops else made

    def of_file(self, path: str) -> dict[str, list[Entry]]:
        """Every identifier of a file, in groups; empty groups are left out."""
        file = self.package.files[path]
        found: dict[str, list[Entry]] = {kind: [] for kind in (*KINDS, "elsewhere")}
        for made in file.definitions:
            entry = Entry(made.name, made)
            for user, lines in self.used.get((path, made.anchor), {}).items():
                if user == path:
                    entry.here = ordered(lines)
                else:
                    entry.others[user] = ordered(lines)
            found[made.kind].append(entry)
        found["import"] = self._with_targets(path, found["import"])
        found["elsewhere"] = self._elsewhere(file.uses, path, {entry.name for entry in found["import"]})
        return {
            kind: sorted(entries, key=lambda one: (*order(one.name), one.definition.line if one.definition else 0))
            for kind, entries in found.items()
            if entries
        }

    def _with_targets(self, path: str, entries: list[Entry]) -> list[Entry]:
        """Imported names with the lines that use what they lead to."""
        lines: dict[str, list[int]] = defaultdict(list)
        for use in self.package.files[path].uses:
            lines[use.name].append(use.line)
        for entry in entries:
            entry.here = ordered([*entry.here, *lines[entry.name]])
        return entries

    def _elsewhere(self, uses: list[Use], path: str, imported: set[str]) -> list[Entry]:
        """Names that this file uses and does not define: attributes of other classes, and of other packages."""
        found: dict[tuple[str, str], Entry] = {}
        for use in uses:
            target = use.target if use.sure else None
            if use.name in imported or (target is not None and target.path == path):
                continue
            key = (use.name, f"{target.path}#{target.anchor}" if target is not None else "")
            found.setdefault(key, Entry(use.name, target)).here.append(use.line)
        for entry in found.values():
            entry.here = ordered(entry.here)
        return list(found.values())

    def of_folder(self, folder: str) -> dict[str, dict[str, list[Definition]]]:
        """Every name defined in the files of a folder and of those in it: by kind, then by name."""
        found: dict[str, dict[str, list[Definition]]] = {kind: {} for kind in KINDS}
        for path, file in self.package.files.items():
            if path.startswith(f"{folder}/") or path == folder:
                for made in file.definitions:
                    found[made.kind].setdefault(made.name, []).append(made)
        return {
            kind: dict(sorted(names.items(), key=lambda one: order(one[0])))
            for kind, names in found.items()
            if names and kind != "import"
        }

    def everywhere(self) -> dict[str, list[Definition]]:
        """Every name that the package defines, in order, with all its definitions."""
        found: dict[str, list[Definition]] = {}
        for file in self.package.files.values():
            for made in file.definitions:
                if made.kind != "import":
                    found.setdefault(made.name, []).append(made)
        return dict(sorted(found.items(), key=lambda one: order(one[0])))

    def named(self, text: str, path: str) -> Definition | None:
        """What a docstring of a file means by a name in backticks; None: nothing, or several things."""
        name = text.removesuffix("()").strip()
        mine = [made for made in self.package.files[path].definitions if made.qualified == name]
        if mine:
            return mine[0]
        parts = name.split(".")
        return next((made for i in range(len(parts)) if (made := self.tops.get(".".join(parts[i:]))) is not None), None)


def order(name: str) -> tuple[bool, str, str]:
    """What names are sorted by: public ones first, then those that begin with an underscore; each by its letters."""
    return name.startswith("_"), name.lower(), name


def ordered(lines: list[int]) -> list[int]:
    """Each line once, in order."""
    return sorted(set(lines))
