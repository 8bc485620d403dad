"""A forward that changes the weights of units it runs later, as a momentum encoder is: they compute with the new ones.

Gathers ahead of time would hand it the old ones, from the second pass on.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import record_events
from ways import assert_equal, example_of, on_ranks, sharded, whole_gradients, whole_parameters

HOWS = ["in place", ".data =", "foreach", "detached"]


def move(keys: list[Tensor], queries: list[Tensor], how: str) -> None:
    """Half of the way from the keys to the queries."""
    if how == "foreach":
        torch._foreach_lerp_(keys, queries, 0.5)
        return
    for key, query in zip(keys, queries, strict=True):
        if how == "in place":
            key.mul_(0.5).add_(query, alpha=0.5)
        elif how == ".data =":
            key.data = key.data * 0.5 + query.data * 0.5
        elif how == "detached":
            key.detach().lerp_(query.detach(), 0.5)
    if how == "foreach":
        torch._foreach_lerp_(keys, queries, 0.5)


class Momentum(nn.Module):
    """Compares a query with a key, whose encoder follows the other one, from pass `begins` on."""

    def __init__(self, how: str, begins: int, alike: bool) -> None:
        super().__init__()
        self.how, self.begins, self.passes = how, begins, 0
        self.query = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.key = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
        if alike:
            self.key.load_state_dict(self.query.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        with torch.no_grad():
            if self.passes >= self.begins:
                move(list(self.key.parameters()), list(self.query.parameters()), self.how)
            self.passes += 1
            key = self.key(x)
        return query * key


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


PROGRAMS = {  # ways to change, the first pass in which they do, whether keys begin as queries, and units kept gathered
    "from the first pass on": (HOWS, 0, False, False),
    "the same at first": (["in place", ".data ="], 0, True, False),  # the first pass changes nothing by itself
    "kept": (["in place", ".data ="], 0, False, True),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_units_compute_with_weights_that_a_forward_changed(way: str, program: str) -> list[str]:
    return trains(way, *PROGRAMS[program])


@pytest.mark.gloo("weights are written to while they are gathered ahead; what was gathered is dropped")
@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_a_forward_that_changes_weights_in_later_passes_only(way: str) -> list[str]:
    return trains(way, ["in place"], 2, False, False)


def trains(way: str, hows: list[str], begins: int, alike: bool, keep: bool) -> list[str]:
    """What is wrong in three steps, by way of changing; outputs, gradients and weights are held to one process."""
    problems = []
    for how in hows:
        example = example_of(lambda how=how: Momentum(how, begins, alike), "query.0", "query.1", "key.0", "key.1")
        model, plain = sharded(example, way, keep=keep), example.make(torch.float64)
        for step in range(4):
            try:
                compare(model, plain, step, how)
            except AssertionError as error:
                problems.append(str(error))
                break
    return problems


def compare(model: nn.Module, plain: nn.Module, step: int, how: str) -> None:
    """One step of both; weights of one process are those of the last micro-batch, as all saw the same weights."""
    world, rank = dist.get_world_size(), dist.get_rank()
    keys = [p.detach().clone() for p in plain.key.parameters()]
    passes = plain.passes
    model(batch(step, rank)).square().mean().backward()
    for other in range(world):
        with torch.no_grad():
            for key, value in zip(plain.key.parameters(), keys, strict=True):
                key.copy_(value)
        plain.passes = passes
        (plain(batch(step, other)).square().mean() / world).backward()
    found = {name: grad for name, grad in whole_gradients(model).items() if name.startswith("query")}
    wanted = {n: p.grad for n, p in plain.named_parameters() if n.startswith("query")}
    assert_equal(found, wanted, f"{how}, step {step}: gradients", 1e-9)
    for one in (model, plain):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {n: p.detach() for n, p in plain.named_parameters()}
    assert_equal(whole_parameters(model), wanted, f"{how}, step {step}: weights", 1e-9)


@pytest.mark.parametrize("way", ["rows", "originals"])
@on_ranks
def test_only_units_that_change_are_not_gathered_ahead(way: str) -> None:
    """Before the unit that runs before them has ended; the others are, as ever: the price is paid where it is due."""
    example = example_of(lambda: Momentum("in place", 0, False), "query.0", "query.1", "key.0", "key.1")
    model = sharded(example, way)
    order: list[str] = []
    for name, module in model.named_modules():
        if (name := name.replace("_fsdp_wrapped_module.", "")) in ("query.0", "key.0"):
            module.register_forward_hook(lambda *_, name=name: order.append(f"end {name}"))
    for _ in range(2):
        model(batch(0, dist.get_rank())).sum().backward()
    order.clear()
    with record_events(lambda event: order.append(f"{event.verb} {event.unit}")):
        model(batch(0, dist.get_rank()))
    assert order.index("gather query.1") < order.index("end query.0") < order.index("gather key.0")
    assert order.index("end key.0") < order.index("gather key.1")


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
@on_ranks
def test_weights_that_are_no_numbers_are_not_taken_for_written(way: str) -> None:
    """Memory that was not initialised yet, say: NaN is not equal to itself."""
    example = example_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "0")
    model = sharded(example, way)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for _ in range(2):
        assert model(batch(0, dist.get_rank())).isnan().all()
