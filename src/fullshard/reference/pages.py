"""Bodies of a file's and a folder's page, as HTML. What is around them (a theme, or `site.py`) is not known here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from . import address
from .docstring import blocks
from .facts import Definition, Import, SourceFile
from .highlight import highlighted
from .keywords import Keywords

INLINE = re.compile(r"``(.+?)``|`([^`]+?)`|\*\*(\S(?:.*?\S)?)\*\*")
SHOWN_FILES = 12


def described(path: str, keywords: Keywords) -> dict[str, list[Definition]]:
    """What a file's page describes: under "" its classes and functions, under each class its methods and classes.

    Functions within functions are in the keyword index only.
    """
    found: dict[str, list[Definition]] = {"": []}
    for made in keywords.package.files[path].definitions:
        if made.kind in ("class", "function", "method") and not made.local:
            found.setdefault(made.parent, []).append(made)
            if made.kind == "class":
                found.setdefault(made.qualified, [])
    return found


class FilePage:
    """Writes one file's page.

    Args:
        keywords: the package's names.
        path: the file.
    """

    def __init__(self, keywords: Keywords, path: str) -> None:
        self.keywords, self.path = keywords, path
        self.file: SourceFile = keywords.package.files[path]
        self.page = address.page(path)

    def body(self) -> str:
        """The whole body."""
        file = self.file
        names = address.to(address.names_page(self.path), self.page)
        parts = [
            f"<h1>{crumbs(self.path, self.page)}</h1>",
            '<dl class="facts">',
            f"<dt>module</dt><dd><code>{escape(file.module)}</code></dd>",
            f"<dt>role</dt><dd>{escape(file.role)}</dd>",
            f"<dt>size</dt><dd>{file.lines:,} lines, {file.nbytes:,} bytes</dd>",
            f'<dt>names</dt><dd><a href="{names}">keyword index</a></dd>',
            "</dl>",
        ]
        if file.faults:
            told = "".join(f"<li>{escape(str(fault))}</li>" for fault in file.faults)
            parts.append(f'<ul class="faults">{told}</ul>')
        parts += [section("Overview", "overview", self.docstring(file.docstring, "no docstring"))]
        parts += [self.definitions(), self.imports(), self.neighbours(), self.source()]
        return "\n".join(part for part in parts if part)

    # -- text

    def inline(self, text: str) -> str:
        """A line of a docstring: code in backticks, linked where it names something of this package."""
        made, at = [], 0
        for found in INLINE.finditer(text):
            made.append(escape(text[at : found.start()], quote=False))
            at = found.end()
            if found[3]:
                made.append(f"<strong>{escape(found[3], quote=False)}</strong>")
                continue
            code = found[1] or found[2]
            target = self.keywords.named(code, self.path)
            shown = f"<code>{escape(code, quote=False)}</code>"
            link = escape(address.described(target, self.page)) if target else ""
            made.append(f'<a href="{link}">{shown}</a>' if target else shown)
        return "".join(made) + escape(text[at:], quote=False)

    def docstring(self, text: str | None, missing: str = "") -> str:
        """A docstring as HTML."""
        if not (text or "").strip():
            return f'<p class="missing">{missing}</p>' if missing else ""
        made = []
        for one in blocks(text or ""):
            if one.kind == "text":
                made.append(f"<p>{self.inline(one.text)}</p>")
            elif one.kind == "kept":
                made.append(f'<pre class="kept">{escape(one.text, quote=False)}</pre>')
            elif one.kind == "head":
                made.append(f'<p class="head">{escape(one.text)}</p>')
            else:
                made.append(self.items(one.items))
        return "\n".join(made)

    def items(self, items: Iterable[tuple[str, str]]) -> str:
        """A list of a docstring: of texts, or of names and texts."""
        lines = (
            f"<code>{escape(name)}</code>: {self.inline(text)}" if name else self.inline(text) for name, text in items
        )
        return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"

    # -- sections

    def definitions(self) -> str:
        """Classes and functions, each with signature and docstring, methods below their class."""
        tree = described(self.path, self.keywords)
        if not tree[""]:
            return ""
        return section("Classes and functions", "definitions", "\n".join(self.one(made, tree, 3) for made in tree[""]))

    def one(self, made: Definition, tree: dict[str, list[Definition]], level: int) -> str:
        """One definition and what is in it."""
        word = "class " if made.kind == "class" else ""
        decorators = "".join(f"<span>@{escape(one)}</span><br>" for one in made.decorators)
        title = f"{decorators}{word}<b>{escape(made.name)}</b>{escape(made.signature, quote=False)}"
        inside = tree.get(made.qualified, []) if made.kind == "class" and made.number == 1 else []
        return (
            f'<section class="definition" id="{escape(made.anchor)}"><h{min(level, 6)}><code>{title}</code> '
            f'<a class="to-source" href="#L{made.line}">line {made.line}</a></h{min(level, 6)}>\n'
            f"{self.docstring(made.docstring)}"
            + "\n".join(self.one(one, tree, level + 1) for one in inside)
            + "</section>"
        )

    def imports(self) -> str:
        """What the file imports, in the order in which it does."""
        if not self.file.imports:
            return ""
        rows = "".join(f"<tr>{self.imported(one)}</tr>" for one in self.file.imports)
        head = "<tr><th>name</th><th>from</th><th>line</th><th>when</th></tr>"
        return section("Imports", "imports", f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>")

    def imported(self, one: Import) -> str:
        """A row of the table of imports."""
        name = escape(one.name or one.module) + (f" as {escape(one.alias)}" if one.alias else "")
        module = f"<code>{escape(one.module)}</code>"
        if one.path:
            module = f'<a href="{address.to(address.page(one.path), self.page)}">{module}</a>'
        return (
            f'<td><code>{name}</code></td><td>{module}</td><td><a href="#L{one.line}">{one.line}</a></td>'
            f"<td>{escape(one.where)}</td>"
        )

    def neighbours(self) -> str:
        """What it depends on, what depends on it, related files."""
        package = self.keywords.package
        return "\n".join(
            section(title, anchor, self.files(paths) if paths else '<p class="missing">nothing in this package</p>')
            for title, anchor, paths in (
                ("Depends on", "depends-on", package.depends.get(self.path, [])),
                ("What depends on it", "dependents", package.dependents.get(self.path, [])),
                ("Related files", "related", package.related.get(self.path, [])),
            )
        )

    def files(self, paths: list[str]) -> str:
        """A list of files with their summaries."""
        told = [(path, self.keywords.package.files[path].summary) for path in paths]
        rows = [
            f'<li><a href="{address.to(address.page(path), self.page)}"><code>{escape(path)}</code></a> '
            f"{self.inline(summary)}</li>"
            for path, summary in told
        ]
        return f'<ul class="files">{"".join(rows)}</ul>'

    def source(self) -> str:
        """The source, each line with an anchor."""
        lines = highlighted(self.file, lambda made: address.source_line(made, self.page))
        rows = "\n".join(
            f'<span class="line" id="L{i}"><a class="ln" href="#L{i}">{i:>4}</a> {line}</span>'
            for i, line in enumerate(lines, 1)
        )
        return section("Source", "source", f'<div class="highlight source"><pre>{rows}\n</pre></div>')


def section(title: str, anchor: str, text: str) -> str:
    """A part of a page under a heading. Its anchor cannot be that of a definition: it holds a space's stand-in."""
    return f'<section id="section-{anchor}"><h2>{escape(title)}</h2>\n{text}</section>'


