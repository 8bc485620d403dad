"""`adopt` itself: names, what was bound before, what is refused, the command, and PyTorch's own users of FSDP."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import script
from torch import nn

import fullshard
import fullshard.state_dict
from fullshard.cli.adopt import run as command
from fullshard.integrations.adopt import OURS, PUBLIC
from ways import on_ranks

FACES = (fullshard, fullshard.wrap, fullshard.state_dict)
INSIDE = ("FlatParamHandle", "HandleTrainingState", "StateDictOptions")  # PyTorch's secrets; and what both share


@on_ranks(by="run_adopted")
def test_every_public_name_is_ours():
    """PyTorch's public names that still are PyTorch's, or not what Fullshard exports."""
    found = []
    for module_name in PUBLIC:
        module = sys.modules[module_name]
        for name, value in vars(module).items():
            origin = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and origin.startswith(PUBLIC) and name not in INSIDE:
                found.append(f"{module_name}.{name}")
        for name in OURS:
            theirs = getattr(module, name, None)
            faces = [getattr(face, name) for face in FACES if hasattr(face, name)]
            if (
                theirs is not None
                and not isinstance(theirs, ModuleType)
                and name != "TrainingState"
                and not any(theirs is one for one in faces)
            ):
                found.append(f"{module_name}.{name} is not fullshard's")
    return found


FIRST = """
import sys, warnings
import torch.distributed.pipelining.stage, torch.distributed.pipelining.schedules
import torch.distributed._composable.replicate_with_fsdp, torch.distributed._tools.fsdp2_mem_tracker
import torch.distributed.optim.named_optimizer
import fullshard
first = fullshard.adopt(lenient={lenient})
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
assert fullshard.adopt(lenient={lenient}) is first
assert FSDP is fullshard.FullyShardedDataParallel and MixedPrecision is fullshard.MixedPrecision
for module, name in (
    ("pipelining.stage", "FSDPModule"), ("pipelining.stage", "fully_shard"), ("pipelining.schedules", "UnshardHandle"),
    ("pipelining.schedules", "FSDPModule"), ("_composable.replicate_with_fsdp", "FSDPModule"),
    ("_tools.fsdp2_mem_tracker", "FSDPModule"), ("checkpoint.state_dict", "get_model_state_dict"),
):
    assert getattr(sys.modules["torch.distributed." + module], name).__module__.startswith("fullshard."), (module, name)
assert torch.distributed.optim.named_optimizer.FSDP is FSDP
from torch.distributed.fsdp._runtime_utils import _lazy_init
assert _lazy_init.__module__.startswith("fullshard.")
"""
REFUSED = """
try:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
except fullshard.PrivateNameError as error:
    assert "fullshard.describe" in str(error) and "_fsdp_state.FSDPState" in str(error), error
    assert "program.py:" in str(error), error
else:
    raise AssertionError("a private class was handed out")
import torch.distributed.fsdp._fully_shard._fsdp_param_group as private
try:
    private.FSDPParamGroup = object
except ImportError as error:
    assert "replaces" in str(error), error
else:
    raise AssertionError("a private class was replaced")
try:
    private.NewName = type("NewName", (), {})
except ImportError as error:
    assert "replaces" in str(error), error
else:
    raise AssertionError("a name was added to a private module")
"""
WARNED = """
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
assert FSDPState.__module__.startswith("torch.") and len(told) == 1 and "FSDPState" in str(told[0].message), told
assert told[0].filename.endswith("program.py"), told[0].filename
"""

TOO_LATE = """
import fullshard

{program}

def adopt():
    try:
        fullshard.adopt(lenient=True)
    except fullshard.PhaseError as error:
        assert {named!r} in str(error) and "python -m fullshard adopt" in str(error), error
    else:
        raise AssertionError("adopted late")
    from torch.distributed.fsdp import FullyShardedDataParallel
    assert FullyShardedDataParallel.__module__.startswith("torch."), "something was replaced"

