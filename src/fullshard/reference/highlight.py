"""A file's source as lines of HTML: coloured, each line with an anchor `L12`, names linked to their definitions.

The classes are those of Pygments (k keyword, s string, c1 comment, ...), so that any of its styles colours them.
"""

from __future__ import annotations

import builtins
import io
import keyword
import tokenize
from collections.abc import Callable
from html import escape

from .facts import Definition, SourceFile

Mark = tuple[str, str, str]
"""What is known of a name at one place: class, address, title."""

PLAIN = {
    tokenize.STRING: "s",
    tokenize.COMMENT: "c1",
    tokenize.NUMBER: "m",
    tokenize.OP: "",
    getattr(tokenize, "FSTRING_START", -1): "s",
    getattr(tokenize, "FSTRING_MIDDLE", -1): "s",
    getattr(tokenize, "FSTRING_END", -1): "s",
}
DEFINED = {"class": "nc", "function": "nf", "method": "nf", "constant": "no"}


def marks(file: SourceFile, link: Callable[[Definition], str]) -> dict[tuple[int, int], Mark]:
    """For each name's place in a file where it leads to, and how it is coloured.

    Args:
        link: the address of a definition, from this file's page.
    """
    found: dict[tuple[int, int], Mark] = {}
    for made in file.definitions:
        if made.kind != "import":
            found[made.line, made.column] = (DEFINED.get(made.kind, ""), "", "")
    for use in file.uses:
        if use.target is not None:
            told = f"{use.target.kind} {use.target.qualified or use.target.path}"
            kind = "" if use.sure else "guess"
            found[use.line, use.column] = (kind, link(use.target), told if use.sure else f"probably {told}")
    return found


def highlighted(file: SourceFile, link: Callable[[Definition], str]) -> list[str]:
    """The lines, as HTML. Of a broken file they are plain."""
    lines = file.text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(file.text).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return [escape(line) for line in lines]
    made = [""] * len(lines)
    done = [0] * len(lines)
    known = marks(file, link)
    for token in tokens:
        (line, column), (last, end) = token.start, token.end
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        for at in range(line, min(last, len(lines)) + 1):
            start = column if at == line else 0
            stop = end if at == last else len(lines[at - 1])
            made[at - 1] += escape(lines[at - 1][done[at - 1] : start], quote=False)
            made[at - 1] += span(lines[at - 1][start:stop], token, known.get((at, start)))
            done[at - 1] = stop
    return [one + escape(lines[i][done[i] :], quote=False) for i, one in enumerate(made)]


def span(text: str, token: tokenize.TokenInfo, mark: Mark | None) -> str:
    """One token, or its part on one line."""
    shown = escape(text, quote=False)
    if token.type != tokenize.NAME:
        kind = PLAIN.get(token.type, "")
        return f'<span class="{kind}">{shown}</span>' if kind and text else shown
    if mark is not None and mark[1]:
        kind = f' class="{mark[0]}"' if mark[0] else ""
        return f'<a{kind} href="{escape(mark[1])}" title="{escape(mark[2])}">{shown}</a>'
    if mark is not None and mark[0]:
        return f'<span class="{mark[0]}">{shown}</span>'
    if keyword.iskeyword(text):
        return f'<span class="k">{shown}</span>'
    return f'<span class="nb">{shown}</span>' if mark is None and hasattr(builtins, text) else shown
