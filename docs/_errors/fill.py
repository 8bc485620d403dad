"""Gives a code to every error and warning in the source that has none.

    python docs/_errors/fill.py; ruff format .

It writes into the source `code="C208"` as the last argument of the call, the next free one of its letter. What it
cannot mend by that (a warning whose text `message` does not make, a class that is handed on) it tells.
"""

from __future__ import annotations

import ast
import re
from collections import Counter

import codes


def fill() -> dict[str, int]:
    """Write the codes; how many in each file."""
    letters = codes.error_classes()
    used = Counter(
        {letter: int(codes.next_free(letter)[1:]) - 1 for letter in {*codes.LETTERS.values(), codes.WARNING}}
    )
    changed: Counter[str] = Counter()
    for path, tree in codes.files():
        file = codes.SOURCE / path
        text = file.read_bytes()
        starts = [0]
        for line in text.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        edits: list[tuple[int, bytes]] = []
        for call, _ in codes.calls_in(tree):
            kind = codes.kind_of(path, call, letters)
            if kind is None or any(keyword.arg == "code" for keyword in call.keywords):
                continue
            letter = codes.WARNING if kind == "warning" else letters[kind]
            used[letter] += 1
            end = starts[(call.end_lineno or 0) - 1] + (call.end_col_offset or 0) - 1  # before the last parenthesis
            edits.append((end, argument(call, text, starts, end, f'code="{letter}{used[letter]:03d}"')))
        for at, new in sorted(edits, reverse=True):
            text = text[:at] + new + text[at:]
        if edits:
            file.write_bytes(text)
            changed[path] = len(edits)
    return dict(changed)


def argument(call: ast.Call, text: bytes, starts: list[int], end: int, new: str) -> bytes:
    """`new` as one more argument of a call, with the commas that it needs."""
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    last = max(starts[(one.end_lineno or 0) - 1] + (one.end_col_offset or 0) for one in given)
    comma = "," in re.sub(r"#[^\n]*", "", text[last:end].decode())
    return (f" {new}," if comma else f", {new}").encode()


if __name__ == "__main__":
    for path, count in fill().items():
        print(f"{path}: {count}")
    for fault in codes.faults():
        print("left:", fault)
