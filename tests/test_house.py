"""The house rules of docs/architecture.md, held by reading the source: floors, forbidden imports, exports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import torch

import fullshard
from fullshard.cli.main import COMMANDS

SOURCE = Path(fullshard.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

FLOORS = {
    "errors": 1, "events": 1, "readers": 1, "text": 1, "containers": 1, "dtypes": 1, "generators": 1,
    "sockets": 1, "version": 1,
    "optimizers": 2, "policies": 2,
    "torch_private": 3, "layout": 3, "watcher": 3,
    "mesh": 4,
    "comm": 5,
    "forms": 6,
    "shard": 7,
    "agreement": 8,
    "runtime": 9,
    "optim": 10,
    "checkpoint": 11,
    "api": 12, "store": 12,
    "insight": 13, "exchange": 13,
    "integrations": 14,
    "cli": 15,
    "wrap": 16, "comm_hooks": 16, "state_dict": 16, "__main__": 16,
    "__init__": 17,
}  # fmt: skip

ADOPT = "integrations/adopt.py"
"""The one file that may name PyTorch's front-ends: it puts names into them, and imports them when it is called."""

FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.testing")
PURE = ("layout", "runtime/trace.py", "agreement/log.py", "watcher/judge.py", "watcher/messages.py", "insight/doctor/")

EXPORTS = [
    "Plan", "Plans", "Rates", "Strategy", "explain_memory", "measure_rates", "plan", "solve",
    "BackwardPrefetch", "Blocks", "CPUOffload", "CPUOffloadPolicy", "CheckpointError", "Comm", "ConfigError",
    "DamagedCheckpointError", "DataParallelMeshDims", "DivergenceError", "Event", "FSDPModule", "FlatParameter",
    "FlatShard", "Folder", "FullOptimStateDictConfig", "FullStateDictConfig", "FullshardError",
    "FullyShardedDataParallel", "GradientReductionHandle", "LayoutError", "Loaded", "LocalOptimStateDictConfig",
    "LocalStateDictConfig", "MemoryUse", "MixedPrecision", "MixedPrecisionPolicy", "Monitor", "Moved",
    "Muon", "NonfiniteGradient",
    "NullComm", "OffloadPolicy", "Offloaded", "OptimStateDictConfig", "OptimStateKeyType", "Owned", "OwnerOptimizer",
    "PhaseError",
    "PrivateNameError", "RecordingComm", "RowShard", "Saving", "ShardPlacementResult", "ShardedGradScaler",
    "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig",
    "StateDictSettings", "StateDictType", "StateOnDisk", "StateOnHost", "StepsInBackward", "TorchComm",
    "UnshardHandle", "adopt",
    "clip_grad_norm_", "convert",
    "describe", "free", "full_parameters", "fully_shard", "join", "keep_gathered", "load", "load_optimizer_state_dict",
    "load_safetensors", "memory_use", "nonfinite_gradients", "offload_by_budget",
    "optimizer_state_dict", "optimizer_state_on_disk", "optimizer_state_on_host", "optimizer_view", "owner_of",
    "park", "record_events", "register_fsdp_forward_method", "resume", "save", "save_safetensors",
    "set_check_nonfinite", "set_token_count", "share_comm_ctx", "step_in_backward", "trace", "verify", "watch", "wrap",
]  # fmt: skip
SAME_CLASS = {
    "MonitorCallback": "one of Lightning's and one of the Trainer's, which users import from different modules",
}
"""Names of classes that mean two things, and which: every other name of a class or file is the only one."""
FACES = {"__init__", "__main__", "wrap", "comm_hooks", "state_dict"}  # names only


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    """Dotted, below `fullshard`; a package's `__init__` is the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


MODULES = {module_of(path): path for path in FILES}


def imports_of(path: Path, for_types: bool = True) -> list[str]:
    """Absolute names of what a file imports, wherever: inside functions and, if `for_types`, for type checking, too."""
    package = ["fullshard", *path.relative_to(SOURCE).parts[:-1]]
    found, tree = [], ast.parse(path.read_text())
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = {id(inner) for node in typed for inner in ast.walk(node)} if not for_types else set()
    for node in [node for node in ast.walk(tree) if id(node) not in left_out]:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            inside = [f"{name}.{alias.name}" for alias in node.names]
            found += [one if one.removeprefix("fullshard.") in MODULES else name for one in inside]
    return found


def ours(path: Path, for_types: bool = True) -> set[str]:
    """The modules of this package that a file imports, as `MODULES` names them."""
    return {
        name.removeprefix("fullshard.")
        for name in imports_of(path, for_types)
        if name.startswith("fullshard.") and name.removeprefix("fullshard.") != module_of(path)
    }


def test_a_floor_imports_only_floors_below_it() -> None:
    for path in FILES:
        mine = package_of(path)
        for name in ours(path):
            other = name.split(".")[0]
            assert other == mine or FLOORS[other] < FLOORS[mine], f"{path} (floor {FLOORS[mine]}) imports {name}"


def depths(modules: set[str]) -> dict[str, int]:
    """How many modules deep each of these imports others of them; a circle raises.

    The name of a class that a module is passed, for type checking, is no import: a Protocol would say it twice.
    """
    graph = {name: {one for one in ours(MODULES[name], for_types=False) if one in modules} for name in modules}
    found: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():  # raises CycleError, which names the circle
        found[name] = 1 + max([found[one] for one in graph[name]], default=0)
    return found


def test_there_are_no_circles() -> None:
    depths(set(MODULES))


def test_a_package_exports_what_others_import() -> None:
    """The `__init__` of a package of the engine lists its face by importing it; what nobody imports is not on it."""
    tests = Path(__file__).parent
    files = [*FILES, *tests.rglob("*.py"), *(tests.parent / "benchmarks").glob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in files}
    for package in ("layout", "mesh", "comm", "forms", "shard", "agreement"):
        face = SOURCE / package / "__init__.py"
        exports = {
            alias.name for node in trees[face].body if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
        }  # fmt: skip
        for path, tree in trees.items():
            if not path.is_relative_to(face.parent):
                for node in ast.walk(tree):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").removeprefix("fullshard.") == package:
                        exports -= {alias.name for alias in node.names}
        exports -= {node.id for node in ast.walk(trees[face]) if isinstance(node, ast.Name)}  # used there
        assert not exports, f"{face} imports {sorted(exports)}, which nobody imports from there"


def test_no_underscore_name_is_imported_from_another_file() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                taken = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not taken, f"{path}:{node.lineno} imports {taken}"


def used_twice(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_a_name_of_a_class_or_file_means_one_thing() -> None:
    """Files of a package's wording, and those named by a command of the command line, are excepted."""
    classes = [
        node.name for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    assert used_twice(classes) == set(SAME_CLASS), "rename one by what it holds"
    commands = {SOURCE / "cli" / f"{command.replace('-', '_')}.py" for command in COMMANDS}
    files = [path.stem for path in FILES if path not in commands and path.stem not in ("__init__", "messages")]
    assert not used_twice(files), "rename one by what it holds"


def test_nothing_imports_pytorchs_own_fsdp_or_testing() -> None:
    for path in FILES:
        for name in imports_of(path):
            assert not name.startswith(FORBIDDEN), f"{path} imports {name}"


def test_nothing_names_pytorchs_own_fsdp_to_import_it() -> None:
    """By `importlib` or `sys.modules`, say; `adopt` alone does."""
    for path in FILES:
        named = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(FORBIDDEN)
        }
        if str(path.relative_to(SOURCE)) != ADOPT:
            assert named <= {"torch.distributed.fsdp"} and (not named or path.name == "private.py"), f"{path}: {named}"


