"""`fullshard dry-run SCRIPT ARGS...`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path

from .main import own_arguments, refuse

USAGE = """usage: fullshard dry-run [--world N] [--ranks-per-node N] [--steps N] [--adopt [--lenient]] SCRIPT ARGS...

Run one rank of a training program as if there were N ranks, to find errors in shapes, placements, layouts and memory
before booking a cluster. The script runs unchanged, on its own device, but its process groups are fake: collectives do
nothing. After the given number of optimizer steps, ends the script and prints its units, the rank's memory, and the
bytes it sends per step.

  --world N            number of ranks (default: 8)
  --ranks-per-node N   ranks on one machine (default: 8, or all if there are fewer)
  --steps N            optimizer steps (default: 2)
  --adopt              for a program of PyTorch's FSDP: run it on Fullshard, as `fullshard adopt` does
  --lenient            with --adopt: as there

Example: fullshard dry-run --world 128 examples/dry_run.py

Exit code: 0 the script took all steps, 1 it raised an error or ended early, 2 bad input."""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = {"--world": 8, "--ranks-per-node": 0, "--steps": 2}
    words, flags = list(arguments), {"--adopt": False, "--lenient": False}
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        if name in flags and not value:
            flags[name] = True
            continue
        if name not in options:
            return refuse(f"there is no option {name!r} (fullshard dry-run --help)")
        value = value or (words.pop(0) if words else "")
        if not value.isdigit() or int(value) < 1:
            return refuse(f"{name} needs a positive integer, not {value!r}")
        options[name] = int(value)
    if not words or not Path(words[0]).is_file():
        return refuse(f"there is no file {words[0]}" if words else "a script is missing (fullshard dry-run --help)")
    script, world, per_node = Path(words[0]), options["--world"], options["--ranks-per-node"]
    if per_node and per_node < world and world % per_node:
        return refuse(f"--ranks-per-node {per_node} does not divide --world {world}")
    return _run_script(script, own_arguments(words), world, per_node, options["--steps"], flags)


def _run_script(
    script: Path, arguments: list[str], world: int, ranks_per_node: int, steps: int, flags: dict[str, bool]
) -> int:
    """Run the script and print the report; the exit code."""
    if flags["--adopt"]:
        from ..integrations.adopt import adopt

        adopt(flags["--lenient"])
    from ..insight.rehearsal import UNSEEN, NotSharded, dry_run

    sys.argv = [str(script), *arguments]
    node = ranks_per_node or min(8, world)
    launcher = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": node}
    os.environ.update({name: str(value) for name, value in launcher.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.path[0] = str(script.resolve().parent)  # as `python script` would
    report, taken, ended = "", 0, ""
    try:
        report, taken = dry_run(partial(runpy.run_path, str(script), run_name="__main__"), world, steps)
    except SystemExit as stop:
        ended = f" with sys.exit({stop.code!r})"
    except NotSharded as error:  # a traceback of the step would not help
        refuse(str(error))
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException:  # torch.distributed.checkpoint raises one that is not an `Exception`
        traceback.print_exc()
        print(f"\nfullshard: the program raised an error as rank 0 of {world}", file=sys.stderr)
        return 1
    if not report:
        print(
            f"fullshard: the program ended{ended} before step {steps}: optimizers of this process took {taken}; "
            "processes that it starts are not dry-run",
            file=sys.stderr,
        )
        return 1
    print(f"\nRank 0 of {world}, step {steps}:\n\n{report}\n\n{UNSEEN}")
    return 0
