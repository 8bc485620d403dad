"""Ranks that hold or run something else than the others: a DivergenceError that names it, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from models import OddMLP


class Renamed(nn.Module):
    """The second layer, but that its weight has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.wait = nn.Parameter(torch.zeros(1023, 13))
        self.bias = nn.Parameter(torch.zeros(1023))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.wait, self.bias)


def different(kind: str) -> nn.Module:
    """A model that rank 1 builds differently."""
    model = OddMLP()
    if dist.get_rank() == 1:
        if kind == "name":
            model.layers[1] = Renamed()
        elif kind == "shape":
            model.layers[1], model.layers[2] = nn.Linear(13, 1021), nn.Linear(1021, 3)
        elif kind == "dtype":
            model.layers[1].bias = nn.Parameter(model.layers[1].bias.detach().double())
        elif kind == "count":
            model.extra = nn.Parameter(torch.ones(3))
        elif kind == "frozen":
            model.layers[1].bias.requires_grad_(False)
    return model


def train_differently(kind: str) -> tuple[str, str]:
    """Type and text of the error that this rank got from its first forward."""
    model = different(kind)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    try:
        model(torch.ones(2, 7))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("name", ["layers.1.weight", "layers.1.wait"]),
        ("shape", ["layers.1.weight", "1023", "1021"]),
        ("dtype", ["layers.1.bias", "float32", "float64"]),
        ("count", ["extra"]),
        ("frozen", ["layers.1.bias"]),
    ],
)
def test_ranks_with_different_parameters(run_ranks, kind, words):
    """Every rank gets the error, with the first difference and both ranks in it."""
    for error, text in run_ranks(train_differently, kind):
        assert error == "DivergenceError", text
        missing = [word for word in [*words, "rank 0", "rank 1"] if word not in text]
        assert not missing, f"the message does not say {missing}:\n{text}"


class Chooses(nn.Module):
    """Runs its layers in an order of the rank's own."""

    def __init__(self, orders: list[list[int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.orders = orders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.orders[dist.get_rank()]:
            x = self.layers[index](x)
        return x


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([[0, 1, 2], [0, 2, 1]], ["rank 0 runs unit 'layers.1'", "rank 1 runs unit 'layers.2'"]),
        ([[0, 1, 2], [0, 1]], ["rank 0 runs unit 'layers.2'", "rank 1 has reached the end"]),
        ([[1, 2], [0, 1, 2]], ["rank 0 runs unit 'layers.1'", "rank 1 runs unit 'layers.0'"]),
    ],
    ids=["swapped", "one left out", "one more"],
)
def test_ranks_that_run_units_in_different_orders(run_ranks, orders, words):
    for text in run_ranks(run_in_order, orders):
        for word in words:
            assert word in text


def run_in_order(orders: list[list[int]]) -> str:
    model = Chooses(orders)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(fullshard.DivergenceError) as caught:
        model(torch.ones(1, 4))
    return str(caught.value)


def test_a_rank_that_begins_anew_while_others_are_in_their_first_pass(run_ranks):
    """All comparisons are of tokens at one place, so that each rank reads what the other one is about to do."""
    for rank, text in enumerate(run_ranks(begin_anew, timeout=30)):
        assert "unit 'layers.1'" in text and "rank 1" in text, (rank, text)
        assert "begins a forward of unit '(root)' with gradients" in text, (rank, text)
        assert "run their units in different orders" in text or "are about to issue different collectives" in text


def begin_anew() -> str:
    model = Chooses([[0, 1, 2], [0, 9]])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(fullshard.DivergenceError) as caught:
        try:
            model(torch.ones(1, 4))
        except IndexError:
            model(torch.ones(1, 4))
    return str(caught.value)


def on_two_replicas(kind: str) -> list[str]:
    """Lines of the error that each of 2 x 2 ranks gets, when rank 1 differs and every rank goes on afterwards."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12 if kind == "shape" and rank == 1 else 8), nn.Linear(8, 8))
    if kind == "weights" and rank == 1:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(6):  # a device shows the difference two backwards later
            model(torch.ones(2, 8)).sum().backward()
            if not (kind == "steps" and rank == 1 and step == 1):
                optimizer.step()
            optimizer.zero_grad()
    except fullshard.DivergenceError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["ranks disagree on what they train", "rank 1", "0.weight", "(12, 8)"]),
        ("weights", ["ranks start from different weights", "ranks 0 and 1", "0.weight"]),
        ("steps", ["optimizers stepped differently", "rank 0: ", "rank 1: "]),
    ],
)
def test_a_rank_of_one_replica_differs(run_ranks, kind, words):
    """The other replica compares equal over the shard axis: it is told over the replicate axis, and does not wait."""
    for lines in run_ranks(on_two_replicas, kind, world=4):
        text = "\n".join(lines)
        assert all(word in text for word in words), text
