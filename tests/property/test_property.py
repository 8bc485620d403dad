"""Any model, sharded in any way, through any sequence of what users do: see `machine.py`.

Each commit draws other examples, the same ones wherever it is checked out. A failure prints the command that repeats
it, and shrinks it; `--property-seed` with other numbers draws more.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Training

EXAMPLES = 15  # of a part; about a second of processor time each
COMMAND = 'python -m pytest tests/property -k "process[0]" --property-seed={}'


def commit() -> int:
    """A number for what is checked out; 0 without git."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return zlib.crc32(head.stdout.encode()) % 1_000_000


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(4))
def test_any_sequence_is_one_process(request, part):
    given = request.config.getoption("--property-seed")
    number = part + (commit() * 10 if given is None else given)
    torch.set_num_threads(1)
    machine = seed(number)(type("Training", (Training,), {}))
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=12,
        database=None,
        deadline=None,
        phases=(Phase.generate,) if given is None else (Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine, settings=limits)
    except BaseException as error:
        error.add_note(f"repeat with: {COMMAND.format(number)}")
        raise
