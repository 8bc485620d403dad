"""Random models, units and uses against one process: what nobody thought of writing a test for.

300 models, each in one front-end: plain ones, ones with uses that differ between ranks and with what MORE names
(tests/random_runs.py), and ones on other meshes, in mixed precision and with errors on one rank (tests/random_wide.py).
Thousands are run by hand (benchmarks/results). A failure says how to repeat it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from random_runs import check_all_wide, check_each, command, wide_command
from random_wide import FRONTS

PLAIN = [range(2000, 2024), range(2024, 2048)]
MORE = [range(3000, 3026), range(3026, 3052), range(3052, 3078)]
WIDE = [(range(7000, 7040), 2), (range(7040, 7080), 2), (range(7080, 7120), 2), (range(7500, 7527), 4)]
WIDE.append((range(7527, 7554), 4))
PATIENCE = 240.0  # seconds; a chunk takes about ten on a machine that does nothing else


def run(run_ranks: Callable, first: str, count: int, check: Callable, *args: object, world: int = 2) -> None:
    try:
        run_ranks(check, *args, world=world, timeout=PATIENCE)
    except Exception as error:  # of ranks that died or hang, only the process that waits for them can say anything
        error.add_note(f"one of {count} from: {first}; the last that ranks printed is the one")
        raise


@pytest.mark.parametrize("seeds", PLAIN, ids=lambda seeds: f"{seeds.start}")
def test_as_one_process(run_ranks, seeds):
    run(run_ranks, command(seeds.start, FRONTS[0], False), len(seeds), check_each, seeds, False)


@pytest.mark.parametrize("seeds", MORE, ids=lambda seeds: f"{seeds.start}")
def test_with_more(run_ranks, seeds):
    run(run_ranks, command(seeds.start, FRONTS[0], True), len(seeds), check_each, seeds, True)


@pytest.mark.parametrize(("seeds", "world"), WIDE, ids=lambda each: f"{getattr(each, 'start', each)}")
def test_wide(run_ranks, seeds, world):
    run(run_ranks, wide_command(seeds.start, world), len(seeds), check_all_wide, seeds, world=world)
