"""Text for people: names as users wrote them, without the parts that wrapping inserted; sizes and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WRAPPED = "_fsdp_wrapped_module"
"""The attribute of a `FullyShardedDataParallel` instance that holds the wrapped module."""
_INSERTED = (f"{WRAPPED}.", "_checkpoint_wrapped_module.")

PLAIN = "_fullshard_plain"
"""Attribute of a class that `fully_shard` derived from a module's class: the original class."""


def plain_class(value: Any) -> type:
    """A value's class as the user wrote it: `Linear`, even after `fully_shard` has made it an `FSDPLinear`."""
    kind = type(value)
    plain: type = vars(kind).get(PLAIN, kind)  # not inherited: a subclass of such a class is the user's own
    return plain


def clean_name(name: str) -> str:
    """A parameter's name (or a prefix that ends in a dot) without the parts inserted by wrappers and checkpointing."""
    for part in _INSERTED:
        name = name.replace(part, "")
    return name


def plain_name(name: str) -> str:
    """`clean_name` that also removes the parts inserted by `torch.compile`."""
    return clean_name(name).replace("_orig_mod.", "")


def plain_path(path: str) -> str:
    """`plain_name` for a module's name."""
    return plain_name(f"{path}.")[:-1]


def clean_path(path: str) -> str:
    """`clean_name` for a module's name."""
    return clean_name(f"{path}.")[:-1]


def size(nbytes: int) -> str:
    """Bytes as people read them: `3.0 KiB`."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """A line for each row of texts, in columns; those in `left`, by number, are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in cells))
    return [line.rstrip() for line in lines]