{call}
"""
START = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import torch.distributed.fsdp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
theirs = [torch.distributed.fsdp]
layer = torch.nn.Linear(2, 2)
"""
LATE = {
    "a name": ("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard", "FSDP, fully_shard"),
    "an enumeration": ("from torch.distributed.fsdp import ShardingStrategy", "__main__ imported ShardingStrategy"),
    "a module": ("import torch.distributed.fsdp as theirs", "__main__ imported theirs"),
    "state dict functions": (
        "from torch.distributed.checkpoint.state_dict import get_state_dict",
        "__main__ imported get_state_dict",
    ),
    "another module of the program": ("import holder", "holder imported Wrapper"),
    "a library that is changed": ("import transformers.modeling_utils", "transformers.modeling_utils is imported"),
    "a class": (
        "import torch.distributed.fsdp\nclass Mine(torch.distributed.fsdp.FullyShardedDataParallel): pass",
        "class Mine(FullyShardedDataParallel)",
    ),
    "a sharded module": (
        START + "torch.distributed.fsdp.fully_shard(layer, mesh=init_device_mesh('cpu', (1,)))",
        "class FSDPLinear(FSDPModule)",
    ),
    "a wrapped module": (
        START + "model = theirs[0].FullyShardedDataParallel(layer, device_id=torch.device('cpu'))",
        "an instance of FullyShardedDataParallel",
    ),
    "a local variable": (
        "def main():\n    from torch.distributed.fsdp import FSDPModule\n    adopt(FSDPModule is None)",
        "main(), ",
    ),
}


def run(folder: Path, program: str) -> str:
    (folder / "holder.py").write_text("from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper\n")
    (folder / "program.py").write_text(program)
    return script(str(folder / "program.py"))


@pytest.mark.parametrize("lenient", [False, True])
def test_all_is_replaced_and_private_names_are_refused(tmp_path, lenient):
    """Or warned of, leniently; also in modules of PyTorch's that were imported before."""
    run(tmp_path, FIRST.format(lenient=lenient) + (WARNED if lenient else REFUSED))


@pytest.mark.parametrize("what", LATE)
def test_adopting_late_is_refused_by_name(tmp_path, what):
    program, named = LATE[what]
    call = "main()" if "def main" in program else "adopt()"
    text = TOO_LATE.format(program=program, named=named, call=call)
    run(tmp_path, text.replace("def adopt():", "def adopt(*_):"))


PROGRAM = """
import sys
import torch.multiprocessing as mp
from torch.distributed.fsdp import FSDPModule

def child(index):
    import fullshard
    assert FSDPModule is fullshard.FSDPModule, "a process that an adopted program starts is not adopted"
    print("child", index, __name__)

if __name__ == "__main__":
    print("main", FSDPModule.__module__, sys.argv[1:])
    mp.spawn(child, nprocs=1)
    sys.exit(3)
"""


