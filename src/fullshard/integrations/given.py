"""What programs hand on to `fully_shard` through a client library, looked at where it is given."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.functional.fully_shard import fully_shard
from ..api.wrapping import CustomPolicy, ModuleWrapPolicy
from ..errors import ArgumentTypeError, ConfigError


def check_sharding(
    given: Any,
    who: str,
    own: Sequence[str] = ("units", "mixed_precision"),
    taken: Sequence[str] = (),
    names: bool = True,
) -> None:
    """Refuse what is no argument of `fully_shard`, or of whoever calls it.

    Args:
        given: arguments by name; None for none.
        who: takes them; for the error.
        own: arguments that it takes besides; `units` takes the place of `auto_wrap_policy`.
        taken: of `fully_shard`'s arguments, those that it gives itself.
        names: whether units may be named by the names of their classes.

    Raises:
        ConfigError: no dictionary; units that are none.
        ArgumentTypeError: an argument that there is not.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(
            "sharding is a dictionary: arguments of fullshard.integrations.hf.shard by their names.",
            expected='{"reshard_after_forward": True}, say',
            got=repr(given),
        )
    known = {*inspect.signature(fully_shard).parameters, *own} - {"module", "auto_wrap_policy", *taken}
    for name in given:
        if name not in known:
            near = next(iter(difflib.get_close_matches(str(name), known)), "")
            near = "units" if name == "auto_wrap_policy" else near
            raise ArgumentTypeError(
                f"{who} has no argument {name!r}.",
                expected=", ".join(sorted(known)),
                got=f"{name}={given[name]!r}"[:200],
                remedy=f"{near}= is meant, probably" if near else "leave it away",
            )
    check_units(given.get("units"), names)


def check_units(units: Any, names: bool = True) -> None:
    """Refuse what does not say which modules become units.

    Args:
        units: as a program gave them.
        names: whether they may be names of classes.

    Raises:
        ConfigError: see above.
    """
    known = (type, str) if names else (type,)
    listed = isinstance(units, (set, frozenset, tuple, list))
    if listed and all(isinstance(one, known) for one in units):
        return
    policy = isinstance(units, (ModuleWrapPolicy, CustomPolicy)) or type(units).__name__ == "CustomPolicy"
    if not listed and (units is None or units == "auto" or isinstance(units, known) or policy or callable(units)):
        return
    raise ConfigError(
        "units says which modules become units of their own.",
        expected=("a class, its name, or some of them; " if names else "a class, or some of them; ")
        + 'a policy of fullshard.wrap; "auto"; or None',
        got=repr(units)[:200],
        remedy='units=["LlamaDecoderLayer"], say; of an Accelerator or Trainer: sharding={"units": [...]}'
        if names
        else "units={Block}, say, with the model's own class; or leave it away",
    )