def crumbs(path: str, origin: str) -> str:
    """A path whose folders are links."""
    *folders, name = path.split("/")
    made = []
    for i, folder in enumerate(folders):
        link = address.to(address.folder_page("/".join(folders[: i + 1])), origin)
        made.append(f'<a href="{link}">{escape(folder)}</a>/<wbr>')
    return "".join(made) + escape(name)


def folder_body(keywords: Keywords, folder: str) -> str:
    """A folder's page: its folders and files, each with role and summary."""
    package, page = keywords.package, address.folder_page(folder)
    beside = FilePage(keywords, next(path for path in package.files if path.startswith(f"{folder}/") or path == folder))
    beside.page = page
    inside = [one for one in package.folders if one.rpartition("/")[0] == folder]
    files = [file for file in package.files.values() if file.folder == folder]
    face = package.files.get(f"{folder}/__init__.py")
    rows = []
    for one in inside:
        about = package.files.get(f"{one}/__init__.py")
        link = address.to(address.folder_page(one), page)
        name = one.rpartition("/")[2]
        rows.append((f'<a href="{link}"><code>{escape(name)}/</code></a>', "folder", about.summary if about else ""))
    for file in files:
        link = address.to(address.page(file.path), page)
        rows.append((f'<a href="{link}"><code>{escape(file.name)}</code></a>', file.role, file.summary))
    table = "".join(
        f"<tr><td>{name}</td><td>{escape(role)}</td><td>{beside.inline(summary)}</td></tr>"
        for name, role, summary in rows
    )
    return "\n".join(
        [
            f"<h1>{crumbs(folder, page)}</h1>",
            f'<p><a href="{address.to(address.folder_names(folder), page)}">keyword index of this folder</a> · '
            f'<a href="{address.to("names.html", page)}">all names</a></p>',
            beside.docstring(face.docstring) if face else "",
            f"<table><thead><tr><th>name</th><th>role</th><th>what it is</th></tr></thead>{table}</table>",
        ]
    )
