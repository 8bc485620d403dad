"""The page of every public name, written before pages are read: autodoc reads signatures and docstrings.

Docstrings are not reST: the reference's writer makes HTML of them, with links into the reference.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import griffe
from docutils import nodes
from reference import Writer
from sphinx import addnodes
from sphinx.application import Sphinx

import fullshard

PAGE = "project/api"

GROUPS = {
    "api": "Sharding and training", "optim": "Optimizers, clipping, scaling", "store": "Checkpoints",
    "exchange": "Checkpoints of other formats", "insight": "What a model costs, holds, and whether it trains right",
    "integrations": "Programs of other libraries", "watcher": "The watcher", "errors": "Errors",
}  # fmt: skip
"""Groups of names by the package that defines them; all others are under "Parts"."""
FIRST = (
    "fully_shard", "FullyShardedDataParallel", "optimizer_view", "save", "load", "clip_grad_norm_",
    "verify", "describe",
)  # fmt: skip
"""What a reader looks for first comes first in its group."""


def write_page(app: Sphinx) -> None:
    """Write docs/project/api.md, if it changed."""
    groups: dict[str, list[str]] = {title: [] for title in [*GROUPS.values(), "Parts"]}
    order = {name: number for number, name in enumerate(FIRST)}
    for name in sorted(fullshard.__all__, key=lambda name: (order.get(name, len(FIRST)), name.lower())):
        module = getattr(getattr(fullshard, name), "__module__", "") or ""
        package = module.split(".")[1] if module.startswith("fullshard.") else ""
        groups[GROUPS.get(package, "Parts")].append(name)
    parts = ["# Public names", "Everything here is imported from `fullshard`."]
    for title, names in groups.items():
        if names:
            parts += [f"## {title}", *[directive(name) for name in names]]
    text = "\n\n".join(parts) + "\n"
    path = Path(app.srcdir) / f"{PAGE}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def directive(name: str) -> str:
    """The directive that shows one name."""
    what = getattr(fullshard, name)
    if inspect.isclass(what):
        return f"```{{eval-rst}}\n.. autoclass:: fullshard.{name}\n   :members:\n```"
    kind = "autofunction" if inspect.isroutine(what) else "autodata"
    return f"```{{eval-rst}}\n.. {kind}:: fullshard.{name}\n```"


def page_writer(app: Any) -> Writer:
    """Writes for the page of public names, which is not among those of the reference."""
    writer = Writer(app.reference)
    writer.page, writer.root = f"{PAGE}.html", "reference/"
    return writer


def as_html(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A docstring's lines, replaced by its HTML."""
    writer = page_writer(app)
    writer.file = app.reference.by_module.get(getattr(obj, "__module__", None))
    html = writer.docstring(griffe.Docstring(inspect.cleandoc("\n".join(lines))))
    lines[:] = [".. raw:: html", "", *(f"   {line}" for line in html.split("\n")), ""]


def source(app: Any, doctree: Any) -> None:
    """Link each name to its page in the reference."""
    for node in doctree.findall(addnodes.desc_signature) if app.env.docname == PAGE else ():
        entry = app.reference.find(f"fullshard.{node.get('fullname', '')}")
        if entry is not None and entry.file is not None:
            link = page_writer(app).link(entry)
            node += nodes.reference("", "[source]", internal=True, refuri=link, classes=["viewcode-link"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", write_page)
    app.connect("autodoc-process-docstring", as_html)
    app.connect("doctree-read", source)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
