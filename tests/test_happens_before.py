"""No two streams race, in any setting; and every wait of the design is seen to matter: without it, some race.

One rank of a group that moves no data: which stream waits for which does not depend on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from happens_before import muted, watched
from streams import MIXED, MUTATIONS, OTHERWISE, SCENARIOS, SUBCLASSES, build, races_in, train
from training import Options
from wrapped import Wrapping


def races_of(options: Options | Wrapping, offload: bool, **how: Any) -> tuple[list[str], set[str], int]:
    with watched(offload) as world:
        with muted(world):  # a model that is made elsewhere
            model = build(options)
        train(model, **how)
    return list(dict.fromkeys(world.races)), {stream.name for stream in world.streams}, world.kernels


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


@offloads
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_races_of_tensor_subclasses(fake_world: Callable, scenario: str, offload: bool) -> None:
    fake_world(2)
    assert not races_in(scenario, Options(), offload, example=SUBCLASSES)


@pytest.mark.parametrize("wait", ["inward waits for compute", "a gather waits for the copy in"])
def test_a_wait_that_is_taken_out_is_missed_of_tensor_subclasses(fake_world: Callable, wait: str) -> None:
    fake_world(2)
    assert races_in("plain", Options(), True, wait, SUBCLASSES), "no race was reported"


@pytest.mark.parametrize("wait", MUTATIONS)
def test_a_wait_that_is_taken_out_is_missed(fake_world: Callable, wait: str) -> None:
    """And nothing is reported with it: of two ranks in `test_no_races_in_scenario`."""
    _, scenario, offload = MUTATIONS[wait]
    options, ranks = OTHERWISE.get(wait, (MIXED, 2))
    fake_world(ranks)
    assert races_in(scenario, options, offload, wait), "no race was reported"
    assert wait not in OTHERWISE or not races_in(scenario, options, offload)
