"""A docstring as blocks that both HTML and Markdown are written from. Google's sections, and reST's fields, are known.

Anything else is a paragraph; text that is indented deeper, or that draws a table or picture, is kept as it is written.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

SECTIONS = {
    "args": "Arguments", "arguments": "Arguments", "parameters": "Arguments", "returns": "Returns", "return": "Returns",
    "yields": "Yields", "raises": "Raises", "attributes": "Attributes", "example": "Example", "examples": "Examples",
    "note": "Note", "notes": "Notes", "warning": "Warning", "warns": "Warns", "see also": "See also",
    "keyword args": "Arguments",
}  # fmt: skip
LISTED = {"Arguments", "Returns", "Yields", "Raises", "Attributes", "Warns"}
"""Sections of which each entry is a name and a text."""
HEAD = re.compile(r"([A-Z][A-Za-z ]+):\s*$")
ENTRY = re.compile(r"(\**[\w.`\[\], |*]+?)\s*(\([^)]*\))?\s*:(?:\s+|$)(.*)", re.S)
FIELD = re.compile(r":(param|type|returns?|rtype|raises?|arg|yields?)\b\s*([^:]*):\s*(.*)", re.S)
BULLET = re.compile(r"(?:[-*+]|\d+[.)])\s+")


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a docstring.

    Attributes:
        kind: "text"; "kept" (as it is written); "list"; "head" (a section's title); "entries".
        text: of a text, head, or what is kept.
        items: of a list its texts, as ("", text); of entries (name, text).
    """

    kind: str
    text: str = ""
    items: tuple[tuple[str, str], ...] = ()


def blocks(docstring: str) -> list[Block]:
    """A docstring, already without its indentation, cut into blocks."""
    found: list[Block] = []
    lines = docstring.expandtabs().rstrip().split("\n")
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        head = HEAD.match(lines[at])
        if head and head[1].lower() in SECTIONS and at + 1 < len(lines) and lines[at + 1].startswith(" "):
            stop = end_of(lines, at + 1)
            found += section(SECTIONS[head[1].lower()], lines[at + 1 : stop])
        else:
            stop = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
            if lines[at].startswith(("    ", "  ", ">>>", "```")):
                stop = fence(lines, at) if lines[at].startswith("```") else stop
                kept = [one for one in lines[at:stop] if not one.startswith("```")]
                found.append(Block("kept", textwrap.dedent("\n".join(kept))))
            else:
                found += paragraph(lines[at:stop])
        at = stop
    return found


def end_of(lines: list[str], start: int) -> int:
    """Where a section ends: at the first line that is not indented."""
    return next((i for i in range(start, len(lines)) if lines[i].strip() and lines[i][0] != " "), len(lines))


def fence(lines: list[str], start: int) -> int:
    """Behind a fenced block."""
    return next((i + 1 for i in range(start + 1, len(lines)) if lines[i].startswith("```")), len(lines))


def section(title: str, lines: list[str]) -> list[Block]:
    """A section's head and what is in it."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    if title not in LISTED:
        return [Block("head", title), *blocks(text)]
    entries: list[list[str]] = []
    for line in text.split("\n"):
        if (line and line[0] != " ") or not entries:
            entries.append([line])
        else:
            entries[-1].append(line)
    items = []
    for one in entries:
        whole = "\n".join([one[0], textwrap.dedent("\n".join(one[1:]))]).strip()
        named = ENTRY.match(whole) if title not in ("Returns", "Yields") else None
        items.append(
            (f"{named[1]}{' ' + named[2] if named[2] else ''}", flat(named[3])) if named else ("", flat(whole))
        )
    return [Block("head", title), Block("entries", items=tuple(items))]


def paragraph(lines: list[str]) -> list[Block]:
    """Text, a list, fields of reST, or a drawing."""
    text = "\n".join(lines)
    if FIELD.match(text):
        fields = [FIELD.match(one) for one in re.split(r"\n(?=:)", text)]
        items = [
            (one[2] or one[1], flat(one[3])) for one in fields if one is not None and one[1] not in ("type", "rtype")
        ]
        return [Block("entries", items=tuple(items))]
    if BULLET.match(text):
        parts = re.split(r"\n(?=\s*(?:[-*+]|\d+[.)])\s)", text)
        return [Block("list", items=tuple(("", flat(BULLET.sub("", one.strip(), count=1))) for one in parts))]
    if len(lines) > 1 and drawn(lines):
        return [Block("kept", text)]
    deeper = next((i for i, one in enumerate(lines) if i and one.startswith("  ")), None)
    if deeper is not None and lines[deeper - 1].rstrip().endswith(":"):
        return [
            Block("text", flat("\n".join(lines[:deeper]))),
            Block("kept", textwrap.dedent("\n".join(lines[deeper:]))),
        ]
    return [Block("text", flat(text))]


def drawn(lines: list[str]) -> bool:
    """Whether lines are a table or a picture: columns, that is runs of blanks within most of them, or rules."""
    columns = sum(bool(re.search(r"\S\s{2,}\S", one)) or bool(re.search(r"[|+]?[-=]{3,}|\|", one)) for one in lines)
    return columns * 2 > len(lines)


def flat(text: str) -> str:
    """One line of text."""
    return " ".join(text.split())
