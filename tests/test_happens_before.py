"""No two streams race, in any setting; and every wait of the design is seen to matter: without it, some race.

One rank of a group that moves no data: which stream waits for which does not depend on values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from happens_before import muted, watched
from streams import MUTATIONS, SCENARIOS, build, races_in, train
from training import Options
from wrapped import Wrapping


def races_of(options: Options | Wrapping, offload: bool, **how: Any) -> tuple[list[str], set[str], int]:
    with watched(offload) as world:
        with muted(world):  # a model that is made elsewhere
            model = build(options)
        train(model, **how)
    return list(dict.fromkeys(world.races)), {stream.name for stream in world.streams}, world.kernels


MIXED = Options(layout="flat", precision="bf16")
CASES: dict[str, tuple[int, Options | Wrapping, dict[str, Any]]] = {  # ranks, how it is sharded and trained
    "rows": (2, Options(), {"micro_batches": 2, "sync": False}),
    "clipping": (2, MIXED, {"micro_batches": 3, "clips": True}),
    "kept gathered": (2, Options(reshard=False), {}),
    "prefetch of three": (2, Options(prefetch=3), {}),
    "no prefetch": (2, Options(prefetch=0), {}),
    "wrapper": (2, Wrapping(), {"micro_batches": 2, "sync": False, "clips": True}),
    "wrapper, original parameters": (2, Wrapping(orig=True, prefetch="BACKWARD_POST"), {"micro_batches": 2}),
    "one rank": (1, Options(), {"micro_batches": 2}),
    "hybrid": (4, Options(mesh="hybrid"), {"micro_batches": 2}),
    "reshard to two": (4, Options(reshard=2), {}),
    "wrapper, hybrid": (4, Wrapping(strategy="HYBRID_SHARD", groups="mesh"), {}),
}
offloads = pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])


@offloads
@pytest.mark.parametrize("case", CASES)
def test_no_races(fake_world: Callable, case: str, offload: bool) -> None:
    ranks, options, how = CASES[case]
    fake_world(ranks)
    races, streams, kernels = races_of(options, offload, **how)
    assert not races, "\n".join(races[:8])
    assert kernels > 400
    assert {"inward", "outward"} <= streams if offload else "inward" not in streams
    assert sum(name.startswith("group") for name in streams) >= ranks // 2


@offloads
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_races_in_scenario(fake_world: Callable, scenario: str, offload: bool) -> None:
    fake_world(2)
    assert not races_in(scenario, MIXED, offload)


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
def test_a_wait_that_is_taken_out_is_missed(fake_world: Callable, wait: str) -> None:
    """And nothing is reported with it: of two ranks in `test_no_races_in_scenario`."""
    scenario, options, offload, ranks = SEEN[wait]
    fake_world(ranks)
    assert races_in(scenario, options, offload, wait), "no race was reported"
    assert (options, ranks) == (MIXED, 2) or not races_in(scenario, options, offload)
