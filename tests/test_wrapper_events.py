"""What `FullyShardedDataParallel` does in a step, from the engine's events: strategies, prefetches, limits, order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fullshard.wrap import CustomPolicy
from training import assert_same

BLOCKS = 5
both = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def tower(**settings: object) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(BLOCKS)))
    return FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}, **settings)


def step(model: nn.Module) -> list[tuple[str, str]]:
    with fullshard.record_events() as events:
        model(torch.ones(2, 8)).sum().backward()
    return [(event.verb, event.unit) for event in events]


@pytest.fixture
def third_step(fake_world):
    """The events of a step once the order of units is known, on one of two ranks that exchange nothing."""
    fake_world(2)

    def run(**settings: object) -> list[tuple[str, str]]:
        model = tower(**settings)
        step(model), step(model)
        return step(model)

    return run


def most_gathered(events: list[tuple[str, str]]) -> int:
    """The most units that were gathered, or being gathered, at any time."""
    now, most = set(), 0
    for verb, unit in events:
        if verb == "gather":
            now.add(unit)
        elif verb == "free":
            now.discard(unit)
        most = max(most, len(now))
    return most


def forward_of(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The events up to the end of the last unit's forward."""
    last = str(BLOCKS - 1)
    return events[: events.index(("free", last)) + 1]


@pytest.mark.parametrize(
    ("strategy", "gathers", "all_reduces"), [("FULL_SHARD", 2, 0), ("SHARD_GRAD_OP", 1, 0), ("NO_SHARD", 1, 1)]
)
@both
def test_strategies(third_step, strategy, gathers, all_reduces, orig):
    """Units have the unwrapped modules' names. NO_SHARD "gathers" by a local copy."""
    events = third_step(use_orig_params=orig, sharding_strategy=ShardingStrategy[strategy])
    assert {unit for _, unit in events} == set(map(str, range(BLOCKS)))
    for unit in map(str, range(BLOCKS)):
        counts = [events.count((verb, unit)) for verb in ("gather", "free", "reduce", "all_reduce")]
        assert counts == [gathers, gathers, 1, all_reduces]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@both
def test_the_root_stays_gathered_until_its_backward(fake_world, strategy, orig):
    """It is gathered once in a step, an inner instance twice. Without a backward, it is freed after its forward."""
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    model = FullyShardedDataParallel(
        blocks,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=CustomPolicy(lambda module: module is blocks[1]),
        use_orig_params=orig,
    )
    for _ in range(3):
        events = step(model)
        counts = [[events.count((verb, unit)) for verb in ("gather", "free", "reduce")] for unit in ("(root)", "1")]
        assert counts == [[1, 1, 1], [2, 2, 1]]
        assert events.index(("free", "(root)")) > events.index(("reduce", "1"))
        assert fullshard.memory_use(model).gathered == 0
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert fullshard.memory_use(model).gathered == 0


@pytest.mark.parametrize(("limit", "most"), [(True, 2), (False, 3)])
def test_all_gather_limiter(third_step, limit, most):
    assert most_gathered(forward_of(third_step(limit_all_gathers=limit))) == most


@pytest.mark.parametrize("kind", ["BACKWARD_PRE", "BACKWARD_POST", None])
def test_backward_prefetch(third_step, kind):
    """When unit 2 is gathered, seen from unit 3, which runs before it in backward."""
    events = third_step(backward_prefetch=BackwardPrefetch[kind] if kind else None)
    backward = events[len(forward_of(events)) :]
    gather = backward.index(("gather", "2"))
    freed, reduced = backward.index(("free", "3")), backward.index(("reduce", "3"))
    if kind == "BACKWARD_PRE":
        assert gather < freed and most_gathered(backward) == 2
    else:
        assert gather > freed and most_gathered(backward) == 1
        assert (gather < reduced) == (kind == "BACKWARD_POST")


