"""Every error that Fullshard raises on purpose.

    FullshardError
      ConfigError      (ValueError)    an argument or a combination of settings that cannot work
      LayoutError      (ValueError)    a parameter that the requested layout does not support
      DivergenceError  (RuntimeError)  ranks disagree
      CheckpointError  (RuntimeError)  a state dict or checkpoint that does not fit the model
        DamagedCheckpointError           files that differ from those written
        MissingStateError (ValueError too) optimizer state to load that lacks a part
      PhaseError       (RuntimeError)  a call at a time when it is not allowed
        UsageError     (AssertionError, ValueError too) the same, in places where PyTorch's wrapper asserts
      NotSupportedError (a ConfigError, NotImplementedError too) an unsupported combination of arguments
      ArgumentTypeError (a ConfigError, TypeError too) an argument of the wrong type
      AssertedError    (a ConfigError, AssertionError too) an invalid argument for which PyTorch asserts
      ReplacementError (a ConfigError, RuntimeError too) an invalid replacement of a parameter
      PrivateNameError (a ConfigError, ImportError too) a program's use of PyTorch's private FSDP names
      UnevenError      (a LayoutError, NotImplementedError too) a parameter that would have to be split unevenly
      NonfiniteError   (RuntimeError)  gradients that are not finite, where the caller asked for an error

Each is also the built-in type that PyTorch raises for the same mistake, so that code which catches
PyTorch's errors still catches ours.

Some mistakes need more than a message: their errors and warnings have a topic, a word that the last line names
(`more:      fullshard explain TOPIC`), and a section of docs/errors.md. The line is a command and not a link, as the
command prints the text of the version that is installed, on machines without a network too.
"""

from __future__ import annotations

from typing import Any


def message(
    what: str,
    *,
    parameter: str | None = None,
    rank: int | None = None,
    expected: object = None,
    got: object = None,
    remedy: str | None = None,
    topic: str | None = None,
) -> str:
    """The text of an error or a warning: what happened, then the facts, a line each, and where to read more."""
    more = None if topic is None else f"fullshard explain {topic}"
    facts = {"parameter": parameter, "rank": rank, "expected": expected, "got": got, "remedy": remedy, "more": more}
    lines = [f"  {key + ':':<11}{value}" for key, value in facts.items() if value is not None]
    return "\n".join([what, *lines])


class FullshardError(Exception):
    """Base of all errors raised by Fullshard: what happened, then the facts a reader needs, a line each.

    Args:
        what: what happened, in one sentence.
        parameter, rank, expected, got, remedy: the facts; those left out are not shown. Attributes of the error too.
        topic: a section of docs/errors.md that says more; if left out, that of the class, if any. An attribute too.
    """

    topic: str | None = None
    """The topic of errors of this class that do not name one."""

    def __init__(
        self,
        what: str,
        *,
        parameter: str | None = None,
        rank: int | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
        topic: str | None = None,
    ) -> None:
        self.topic = topic or self.topic
        super().__init__(
            message(what, parameter=parameter, rank=rank, expected=expected, got=got, remedy=remedy, topic=self.topic),
        )
        self.what = what
        self.parameter, self.rank, self.expected, self.got, self.remedy = parameter, rank, expected, got, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self).__new__,
            (type(self), *self.args),
            self.__dict__,
        )  # keeps the text, also in a different process


class ConfigError(FullshardError, ValueError):
    """An argument, or a combination of settings, that cannot work."""


class LayoutError(FullshardError, ValueError):
    """A parameter that the requested layout does not support."""


class DivergenceError(FullshardError, RuntimeError):
    """Ranks disagree on what they train or on what to do next."""


class CheckpointError(FullshardError, RuntimeError):
    """A state dict or checkpoint that does not fit the model."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint that are missing, truncated, or changed; a different checkpoint may be intact."""

    topic = "checkpoint-damaged"


class MissingStateError(CheckpointError, ValueError):
    """Optimizer state to load that lacks all states, or those of a parameter whose neighbours it contains."""


class PhaseError(FullshardError, RuntimeError):
    """A call at a time when it is not allowed."""


class UsageError(PhaseError, AssertionError, ValueError):
    """A method of `FullyShardedDataParallel` called at the wrong time; PyTorch's asserts, or raises `ValueError`."""


class NotSupportedError(ConfigError, NotImplementedError):
    """An unsupported combination of arguments; PyTorch raises `NotImplementedError` here."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument of the wrong type; PyTorch raises `TypeError` here."""


class AssertedError(ConfigError, AssertionError):
    """An invalid argument for which PyTorch raises `AssertionError`."""


class ReplacementError(ConfigError, RuntimeError):
    """An invalid replacement of a parameter; PyTorch's writeback raises `RuntimeError`."""


class PrivateNameError(ConfigError, ImportError):
    """An adopted program's use of a private name of PyTorch's FSDP; libraries can handle the ImportError."""


class UnevenError(LayoutError, NotImplementedError):
    """A parameter that would have to be split unevenly on a dim other than the first."""


class NonfiniteError(FullshardError, RuntimeError):
    """Gradients whose norm is not finite, where the caller asked for an error."""


_MOST_CHARACTERS = 160  # of a repr; longer ones tell less than a class


def class_and_value(value: object) -> str:
    """An argument's repr with its class's module: PyTorch has classes of the same names, whose reprs look like ours."""
    kind, shown = type(value), repr(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if "\n" in shown or len(shown) > _MOST_CHARACTERS:
        return f"{shown[:_MOST_CHARACTERS]}..." if kind is str else f"an object of class {name}"
    return shown if kind.__module__ == "builtins" else f"{shown}, a {name}"


def invalid_argument(
    argument: str, value: object, expected: str, remedy: str | None = None, kind: type[ConfigError] = ConfigError
) -> ConfigError:
    """The error for an argument of a wrong type or value.

    Args:
        argument: its name, with the function that takes it where the name alone is not enough: "fully_shard(layout=)".
        value: what was passed.
        expected: the values that are valid.
        remedy: what to pass instead, if `expected` does not say it all.
        kind: a class below `ConfigError`, where PyTorch raises a different built-in error.
    """
    return kind(f"{argument} is invalid.", expected=expected, got=class_and_value(value), remedy=remedy)


def check_switch(argument: str, value: object, remedy: str | None = None) -> bool:
    """Return a switch as a bool: a bool, also NumPy's, or 0 or 1. "no", taken for its truth, would turn it on.

    Args: see `invalid_argument`.
    """
    if value is True or value is False:
        return value
    if type(value).__name__ not in ("bool", "bool_") and not (isinstance(value, int) and value in (0, 1)):
        raise invalid_argument(argument, value, "True or False", remedy)
    return bool(value)


def check_module(function: str, value: object) -> None:
    """Raise unless the first argument of `function` is a module.

    Raises:
        ConfigError: it is not.
    """
    from torch import nn  # here: the command line uses errors where it does not import torch

    if not isinstance(value, nn.Module):
        raise ConfigError(f"{function} takes a module.", expected="a torch.nn.Module", got=class_and_value(value))


def class_to_catch(error: BaseException) -> str:
    """The name of the class by which users catch an error: its branch of the tree above (`ConfigError`).

    Classes below the branches exist only for code that catches PyTorch's errors, and are not exported.
    """
    branches = [kind for kind in type(error).__mro__ if FullshardError in kind.__bases__]
    return (branches[0] if branches else type(error)).__name__
