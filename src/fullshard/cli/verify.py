"""`fullshard verify SCRIPT-OR-MODULE:FUNCTION`.

FUNCTION takes no arguments and returns those of `fullshard.verify` by name (model_fn, batch_fn, loss_fn, ...), or a
Report that it got from `fullshard.verify`. It is called once the process group is initialized. Its program's own
arguments follow --.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import ConfigError, class_to_catch
from . import terminal
from .local_ranks import MOST_RANKS, run_ranks
from .main import refuse
from .target import function_at, program_arguments

if TYPE_CHECKING:
    from ..insight.verify import VerifyReport

STYLES = {"^verify: ok": "bold green", "^verify: DIFFERENT": "bold red", "(?m)^  cause:.*$": "yellow"}


@dataclass(frozen=True)
class VerifyArguments:
    """Train a few steps sharded and unsharded on the same batches, and report the first difference.

    fullshard.verify does the same within a program. Example:
        fullshard verify train.py:check --ranks 2 -- --width 64

    Exit code: 0 no difference, 1 a difference, 2 bad input. Use --ranks, or torchrun, where each process is a rank.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT-OR-MODULE:FUNCTION")]
    """a path to a .py file, or an importable module, and a function in it that returns the arguments of
    fullshard.verify (model_fn, batch_fn, loss_fn, ...) as a dictionary; put its program's own arguments after --"""
    ranks: int = 1
    """processes to start on this machine"""
    steps: int | None = None
    """overrides the function's"""
    seed: int | None = None
    """overrides the function's"""
    tolerance: float | None = None
    """overrides the function's, or the default of each dtype"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return terminal.run(VerifyArguments, "verify", arguments[:cut], partial(_verify, arguments, arguments[cut + 1 :]))


def _verify(arguments: list[str], program: list[str], options: VerifyArguments) -> int:
    """Run this command, with these unparsed arguments and the program's, as one or several ranks."""
    if not 1 <= options.ranks <= MOST_RANKS:
        return refuse(f"--ranks must be from 1 to {MOST_RANKS}, got {options.ranks}; more need torchrun")
    if options.ranks > 1 and "RANK" not in os.environ:
        codes = run_ranks(["-m", "fullshard", "verify", *arguments], options.ranks)
        broken = [f"rank {rank} ended with exit code {code}" for rank, code in codes.items() if code not in (0, 1, 2)]
        return refuse("; ".join(broken)) if broken else max(codes.values())
    import torch.distributed as dist

    first = os.environ.get("RANK", "0") == "0"
    try:
        with program_arguments(options.target, program):
            report = _report(options)
    except ConfigError as error:
        return refuse(str(error)) if first else 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if first:
        terminal.show(str(report), STYLES)
    return 0 if report.ok else 1


def _report(options: VerifyArguments) -> VerifyReport:
    """Call the user's function, then `verify` with the returned arguments.

    Raises:
        ConfigError: the function cannot be called, or `verify` cannot be called with its result.
    """
    import torch
    import torch.distributed as dist

    from ..insight.verify import VerifyReport, verify

    function = function_at(options.target)
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    try:
        result = function()
    except ConfigError:
        raise
    except SystemExit as stop:
        raise ConfigError(f"{options.target} ended with sys.exit({stop.code!r})") from stop
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{options.target} raised {class_to_catch(error)} at {line.filename}:{line.lineno}: {error}"
        ) from error
    if isinstance(result, VerifyReport):
        return result
    if not isinstance(result, Mapping):
        raise ConfigError(
            f"{options.target} must return a dictionary of fullshard.verify's arguments, or its report",
            got=type(result).__name__,
        )
    parameters = inspect.signature(verify).parameters
    unknown = [name for name in result if name not in parameters]
    missing = [name for name in ("model_fn", "batch_fn", "loss_fn") if name not in result]
    if unknown or missing:
        wrong = f"unknown: {', '.join(map(str, unknown))}" if unknown else f"missing: {', '.join(missing)}"
        raise ConfigError(f"{options.target} returned arguments that fullshard.verify cannot take ({wrong})")
    overrides = {"steps": options.steps, "seed": options.seed, "tolerance": options.tolerance}
    return verify(**{**result, **{name: value for name, value in overrides.items() if value is not None}})
