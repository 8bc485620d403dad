"""The same pages as Markdown with front matter: for a file its page and its index, for a folder one page.

    fullshard/runtime/root.py.md   fullshard/runtime/root.py.names.md   fullshard/runtime/README.md   names.md

Front matter has only strings and numbers, quoted as JSON quotes them, which is YAML too.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from urllib.parse import quote

from .docstring import blocks
from .facts import Definition, SourceFile
from .keywords import GROUPS, Entry, Keywords
from .pages import described


def texts(keywords: Keywords) -> Iterator[tuple[str, str]]:
    """Every file's name and text."""
    for path in keywords.package.files:
        yield f"{path}.md", file_page(keywords, path)
        yield f"{path}.names.md", file_names(keywords, path)
    for folder in keywords.package.folders:
        yield f"{folder}/README.md", folder_page(keywords, folder)
    yield "names.md", all_names(keywords)


def front(**values: object) -> str:
    """Front matter."""
    return (
        "---\n"
        + "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
        + "---\n\n"
    )


def to(target: str, origin: str, anchor: str = "") -> str:
    """The link from one page to another; both are names from the root."""
    return quote(posixpath.relpath(target, posixpath.dirname(origin) or ".")) + (f"#{anchor}" if anchor else "")


def plain(text: str) -> str:
    """Text in which nothing is markup but what a docstring marks, code in backticks."""
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(one if i % 2 else re.sub(r"([*_<>\[\]|\\])", r"\\\1", one) for i, one in enumerate(parts))


def code(text: str) -> str:
    """A code span, whatever backticks are in it."""
    marks = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{marks}{space}{text}{space}{marks}".replace("|", "\\|")


def fenced(text: str, language: str = "") -> str:
    """A code block, whose fence is longer than any in the text."""
    longest = max((len(one) for one in re.findall(r"`{3,}", text)), default=2)
    mark = "`" * max(3, longest + 1)
    return f"{mark}{language}\n{text.rstrip()}\n{mark}"


def docstring(text: str | None) -> str:
    """A docstring as Markdown."""
    made = []
    for one in blocks(text or ""):
        if one.kind == "text":
            made.append(plain(one.text))
        elif one.kind == "kept":
            made.append(fenced(one.text, "text"))
        elif one.kind == "head":
            made.append(f"**{one.text}**")
        else:
            made.append("\n".join(f"- {code(name) + ': ' if name else ''}{plain(told)}" for name, told in one.items))
    return "\n\n".join(made)


def file_page(keywords: Keywords, path: str) -> str:
    """A file's page."""
    package, file, page = keywords.package, keywords.package.files[path], f"{path}.md"
    tree = described(path, keywords)
    parts = [f"# {path}", *[f"> {plain(str(fault))}" for fault in file.faults]]
    parts += [f"{plain(file.role)}; [keyword index]({to(f'{path}.names.md', page)})"]
    parts += ["## Overview", docstring(file.docstring) or "No docstring."]
    if tree[""]:
        parts += ["## Classes and functions", *[one for made in tree[""] for one in definition(made, tree, 3)]]
    if file.imports:
        parts += ["## Imports", imports(file, page)]
    for title, paths in (
        ("Depends on", package.depends.get(path, [])),
        ("What depends on it", package.dependents.get(path, [])),
        ("Related files", package.related.get(path, [])),
    ):
        parts += [f"## {title}", listed(keywords, paths, page) or "Nothing in this package."]
    parts += ["## Source", fenced(file.text, "python")]
    return header(keywords, file, "file") + "\n\n".join(parts) + "\n"


def header(keywords: Keywords, file: SourceFile, kind: str) -> str:
    """A file's front matter."""
    return front(
        title=file.module,
        kind=kind,
        path=file.path,
        role=file.role,
        lines=file.lines,
        bytes=file.nbytes,
        summary=file.summary,
        depends_on=keywords.package.depends.get(file.path, []),
        depended_on_by=keywords.package.dependents.get(file.path, []),
        faults=[str(fault) for fault in file.faults],
    )


