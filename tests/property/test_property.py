"""Any model, sharded in any way, through any sequence of what users do: see `machine.py`.

`make test` draws the same examples every time. `--property-minutes` (`make test-property MINUTES=30`) draws those of
the day for so long, `--property-seed` those of a number. A failure prints the program that failed, which `cases.py` can
take, and the command that repeats and shrinks it.
"""

from __future__ import annotations

import gc
import time
from datetime import UTC, datetime
from itertools import count

import pytest
import torch
from cases import CASES
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from invariants import rss
from machine import Training
from random_blocks import BlockPlan, ModelPlan
from random_ways import Way

from ways import WAYS

FIRST = 106  # number of the first part's examples
EXAMPLES = 50  # of a part; nearly a second of processor time each
COMMAND = 'python -m pytest tests/property -k "process[0]" --property-seed={}'


@pytest.fixture(autouse=True, scope="module")
def what_is_here_already() -> None:
    """Is not looked at when the machine counts objects, many times."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def draw(number: int, shrinks: bool) -> None:
    """The examples of that number."""
    machine = seed(number)(type("Training", (Training,), {}))
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=12,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine, settings=limits)
    except BaseException as error:
        error.add_note(f"repeat with: {COMMAND.format(number)}\nand put the program into tests/property/cases.py")
        raise


def run(example: object) -> None:
    """One program of rules."""
    machine = Training()
    try:
        example(machine)
        machine.bytes_stay()
        machine.steady_at_end()
    finally:
        machine.end()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_failed_once(case):
    run(case)


@pytest.mark.parametrize(("front", "world"), [*((way, 2) for way in WAYS), ("rows", 4), ("wrapper", 4)])
def test_plain_steps(front, world):
    """Collectives of a step are counted (`plain_counts`), and forty steps take no memory beyond those before."""
    plan = ModelPlan((BlockPlan(), BlockPlan("norm", passes="list"), BlockPlan("twice"), BlockPlan("again")))
    machine = Training()
    try:
        machine.start(plan, Way(front), world)
        machine.accumulate()
        machine.look(0, writes_back=True)
        machine.change_in_between()
        machine.change("mul_")
        machine.step(2, clips=True)
        machine.park()
        machine.steady(vain=True)
        machine.steady()
        before = rss()
        for _ in range(3):
            machine.steady()
        assert rss() - before < 2**20, (rss(), before)
    finally:
        machine.end()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Four parts of the same examples; with `--property-minutes` two workers that draw those of the day."""
    if "part" in metafunc.fixturenames:
        minutes = metafunc.config.getoption("--property-minutes")
        mark = pytest.mark.timeout(1200 + 60 * minutes)
        metafunc.parametrize("part", [pytest.param(part, marks=mark) for part in range(2 if minutes else 4)])


def test_any_sequence_is_one_process(request, part):
    minutes, given = (request.config.getoption(f"--property-{name}") for name in ("minutes", "seed"))
    today = 1000 * datetime.now(UTC).toordinal()
    first = today + 500 * part if minutes else part + (FIRST if given is None else given)
    end = time.monotonic() + 60 * minutes
    for number in count(first):
        draw(number, shrinks=minutes > 0 or given is not None)
        if time.monotonic() > end:
            break
