"""The page of every public name, written before pages are read: autodoc reads signatures and docstrings.

Docstrings are not reST: each is cut into blocks as the reference does, and written as reST that means the same.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import fullshard
from fullshard.reference.docstring import blocks

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
    path = Path(app.srcdir) / "project" / "api.md"
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


def as_rest(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A docstring's lines, replaced by reST."""
    made: list[str] = []
    for one in blocks("\n".join(lines)):
        if one.kind == "text":
            made += [inline(one.text), ""]
        elif one.kind == "kept":
            made += ["::", "", *[f"    {line}" for line in one.text.split("\n")], ""]
        elif one.kind == "head":
            made += [f"**{one.text}**", ""]
        else:
            made += [f"- {literal(key) + ': ' if key else ''}{inline(text)}" for key, text in one.items] + [""]
    lines[:] = made


def inline(text: str) -> str:
    """Text whose backticks are literals, and in which nothing else is markup."""
    parts = re.split(r"``(.+?)``|`([^`]+)`", text)
    made = ""
    for plain, double, single in zip(parts[0::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
        made += re.sub(r"([*_|`\\<>])", r"\\\1", plain)
        if double or single:
            made += f"\\ {literal(double or single)}\\ "
    return made


def literal(text: str) -> str:
    """A literal; one that reST cannot write, with blanks at its ends or a backslash at its end, is plain."""
    text = text.strip().rstrip("\\")
    return f"``{text}``" if text else ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", write_page)
    app.connect("autodoc-process-docstring", as_rest)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
