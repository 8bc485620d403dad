"""The entry point of `fullshard`. Exit codes: 0 nothing is wrong, 1 a problem was found, 2 bad input.

Does not import torch; commands do, once their arguments are parsed.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from ..version import VERSION

COMMANDS: dict[str, str] = {
    "adopt": "run a program with Fullshard in place of PyTorch's FSDP",
    "compare": "how does a program run on PyTorch's FSDP and on Fullshard, side by side?",
    "convert": "write a checkpoint in a different format",
    "doctor": "why did a run hang or die?",
    "dry-run": "does one rank of a program run, for any number of ranks?",
    "explain": "what does this error mean, and how is it fixed?",
    "inspect": "what is in a checkpoint, and is it intact?",
    "plan": "how much memory, traffic and time does a step take, and which strategy fits?",
    "trace": "why is a step slow, and which rank is late?",
    "verify": "does a sharded program train like a single process?",
}
"""Command -> summary. Each is a module of this package with `run(arguments) -> exit code`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after `fullshard` on the command line; None: those of this process.

    Returns:
        The exit code.
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
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"commands: {', '.join(COMMANDS)}"
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
    """Print an error to stderr; returns the exit code for bad input."""
    print(f"fullshard: {chr(10).join(map(printable, text.splitlines()))}", file=sys.stderr)
    return 2


def own_arguments(words: list[str]) -> list[str]:
    """The arguments of a program from its name and what follows, with or without a `--` between them."""
    return words[2:] if words[1:2] == ["--"] else words[1:]


def printable(line: str) -> str:
    """Escape the characters of a line that could control the terminal: names in files may contain any."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in line)
