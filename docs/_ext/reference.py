"""The reference of a Python package, from its source alone: a page and a keyword index for every file.

python docs/_ext/reference.py PACKAGE [--out DIR]     any installed package, folder or file
the Sphinx extension "reference"                      the site's own reference, under reference/
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from html import escape
from itertools import accumulate
from keyword import iskeyword
from pathlib import Path
from textwrap import dedent, indent
from typing import Any
from urllib.parse import quote

import griffe
from markdown_it import MarkdownIt

sys.path.insert(0, str(Path(__file__).parent))

from reading import Entry, File, Package, locate, sentence, sources

STATIC = Path(__file__).parents[1] / "_static"
ASSETS = ("reference.css", "names-search.js")
KINDS = {
    "class": "Classes", "function": "Functions", "method": "Methods", "constant": "Constants",
    "attribute": "Attributes", "parameter": "Parameters", "variable": "Variables", "import": "Imported names",
    "outside": "Names defined elsewhere",
}  # fmt: skip
"""The groups of a keyword index, in order, with their titles."""
STRING = r"""(?:\b[rbfuRBFU]{1,2})?(?:Q{3}(?:\\.|[^\\])*?Q{3}|Q(?:\\.|[^Q\\\n])*Q)"""
TOKEN = re.compile(
    rf"""(?P<c1>\#[^\n]*)|(?P<s>{STRING.replace("Q", '"')}|{STRING.replace("Q", "'")})|(?P<n>[^\W\d]\w*)|[<>&]""", re.S
)
"""What is coloured or linked in source: comments, strings, names."""
ROLE = re.compile(r":(?:\w+:)?\w+:`(?:([^`<]+?)\s*<[^`]*>|~?(?:(?<=~)[\w.]*\.)?!?([^`]+))`")
DIRECTIVE = re.compile(r"\.\. ([\w-]+)::[ ]?(.*)")
ADMONITIONS = {"note", "notes", "warning", "warnings", "example", "tip", "important", "see-also", "references"}
SEARCH = """<h1>All names</h1>
<p><input id="names-query" type="search" placeholder="name, or a part of one" aria-label="search names"></p>
<p id="names-count" role="status"></p><dl id="names-list"></dl>
<script src="names-data.js"></script><script src="names-search.js"></script>"""
LONGEST = 110  # characters of a signature, assignment or expression in an index


# -- docstrings


def markdown(text: str) -> str:
    """A docstring's text as Markdown: roles and directives of reST replaced, pictures and examples kept as they are."""
    text = re.sub(r"`([^`<]+?) <(\w+://[^`>]+)>`__?", r"[\1](\2)", ROLE.sub(lambda m: f"`{m[1] or m[2]}`", text))
    parts = []
    for part in re.split(r"\n\s*\n", text.expandtabs()):
        lines = part.rstrip().split("\n")
        if directive := DIRECTIVE.match(lines[0].strip()):
            label = directive[1].replace("-", " ").capitalize()
            lines[0] = "" if directive[1] in ("code-block", "code", "math") else f"**{label}:** {directive[2]}"
        columns = sum(bool(re.search(r"\S {2,}\S|[-=]{4,}|\|", line)) for line in lines)
        deeper = next((i for i, line in enumerate(lines) if i and re.match(" {2,}", line)), len(lines))
        if lines[0].startswith(">>>") or (len(lines) > 1 and columns * 2 > len(lines)):
            lines = [f"    {line}" for line in lines]
        elif deeper < len(lines) and lines[deeper - 1].endswith(":") and not lines[0].startswith("    "):
            lines[deeper:] = ["", indent(dedent("\n".join(lines[deeper:])), "    ")]
        lines[-1] = re.sub("::$", ":", lines[-1])
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


