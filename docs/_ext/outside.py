"""Links from pages to files outside docs/, which a repository browser follows, lead to what the site has for them.

Markdown files outside docs/ (the changelog, results of benchmarks) are copied into docs/project/ before pages are read;
Python files have a page in the reference; any other file is copied into the site as it is, which Sphinx does by itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri

COPIES = {"CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing", "README.md": "readme"}
"""Files of the repository's root, and the page in docs/project/ that each becomes."""
RESULTS = "benchmarks/results"
PROGRAMS = ("src", "examples", "benchmarks", "docs")
"""Folders whose Python files have pages in the reference."""
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def page_of(file: str) -> str | None:
    """The page for a file or folder of the repository outside docs/; None: it has none.

    Args:
        file: its path from the repository's root, with `/`.
    """
    if file in COPIES:
        return f"project/{COPIES[file]}"
    if file == RESULTS:
        return "project/results"
    if file.startswith(f"{RESULTS}/") and file.endswith(".md"):
        return f"project/results/{Path(file).stem}"
    top, _, rest = file.partition("/")
    if top == "src" and rest and "." not in rest:
        return f"reference/{rest}/index"
    if top in PROGRAMS and file.endswith(".py"):
        return f"reference/{rest if top == 'src' else file}"
    return None


def copied(text: str, file: str, page: str) -> str:
    """A Markdown file's text with its links as they must be in the page that it becomes in docs/."""
    here, there = os.path.dirname(file), os.path.dirname(f"docs/{page}")

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(here, match[1]))
        return f"]({os.path.relpath(target, there)}{match[2] or ''})"

    return LINK.sub(moved, text)


def write_copies(app: Sphinx) -> None:
    """Write docs/project/: only what changed, so that Sphinx reads only that again."""
    docs = Path(app.srcdir)
    root = docs.parent
    results = sorted((root / RESULTS).glob("*.md"), reverse=True)
    wanted = {page_of(name): copied((root / name).read_text(), name, str(page_of(name))) for name in COPIES}
    for result in results:
        name = f"{RESULTS}/{result.name}"
        wanted[page_of(name)] = copied(result.read_text(), name, str(page_of(name)))
    listed = "\n".join(f"results/{result.stem}" for result in results)
    wanted["project/results"] = (
        "# Results of benchmarks\n\nEach names its hardware, its date and the command that reproduces it.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    )
    for page, text in wanted.items():
        path = docs / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if page == "project/readme":  # not in the tree of pages: index.md says the same
            text = f"---\norphan: true\n---\n\n{text}"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def lead_links(app: Sphinx, doctree: nodes.document) -> None:
    """Turn references to files outside docs/ into links to their pages; those without one stay downloads."""
    docs = Path(app.srcdir)
    here = app.env.docname
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        target, _, anchor = str(node.get("reftarget", "")).partition("#")
        if not target or "://" in target or (node.get("refexplicit") is None and "/" not in target):
            continue
        page = page_of_link(target, docs, here)
        if page is not None:
            anchor = f"#{anchor}" if anchor else ""
            uri = relative_uri(app.builder.get_target_uri(here), f"{page}.html") + anchor
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


def page_of_link(link: str, docs: Path, here: str) -> str | None:
    """The page for a link as MyST hands it over: from docs/ with a `/`, from its page, or absolute without `.md`."""
    ways = [docs / link.lstrip("/"), (docs / here).parent / link, Path(link), Path(f"{link}.md")]
    for way in ways:
        file = Path(os.path.normpath(way))
        if file.exists() and file.is_relative_to(docs.parent) and file != docs.parent:
            return page_of(file.relative_to(docs.parent).as_posix())
    return None


def drop_empty_globs(app: Sphinx, page: str, source: list[str]) -> None:
    """Take patterns out of the index's tree that no page matches yet: Sphinx warns of them, and nothing is wrong."""
    if page == "index":
        docs = Path(app.srcdir)
        lines = source[0].split("\n")
        source[0] = "\n".join(line for line in lines if not _GLOB.fullmatch(line) or list(docs.glob(f"{line}.md")))


_GLOB = re.compile(r"[\w/.-]*\*")  # a line of a toctree; prose may end in bold


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", write_copies)
    app.connect("source-read", drop_empty_globs)
    app.connect("doctree-read", lead_links, priority=100)  # before Sphinx collects downloads
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
