"""Bodies of keyword indexes, as HTML: of a file, of a folder, of all names by first letter; the data of the search."""

from __future__ import annotations

import json
from html import escape

from . import address
from .facts import KINDS, Definition
from .keywords import GROUPS, Entry, Keywords
from .pages import crumbs, section

SHOWN = 12
"""Definitions of one name that a folder's or the global index lists; the search lists all."""


def file_names(keywords: Keywords, path: str) -> str:
    """A file's index: every identifier in it, where it is defined and where it is used."""
    page = address.names_page(path)
    parts = [
        f"<h1>{crumbs(path, page)}: names</h1>",
        f'<p><a href="{address.to(address.page(path), page)}">the file</a> · '
        f'<a href="{address.to("names.html", page)}">all names</a></p>',
    ]
    groups = keywords.of_file(path)
    parts += [
        section(GROUPS[kind], kind, f'<dl class="names">{"".join(entry(one, path, page) for one in entries)}</dl>')
        for kind, entries in groups.items()
    ]
    if not groups:
        parts.append('<p class="missing">There is no name in this file that could be read.</p>')
    return "\n".join(parts)


def entry(one: Entry, path: str, page: str) -> str:
    """One name of a file's index."""
    made = one.definition
    shown = f"<code>{escape(made.qualified or made.path if made is not None else one.name)}</code>"
    told = []
    if made is not None:
        shown = f'<a href="{escape(address.described(made, page))}">{shown}</a>'
        where = f"line {made.line}" if made.path == path else f"{made.path}:{made.line}"
        if made.kind != "module":
            told.append(f'defined <a href="{escape(address.source_line(made, page))}">{escape(where)}</a>')
    if one.here:
        told.append("used " + lines(one.here, path, page))
    told += [f"{escape(other)}: {lines(at, other, page)}" for other, at in sorted(one.others.items())]
    return f"<dt>{shown}</dt><dd>{'; '.join(told)}</dd>"


def lines(numbers: list[int], path: str, page: str) -> str:
    """Lines of a file, each a link."""
    target = address.page(path)
    return ", ".join(f'<a href="{address.to(target, page, f"L{number}")}">{number}</a>' for number in numbers)


def folder_names(keywords: Keywords, folder: str) -> str:
    """A folder's index: every name defined in its files and in its folders'."""
    page = address.folder_names(folder)
    parts = [
        f"<h1>{crumbs(folder, page)}: names</h1>",
        f'<p><a href="{address.to(address.folder_page(folder), page)}">the folder</a> · '
        f'<a href="{address.to("names.html", page)}">all names</a></p>',
    ]
    for kind, names in keywords.of_folder(folder).items():
        rows = "".join(
            f"<dt><code>{escape(name)}</code></dt><dd>{places(made, page)}</dd>" for name, made in names.items()
        )
        parts.append(section(GROUPS[kind], kind, f'<dl class="names">{rows}</dl>'))
    return "\n".join(parts)


def places(made: list[Definition], page: str, *, kinds: bool = False) -> str:
    """Links to where a name is defined; of a name that many files define the first few, and the search for the rest."""
    told = [
        f'<a href="{escape(address.described(one, page))}">{escape(one.path)}:{one.line}</a>'
        f"{' (' + one.kind + ')' if kinds else ''}"
        for one in made[:SHOWN]
    ]
    if len(made) > SHOWN:
        search = address.to("names.html", page)
        told.append(f'<a href="{search}?q={escape(made[0].name)}">{len(made) - SHOWN} more</a>')
    return "<br>".join(told)


def letters(keywords: Keywords) -> dict[str, str]:
    """The global index: a body for each page by first letter."""
    pages: dict[str, list[str]] = {}
    for name, made in keywords.everywhere().items():
        page = address.letter_page(name)
        row = f"<dt><code>{escape(name)}</code></dt><dd>{places(made, page, kinds=True)}</dd>"
        pages.setdefault(page, []).append(row)
    known = sorted(pages, key=lambda page: (page == address.OTHER, page))  # the alphabet, then all that is in none
    return {
        page: f"<h1>Names: {title(page)}</h1>\n<p>{alphabet(known, page)}</p>\n"
        f'<dl class="names">{"".join(pages[page])}</dl>'
        for page in known
    }


def title(page: str) -> str:
    """What a page of the global index is called."""
    return "others" if page == address.OTHER else page.removeprefix("letter-").removesuffix(".html").upper()


def alphabet(pages: list[str], origin: str) -> str:
    """Links to the pages of the global index."""
    return " ".join(f'<a href="{address.to(page, origin)}">{title(page)}</a>' for page in pages)


def all_names(keywords: Keywords, pages: list[str]) -> str:
    """The global index's first page, with the search. It needs `names-data.js` and `names-search.js` beside it."""
    known = keywords.everywhere()
    count = sum(len(made) for made in known.values())
    folders = "".join(
        f'<li><a href="{address.to(address.folder_names(one), "names.html")}"><code>{escape(one)}/</code></a></li>'
        for one in keywords.package.folders
    )
    return (
        f"<h1>All names</h1>\n<p>{len(known):,} names, defined {count:,} times.</p>\n"
        '<p><input id="names-query" type="search" placeholder="name, or a part of one" aria-label="search names" '
        'autocomplete="off"> <select id="names-kind" aria-label="kind"><option value="">any kind</option>'
        + "".join(f'<option value="{i}">{kind}</option>' for i, kind in enumerate(KINDS) if kind != "import")
        + '</select></p>\n<p id="names-told" role="status"></p>\n<dl id="names-found" class="names"></dl>\n'
        "<noscript><p>The search needs JavaScript; the lists by letter do not.</p></noscript>\n"
        f"<h2>By first letter</h2>\n<p>{alphabet(pages, 'names.html')}</p>\n"
        f"<h2>By folder</h2>\n<ul>{folders}</ul>\n"
        '<script src="names-data.js"></script><script src="names-search.js"></script>'
    )


def search_data(keywords: Keywords) -> str:
    """What the search looks in, as a script, because a page opened from a disk may not fetch: files, then names.

    A name's places are in one list of numbers, three for each: kind, file, line.
    """
    files = list(keywords.package.files)
    number = {path: i for i, path in enumerate(files)}
    kinds = {kind: i for i, kind in enumerate(KINDS)}
    names = [
        [name, [n for one in made for n in (kinds[one.kind], number[one.path], one.line)]]
        for name, made in keywords.everywhere().items()
    ]
    data = {"kinds": KINDS, "files": files, "names": names}
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return f"window.NAMES = {text};\n"