class Writer:
    """Writes the pages of a package as HTML without what a theme puts around it."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.page = ""  # the page that is written
        self.root = ""  # where pages lie, from the folder that `page` counts from
        self.markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
        self.markdown.add_render_rule("code_inline", lambda _, tokens, at, *__: self.code(tokens[at].content))
        self.file: File | None = None
        self.described: dict[str, dict[str, str]] = {}
        self.unique: dict[str, Entry | None] = {}  # names that one file alone defines
        for entry in package.entries.values():
            if entry.obj is not None and entry.kind in ("class", "function", "method"):
                self.unique[entry.qualified] = None if entry.qualified in self.unique else entry

    def to(self, page: str, anchor: str = "") -> str:
        """The link from the page that is written to another one, or to a place on it."""
        here = posixpath.dirname(self.page) or "."
        path = "" if page == self.page else quote(posixpath.relpath(self.root + page, here))
        return path + (f"#{quote(anchor, safe='.<>-_')}" if anchor else "" if path else posixpath.basename(page))

    def link(self, entry: Entry) -> str:
        """The link to a definition: its section where it has one, its line elsewhere."""
        assert entry.file is not None
        section = entry.kind in ("class", "function", "method") and entry.obj is not None
        anchor = "" if entry.kind == "module" else entry.qualified if section else f"L{entry.lines[0]}"
        return self.to(f"{entry.file.path}.html", anchor)

    def code(self, text: str) -> str:
        """Code in a docstring, as a link where it names something in the package."""
        name, shown = text.removesuffix("()"), f"<code>{escape(text, quote=False)}</code>"
        entry = None
        if re.fullmatch(r"[\w.]+", name):
            near = self.package.find(f"{self.file.module}.{name}") if self.file is not None else None
            entry = near or self.package.find(name) or self.unique.get(name)
        return f'<a href="{escape(self.link(entry))}">{shown}</a>' if entry is not None and entry.file else shown

    def inline(self, text: str) -> str:
        return self.markdown.renderInline(markdown(text))

    def docstring(self, docstring: griffe.Docstring | None) -> str:
        """A docstring as HTML, its sections with their names."""
        parts = []
        for section in parsed(docstring):
            kind = section.kind.value
            title = section.title or kind.capitalize().replace("Parameters", "Arguments")
            text = section.value if kind == "text" else ""
            if kind == "admonition" and section.value.kind not in ADMONITIONS:  # a line that ends in a colon
                text = f"{title}:\n{indent(section.value.contents, '    ')}"
            if text:
                parts.append(self.markdown.render(markdown(text)))
                continue
            parts.append(f'<p class="head">{escape(title)}</p>')
            if kind == "admonition":
                parts.append(self.markdown.render(markdown(section.value.contents)))
            elif kind == "examples":
                texts = (text if kind.value == "text" else f"```\n{text}\n```" for kind, text in section.value)
                parts.append(self.markdown.render("\n\n".join(texts)))
            elif kind != "deprecated":
                rows = ((shown_name(item, docstring), item.description) for item in section.value)
                items = (f"<code>{escape(name)}</code>: " * bool(name) + self.inline(text) for name, text in rows)
                parts.append("<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>")
        return "\n".join(parts)

    def meaning(self, entry: Entry) -> str:
        """What a name means, in one line of Markdown: its docstring's first sentence, or else how it is written."""
        if entry.kind == "module" and entry.file is not None:
            return entry.file.purpose
        if entry.kind == "import":
            target = self.package.find(entry.written)
            return self.meaning(target) if target is not None and target is not entry else f"`{entry.written}`"
        if entry.obj is not None and entry.obj.docstring is not None:
            return sentence(entry.obj.docstring.value)
        if entry.kind in ("parameter", "attribute") and entry.file is not None:
            around = f"{entry.file.module}.{entry.qualified}".rpartition(".")[0]
            for place in (around, around.removesuffix(".__init__")):
                if description := self.items(place).get(entry.name):
                    return sentence(description)
        comment = re.search(r"\s{2}# (?!type:|noqa|fmt:)(.+)$", entry.written)
        if comment and entry.kind != "outside":
            return comment[1]
        written = without_any(" ".join(entry.written.split()))
        return f"`{written[:LONGEST]}{'…' * (len(written) > LONGEST)}`" if "`" not in written else written

    def items(self, dotted: str) -> dict[str, str]:
        """What the docstring of a class or function says of its parameters and attributes."""
        if dotted not in self.described:
            owner = self.package.entries.get(dotted)
            sections = parsed(owner.obj.docstring) if owner is not None and owner.obj is not None else []
            lists = [section.value for section in sections if section.kind.value in ("parameters", "attributes")]
            self.described[dotted] = {
                name.lstrip("*"): item.description
                for section in lists
                for item in section
                for name in names_of(item).split(", ")
            }
        return self.described[dotted]

    # -- pages

    def pages(self) -> Iterator[tuple[str, str, str]]:
        """Every page: its path, its title, its body."""
        for file in self.package.files.values():
            self.page, self.file = f"{file.path}.html", file
            yield self.page, file.module, self.file_page(file)
        self.file = None
        for folder in sorted({str(parent) for path in self.package.files for parent in Path(path).parents} - {"."}):
            self.page = f"{folder}/index.html"
            yield self.page, f"{folder}/", self.folder_page(folder)
        self.page = "names.html"
        yield self.page, "All names", SEARCH

    def file_page(self, file: File) -> str:
        """A file's page: what it is for, its definitions, its keyword index, its neighbours, its source."""
        top = [entry for entry in file.entries if entry.obj is not None and "." not in entry.qualified]
        named = [entry for entry in top if entry.kind in ("constant", "variable") and entry.name[:2] != "__"]
        values = "".join(map(self.field, named))
        parts = {
            "Overview": self.overview(file),
            "Classes and functions": "".join(
                self.definition(entry, 3) for entry in top if entry.kind in ("class", "function")
            ),
            "Constants and variables": f"<dl>{values}</dl>" * bool(values),
            "Keyword index": self.index(file),
            "Depends on": self.neighbours(file.imports, file.path),
            "Used by": self.neighbours(file.imported_by),
            "Source": self.source(file),
        }
        anchors = {title: f"section-{title.lower().replace(' ', '-')}" for title, text in parts.items() if text}
        contents = " · ".join(f'<a href="#{anchor}">{title}</a>' for title, anchor in anchors.items())
        head = [
            f'<h1>{self.crumbs(file.path)}</h1>\n<p class="purpose">{self.inline(file.purpose)}</p>',
            f'<p class="faults">{escape(file.fault)}</p>' * bool(file.fault),
            f"<p>Module <code>{escape(file.module)}</code>, {len(file.text.splitlines()):,} lines. {contents}</p>",
        ]
        sections = (f'<section id="{at}"><h2>{title}</h2>\n{parts[title]}</section>' for title, at in anchors.items())
        return "\n".join([*head, *sections])

    def overview(self, file: File) -> str:
        """A file's docstring after the sentence that says what the file is for."""
        first, _, rest = file.docstring.partition("\n\n")
        text = " ".join(first.split()).removeprefix(file.purpose).strip() + f"\n\n{rest}"
        return self.docstring(griffe.Docstring(text.strip())) if text.strip() else ""

    def definition(self, entry: Entry, level: int) -> str:
        """A class or function: signature, docstring, fields, methods."""
        assert entry.file is not None and entry.obj is not None
        inner = [
            member for member in entry.file.entries
            if entry.kind == "class" and member.obj is not None
            and member.qualified.rpartition(".")[0] == entry.qualified
        ]  # fmt: skip
        own = (self.field(member) for member in inner if member.kind == "attribute" and member.name[:2] != "__")
        fields = "".join(dict.fromkeys(own))  # a line that assigns several has one place
        above = "".join(f"@{escape(str(decorator.value))}<br>" for decorator in getattr(entry.obj, "decorators", []))
        return (
            f'<section class="definition" id="{escape(entry.qualified)}"><h{level}><code>{above}'
            f'{escape(without_any(entry.written), quote=False)}</code> <a class="line" href="#L{entry.lines[0]}">line '
            f"{entry.lines[0]}</a></h{level}>\n{self.docstring(entry.obj.docstring)}"
            + f"<dl>{fields}</dl>" * bool(fields)
            + "".join(self.definition(child, min(level + 1, 6)) for child in inner if child.kind in ("class", "method"))
            + "</section>\n"
        )

    def field(self, entry: Entry) -> str:
        """A constant, variable, field or enum member: how it is written, and what it means where somebody said so."""
        written, meaning = without_any(entry.written), self.meaning(entry)
        shown = escape(written.partition("  #")[0][:LONGEST], quote=False)
        link = f'<dt><a href="#L{entry.lines[0]}"><code>{shown}</code></a></dt>'
        return link + f"<dd>{self.inline(meaning)}</dd>" * (not meaning.startswith("`" + written[:20]))

    def index(self, file: File) -> str:
        """Every name of a file: what it means, where it is defined, which lines use it here and in other files."""
        groups: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
        for entry in file.entries:
            groups[entry.kind].append(entry)
        imported = {id(self.package.find(entry.written)) for entry in groups["import"]}
        linked = {id(entry): entry for entry, _ in file.links.values() if entry.file is not file}
        linked = {key: entry for key, entry in linked.items() if entry.kind != "module"}
        groups["outside"] += [entry for key, entry in linked.items() if key not in imported]
        tables = []
        for kind, entries in groups.items():
            rows = "".join(self.row(entry, file) for entry in sorted(entries, key=order))
            head = "<tr><th>name</th><th>meaning</th><th>defined</th><th>used on lines</th></tr>"
            tables.append(f"<h3>{KINDS[kind]}</h3><table><thead>{head}</thead>{rows}</table>" if entries else "")
        return "\n".join(tables)

    def row(self, entry: Entry, file: File) -> str:
        """One name of a keyword index."""
        around, _, name = entry.qualified.rpartition(".")
        shown = f'<code><span class="around">{escape(around)}.</span>' * bool(around) or "<code>"
        shown += f"{escape(name)}</code>"
        target = self.package.find(entry.written) if entry.kind == "import" else entry
        if target is not None and target.file is not None:
            shown = f'<a href="{escape(self.link(target))}">{shown}</a>'
        defined, uses = "", [self.lines(entry.uses[file.path], file.path)] if file.path in entry.uses else []
        if entry.file is file:
            defined = self.lines(entry.lines, file.path)
            others = sorted(path for path in entry.uses if path != file.path)
            uses += [f"{escape(path)}: {self.lines(entry.uses[path], path)}" for path in others]
        elif entry.file is not None:
            defined = f'<a href="{self.link(entry)}">{escape(entry.file.path)}</a>'
        meaning = self.inline(self.meaning(entry))
        return f"<tr><td>{shown}</td><td>{meaning}</td><td>{defined}</td><td>{'; '.join(uses)}</td></tr>"

    def lines(self, numbers: list[int] | dict[int, bool], path: str) -> str:
        """Lines of a file, each a link; a question mark after a guess."""
        page = f"{path}.html"
        guesses = {line for line in numbers if isinstance(numbers, dict) and not numbers[line]}
        return ", ".join(f'<a href="{self.to(page, f"L{n}")}">{n}</a>{"?" * (n in guesses)}' for n in sorted(numbers))

    def neighbours(self, files: dict[str, list[tuple[str, int]]], importer: str = "") -> str:
        """Other files: what each is for, and the imported names, each a link to the line that imports it."""
        rows = []
        for path, names in sorted(files.items()):
            page = f"{importer or path}.html"
            imported = ", ".join(
                f'<a href="{self.to(page, f"L{line}")}"><code>{escape(name)}</code></a>' for name, line in names
            )
            link = f'<a href="{self.to(f"{path}.html")}"><code>{escape(path)}</code></a>'
            purpose = self.inline(self.package.files[path].purpose)
            rows.append(f"<tr><td>{link}</td><td>{purpose}</td><td>{imported}</td></tr>")
        return f"<table>{''.join(rows)}</table>" * bool(rows)

    def source(self, file: File) -> str:
        """The source: each line has an anchor, names lead to their definitions, and classes are those of Pygments."""
        lines = file.text.split("\n")
        starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
        links = {
            starts[line - 1] + len(lines[line - 1].encode()[:at].decode()): to for (line, at), to in file.links.items()
        }

        def shown(token: re.Match[str]) -> str:
            text, style = escape(token[0], quote=False), token.lastgroup
            if style == "n":
                entry, sure = links.get(token.start(), (None, True))
                if entry is not None and entry.file is not None:
                    guess = "" if sure else ' class="guess"'
                    return f'<a{guess} href="{self.link(entry)}" title="{entry.kind} {entry.qualified}">{text}</a>'
                style = "k" if iskeyword(text) else None
            return "\n".join(f'<span class="{style}">{part}</span>' if style else part for part in text.split("\n"))

        coloured = TOKEN.sub(shown, file.text).removesuffix("\n").split("\n") if file.text else []
        rows = (
            f'<span class="line" id="L{n}"><a class="ln" href="#L{n}">{n:>4}</a> {text}</span>\n'
            for n, text in enumerate(coloured, 1)
        )
        return f'<div class="highlight source"><pre>{"".join(rows)}</pre></div>'

    def crumbs(self, path: str) -> str:
        """A path whose folders are links."""
        *folders, name = path.split("/")
        places = [("/".join(folders[: i + 1]), folder) for i, folder in enumerate(folders)]
        links = [f'<a href="{self.to(f"{place}/index.html")}">{escape(folder)}</a>/<wbr>' for place, folder in places]
        return "".join(links) + escape(name)

    def folder_page(self, folder: str) -> str:
        """A folder's page: its folders and files, and what each is for."""
        files, face = self.package.files, self.package.files.get(f"{folder}/__init__.py")
        inner = sorted({path[len(folder) + 1 :].split("/")[0] for path in files if path.startswith(f"{folder}/")})
        rows = []
        for name in sorted(inner, key=lambda path: (path.endswith(".py"), path)):
            page = f"{folder}/{name}.html" if name.endswith(".py") else f"{folder}/{name}/index.html"
            file = files.get(f"{folder}/{name}") or files.get(f"{folder}/{name}/__init__.py")
            purpose = self.inline(file.purpose) if file is not None else ""
            slash = "" if name.endswith(".py") else "/"
            rows.append(
                f'<tr><td><a href="{self.to(page)}"><code>{escape(name)}{slash}</code></a></td><td>{purpose}</td></tr>'
            )
        about = self.docstring(face.obj.docstring) if face is not None and face.obj is not None else ""
        names = f'<p><a href="{self.to("names.html")}">All names</a></p>'
        return f"<h1>{self.crumbs(folder)}/</h1>{names}{about}<table>{''.join(rows)}</table>"

    def assets(self) -> Iterator[tuple[str, str]]:
        """The files beside the pages: style, search, and the names to search in."""
        yield from ((name, (STATIC / name).read_text()) for name in ASSETS)
        paths = list(self.package.files)
        numbers = {path: number for number, path in enumerate(paths)}
        listed = [
            (path, entry)
            for path, file in self.package.files.items()
            for entry in file.entries
            if entry.obj is not None
        ]
        names = [
            [entry.qualified, entry.kind, numbers[path], entry.lines[0], self.meaning(entry).replace("`", "")]
            for path, entry in sorted(listed, key=lambda at: order(at[1]))
        ]
        data = json.dumps({"files": paths, "names": names}, separators=(",", ":")).replace("</", "<\\/")
        yield "names-data.js", f"window.NAMES = {data};\n"


