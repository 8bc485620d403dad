"""`fullshard dry-run SCRIPT ARGS...`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

from .main import refuse

USAGE = """usage: fullshard dry-run [--world N] [--ranks-per-node N] [--steps N] SCRIPT ARGS...

Run one rank of a training program as if there were N, to find errors of shapes, placements, layouts and memory before a
cluster is booked. The script runs as it is, on its own device, but the process groups that it makes are fake:
collectives do nothing. After some steps of its optimizer it is ended; its units, what the rank holds, and what it sends
in a step are printed.

  --world N            ranks (default: 8)
  --ranks-per-node N   of one machine (default: 8, or all if there are fewer)
  --steps N            of the optimizer (default: 2)

Example: fullshard dry-run --world 128 examples/dry_run.py

Exit code: 0 it took its steps, 1 it raised or ended before, 2 bad input."""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    options = {"--world": 8, "--ranks-per-node": 0, "--steps": 2}
    rest = list(arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if rest else 2
    while rest and rest[0].startswith("-"):
        name, _, value = rest.pop(0).partition("=")
        if name not in options:
            return refuse(f"there is no option {name!r} (fullshard dry-run --help)")
        value = value or (rest.pop(0) if rest else "")
        if not value.isdigit() or int(value) < 1:
            return refuse(f"{name} needs a positive integer, not {value!r}")
        options[name] = int(value)
    if not rest:
        return refuse("there is no script (fullshard dry-run --help)")
    script = Path(rest[0])
    if not script.is_file():
        return refuse(f"there is no file {script}")
    return follow(script, rest[1:], options["--world"], options["--ranks-per-node"], options["--steps"])


def follow(script: Path, arguments: list[str], world: int, ranks_per_node: int, steps: int) -> int:
    """Run the script, and print what was found; the exit code."""
    from ..insight.dry_run import UNSEEN, dry_run

    sys.argv = [str(script), *arguments]
    node = ranks_per_node or min(8, world)
    launcher = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": node}
    os.environ.update({name: str(value) for name, value in launcher.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.path[0] = str(script.resolve().parent)  # as `python script` would
    report = ""
    try:
        with suppress(SystemExit):
            report = dry_run(partial(runpy.run_path, str(script), run_name="__main__"), world, steps).report
    except Exception:
        traceback.print_exc()
        print(f"\nfullshard: the program raised as rank 0 of {world}", file=sys.stderr)
        return 1
    if not report:
        print(f"fullshard: the program ended before step {steps} of its optimizer", file=sys.stderr)
        return 1
    print(f"\nRank 0 of {world}, step {steps}:\n\n{report}\n\n{UNSEEN}")
    return 0
