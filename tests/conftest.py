"""Fixtures for every test: rank processes, and a fake process group in this process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the rank processes

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import memory_ranks
import ranks
from error_recorder import Recorder
from ranks import RankPools

# How long an example takes says how loaded the machine is: nothing of ours.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gloo", action="store_true", help="ranks are processes over gloo in all tests")
    parser.addoption("--all-ways", action="store_true", help="all cases, of every layout")
    parser.addoption("--property-seed", type=int, help="draw the examples of this number, and shrink what fails")
    parser.addoption("--property-minutes", type=float, default=0, help="draw new examples for so long (tests/property)")
    parser.addoption("--record-errors", type=Path, metavar="FILE", help="add which test raises which error to FILE")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Programs of client libraries need packages of their own: they are run by name, `make test-clients`."""
    return True if collection_path.name == "clients" and not any("clients" in one for one in config.args) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of cases in many ways a part is run, the same in each run; `--all-ways` takes all.

    Left out are those marked `further`; of the cases of a test on ranks an eighth, of one in `_MANY` fewer, by their
    names; and so of corner cases with a layout or wrapper among their parameters: most of those of `blocks` and
    `owner`, which differ from `flat` in the plan alone. Of every test one case is run. The machine of
    `tests/property` goes through this in other ways.
    """
    if config.getoption("--all-ways"):
        return
    kept = [item for item in items if _number(item) == 0]
    tests = {_test_of(item) for item in kept}
    lowest: dict[tuple[str, str], pytest.Item] = {}
    for item in items:
        if _test_of(item) not in tests and (number := _number(item)) is not None:
            known = lowest.get(_test_of(item))
            if known is None or number < (_number(known) or 0):
                lowest[_test_of(item)] = item
    chosen = {id(item) for item in [*kept, *lowest.values()]}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def _test_of(item: pytest.Item) -> tuple[str, str]:
    return str(item.path), getattr(item, "originalname", item.name)


def _number(item: pytest.Item) -> int | None:
    """0 for a case that is run; more for one that is not, of which the test's lowest is; None for one never run."""
    if item.get_closest_marker("further") is not None:
        return None
    call = getattr(item, "callspec", None)
    given = set(map(str, call.params.values())) if call is not None else set()
    if not given or "/errors/" in str(item.path):  # each is the example of an error
        return 0
    part = _MANY.get(item.path.stem, 1) * (_PART if "run_ranks" in getattr(item, "fixturenames", ()) else 1)
    if "/corners/" in str(item.path):
        part = max([every for way, every in _CORNERS.items() if way in given], default=part)
    return zlib.crc32(item.name.encode()) % part


_PART = 8
_CORNERS = {"rows": 24, "flat": 30, "wrapper": 30, "originals": 30, "blocks": 60, "owner": 60}
_MANY = {
    **dict.fromkeys(("test_happens_before", "test_settings", "test_packed", "test_delayed", "test_wrapper"), 8),
    **dict.fromkeys(("test_autograd", "test_state_dict_helpers", "test_user_gradients", "test_models"), 6),
    **dict.fromkeys(("test_stuck", "test_compiled_optimizers"), 6),
    **dict.fromkeys(("test_initialisation", "test_recipes", "test_gather_extensions"), 4),
    **dict.fromkeys(("test_verify", "test_tensor_parallel", "test_known", "test_kinds", "test_benchmark_report"), 4),
    **dict.fromkeys(("test_history", "test_damage", "test_convert"), 3),
    **dict.fromkeys(("test_offload", "test_wrapper_state", "test_method_effects", "test_wrapper_events"), 3),
    **dict.fromkeys(("test_optimizers", "test_refused", "test_unusual_dtypes"), 3),
    **dict.fromkeys(("test_out_of_memory", "test_engine", "test_interchange", "test_checkpoints"), 2),
    **dict.fromkeys(("test_comm_methods", "test_dcp_folders", "test_safetensors", "test_fsdp1", "test_parking"), 2),
    **dict.fromkeys(("test_process_groups", "test_several_roots", "test_wrapper_optimizer", "test_precision"), 2),
    **dict.fromkeys(("test_save_and_load", "test_wrapper_parts", "test_wrapper_together", "test_wrapper_summon"), 2),
    **dict.fromkeys(("test_wrapper_precision", "test_full_parameters", "test_methods", "test_extensions"), 2),
}


@pytest.fixture(scope="session")
def error_recorder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorder | None]:
    """What `--record-errors` asks for; None without it."""
    result = request.config.getoption("--record-errors")
    recorder = None
    if result is not None:
        recorder = Recorder(result.absolute(), tmp_path_factory.mktemp("errors") / "codes")
        ranks.NOTES = recorder.notes
    yield recorder
    ranks.NOTES = None


@pytest.fixture(autouse=True)
def errors_of_this_test(request: pytest.FixtureRequest, error_recorder: Recorder | None) -> Iterator[None]:
    """With `--record-errors`: which errors the test raised. Those for which the error index names it are among them."""
    if error_recorder is None:
        yield
        return
    error_recorder.codes_since()
    yield
    codes = error_recorder.codes_since()
    test = request.node.nodeid
    error_recorder.write(test, codes)
    missing = error_recorder.promised(test) - set(codes)
    assert not missing, f"the error index says that this test raises {sorted(missing)}; it raised {codes}"


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """The session's pools of gloo ranks, one per world size, each started on first use."""
    pools = RankPools(tmp_path_factory.mktemp("ranks"))
    yield pools
    pools.close()


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Callable:
    """`run_ranks(fn, *args, world=2, timeout=60)`: a module-level function on every rank; results by rank.

    Ranks are threads (`memory_ranks.py`); processes over gloo for tests marked `gloo(reason)`, and with `--gloo`.
    """
    if request.config.getoption("--gloo") or request.node.get_closest_marker("gloo"):
        return request.getfixturevalue("rank_pools").run
    return memory_ranks.run


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """`fake_world(world, rank=0)`: this process as one rank of a group whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    environment = dict(os.environ)

    def start(world: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