def parsed(docstring: griffe.Docstring | None) -> list[Any]:
    """A docstring's sections, whether Google's, numpy's or Sphinx's style has them."""
    if docstring is None:
        return []
    style, _ = griffe.infer_docstring_style(docstring, method="heuristics", default="google")
    options: dict[str, Any] = {"returns_multiple_items": False} if style is griffe.Parser.google else {}
    return docstring.parse(style, warnings=False, **options)


def names_of(item: Any) -> str:
    """The names of an item of a docstring's section: `first, second: what they hold` is one item."""
    return f"{item.name} {item.annotation}" if item.name.endswith(",") else item.name


def shown_name(item: Any, docstring: griffe.Docstring | None) -> str:
    """What an item is about: names, or a type as far as the docstring itself says it."""
    if getattr(item, "name", ""):
        return names_of(item)
    named = str(getattr(item, "annotation", None) or "")
    return named if docstring is not None and f"{named}:" in docstring.value else ""


def without_any(written: str) -> str:
    """A definition without the annotations that say nothing."""
    return re.sub(r"(: | -> )Any(?=[,)= ]|$)", "", written)


def order(entry: Entry) -> tuple[bool, str, str]:
    """Public names first, each by its letters."""
    return entry.name.startswith("_"), entry.name.lower(), entry.qualified


