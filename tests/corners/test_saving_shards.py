"""Sharded tensors as values: pickled, saved, copied, staged by DCP, and written by its Hugging Face writer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same

LAYOUTS = {"rows": "rows", "flat": "flat", "owner": "owner", "blocks": fullshard.Blocks("row")}
Values = dict[str, Any]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def network() -> nn.Sequential:
    """Dims of 7 and 3: nothing divides evenly, and parts begin in the middle of a unit's shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded(layout: str) -> nn.Module:
    """A model that was trained for a step, by AdamW; its gradients are kept. 'torch': PyTorch's, as a control."""
    model = network()
    for unit in (model[0], model):
        if layout == "torch":
            torch_fsdp.fully_shard(unit)
        else:
            fullshard.fully_shard(unit, layout=LAYOUTS[layout])
    return model


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7) * (1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    return model, optimizer


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Values]:
    """Everything a user can get hold of that is sharded."""
    parameters = dict(model.named_parameters())
    state = {f"{n}.{k}": v for n, p in parameters.items() for k, v in optimizer.state[p].items() if v.dim()}
    return {
        "state_dict": dict(model.state_dict()),
        "gradients": {name: p.grad for name, p in parameters.items()},
        "optimizer state": state,
        "detached": {name: p.detach() for name, p in parameters.items()},
        "data": {name: p.data for name, p in parameters.items()},
        "clones": {name: p.detach().clone() for name, p in parameters.items()},
    }


def saved(values: Any, weights_only: bool) -> Any:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda values: pickle.loads(pickle.dumps(values)),
    "torch.save": lambda values: saved(values, False),
    "torch.save, weights only": lambda values: saved(values, True),
    "deepcopy": copy.deepcopy,
}


def unequal(got: Values, want: Values) -> list[str]:
    """Names whose tensors differ, in this rank's part or as a whole, or share memory."""
    problems = []
    for name, tensor in want.items():
        other = got[name]
        whole, wanted = other.full_tensor(), tensor.full_tensor()  # collective: on every rank, whatever this one finds
        if not torch.equal(other.to_local(), tensor.to_local()):
            problems.append(f"{name}: this rank's part differs")
        elif not torch.equal(whole, wanted):
            problems.append(f"{name}: the whole differs")
        elif tensor.to_local().numel() and other.to_local().data_ptr() == tensor.to_local().data_ptr():
            problems.append(f"{name}: shares memory with what it was made of")
    return problems


def attempt(layout: str, way: str) -> list[str]:
    problems = []
    for kind, values in values_of(*trained(sharded(layout))).items():
        if kind == "gradients" and layout == "torch":  # PyTorch's cannot be either
            continue
        try:
            found = unequal(WAYS[way](values), values)
        except fullshard.PhaseError as error:  # parts of elements may refuse to be pickled, by name and with a remedy
            named = all(word in str(error) for word in ("weight", "remedy"))
            found = [] if named and layout not in ("rows", "torch") and way != "deepcopy" else [repr(error)[:200]]
        except Exception as error:
            found = [f"{type(error).__name__}: {str(error)[:160]}"]
        problems += [f"{kind}: {problem}" for problem in found]
    return problems


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["torch", *LAYOUTS])
def test_there_and_back(run_ranks, layout, way):
    assert_same(run_ranks(attempt, layout, way))


def parameters_alone(layout: str) -> list[str]:
    """Parameters themselves, with a user's attribute; as PyTorch's can be."""
    problems = []
    model = sharded(layout)
    for name, parameter in model.named_parameters():
        for way in ("pickle", "torch.save", "deepcopy"):
            try:
                other = WAYS[way](parameter)
            except Exception as error:
                problems.append(f"{way} of {name}: {type(error).__name__}: {str(error)[:120]}")
                continue
            problems += [f"{way} of {p}" for p in unequal({name: other}, {name: parameter})]
            if not other.requires_grad:
                problems.append(f"{way} of {name}: requires_grad is lost")
    model(torch.ones(1, 7)).sum().backward()  # the originals are as they were
    return problems


@pytest.mark.parametrize("layout", ["torch", "rows"])
def test_parameters_alone(run_ranks, layout):
    assert_same(run_ranks(parameters_alone, layout))


