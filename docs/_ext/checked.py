"""What a built site must hold: every link leads somewhere, and nothing is loaded from the network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sphinx.application import Sphinx
from sphinx.util import logging

LINK = re.compile(r"""<(?:a|img|link|script|source|iframe)\b[^>]*?\b(href|src)="([^"]*)\"""")
LOADED = re.compile(r"""<(?:img|script|source|iframe|link)\b[^>]*?\b(?:href|src)="((?:https?:)?//[^"]*)\"""")
IN_STYLE = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]*)""")
ANCHOR = re.compile(r"""\b(?:id|name)="([^"]*)\"""")
logger = logging.getLogger(__name__)


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a built site, a line each: links to what is not there, and loads from the network."""
    texts = {path: path.read_text(errors="replace") for path in sorted(site.rglob("*.html"))}
    anchors = {path: set(ANCHOR.findall(text)) for path, text in texts.items()}
    there: dict[str, bool] = {}
    for path, text in texts.items():
        name = path.relative_to(site)
        yield from (f"{name} loads {url}" for url in LOADED.findall(text))
        for link in {match[1].replace("&amp;", "&") for match in LINK.findall(text)}:
            if re.match(r"[a-z]+:|//", link):
                continue
            file, _, anchor = link.partition("#")
            file = unquote(file.partition("?")[0])
            target = os.path.normpath(path.parent / file) if file else str(path)
            if target not in there:
                there[target] = os.path.exists(target)
            if not there[target]:
                yield f"{name} links to {link}, which is not there"
            elif anchor and unquote(anchor) not in anchors.get(Path(target), {unquote(anchor)}):
                yield f"{name} links to {link}, and that page has no such anchor"
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        text = path.read_text(errors="replace")
        yield from (f"{path.relative_to(site)} loads {url}" for url in IN_STYLE.findall(text))


def check(app: Sphinx, error: Exception | None) -> None:
    """Warn of each fault, once all pages are written; a warning fails the build."""
    if error is None and app.builder.format == "html":
        for fault in faults(Path(app.outdir)):
            logger.warning("%s", fault)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("build-finished", check, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