# -- the command


def main(arguments: list[str] | None = None) -> int:
    """Write a package's reference. Exit code: 1 if a file could not be parsed, 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", metavar="PACKAGE", help="a folder, a .py file or the name of an installed package")
    parser.add_argument("--out", metavar="DIR", type=Path, help="a new or empty folder; NAME-reference by default")
    options = parser.parse_args(arguments)
    try:
        package = locate(options.package)
    except FileNotFoundError as error:
        parser.error(str(error))
    out = options.out or Path(f"{package.name}-reference")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{str(out)!r} is not an empty folder")
    writer, start = Writer(package), next(iter(package.files))
    first = f"{package.name}/index.html" if "/" in start else f"{start}.html"
    for page, title, body in writer.pages():
        write(out / page, alone(page, title, body, first))
    for name, text in [*writer.assets(), ("index.html", f'<meta http-equiv="refresh" content="0; url={first}">')]:
        write(out / name, text)
    faults = [file.fault for file in package.files.values() if file.fault]
    print("\n".join([*faults, f"{len(package.files)} files, {len(faults)} could not be parsed: {out / first}"]))
    return 1 if faults else 0


def alone(page: str, title: str, body: str, first: str) -> str:
    """A page without a theme."""
    up = "../" * page.count("/")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="{up}reference.css"></head>'
        f'<body class="alone"><p><a href="{up}{first}">files</a> <a href="{up}names.html">names</a></p>'
        f'<main class="reference">\n{body}\n</main></body></html>\n'
    )


def write(path: Path, text: str) -> None:
    """Write a file that changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != text.encode("utf-8", "replace"):
        path.write_bytes(text.encode("utf-8", "replace"))


