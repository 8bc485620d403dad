"""Random models, units and uses against one process: what nobody thought of writing a test for.

The models are in tests/random_models.py, what happens to them in tests/random_runs.py. A failure says how to repeat it.
"""

from __future__ import annotations

import pytest

from random_runs import FRONTS, check_all, command

OLD = [range(2000, 2012), range(2012, 2024), range(2040, 2050)]
MORE = [range(3000, 3010), range(3010, 3020)]  # with uses that differ, in-place starts, and what MORE names


def run(run_ranks, seeds: range, front: object, more: bool) -> None:
    try:
        run_ranks(check_all, seeds, front, more)
    except Exception as error:  # of ranks that died or hang, only the process that waits for them can say anything
        error.add_note(f"repeat with: {command(seeds.start, front, more)} --count {len(seeds)}")
        raise


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize("seeds", OLD, ids=lambda seeds: f"{seeds.start}")
def test_as_one_process(run_ranks, seeds, front):
    run(run_ranks, seeds, front, more=False)


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize("seeds", MORE, ids=lambda seeds: f"{seeds.start}")
def test_with_more(run_ranks, seeds, front):
    run(run_ranks, seeds, front, more=True)
