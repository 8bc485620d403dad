"""The entry point of `fullshard`. Exit codes: 0 right, 1 something was found, 2 bad input, told in one line."""

from __future__ import annotations

import importlib
import sys

COMMANDS: dict[str, str] = {
    "adopt": "run a program with Fullshard in the place of PyTorch's FSDP",
    "convert": "write a checkpoint in another format",
    "docs": "write a reference of any Python package: a page and an index of names for every file",
    "doctor": "why did a run hang or die?",
    "explain": "what does this error's code mean?",
    "inspect": "what is in a checkpoint, and is it undamaged?",
    "verify": "does a sharded program train as one process would?",
}
"""The commands: for each a module of this package with `run(arguments) -> int`, and what it answers in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what comes after `fullshard` on the command line; None: this process's.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: fullshard COMMAND ...   (fullshard COMMAND --help)\n")
        print("\n".join(f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()))
        return 0 if given else 2
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        return refuse(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}")
    try:
        command = importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "rich"):
            raise
        return refuse(f"{error.name} is not installed, which the command line needs: pip install tyro rich")
    code: int = command.run(rest)
    return code


def refuse(text: str, *, lines: bool = False) -> int:
    """Say in one line why nothing was done, or, if `lines`, in those of the text; the exit code for that."""
    told = text.splitlines() if lines else [" ".join(text.split())]
    print(f"fullshard: {chr(10).join(map(printable, told))}", file=sys.stderr)
    return 2


def printable(line: str) -> str:
    """A line without what could change the terminal: names in files may hold anything."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in line)