def definition(made: Definition, tree: dict[str, list[Definition]], level: int) -> Iterator[str]:
    """A class or function, and what is in it."""
    word = "class " if made.kind == "class" else ""
    yield f"{'#' * min(level, 6)} {code(made.qualified)}"
    head = "\n".join([*[f"@{one}" for one in made.decorators], f"{word}{made.name}{made.signature}"])
    yield fenced(head, "python")
    yield f"{made.kind}, lines {made.line} to {made.end}"
    if made.docstring:
        yield docstring(made.docstring)
    for one in tree.get(made.qualified, []) if made.kind == "class" and made.number == 1 else []:
        yield from definition(one, tree, level + 1)


def imports(file: SourceFile, page: str) -> str:
    """The list of imports."""
    rows = []
    for one in file.imports:
        name = code(one.name or one.module) + (f" as {code(one.alias)}" if one.alias else "")
        module = f"[{code(one.module)}]({to(f'{one.path}.md', page)})" if one.path else code(one.module)
        rows.append(f"- {name} from {module}, line {one.line}{' (' + one.where + ')' if one.where else ''}")
    return "\n".join(rows)


def listed(keywords: Keywords, paths: list[str], page: str) -> str:
    """Files with their summaries."""
    told = [(path, keywords.package.files[path].summary) for path in paths]
    return "\n".join(
        f"- [{code(path)}]({to(f'{path}.md', page)}){': ' + plain(summary) if summary else ''}"
        for path, summary in told
    )


def file_names(keywords: Keywords, path: str) -> str:
    """A file's index."""
    page = f"{path}.names.md"
    file = keywords.package.files[path]
    parts = [f"# {path}: names", f"[the file]({to(f'{path}.md', page)})"]
    for kind, entries in keywords.of_file(path).items():
        parts += [f"## {GROUPS[kind]}", "\n".join(entry(one, path, page) for one in entries)]
    return header(keywords, file, "names") + "\n\n".join(parts) + "\n"


def entry(one: Entry, path: str, page: str) -> str:
    """One name of a file's index."""
    made = one.definition
    told = []
    if made is not None and made.kind != "module":
        told.append(
            f"defined line {made.line}" if made.path == path else f"defined {link(made.path, page)}:{made.line}"
        )
    if one.here:
        told.append(f"used {', '.join(map(str, one.here))}")
    told += [f"{link(other, page)}: {', '.join(map(str, at))}" for other, at in sorted(one.others.items())]
    return f"- {code((made.qualified or made.path) if made is not None else one.name)} {'; '.join(told)}"


def link(path: str, page: str) -> str:
    """A link to a file's page."""
    return f"[{code(path)}]({to(f'{path}.md', page)})"


def folder_page(keywords: Keywords, folder: str) -> str:
    """A folder's page: what is in it, and its names."""
    package, page = keywords.package, f"{folder}/README.md"
    face = package.files.get(f"{folder}/__init__.py")
    files = [file for file in package.files.values() if file.folder == folder]
    inside = [one for one in package.folders if one.rpartition("/")[0] == folder]
    parts = [f"# {folder}/", docstring(face.docstring) if face else ""]
    parts.append("\n".join(f"- [{code(one + '/')}]({to(f'{one}/README.md', page)})" for one in inside))
    parts.append("\n".join(f"- {link(file.path, page)} ({plain(file.role)}): {plain(file.summary)}" for file in files))
    for kind, names in keywords.of_folder(folder).items():
        rows = [f"- {code(name)} {places(made, page)}" for name, made in names.items()]
        parts += [f"## {GROUPS[kind]}", "\n".join(rows)]
    return (
        front(title=f"{folder}/", kind="folder", path=folder, files=len(files))
        + "\n\n".join(filter(None, parts))
        + "\n"
    )


def places(made: list[Definition], page: str) -> str:
    """Where a name is defined: each file once, with its lines."""
    lines: dict[str, list[str]] = {}
    for one in made:
        lines.setdefault(one.path, []).append(str(one.line))
    return "; ".join(f"{link(path, page)}: {', '.join(at)}" for path, at in lines.items())


def all_names(keywords: Keywords) -> str:
    """Every name of the package."""
    rows = [f"- {code(name)} {places(made, 'names.md')}" for name, made in keywords.everywhere().items()]
    head = front(title=f"{keywords.package.name}: all names", kind="names", names=len(rows))
    return head + f"# {keywords.package.name}: all names\n\n" + "\n".join(rows) + "\n"
