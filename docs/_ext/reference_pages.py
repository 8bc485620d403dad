"""The reference within the site: a page and a keyword index for every file under src/, and for programs beside it.

What the pages say comes from `fullshard.reference`, which reads source and imports nothing. They are no documents of
Sphinx: 600 of them would make every build and every sidebar long. Sphinx renders one empty page per depth of folders,
in the theme, and each page of that depth takes its frame from it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from fullshard.reference import Keywords, Place, package, site
from fullshard.reference.find import sources

PROGRAMS = ("benchmarks", "docs", "examples")
"""Folders of the repository besides src/ whose Python files have pages."""
BODY, TITLE = "@@reference-body@@", "@@reference-title@@"


def place(root: Path) -> Place:
    """The project's source files: those of src/ without `src`, those of programs with their folder's name."""
    found = {one.relative_to(root / "src").as_posix(): one for one in sources(root / "src")}
    for folder in PROGRAMS:
        found |= {
            one.relative_to(root).as_posix(): one
            for one in sources(root / folder)
            if not any(part.startswith("_") for part in one.relative_to(root).parts[:-1])
        }
    return Place("fullshard", root / "src", found)


def frames(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """An empty page per depth for Sphinx to render. Pages are read here, so that the search may look in them."""
    if app.builder.format != "html":
        return
    app.reference = Keywords(package(place(Path(app.srcdir).parent)))  # type: ignore[attr-defined]
    for depth in depths(app):
        context = {"title": TITLE, "body": BODY, "display_toc": False, "toc": ""}
        yield frame_name(depth), context, "page.html"


def depths(app: Sphinx) -> list[int]:
    """How many folders deep pages lie below `reference/`."""
    package = app.reference.package  # type: ignore[attr-defined]
    return sorted({0, *(path.count("/") for path in package.files)})


def frame_name(depth: int) -> str:
    """The empty page for a depth."""
    return "reference/" + "frame/" * depth + "frame"


def fill(app: Sphinx, error: Exception | None) -> None:
    """Write every page into its frame."""
    if error is not None or not hasattr(app, "reference"):
        return
    out = Path(app.outdir)
    taken = {}
    for depth in depths(app):
        path = out / f"{frame_name(depth)}.html"
        taken[depth] = path.read_text()
        path.unlink()
    for depth in sorted(depths(app), reverse=True)[:-1]:
        (out / frame_name(depth)).parent.rmdir()
    for page in site.pages(app.reference):
        write(out / "reference" / page.name, framed(taken[page.name.count("/")], page))
    for name, text in site.assets(app.reference).items():
        write(out / "reference" / name, text)


def framed(frame: str, page: site.Page) -> str:
    """A page in its frame."""
    up = "../" * page.name.count("/")
    style = f'<link rel="stylesheet" href="{up}reference.css" />'
    text = frame.replace("</head>", f"{style}</head>", 1).replace(TITLE, html.escape(page.title))
    text = re.sub(r'<a[^>]*href="[^"]*_sources[^>]*>.*?</a>', "", text, flags=re.S)
    return text.replace(BODY, f'<div class="reference">\n{page.body}\n</div>', 1)


def write(path: Path, text: str) -> None:
    """Write what changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(errors="replace") != text:
        path.write_text(text, errors="replace")


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("html-collect-pages", frames)
    app.connect("build-finished", fill, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
