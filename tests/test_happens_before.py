"""No two streams race, in any setting; and every wait of the design is seen to matter: without it, some race."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fullshard import Blocks
from happens_before import muted, watched
from streams import MUTATIONS, SCENARIOS, build, races_in, train
from training import Options
from wrapped import Wrapping

pytestmark = pytest.mark.gloo("streams are simulated by replacing parts of torch")


def races_of(options: Options | Wrapping, offload: bool, **how: Any) -> tuple[list[str], set[str], int]:
    with watched(offload) as world:
        with muted(world):  # a model that is made elsewhere
            model = build(options)
        train(model, **how)
    return list(dict.fromkeys(world.races)), {stream.name for stream in world.streams}, world.kernels


CASES: dict[str, tuple[Options | Wrapping, dict[str, Any]]] = {
    "rows": (Options(), {}),
    "flat": (Options(layout="flat"), {}),
    "blocks": (Options(layout=Blocks("row")), {}),
    "bf16": (Options(precision="bf16"), {}),
    "bf16, flat, bf16 reduced": (Options(layout="flat", precision="bf16_reduce"), {}),
    "accumulation": (Options(layout="flat"), {"micro_batches": 3}),
    "accumulation, rows": (Options(precision="bf16"), {"micro_batches": 2}),
    "accumulation without sync": (Options(), {"micro_batches": 3, "sync": False}),
    "clipping": (Options(layout="flat"), {"clips": True}),
    "kept gathered": (Options(reshard=False), {}),
    "prefetch of three": (Options(prefetch=3), {}),
    "no prefetch": (Options(prefetch=0), {}),
    "wrapper": (Wrapping(), {"micro_batches": 2, "sync": False, "clips": True}),
    "wrapper, original parameters": (Wrapping(orig=True, prefetch="BACKWARD_POST"), {"micro_batches": 2}),
}
FOUR = {
    "hybrid": (Options(mesh="hybrid"), {"micro_batches": 2}),
    "hybrid, flat": (Options(mesh="hybrid", layout="flat", precision="bf16"), {"clips": True}),
    "reshard to two": (Options(reshard=2), {}),
    "wrapper, hybrid": (Wrapping(strategy="HYBRID_SHARD", groups="mesh"), {}),
}
offloads = pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])


def check(results: list[tuple[list[str], set[str], int]], offload: bool, groups: int) -> None:
    for races, streams, kernels in results:
        assert not races, "\n".join(races[:8])
        assert kernels > 500
        assert {"inward", "outward"} <= streams if offload else "inward" not in streams
        assert sum(name.startswith("group") for name in streams) >= groups


@offloads
@pytest.mark.parametrize("case", CASES)
def test_no_races(run_ranks: Callable, case: str, offload: bool) -> None:
    options, how = CASES[case]
    check(run_ranks(races_of, options, offload, **how), offload, 1)


@offloads
@pytest.mark.parametrize("case", FOUR)
def test_no_races_on_four_ranks(run_ranks: Callable, case: str, offload: bool) -> None:
    options, how = FOUR[case]
    check(run_ranks(races_of, options, offload, world=4, **how), offload, 2)


@offloads
def test_no_races_on_one_rank(run_ranks: Callable, offload: bool) -> None:
    check(run_ranks(races_of, Options(), offload, world=1, micro_batches=2), offload, 0)


@offloads
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_races_in_scenario(run_ranks: Callable, scenario: str, offload: bool) -> None:
    for options in (MIXED,) if offload else (Options(), MIXED):
        for races in run_ranks(races_in, scenario, options, offload):
            assert not races, "\n".join(races[:8])


MIXED = Options(layout="flat", precision="bf16")
SEEN: dict[str, tuple[str, Options, bool, int]] = {  # where each is missed: scenario, options, offload, ranks
    "inward waits for compute": ("plain", MIXED, True, 2),
    "a gather waits for the copy in": ("plain", MIXED, True, 2),
    "compute waits for the lane": ("plain", MIXED, True, 1),
    "compute waits for a gather": ("plain", MIXED, False, 2),
    "compute waits for a reduction": ("plain", MIXED, False, 2),
    "compute waits for an all-reduce": ("plain", Options(mesh="hybrid"), False, 4),
    "a staged shard is held": ("plain", replace(MIXED, prefetch=3), True, 2),
    "outward waits for compute": ("plain", MIXED, True, 2),
    "a slice is held": ("plain", MIXED, True, 2),
    "compute waits for the third last slice": ("plain", MIXED, True, 2),
    "the host waits before it adds": ("accumulating", MIXED, True, 2),
    "the host waits for gradients": ("plain", MIXED, True, 2),
    "the host waits at the end of a pass": ("evaluating", MIXED, True, 2),
    "the host waits at the end of a backward": ("swapped_after_accumulation", MIXED, True, 2),
    "the host waits for unshard": ("swapped_while_unsharded", MIXED, True, 2),
    "the host waits in reshard": ("swapped_after_a_gather_in_vain", MIXED, True, 2),
    "the host waits in recovery": ("swapped_after_a_broken_backward", MIXED, True, 2),
    "the host waits before hooks": ("stepped_by_hooks", MIXED, True, 2),
    "a stream waits for the one before it": ("trained_under_side", MIXED, False, 2),
    "memory goes back to who has waited": ("unsharded_under_side", MIXED, True, 2),
    "... when a gather is waited for": ("unsharded_under_side", MIXED, False, 2),
    "... when a unit is freed": ("resharded_under_side", MIXED, False, 2),
    "... when a reduction is waited for": ("trained_under_side", MIXED, False, 2),
    "... of what was staged": ("unsharded_under_side", MIXED, False, 2),
    "... of a freed unit": ("unsharded_under_side", MIXED, False, 2),
    "... of collected gradients": ("accumulated_under_side", MIXED, False, 2),
}


def test_every_wait_that_can_be_taken_out_is() -> None:
    assert SEEN.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("wait", SEEN)
def test_a_wait_that_is_taken_out_is_missed(run_ranks: Callable, wait: str) -> None:
    scenario, options, offload, world = SEEN[wait]
    for found in run_ranks(races_in, scenario, options, offload, wait, world=world):
        assert found, "no race was reported"
    if (options, world) == (MIXED, 2):
        return  # without the mutation: `test_no_races_in_scenario`
    for found in run_ranks(races_in, scenario, options, offload, world=world):
        assert not found, "\n".join(found[:8])