def test_the_command_runs_a_script_and_what_it_starts(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    told = script("-m", "fullshard", "adopt", str(path), "--", "one", "--two", code=3)
    assert "adopts this program" in told and "main fullshard.api.functional.module ['one', '--two']" in told
    assert "child 0 __mp_main__" in told
    assert ": 1 name\n" in told and ": 1 names" not in told


def test_the_command_runs_a_module_and_what_it_starts(tmp_path):
    """A part of a package, which imports from beside it; and a package, by its `__main__`."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").touch()
    for name in ("program", "__main__"):
        (package / f"{name}.py").write_text("from . import beside\n" + PROGRAM)
    for name in ("package.program", "package"):
        told = script("-m", "fullshard", "adopt", "-m", name, "one", code=3, PYTHONPATH=str(tmp_path))
        assert "main fullshard.api.functional.module ['one']" in told and "child 0 __mp_main__" in told


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert command([str(tmp_path / "none.py")]) == 2 and "there is no file" in capsys.readouterr().err
    assert command(["--strict"]) == 2 and "there is no option '--strict'" in capsys.readouterr().err
    assert command(["--lenient", "-m"]) == 2 and "-m needs a module" in capsys.readouterr().err
    assert command(["--help"]) == 0 and "--lenient" in capsys.readouterr().out


class Stage(nn.Module):
    """A pipeline's only stage: two layers that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "Interleaved1F1B"])
@on_ranks(by="run_adopted")
def test_a_pipeline_reduces_once_for_all_micro_batches(kind):
    """Each rank is a pipeline by itself, of one stage or of two that take turns; data parallel over both ranks."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    parts = 2 if kind == "Interleaved1F1B" else 1

    def made() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*[Stage() for _ in range(parts)])

    plain, model = made(), made()
    mesh = init_device_mesh("cpu", (2,))
    for part in model:
        for layer in part.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, at, parts, cpu, group=alone) for at, part in enumerate(model)]
    loss: Any = nn.functional.mse_loss
    given = stages if parts == 2 else stages[0]
    schedule: Any = getattr(pipelining, f"Schedule{kind}")(given, n_microbatches=3, loss_fn=loss)
    data = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(2))  # steps, ranks, rows, width
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
    for step in range(2):
        mine = data[step, dist.get_rank()]
        with fullshard.record_events() as events:
            schedule.step(mine, target=mine.flip(0))
        verbs = [event.verb for event in events if event.unit != "(root)"]
        learns = 2 * (step == 0 and parts == 2)  # PyTorch runs a backward first, to learn shapes
        assert verbs.count("reduce") == 2 * parts + learns, verbs
        assert parts == 2 or (
            "reduce" not in verbs[: verbs.index("collect") + 1] and verbs.count("collect") >= 2 * parts
        ), verbs
        both = data[step].flatten(0, 1)
        loss(plain(both), data[step].flip(1).flatten(0, 1)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-6)


@on_ranks(by="run_adopted")
def test_activation_checkpoints_are_applied_by_our_policies():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

    for policy in (ModuleWrapPolicy({nn.Linear}), CustomPolicy(lambda module: isinstance(module, nn.Linear))):
        model = Stage()
        checkpoint_wrapper.apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert all(isinstance(layer, checkpoint_wrapper.CheckpointWrapper) for layer in model.layers), policy


@on_ranks(by="run_adopted")
def test_marks_are_there_and_true():
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
    from torch.distributed.fsdp.fully_sharded_data_parallel import TrainingState
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    for originals in (True, False):
        inner = Stage()
        model: Any = FullyShardedDataParallel(
            inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=originals
        )
        layer: Any = inner.layers[0]
        assert inner._is_fsdp_managed_module and layer.module._is_fsdp_managed_module
        assert inner._fsdp_use_orig_params is originals and model._use_orig_params is originals
        assert model._is_root is None and model._device_mesh is None and model.training_state is TrainingState.IDLE
        states = []
        layer.module.register_forward_pre_hook(lambda *_, m=model, to=states: to.append(m.training_state))
        model(torch.zeros(1, 6))
        assert states == [TrainingState.FORWARD_BACKWARD] and model._is_root is True and layer._is_root is False
        with FullyShardedDataParallel.summon_full_params(model):
            assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
        assert model._state_dict_type is StateDictType.FULL_STATE_DICT
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        assert model._state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert ModuleWrapPolicy({nn.Linear})._module_classes == {nn.Linear}
    unit: Any = fully_shard(Stage())
    assert unit._is_fsdp_managed_module and unit.layers[0]._is_fsdp_managed_module
    state = unit._get_fsdp_state()
    state._lazy_init()
    assert state._is_root is True and fully_shard.state(nn.Linear(1, 1)) is None


def test_trackers_of_private_methods_are_refused(run_adopted):
    assert all("memory_use" in text for text in run_adopted(tracked))


def tracked() -> str:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    with pytest.raises(fullshard.PrivateNameError) as error:
        FSDPMemTracker(Stage())
    return str(error.value)
