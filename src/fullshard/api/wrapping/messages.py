"""The wording of errors and warnings about wrapping policies."""

from __future__ import annotations

from typing import Any

from ...errors import ArgumentTypeError, ConfigError, message

# plan.py


def not_classes(policy: object) -> ConfigError:
    """The error for an `auto_wrap_policy` that contains anything but classes."""
    return ConfigError(
        f"auto_wrap_policy must contain module classes, got {policy!r}",
        remedy="pass the classes of the model's blocks, {Block}, not instances or names of classes",
    )


def not_a_policy(policy: Any, is_class: bool) -> ArgumentTypeError:
    """The error for an invalid `auto_wrap_policy`; `is_class`: it is a class rather than a set of classes."""
    return ArgumentTypeError(
        'auto_wrap_policy must be "auto", a set of module classes, a ModuleWrapPolicy, a CustomPolicy or a callable, '
        f"got {policy!r}",
        remedy=f"pass a set: {{{policy.__name__}}}" if is_class else 'pass "auto", or {Block}',
    )


def nothing_chosen(auto: bool, kind: str, largest: str) -> str:
    """The warning for a policy that chose no module; `auto`: the policy is "auto"."""
    chose = 'Units are the repeated blocks of a model ("auto"), but this one repeats none' if auto else ""
    return message(
        f"{chose or 'auto_wrap_policy matched no module'}: the model becomes a single unit, gathered whole.",
        expected="modules of the classes that it names" if not auto else "blocks that the model repeats",
        got=f"{kind}, in which the largest classes are: {largest}",
        remedy="name the class of the model's blocks, {Block}; nothing, if a single unit is intended",
    )


# policies.py


def no_answer(kind: str, answer: object) -> ConfigError:
    """The error for a `CustomPolicy` whose function returns neither a bool nor a dict."""
    return ConfigError(
        f"CustomPolicy's lambda_fn returned an invalid value for a {kind}.",
        expected="False, True or a dict of arguments",
        got=repr(answer),
    )
