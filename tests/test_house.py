"""The house rules of docs/architecture.md, held by reading the source: floors, forbidden imports, exports, sizes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fullshard

SOURCE = Path(fullshard.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

FLOORS = {
    "errors": 1, "events": 1, "names": 1, "containers": 1, "dtypes": 1, "policies": 2,
    "torch_private": 3, "layout": 3,
    "mesh": 4,
    "comm": 5,
    "shard": 6,
    "runtime": 7,
    "checkpoint": 8, "optim": 8, "insight": 8,
    "api": 9,
    "cli": 10, "integrations": 10,
    "wrap": 11, "comm_hooks": 11, "state_dict": 11,
    "__init__": 12,
}  # fmt: skip

FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.testing")
PURE = ("layout", "runtime/schedule.py")

EXPORTS = [
    "Blocks",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Comm",
    "ConfigError",
    "DivergenceError",
    "DataParallelMeshDims",
    "Event",
    "FSDPModule",
    "FlatParameter",
    "FlatShard",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "FullshardError",
    "LayoutError",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryUse",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "NullComm",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PhaseError",
    "RecordingComm",
    "RowShard",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TorchComm",
    "UnshardHandle",
    "clip_grad_norm_",
    "describe",
    "fully_shard",
    "load_optimizer_state_dict",
    "memory_use",
    "optimizer_state_dict",
    "optimizer_view",
    "record_events",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "wrap",
]


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Absolute names of what a file imports, and whether only for type checking."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    package = ["fullshard", *path.relative_to(SOURCE).parts[:-1]]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *([node.module] if node.module else [])])]
        else:
            continue
        found.extend((name, id(node) in typing_only) for name in names)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_floor_imports_only_floors_below_it(path: Path) -> None:
    mine = package_of(path)
    for name, typing_only in imports_of(path):
        if not name.startswith("fullshard.") or typing_only:
            continue
        other = name.split(".")[1]
        assert other == mine or FLOORS[other] < FLOORS[mine], f"{path} (floor {FLOORS[mine]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_imports_pytorchs_own_fsdp_or_testing(path: Path) -> None:
    for name, _ in imports_of(path):
        assert not name.startswith(FORBIDDEN), f"{path} imports {name}"


def test_layouts_and_schedule_are_pure() -> None:
    for path in FILES:
        if str(path.relative_to(SOURCE)).startswith(PURE):
            assert not [name for name, _ in imports_of(path) if name.split(".")[0] == "torch"], path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, f"{path} is long; a file has one subject"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{path}:{node.lineno} {node.name} has {lines} lines"


def test_no_environment_variable_changes_the_engine() -> None:
    for path in FILES:
        if package_of(path) != "cli":
            assert "environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_exported_names_are_these() -> None:
    assert sorted(fullshard.__all__) == sorted(EXPORTS)
    for name in EXPORTS:
        assert getattr(fullshard, name).__doc__, f"{name} has no docstring"
