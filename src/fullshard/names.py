"""Names as users wrote them, without what wrapping put into them."""

from __future__ import annotations

from typing import Any

WRAPPED = "_fsdp_wrapped_module"
"""The name under which a `FullyShardedDataParallel` instance holds the module it wraps."""
_INSERTED = (f"{WRAPPED}.", "_checkpoint_wrapped_module.")

PLAIN = "_fullshard_plain"
"""On a class that `fully_shard` made of a module's: the class that it was."""


def plain_class(value: Any) -> type:
    """A value's class as its user wrote it: `Linear`, also of a module that `fully_shard` made an `FSDPLinear`."""
    kind = type(value)
    plain: type = vars(kind).get(PLAIN, kind)  # not inherited: a subclass of it is the user's own
    return plain


def clean_name(name: str) -> str:
    """A parameter's name (or a prefix that ends in a dot) without what instances and checkpoint wrappers put in."""
    for part in _INSERTED:
        name = name.replace(part, "")
    return name


def plain_name(name: str) -> str:
    """A parameter's name (or a prefix that ends in a dot) without what wrapping, checkpointing and compiling put in."""
    return clean_name(name).replace("_orig_mod.", "")


def plain_path(path: str) -> str:
    """A module's name, likewise."""
    return plain_name(f"{path}.")[:-1]


def clean_path(path: str) -> str:
    """A module's name, likewise."""
    return clean_name(f"{path}.")[:-1]
