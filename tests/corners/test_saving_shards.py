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

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import mesh_of
from ways import WRAPPERS, on_ranks, shard

Values = dict[str, Any]
every_way = pytest.mark.parametrize("way", ["torch", "rows", "flat"])


def trained(way: str, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """After a step, by AdamW; its gradients are kept. "torch": PyTorch's, as a control.

    Dims of 7 and 3: nothing divides evenly, and parts begin in the middle of a unit's shard.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    if way == "torch":
        torch_fsdp.fully_shard(model[0])
        torch_fsdp.fully_shard(model)
    else:
        model = shard(model, way, lambda made: [made[0]], **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7) * (1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    return model, optimizer


def saved(values: Any, weights_only: bool) -> Any:
    torch.save(values, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda values: pickle.loads(pickle.dumps(values)),
    "torch.save": lambda values: saved(values, False),
    "torch.save, weights only": lambda values: saved(values, True),
    "deepcopy": copy.deepcopy,
}
every_copy = pytest.mark.parametrize("how", COPIES)


def unequal(got: Values, want: Values) -> list[str]:
    """Names whose tensors differ, in this rank's part or as a whole, or share memory."""
    problems = []
    for name, tensor in want.items():
        other = got[name]
        whole, wanted = other.full_tensor(), tensor.full_tensor()  # collective: on every rank, whatever this one finds
        if not torch.equal(other.to_local(), tensor.to_local()) or other.requires_grad != tensor.requires_grad:
            problems.append(f"{name}: this rank's part differs")
        elif not torch.equal(whole, wanted):
            problems.append(f"{name}: the whole differs")
        elif tensor.to_local().numel() and other.to_local().data_ptr() == tensor.to_local().data_ptr():
            problems.append(f"{name}: shares memory with what it was made of")
    return problems


@every_copy
@every_way
@on_ranks
def test_there_and_back(way: str, how: str) -> list[str]:
    """Everything sharded that a user can get hold of. Runs of elements may refuse to be pickled, by name."""
    problems = []
    model, optimizer = trained(way)
    parameters = dict(model.named_parameters())
    for kind, values in {
        "parameters": parameters,
        "state_dict": dict(model.state_dict()),
        "gradients": {name: p.grad for name, p in parameters.items()},
        "state": {f"{n}.{k}": v for n, p in parameters.items() for k, v in optimizer.state[p].items() if v.dim()},
        "detached": {name: p.detach() for name, p in parameters.items()},
        "data": {name: p.data for name, p in parameters.items()},
        "clones": {name: p.detach().clone() for name, p in parameters.items()},
    }.items():
        if way == "torch" and kind in ("gradients", "parameters"):  # PyTorch's cannot be either, together
            continue
        try:
            found = unequal(COPIES[how](values), values)
        except fullshard.PhaseError as error:
            named = all(word in str(error) for word in ("weight", "remedy"))
            found = [] if named and way == "flat" and how != "deepcopy" else [repr(error)[:200]]
        problems += [f"{kind}: {problem}" for problem in found]
    model(torch.ones(1, 7)).sum().backward()  # the originals are as they were
    return problems


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
@on_ranks
def test_a_part_does_not_bring_its_units_whole_shard_along(dump: Callable[..., None]) -> None:
    """16 tensors of one unit, each pickled with its own elements."""
    model = fullshard.fully_shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    state = dict(model.state_dict())
    dump(state, buffer := io.BytesIO())
    assert buffer.tell() < 1.5 * sum(v.to_local().nbytes for v in state.values()) + 20_000


@pytest.mark.gloo("torch saves in the background over gloo")
@every_way
@on_ranks
def test_async_save(way: str, tmp_path: Path) -> list[str]:
    """It copies first: a step taken before it is done does not reach what is written."""

    def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": dict(model.state_dict()), "optimizer": get_optimizer_state_dict(model, optimizer)}

    model, optimizer = trained(way)
    values = state_of(model, optimizer)
    want = {name: tensor.full_tensor().clone() for name, tensor in values["model"].items()}
    future = dcp.async_save(values, checkpoint_id=tmp_path)
    optimizer.step()
    future.result()
    loaded = state_of(*trained(way))
    for tensor in loaded["model"].values():
        tensor.to_local().zero_()
    dcp.load(loaded, checkpoint_id=tmp_path)
    return [name for name, tensor in want.items() if not torch.equal(loaded["model"][name].full_tensor(), tensor)]


@pytest.mark.parametrize("consolidates", [False, True])
@every_way
@on_ranks
def test_hugging_face_writer(way: str, consolidates: bool, tmp_path: Path) -> list[str]:
    """Right numbers; or, for runs of elements, which can be several rectangles, an error that names one."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = dict(trained(way)[0].state_dict())
    given = {"save_distributed": True, "enable_consolidation": consolidates}
    try:
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=tmp_path, **given))
    except (CheckpointException, fullshard.FullshardError) as error:
        assert "0.weight" in str(error) and "remedy" in str(error) and way == "flat", error
        return []
    if not consolidates:
        loaded = {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path=tmp_path))
        return unequal(loaded, state)
    found: dict[str, Tensor] = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        found |= safetensors.load_file(file)
    whole = {name: tensor.full_tensor() for name, tensor in state.items()}
    return [name for name, tensor in whole.items() if not torch.equal(found[name], tensor)]


@pytest.mark.gloo("torch saves in the background over gloo")
@pytest.mark.parametrize(
    ("with_mesh", "how"), [(False, "pickle"), (True, "deepcopy"), (True, "torch.save"), (True, "async_save")]
)  # DCP cannot stage the `ShardedTensor`s of an instance without a mesh, PyTorch's included
@pytest.mark.parametrize("way", WRAPPERS)
@on_ranks
def test_wrappers_sharded_state(way: str, with_mesh: bool, how: str, tmp_path: Path) -> list[str]:
    model, _ = trained(way, **({"device_mesh": mesh_of("1d")} if with_mesh else {}))
    with FSDP.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT):
        state = dict(model.state_dict())
        before = {name: part_of(value).clone() for name, value in state.items()}
        if how == "async_save":
            dcp.async_save({"model": state}, checkpoint_id=tmp_path).result()
            other = dict(model.state_dict())
            dcp.load({"model": other}, checkpoint_id=tmp_path)
        else:
            try:
                other = COPIES[how](state)
            except fullshard.PhaseError as error:
                assert "remedy" in str(error) and "weight" in str(error)
                return []
    return [name for name, part in before.items() if not torch.equal(part_of(other[name]), part)]


def part_of(value: Any) -> Tensor:
    """This rank's elements of a DTensor, a ShardedTensor or a plain tensor."""
    if hasattr(value, "local_shards"):
        parts = [shard.tensor.flatten() for shard in value.local_shards()]
        return torch.cat(parts) if parts else torch.empty(0)
    return (value.to_local() if hasattr(value, "to_local") else value).flatten()
