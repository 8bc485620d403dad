"""Errors of ranks that do something else than the other one: programs of two ranks, run on both at the same time."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import fully_shard
from fullshard.agreement.log import Log
from fullshard.api import save_pretrained
from quantised import GatheredInt8
from raising import Programs, assert_raised, outcome, sharded, two_layers, words_of, wrapped

pytestmark = pytest.mark.gloo("what happens when ranks differ is found by the watcher and told by gloo")

ONE = torch.ones(1, 4)
PROGRAMS = Programs()
CALLS = [  # by each rank, with its number and a folder that both see
    (
        lambda rank, folder: verified(DeviceMesh("cpu", [1, 0] if rank == 0 else [0, 1])),
        "ConfigError: data_mesh does not number the ranks",
    ),
    (
        lambda rank, folder: verified(DeviceMesh("cpu", [0])),
        "ConfigError: data_mesh does not number the ranks ... None: not in",
    ),
    (
        lambda rank, folder: fullshard.save(folder, sharded(), step=100 + rank),
        "DivergenceError: Ranks save different steps; nothing was written",
    ),
    (
        lambda rank, folder: fullshard.save(folder, fully_shard(nn.Linear(4 + rank, 4, bias=False))),
        "DivergenceError: Ranks have different shapes or dtypes for the same tensor",
    ),
    (
        lambda rank, folder: fullshard.save(folder / f"machine-{rank}", sharded()),
        "CheckpointError: A rank cannot see the folder that rank 0 created",
    ),
]
SECONDS = 30  # a hang is this


@pytest.mark.parametrize("words", PROGRAMS)
def test_two_ranks(run_ranks, tmp_path, words):
    assert_raised(words, run_ranks(outcome, PROGRAMS[words], tmp_path, timeout=SECONDS))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[words_of(row) for row in CALLS])
def test_calls(run_ranks, tmp_path, number):
    assert_raised(words_of(CALLS[number]), run_ranks(called, number, tmp_path, timeout=SECONDS))


def called(number: int, folder: Path) -> list[str]:
    return outcome(CALLS[number][0], folder)


# What ranks train.


@PROGRAMS.raise_("DivergenceError: ranks start from different weights (compared at the first forward)")
def weights_that_one_rank_loaded(rank: int, folder: Path) -> None:
    model = nn.Linear(4, 4)
    if rank == 0:
        model.load_state_dict(nn.Linear(4, 4).state_dict())
    fully_shard(model)(ONE)


@PROGRAMS.raise_("DivergenceError: optimizers stepped differently on different ranks: their")
def other_learning_rates(rank: int, folder: Path) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    for _ in range(2):
        model(ONE).sum().backward()
        optimizer.step()


@PROGRAMS.raise_("DivergenceError: ranks are about to issue different collectives (step 0).")
def a_forward_beside_a_backward(rank: int, folder: Path) -> None:
    model = sharded()
    loss = model(ONE).sum()
    loss.backward() if rank == 0 else model(ONE)


@PROGRAMS.raise_("DivergenceError: ranks gathered or reduced different units, or in different orders")
def units_that_others_did_not_reduce(rank: int, folder: Path) -> None:
    model = sharded()
    with mock.patch.object(Log, "fingerprint", lambda _: rank):  # as if this rank had issued something else
        model(ONE).sum().backward()


@PROGRAMS.raise_("DivergenceError: Ranks called set_token_count with different numbers of")
def other_numbers_of_micro_batches(rank: int, folder: Path) -> None:
    model = sharded(reduction="tokens")
    fullshard.set_token_count(model, [8] * (1 + rank))
    model(ONE).sum().backward()


@PROGRAMS.raise_("ConfigError: join: a rank has no batches, so it has none to repeat")
def no_batch_at_all(rank: int, folder: Path) -> None:
    model = sharded()
    for batch in fullshard.join(model, [ONE] if rank == 0 else []):
        model(batch).sum().backward()


class Uneven(GatheredInt8):
    """Sends one row more on rank 1."""

    def fsdp_pre_all_gather(self, mesh, *_):
        return (torch.ones(3 + dist.get_rank(), 4),), None


@PROGRAMS.raise_("DivergenceError: fsdp_pre_all_gather returned tensors that cannot be")
def rows_that_are_neither_alike_nor_chunks(rank: int, folder: Path) -> None:
    layer = nn.Linear(4, 5, bias=False)
    layer.weight = nn.Parameter(Uneven(layer.weight.detach()))
    fully_shard(layer)(ONE)


class Repeats(nn.Sequential):
    """Runs its last layer as often as it is told to."""

    times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        for _ in range(self.times):
            x = self[1](x)
        return x


@PROGRAMS.raise_("DivergenceError: Unit '1' runs at a different point, or more often, than")
def a_layer_that_runs_once_more(rank: int, folder: Path) -> None:
    model = Repeats(*two_layers())
    for layer in model:
        fully_shard(layer)
    fully_shard(model, unused="zeros")
    model(ONE).sum().backward()
    model.times = 2
    model(ONE)


# What they save.


@PROGRAMS.raise_("DivergenceError: Ranks' optimizers have")
def an_optimizer_of_fewer_parameters(rank: int, folder: Path) -> None:
    model = wrapped(use_orig_params=True)
    optimizer = torch.optim.Adam(list(model.parameters())[rank:])
    model(ONE).sum().backward()
    optimizer.step()
    type(model).optim_state_dict(model, optimizer)


def alone(rank: int) -> nn.Module:
    """A layer that each rank shards over itself."""
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])]
    return fully_shard(nn.Linear(4, 4), mesh=meshes[rank])


@PROGRAMS.raise_("DivergenceError: Ranks have different tensors under the same name; nothing was written")
def models_of_their_own(rank: int, folder: Path) -> None:
    torch.manual_seed(rank)
    fullshard.save(folder, alone(rank))


@PROGRAMS.raise_("DivergenceError: Ranks read different checkpoints; nothing was loaded")
def folders_of_two_checkpoints(rank: int, folder: Path) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    torch.manual_seed(rank)
    fullshard.save(folder / f"disk-{rank}", nn.Linear(2, 2), process_group=alone)  # of one name, and other values
    fullshard.load(folder / f"disk-{rank}", nn.Linear(2, 2))


@PROGRAMS.raise_("DivergenceError: Ranks ask for different steps; nothing was loaded")
def loading_other_steps(rank: int, folder: Path) -> None:
    model = sharded()
    for step in (1, 2):
        fullshard.save(folder, model, step=step)
    fullshard.load(folder, model, step=1 + rank)


@PROGRAMS.raise_("CheckpointError: The saving ranks do not have every element of a tensor exactly once")
def a_save_of_half_of_the_ranks(rank: int, folder: Path) -> None:
    alone = dist.new_group([0])
    model = sharded()
    if rank == 0:
        fullshard.save(folder, model, process_group=alone)


@PROGRAMS.raise_("CheckpointError: A background save failed ... rank 1: ")
def a_disk_of_rank_1_that_is_full(rank: int, folder: Path) -> None:
    def sees(where: fullshard.Folder, name: str) -> bool:
        if rank == 1:
            (where.at(name) / "rank-1.safetensors").mkdir()  # where its file is to be
        return True

    with mock.patch.object(fullshard.Folder, "sees", sees):
        saving = fullshard.save(folder, sharded(), asynchronous=True)
    saving.wait()


@PROGRAMS.raise_("UserWarning: The random generators were left unchanged")
def random_numbers_of_other_ranks(rank: int, folder: Path) -> None:
    model = sharded()
    torch.manual_seed(rank)
    fullshard.save(folder, model)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    fullshard.load(folder, two_layers(), process_group=alone)


@PROGRAMS.raise_("PhaseError: The loop over full_parameters stopped before its end")
def a_loop_that_is_left(rank: int, folder: Path) -> None:
    for _ in fullshard.full_parameters(sharded(), bucket_bytes=64):
        if rank == 0:
            break


# What they verify.


def verified(mesh: DeviceMesh) -> None:
    """Verify two layers on batches that this mesh numbers."""
    fullshard.verify(two_layers, lambda *_: ONE, lambda model, x: model(x).sum(), data_mesh=mesh)


# Hugging Face's libraries ask one rank for what takes all.


@PROGRAMS.raise_("PhaseError: save_pretrained of a sharded model gathers its weights")
def weights_of_the_main_process_alone(rank: int, folder: Path) -> None:
    model = sharded()
    save_pretrained.PATIENCE = 0.5
    if rank == 0:
        save_pretrained.gathered(model, "save_pretrained")
