"""The entry point of `fullshard`. Exit codes: 0 nothing is wrong, 1 a problem was found, 2 bad input.

Imports no torch: commands do, once they know that they have something to do with it.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from ..version import VERSION

COMMANDS: dict[str, str] = {
    "adopt": "run a program with Fullshard in the place of PyTorch's FSDP",
    "compare": "the same program on PyTorch's FSDP and on Fullshard, side by side",
    "convert": "write a checkpoint in another format",
    "doctor": "why did a run hang or die?",
    "dry-run": "does one rank of a program run, in a world of any size?",
    "explain": "what does this error mean, and what is to be done?",
    "inspect": "what is in a checkpoint, and is it undamaged?",
    "plan": "what will a training step hold, send and take, and which strategy fits?",
    "trace": "why is a step slow, and which rank is late?",
    "verify": "does a sharded program train as one process would?",
}
"""The commands: for each a module of this package with `run(arguments) -> int`, and what it answers in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what comes after `fullshard` on the command line; None: this process's.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        if words[1:] and words[1] in COMMANDS:  # fullshard help verify
            return main([words[1], "--help"])
        width = max(map(len, COMMANDS))
        print("usage: fullshard COMMAND ...   (fullshard COMMAND --help)\n")
        print("\n".join(f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()))
        return 0 if words else 2
    if words[0] == "--version":
        print(f"fullshard {VERSION}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        return refuse(f"unknown command {name!r}; {hint}")
    try:
        command = importlib.import_module(f".{name.replace('-', '_')}", __package__)
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        return refuse(f"the command line needs {error.name}, which is not installed: pip install tyro rich")
    code: int = command.run(rest)
    return code


def refuse(text: str) -> int:
    """Print to stderr why nothing was done; returns the exit code for bad input."""
    print(f"fullshard: {chr(10).join(map(printable, text.splitlines()))}", file=sys.stderr)
    return 2


def printable(line: str) -> str:
    """A line without what could change the terminal: names in files may hold anything."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in line)