# -- the Sphinx extension. Sphinx renders an empty page for each depth of folders: the frames of all pages.

PROGRAMS = ("benchmarks", "docs", "examples")
"""Folders of the repository besides src/ whose Python files have pages."""
BODY, TITLE = "@@reference-body@@", "@@reference-title@@"


def read(app: Any) -> None:
    """Read the project's source, before pages are read: other extensions use it."""
    root = Path(app.srcdir).parent
    paths = sources(root / "src" / "fullshard")
    for folder in PROGRAMS:
        paths |= {name: path for name, path in sources(root / folder).items() if "/_" not in name}
    app.reference = Package("fullshard", paths)


def frames(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """An empty page for each depth of folders."""
    for depth in range(1 + max(path.count("/") for path in app.reference.files) if app.builder.format == "html" else 0):
        context = {"title": TITLE, "body": BODY, "display_toc": False, "toc": ""}
        yield "reference/" + "frame/" * depth + "frame", context, "page.html"


def fill(app: Any, error: Exception | None) -> None:
    """Write every page into its frame."""
    if error is not None or app.builder.format != "html":
        return
    out, taken, writer = Path(app.outdir) / "reference", {}, Writer(app.reference)
    for path in sorted(out.rglob("frame.html"), reverse=True, key=lambda path: len(path.parts)):
        taken[len(path.relative_to(out).parts) - 1] = path.read_text()
        path.unlink()
        if path.parent.name == "frame":
            path.parent.rmdir()
    for page, title, body in writer.pages():
        depth = page.count("/")
        frame = re.sub(r'<a[^>]*href="[^"]*_sources[^>]*>.*?</a>', "", taken[depth], flags=re.S)
        style = f'<link rel="stylesheet" href="{"../" * depth}reference.css" /></head>'
        frame = frame.replace("</head>", style, 1).replace(TITLE, escape(title))
        write(out / page, frame.replace(BODY, f'<div class="reference">\n{body}\n</div>', 1))
    for name, text in writer.assets():
        write(out / name, text)


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", read)
    app.connect("html-collect-pages", frames)
    app.connect("build-finished", fill, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    sys.exit(main())
