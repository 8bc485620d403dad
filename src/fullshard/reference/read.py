"""A file's bytes as text and syntax tree, or what is wrong with them; a broken file never stops the others."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from pathlib import Path

from .facts import Fault

TOO_LARGE = 4 << 20
"""Bytes; a larger file is data in Python's syntax, and its tree would take gigabytes."""


def read(file: Path, path: str) -> tuple[str, int, ast.Module | None, list[Fault]]:
    """Text, bytes on disk, tree (None: it cannot be parsed), and what was wrong.

    Args:
        file: where it lies.
        path: its name in faults.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        return "", 0, None, [Fault(path, 0, f"cannot be read: {error.strerror}")]
    text, faults = decoded(raw, path)
    if len(raw) > TOO_LARGE:
        faults.append(Fault(path, 0, f"{len(raw):,} bytes are too many to analyse"))
    if faults:
        return text, len(raw), None, faults
    tree, faults = parsed(text, path)
    return text, len(raw), tree, faults


def decoded(raw: bytes, path: str) -> tuple[str, list[Fault]]:
    """The text, in the encoding that it declares; what cannot be decoded shows as U+FFFD, and is a fault."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        text = _one_newline(raw.decode("utf-8", "replace"))
        line = text[: text.find("\ufffd")].count("\n") + 1 if "\ufffd" in text else 1
        reason = getattr(error, "reason", None) or getattr(error, "msg", None) or str(error)
        return text, [Fault(path, line, f"cannot be decoded: {reason}")]
    return _one_newline(text.removeprefix("\ufeff")), []


def _one_newline(text: str) -> str:
    return re.sub(r"\r\n?", "\n", text)


def parsed(text: str, path: str) -> tuple[ast.Module | None, list[Fault]]:
    """The tree, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the code that is read: invalid escapes, `is` with a literal
            return ast.parse(text, path), []
    except SyntaxError as error:
        return None, [Fault(path, error.lineno or 0, f"syntax error: {error.msg}")]
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply for the parser
        return None, [Fault(path, 0, f"cannot be parsed: {error or type(error).__name__}")]
