"""llms.txt and llms-full.txt beside the site's first page: the pages' own text, for readers that are programs.

llms.txt (https://llmstxt.org) lists the pages with one sentence each; llms-full.txt holds the text of them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def ordered(app: Sphinx) -> Iterator[tuple[str, list[str]]]:
    """Sections of the first page's tree with their pages, those below a page right after it."""
    for tree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        pages: list[str] = []
        for page in tree["includefiles"]:
            pages += [inner for inner in below(app, page) if inner not in pages]
        yield tree.get("caption") or "Pages", pages


def below(app: Sphinx, page: str) -> list[str]:
    """A page and all that its tree leads to."""
    return [page, *[lower for inner in app.env.toctree_includes.get(page, []) for lower in below(app, inner)]]


def summary(app: Sphinx, page: str) -> str:
    """The first sentence of a page's text."""
    for paragraph in app.env.get_doctree(page).findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if text:
            return re.split(r"(?<!\b[A-Z])\. ", text)[0].rstrip(".:") + "."  # an initial's dot ends no sentence
    return ""


def texts(app: Sphinx) -> tuple[str, str]:
    """llms.txt and llms-full.txt."""
    titles = app.env.titles
    root = app.config.root_doc
    short = [f"# {app.config.project}\n\n> {' '.join(first(app, root).split())}\n"]
    full = [source(app, root)]
    for caption, pages in ordered(app):
        short.append(f"## {caption}\n")
        for page in pages:
            description = summary(app, page)
            short.append(f"- [{titles[page].astext()}](_sources/{page}.md.txt){description and f': {description}'}")
            full.append(source(app, page))
        short.append("")
    files = [f"- {path}: {file.purpose}" for path, file in app.reference.files.items()]  # type: ignore[attr-defined]
    short.append("## Optional\n\n- [the text of all pages](llms-full.txt)")
    full.append("\n".join(["# Files", "", *files]))
    return "\n".join(short) + "\n", "\n\n".join(full) + "\n"


def first(app: Sphinx, page: str) -> str:
    """A page's first paragraph."""
    return next(paragraph.astext() for paragraph in app.env.get_doctree(page).findall(nodes.paragraph))


def source(app: Sphinx, page: str) -> str:
    """A page's Markdown, under a line that names it."""
    return f"<!-- {page}.md -->\n\n{Path(app.env.doc2path(page)).read_text().strip()}"


def write(app: Sphinx, error: Exception | None) -> None:
    """Write both files."""
    if error is None and app.builder.format == "html":
        short, full = texts(app)
        (Path(app.outdir) / "llms.txt").write_text(short)
        (Path(app.outdir) / "llms-full.txt").write_text(full)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("build-finished", write, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
