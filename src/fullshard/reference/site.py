"""The pages of a package: their names, titles and bodies; and a site of its own for them, without any theme."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import NamedTuple

from . import address, index_pages
from .keywords import Keywords
from .pages import FilePage, folder_body


class Page(NamedTuple):
    """One page: where it lies from the site's root, what it is called, and its body."""

    name: str
    title: str
    body: str


def pages(keywords: Keywords) -> Iterator[Page]:
    """Every page of a package: of files, their indexes, folders, their indexes, and all names."""
    package = keywords.package
    for path, file in package.files.items():
        yield Page(address.page(path), file.module, FilePage(keywords, path).body())
        yield Page(address.names_page(path), f"{file.module}: names", index_pages.file_names(keywords, path))
    for folder in package.folders:
        yield Page(address.folder_page(folder), f"{folder}/", folder_body(keywords, folder))
        yield Page(address.folder_names(folder), f"{folder}/: names", index_pages.folder_names(keywords, folder))
    letters = index_pages.letters(keywords)
    for name, body in letters.items():
        yield Page(name, f"Names: {index_pages.title(name)}", body)
    yield Page("names.html", "All names", index_pages.all_names(keywords, list(letters)))


def assets(keywords: Keywords) -> dict[str, str]:
    """The files that pages need beside them: style and search."""
    found = {name: static(name) for name in ("reference.css", "names-search.js")}
    return found | {"names-data.js": index_pages.search_data(keywords)}


def static(name: str) -> str:
    """A file of the folder `static`."""
    return files(__package__).joinpath("static", name).read_text()


def alone(keywords: Keywords) -> Iterator[tuple[str, str]]:
    """A site of its own: for every file its name and text."""
    name = keywords.package.name
    first = address.folder_page(name) if f"{name}/" in next(iter(keywords.package.files)) else None
    for page in pages(keywords):
        yield page.name, framed(page, name, first or address.page(next(iter(keywords.package.files))))
    yield from assets(keywords).items()
    yield "site.css", static("site.css")
    start = first or address.page(next(iter(keywords.package.files)))
    moved = f'<meta http-equiv="refresh" content="0; url={escape(start)}">'
    link = f'<a href="{escape(start)}">{escape(name)}</a>'
    yield "index.html", f'<!doctype html><meta charset="utf-8"><title>{escape(name)}</title>{moved}{link}\n'


def framed(page: Page, name: str, first: str) -> str:
    """A page as a whole HTML document."""
    styles = "".join(
        f'<link rel="stylesheet" href="{address.to(sheet, page.name)}">' for sheet in ("site.css", "reference.css")
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{styles}</head>\n'
        f'<body><header><a href="{address.to(first, page.name)}">{escape(name)}</a>'
        f'<a href="{address.to("names.html", page.name)}">all names</a></header>\n'
        f'<main class="reference">\n{page.body}\n</main></body></html>\n'
    )
