"""The glossary: the table of words in docs/architecture.md as a page, and each word explained where it is first used.

A word that is also plain English (`full`, `plan`, `trace`) has an entry and no hover: most uses mean nothing special.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

PAGE = "project/glossary"
PLAIN = {"event", "form", "free", "full", "log", "member", "pass", "phase", "plan", "reduce", "segment", "trace"}
"""Words without hover."""
LEFT_ALONE = (nodes.literal, nodes.literal_block, nodes.title, nodes.reference, nodes.raw, nodes.term, addnodes.desc)


def words(architecture: str) -> dict[str, str]:
    """Every word of the table and what it means: a row for each word, so that each meaning can be read by itself."""
    table = architecture.partition("| word | meaning |")[2].partition("\n\n")[0]
    rows = (re.split(r"(?<!\\)\|", row.strip("|")) for row in table.split("\n")[2:])
    return {name.strip(): meaning.strip() for name, meaning in rows}


def plain(markdown: str) -> str:
    """Text without backticks, for a hover."""
    return markdown.replace("`", "")


def write_page(app: Sphinx) -> None:
    """Write docs/project/glossary.md, if it changed."""
    docs = Path(app.srcdir)
    app.words = words((docs / "architecture.md").read_text())  # type: ignore[attr-defined]
    entries = "\n\n".join(f"{word}\n  {meaning}" for word, meaning in sorted(app.words.items()))  # type: ignore[attr-defined]
    text = (
        "# Glossary\n\nThe words of this project, in code, errors, pages and events. "
        "[Architecture](../architecture.md) has them in the order in which they build on each other.\n\n"
        f"```{{glossary}}\n{entries}\n```\n"
    )
    path = docs / f"{PAGE}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def pattern(terms: dict[str, str]) -> re.Pattern[str]:
    """Matches a word that is explained, in the singular or plural."""
    explained = sorted((term for term in terms if term not in PLAIN), key=len, reverse=True)
    return re.compile(rf"\b({'|'.join(map(re.escape, explained))})(s?)\b", re.IGNORECASE)


def explain(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Give each word's first use on a page its meaning as a hover, and a link to the glossary."""
    if app.builder.format != "html" or page == PAGE:
        return
    terms: dict[str, str] = app.words  # type: ignore[attr-defined]
    left = set(terms) - PLAIN
    matches = pattern(terms)
    for node in list(doctree.findall(nodes.Text)):
        if not left or within(node):
            continue
        use = next((use for use in matches.finditer(node) if use[1].lower() in left), None)
        if use is None:
            continue
        word = use[1].lower()
        left.discard(word)
        link = nodes.reference("", "", internal=True, refuri=address(app, page, word), classes=["word"])
        link += nodes.abbreviation(use[0], use[0], explanation=plain(terms[word]))
        parts = [nodes.Text(node[: use.start()]), link, nodes.Text(node[use.end() :])]
        node.parent.replace(node, [part for part in parts if part is link or str(part)])


def within(node: nodes.Node) -> bool:
    """Whether text is in code, a title or a link already, or in what autodoc wrote."""
    above = node.parent
    while above is not None:
        if isinstance(above, LEFT_ALONE):
            return True
        above = above.parent
    return False


def address(app: Sphinx, page: str, word: str) -> str:
    """The link from a page to a word's entry."""
    _, anchor = app.env.domains.standard_domain.objects["term", word]
    return f"{app.builder.get_relative_uri(page, PAGE)}#{anchor}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", write_page)
    app.connect("doctree-resolved", explain)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
