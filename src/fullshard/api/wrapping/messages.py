"""What wrapping by policies says: the wording of errors and warnings."""

from __future__ import annotations

from typing import Any

from ...errors import ArgumentTypeError, ConfigError, message

# plan.py


def not_classes(policy: object) -> ConfigError:
    """The error for `auto_wrap_policy` that holds anything but classes."""
    return ConfigError(
        f"auto_wrap_policy must hold module classes, got {policy!r}",
        remedy="name the classes of the model's blocks, {Block}, not modules of them nor their names",
    )


def not_a_policy(policy: Any, one_class: bool) -> ArgumentTypeError:
    """The error for an invalid `auto_wrap_policy`; `one_class`: it is a class."""
    return ArgumentTypeError(
        'auto_wrap_policy must be "auto", a set of module classes, a ModuleWrapPolicy, a CustomPolicy or a callable, '
        f"got {policy!r}",
        remedy=f"give a set of it: {{{policy.__name__}}}" if one_class else 'give "auto", or {Block}',
    )


def nothing_chosen(auto: bool, kind: str, largest: str) -> str:
    """The warning for a policy that chose no module; `auto`: the policy is "auto"."""
    return message(
        "auto_wrap_policy chose no module: the model becomes one unit, gathered whole.",
        expected="modules of the classes that it names" if not auto else "blocks that the model repeats",
        got=f"a {kind}, in which the largest classes are: {largest}",
        remedy="name the class of the model's blocks, {Block}; or leave auto_wrap_policy out if one unit is meant",
    )


# policies.py


def no_answer(kind: str, answer: object) -> ConfigError:
    """The error for a `CustomPolicy` that answers neither a bool nor a dict."""
    return ConfigError(
        f"CustomPolicy's lambda_fn gave no answer for a {kind}.",
        expected="False, True or a dict of arguments",
        got=repr(answer),
    )


def wrapper_not_callable(wrapper_cls: object) -> ConfigError:
    """The error for an invalid `wrapper_cls`."""
    return ConfigError(f"enable_wrap needs a wrapper_cls that can be called, got {wrapper_cls!r}")


def not_module_classes(argument: str, cls: object) -> ConfigError:
    """The error for a class policy that holds anything but classes."""
    return ConfigError(f"{argument} must hold module classes, got {cls!r}")