def test_layouts_and_logs_of_passes_are_pure() -> None:
    for path in FILES:
        if str(path.relative_to(SOURCE)).startswith(PURE):
            assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"], path


def test_no_environment_variable_changes_the_engine() -> None:
    for path in FILES:
        if package_of(path) != "cli":
            assert "environ" not in path.read_text() and "getenv" not in path.read_text(), path


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """`torch.set_default_device` is the user's: the host's own buffers would follow it."""
    makers = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.linspace}
    makers |= {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.empty_strided}
    makers |= {torch.rand, torch.randn, torch.randint, torch.randperm}
    names = {maker.__name__ for maker in makers}
    unnamed = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in names}
        and not {"device", None} & {keyword.arg for keyword in node.keywords}  # None: **keywords
    ]
    assert not unnamed, unnamed


def test_exported_names_are_these() -> None:
    assert sorted(fullshard.__all__) == sorted(EXPORTS)
    for name in EXPORTS:
        assert getattr(fullshard, name).__doc__, f"{name} has no docstring"


def test_names_are_imported_when_they_are_used() -> None:
    """`import fullshard`, help and missing paths cost no import of torch; type checkers see the same names."""
    program = (
        "import sys, fullshard.cli.main as cli; "
        "codes = [cli.main([*name, '--help']) for name in [[], *([name] for name in cli.COMMANDS)]]; "
        "refused = [cli.main(words.split()) for words in ('trace nowhere', 'inspect nowhere', 'convert nowhere b')]; "
        "assert 'torch' not in sys.modules and not any(codes) and refused == [2, 2, 2]; "
        "import fullshard; fullshard.fully_shard, fullshard.wrap.ModuleWrapPolicy, fullshard.state_dict"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    only = {
        ast.unparse(node.test): node.body
        for node in ast.parse((SOURCE / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    }
    for_checkers = {
        alias.name: f".{node.module or alias.name}"
        for node in only["TYPE_CHECKING"]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_checkers == {**fullshard._HOMES, **{name: f".{name}" for name in fullshard._MODULES}}
    at_run_time = [node.name for node in only["not TYPE_CHECKING"] if isinstance(node, ast.FunctionDef)]
    assert at_run_time == ["__getattr__"]  # type checkers that saw it would accept misspelt names


def test_modules_of_tests_have_names_of_their_own():
    """Each folder of tests is on the path: of two files of one name pytest collects one, where both are run."""
    names = [file.stem for file in Path(__file__).parent.rglob("*.py") if file.stem not in ("__init__", "conftest")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"{sorted(twice)}: rename one of each"