def test_no_sync_communicates_no_gradients(fake_world):
    fake_world(2)
    model = tower()
    step(model)
    with model.no_sync():
        assert not [unit for verb, unit in step(model) if verb in ("reduce", "all_reduce")]


class Branching(nn.Module):
    """Runs its layers in another order on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.left, self.right) if dist.get_rank() == 0 else (self.right, self.left)
        return second(first(x))


def run_in_other_orders() -> None:
    model = FullyShardedDataParallel(Branching(), auto_wrap_policy={nn.Linear})
    with pytest.raises(fullshard.DivergenceError, match=r"(?s)left.*right|right.*left"):
        model(torch.ones(1, 4))


def test_another_order_on_another_rank_is_reported_with_names(run_ranks):
    run_ranks(run_in_other_orders)


def parameters_shown(orig: bool) -> list[str]:
    """What the module's attribute is outside and inside forward."""
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 4)), use_orig_params=orig)
    layer, inside = model.module[0], []
    layer.register_forward_hook(lambda module, args, out: inside.append(tuple(module.weight.shape)))
    model(torch.ones(1, 6))
    problems = [] if inside == [(4, 6)] else [f"inside {inside}"]
    if orig:
        held = [tuple(p.shape) for p in layer.parameters()]
        rank = dist.get_rank()
        if held[0] != (16 if rank == 0 else 8,):  # 24 + 4 elements, 16-byte aligned, over two ranks
            problems.append(f"rank {rank} holds {held}")
    else:
        if tuple(layer.weight.shape) != (4, 6) or layer.weight.dtype != torch.float32:
            problems.append("the stand-in does not tell its shape")
        try:
            layer.weight.sum()
        except fullshard.PhaseError as error:
            if "0.weight" not in str(error) or "summon_full_params" not in str(error):
                problems.append(str(error))
        else:
            problems.append("a sharded parameter was summed")
        (flat,) = model.parameters()
        if not isinstance(flat, fullshard.FlatParameter) or isinstance(layer.weight, fullshard.FlatParameter):
            problems.append("FlatParameter")
        if flat._fqns != ("0.weight", "0.bias") or flat._shapes != ((4, 6), (4,)) or flat.numel() * 2 < 28:
            problems.append("metadata")
    return problems


@both
def test_what_modules_show(run_ranks, orig):
    assert_same(run_ranks(parameters_shown, orig))


# Fullshard's own functions on wrapped models.


def build(orig: bool) -> FullyShardedDataParallel:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}, use_orig_params=orig)


def inner_first(orig: bool) -> list[str]:
    """Looking into an inner instance before the first forward does not make it a root."""
    model = build(orig)
    with FullyShardedDataParallel.summon_full_params(model.module[0]):
        shape = tuple(model.module[0].module.weight.shape)
    model(torch.ones(2, 5))
    problems = [] if shape == (7, 5) else [f"{shape}"]
    if not model.check_is_root() or model.module[0].check_is_root():
        problems.append("roots")
    return problems


@both
def test_an_inner_instance_looked_into_first_stays_inner(run_ranks, orig):
    assert_same(run_ranks(inner_first, orig))


def described(orig: bool) -> tuple[str, fullshard.MemoryUse]:
    model = build(orig)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return fullshard.describe(model), fullshard.memory_use(model, optimizer)


@both
def test_describe_and_memory_use(run_ranks, orig):
    """(7 * 5 + 7) elements are 48 with padding, (3 * 7 + 3) are 32: 40 of them on each of two ranks."""
    for text, use in run_ranks(described, orig):
        assert text.splitlines()[0] == "2 ranks: sharded 2 ways; gradients: mean over 2"
        assert [line.split()[:5] for line in text.splitlines()[2:4]] == [
            ["0", "flat", "float32", "2", "42"],
            ["2", "flat", "float32", "2", "24"],
        ]
        assert text.splitlines()[4].split()[:4] == ["in", "all", "4", "66"]
        assert use.parameters == 40 * 4
        assert use.gathered == 0