def sizes(layout: str, way: str) -> tuple[int, int]:
    """Bytes of what was written, and of this rank's parts."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    (torch_fsdp if layout == "torch" else fullshard).fully_shard(model)
    state = dict(model.state_dict())
    buffer = io.BytesIO()
    (pickle.dump if way == "pickle" else torch.save)(state, buffer)
    return buffer.tell(), sum(v.to_local().nbytes for v in state.values())


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
@pytest.mark.parametrize("layout", ["torch", "rows"])
def test_a_part_does_not_bring_its_units_whole_shard_along(run_ranks, layout, way):
    """16 tensors of one unit, each pickled with its own elements."""
    for written, held in run_ranks(sizes, layout, way):
        assert written < 1.5 * held + 20_000


def staged(layout: str, folder: str) -> list[str]:
    """`async_save` copies first: a step taken before it is done does not reach what is written."""
    model, optimizer = trained(sharded(layout))
    values = {"model": dict(model.state_dict()), "optimizer": get_optimizer_state_dict(model, optimizer)}
    want = {name: tensor.full_tensor().clone() for name, tensor in values["model"].items()}
    try:
        future = dcp.async_save(values, checkpoint_id=folder)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:160]}"]
    optimizer.step()
    future.result()
    fresh, fresh_optimizer = trained(sharded(layout))
    loaded = {"model": dict(fresh.state_dict()), "optimizer": get_optimizer_state_dict(fresh, fresh_optimizer)}
    for tensor in loaded["model"].values():
        tensor.to_local().zero_()
    dcp.load(loaded, checkpoint_id=folder)
    return [name for name, tensor in want.items() if not torch.equal(loaded["model"][name].full_tensor(), tensor)]


@pytest.mark.gloo("torch saves in the background over gloo")
@pytest.mark.parametrize("layout", ["torch", *LAYOUTS])
def test_async_save(run_ranks, layout, tmp_path):
    assert_same(run_ranks(staged, layout, str(tmp_path)))


# Hugging Face's writer keeps one tensor for each name and rank; a run of elements can be several rectangles.


def written_for_hugging_face(layout: str, folder: str) -> list[str]:
    state = dict(sharded(layout).state_dict())
    try:
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True))
    except (CheckpointException, fullshard.FullshardError) as error:
        named = "0.weight" in str(error) and "remedy" in str(error) and layout == "flat"
        return [] if named else [f"{type(error).__name__}: {str(error)[:300]}"]
    loaded = {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path=folder))
    return unequal(loaded, state)


@pytest.mark.parametrize("layout", ["torch", *LAYOUTS])
def test_hugging_face_writer(run_ranks, layout, tmp_path):
    """Right numbers; or, for runs of elements, an error that names one."""
    pytest.importorskip("safetensors")
    assert_same(run_ranks(written_for_hugging_face, layout, str(tmp_path)))


def consolidated_for_hugging_face(layout: str, folder: str) -> list[str]:
    """The writer's other form: one file that `safetensors` alone can read."""
    state = dict(sharded(layout).state_dict())
    want = {name: tensor.full_tensor() for name, tensor in state.items()}
    writer = dcp.HuggingFaceStorageWriter(path=folder, save_distributed=True, enable_consolidation=True)
    try:
        dcp.save(state, storage_writer=writer)
    except (CheckpointException, fullshard.FullshardError) as error:
        named = "0.weight" in str(error) and "remedy" in str(error) and layout == "flat"
        return [] if named else [f"{type(error).__name__}: {str(error)[:300]}"]
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return [name for name, tensor in want.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("layout", ["torch", *LAYOUTS])
def test_hugging_face_writer_consolidates(run_ranks, layout, tmp_path):
    pytest.importorskip("safetensors")
    assert_same(run_ranks(consolidated_for_hugging_face, layout, str(tmp_path)))


# The wrapper's state dicts.


def wrapped(library: Any, orig: bool, with_mesh: bool) -> nn.Module:
    given: dict[str, Any] = {"use_orig_params": orig, "device_id": torch.device("cpu")}
    if with_mesh:
        given["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    model[0] = library.FullyShardedDataParallel(model[0], **given)
    return library.FullyShardedDataParallel(model, **given)


def wrapper_state(kind: str, orig: bool, with_mesh: bool, way: str, folder: str) -> list[str]:
    model, _ = trained(wrapped(fullshard, orig, with_mesh))
    with FSDP.state_dict_type(model, fullshard.StateDictType[kind]):
        state = dict(model.state_dict())
        before = {name: part_of(value).clone() for name, value in state.items()}
        try:
            if way == "async_save":
                dcp.async_save({"model": state}, checkpoint_id=folder).result()
                other = dict(model.state_dict())
                dcp.load({"model": other}, checkpoint_id=folder)
            else:
                other = WAYS[way](state)
        except fullshard.PhaseError as error:
            return [] if "remedy" in str(error) and "weight" in str(error) else [repr(error)]
        except Exception as error:
            return [f"{type(error).__name__}: {str(error)[:200]}"]
        return [name for name, part in before.items() if not torch.equal(part_of(other[name]), part)]


def part_of(value: Any) -> Tensor:
    """This rank's elements of a DTensor, a ShardedTensor or a plain tensor."""
    if hasattr(value, "local_shards"):
        parts = [shard.tensor.flatten() for shard in value.local_shards()]
        return torch.cat(parts) if parts else torch.empty(0)
    return (value.to_local() if hasattr(value, "to_local") else value).flatten()


@pytest.mark.gloo("torch saves in the background over gloo")
@pytest.mark.parametrize(
    ("with_mesh", "way"),
    [(mesh, way) for mesh in (False, True) for way in ("pickle", "deepcopy", "torch.save")] + [(True, "async_save")],
)  # DCP cannot stage the `ShardedTensor`s of an instance without a mesh, PyTorch's included
@pytest.mark.parametrize("orig", [False, True], ids=["flat parameter", "original parameters"])
def test_wrappers_sharded_state(run_ranks, orig, with_mesh, way, tmp_path):
    assert_same(run_ranks(wrapper_state, "SHARDED_STATE_DICT", orig, with_mesh, way, str(tmp_path)))
