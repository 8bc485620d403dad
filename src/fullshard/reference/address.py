"""Addresses of pages: what a page is called, and how another page links to it. All relative: a site opens from a disk.

fullshard/runtime/root.py.html         a file          fullshard/runtime/index.html   a folder
fullshard/runtime/root.py.names.html   its index       fullshard/runtime/names.html   the folder's index
names.html, letter-a.html              the index of all names, and its pages by first letter
"""

from __future__ import annotations

import posixpath
from functools import lru_cache
from urllib.parse import quote

from .facts import Definition

OTHER = "letter-other.html"
"""The page of names that begin with no letter of the alphabet."""


def page(path: str) -> str:
    """A file's page."""
    return f"{path}.html"


def names_page(path: str) -> str:
    """A file's keyword index."""
    return f"{path}.names.html"


def folder_page(folder: str) -> str:
    """A folder's page."""
    return f"{folder}/index.html"


def folder_names(folder: str) -> str:
    """A folder's keyword index."""
    return f"{folder}/names.html"


def letter_page(name: str) -> str:
    """The page of the global index on which a name stands."""
    first = name.lstrip("_")[:1].lower()
    return f"letter-{first}.html" if first.isascii() and first.isalpha() else OTHER


@lru_cache(maxsize=1 << 16)
def relative(target: str, origin: str) -> str:
    """The path from one page to another. Kept: a site asks the same a hundred thousand times."""
    return quote(posixpath.relpath(target, posixpath.dirname(origin) or "."))


def to(target: str, origin: str, anchor: str = "") -> str:
    """The link from one page to another.

    Args:
        target, origin: pages, from the site's root.
        anchor: a place on the target; "" for its beginning.
    """
    where = f"#{quote(anchor, safe='.<>-_')}" if anchor else ""
    if target == origin:
        return where or posixpath.basename(target)
    return relative(target, origin) + where


def source_line(made: Definition, origin: str) -> str:
    """The link to the line of the source on which something is defined."""
    return to(page(made.path), origin, f"L{made.line}" if made.kind != "module" else "")


def described(made: Definition, origin: str) -> str:
    """The link to what a page says of a definition: its section where it has one, else its line."""
    if made.kind in ("class", "function", "method") and not made.local:
        return to(page(made.path), origin, made.anchor)
    return source_line(made, origin)
