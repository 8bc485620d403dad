"""Files that the ranks of PyTorch's first FSDP wrote, each its own; and the one file of a full state dict."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from files import Runs, same
from fullshard import CheckpointError, convert
from fullshard.store.formats.state import TensorShards
from fullshard.store.formats.torch_file import TorchFileSource
from fullshard.store.pickles import PickledTensor
from fullshard.store.storage import Stored

WORLD = 2


class Model(nn.Module):
    """Parameters of its own before and after a wrapped part, ties, a buffer; sizes that 16 bytes do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.zeros(1))
        self.last = nn.Linear(3, 1)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.embedding(tokens))
        return self.head(x) * self.scale + self.last(x)


def numbered(model: nn.Module) -> dict[str, Tensor]:
    """Give every element a value of its own; what a state dict has to hold then."""
    at = 0
    for parameter in model.parameters():
        parameter.data = torch.arange(at, at + parameter.numel()).to(torch.bfloat16).view_as(parameter)
        at += parameter.numel()
    return {name: value.clone() for name, value in model.state_dict().items()}


def saved_by_pytorch(folder: str) -> None:
    """A folder for each kind of state dict and each `use_orig_params`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")

    def put(name: str, content: dict[str, Any]) -> None:
        where = Path(folder) / name
        where.mkdir(exist_ok=True)
        torch.save(content, where / f"rank{dist.get_rank()}.pt")

    for originals in (False, True):
        model = Model().bfloat16()
        numbered(model)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential))
        policy = ModuleWrapPolicy({nn.Sequential})
        wrapped = FSDP(model, auto_wrap_policy=policy, use_orig_params=originals, device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.0)
        wrapped(torch.arange(5)).sum().backward()
        optimizer.step()
        for kind in ("LOCAL", "SHARDED", "FULL"):
            FSDP.set_state_dict_type(wrapped, StateDictType[f"{kind}_STATE_DICT"])
            content: dict[str, Any] = {"model": wrapped.state_dict(), "epoch": 2}
            put(f"{kind}-{originals}-optimizer", {**content, "optimizer": optimizer.state_dict()})
            if kind != "LOCAL":
                content["optimizer"] = FSDP.optim_state_dict(wrapped, optimizer)
            put(f"{kind}-{originals}", content)


@pytest.fixture(scope="module")
def folder(rank_pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fsdp1")
    rank_pools.run(saved_by_pytorch, str(made), world=WORLD)
    return made


@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize("kind", ["SHARDED", "FULL"])
def test_every_kind_becomes_a_plain_file(folder: Path, tmp_path: Path, kind: str, originals: bool) -> None:
    where = folder / f"{kind}-{originals}"
    source = where / "rank0.pt" if kind == "FULL" else where
    done = convert(source, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = numbered(Model().bfloat16())
    assert loaded["model"].keys() == expected.keys() and not done.left_out
    assert all(same(loaded["model"][name], value) for name, value in expected.items())
    assert loaded["epoch"] == 2
    if (kind, originals) != ("FULL", True):  # where PyTorch 2.13 saves one tensor for both averages
        full = torch.load(folder / "FULL-False" / "rank0.pt", weights_only=True)["optimizer"]["state"]
        assert full.keys() == loaded["optimizer"]["state"].keys() and full
        for name, state in full.items():
            assert all(same(loaded["optimizer"]["state"][name][key], value) for key, value in state.items())


def test_local_state_is_refused_by_name(folder: Path) -> None:
    for originals in (False, True):
        with pytest.raises(
            CheckpointError, match=r"(?s)flat parameters.*LOCAL_STATE_DICT.*_flat_param.*FULL or SHARDED"
        ):
            TorchFileSource(folder / f"LOCAL-{originals}")


def test_optimizer_state_of_each_ranks_own_parts_is_refused_by_name(folder: Path) -> None:
    for originals in (False, True):
        where = folder / f"SHARDED-{originals}-optimizer"
        with pytest.raises(CheckpointError, match="each rank's own parts"):
            TorchFileSource(where)
        with TorchFileSource(where, model_only=True) as source:
            assert "model.inner.0.weight" in source.entries and not source.values


def test_files_of_ranks_that_are_missing_are_noticed(folder: Path, tmp_path: Path) -> None:
    for rank in range(WORLD):
        where = tmp_path / str(rank)
        where.mkdir()
        (where / "a.pt").write_bytes((folder / "SHARDED-True" / f"rank{rank}.pt").read_bytes())
        with pytest.raises(CheckpointError, match="incomplete checkpoint"):
            TorchFileSource(where)


def test_a_rank_without_rows_of_a_tensor_hides_no_other_ranks_rows() -> None:
    def part(offset: int, rows: int) -> tuple[Any, TensorShards]:
        stored = PickledTensor("0", 3 * rows, torch.float32, 0, (rows, 3), (3, 1))
        place = Stored("weight", (offset, 0), (rows, 3), "a.pt", 0, 12 * rows)
        return mock.Mock(**{"stored.return_value": place}), TensorShards(
            (4, 3), torch.float32, (((offset, 0), stored),), 3
        )

    source: Any = mock.Mock(**{"storage.sizes": {"a.pt": 100}})
    TorchFileSource._add_merged(source, "weight", [part(2, 0), part(0, 2), part(2, 2)])
    ((name, entry, parts), _) = source._add.call_args
    assert name == "weight" and [part.sizes for part in parts] == [(2, 3), (2, 3)] and entry.shape == (4, 3)
    source.storage.sizes["a.pt"] = 24  # both parts name one record
    with pytest.raises(CheckpointError, match="larger than the files"):
        TorchFileSource._add_merged(source, "weight", [part(0, 2), part(2, 2)])


def test_pickles_do_not_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes((folder / "SHARDED-False" / "rank0.pt").read_bytes())
    torch.save({"model": {"x": Runs(tmp_path / "ran")}}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        TorchFileSource(tmp_path)
    assert not (tmp_path / "ran").exists()
