"""What a step costs that can be counted on a CPU: roundings, bytes held, copies, collectives and waits for the host."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import EVERY_LAYOUT, WRAPPERS, layers, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
import fullshard.state_dict
from fullshard import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fullshard.state_dict import StateDictOptions
from ways import wrap

every_layout = pytest.mark.parametrize("layout", EVERY_LAYOUT, ids=str)


# An axis of one rank.


@every_layout
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)], ids=str)
def test_a_factor_of_the_users_is_not_divided_by_an_axis_of_one(run_ranks, mesh, layout):
    """Sums are asked for: what a hook sees and what comes out is the sum, whichever axis has one rank."""
    assert all(run_ranks(summed, mesh, layout))


def summed(mesh: tuple[int, int], layout: Any) -> bool:
    given = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model, whole, seen = shard(layers(), layout=layout, mesh=given), layers(), []
    for unit in model.modules():
        if isinstance(unit, fullshard.FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_all_reduce_hook(lambda gradient: seen.append(gradient.detach().clone()))
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
    for _ in range(2 * dist.get_world_size()):
        whole(x).sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    assert len(seen) == 4, "a hook for each unit with parameters and backward"
    return True


class Recorded:
    """A user's reduce-scatter, which notes what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.asked.append((dist.get_world_size(group), op))
        kind = str(op).rsplit(".", maxsplit=1)[-1]
        size = dist.get_world_size(group)
        dist.all_reduce(whole := input_tensor.clone(), group=group)
        output_tensor.copy_(whole.chunk(size)[dist.get_rank(group)])
        if kind == "AVG":
            output_tensor.div_(size)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_collective_on_one_rank_is_asked_for_a_sum(run_ranks, mesh, layout):
    """An average of one rank's is a sum, and the one that every backend knows and has a fast path for."""
    assert all(run_ranks(asked_for, mesh, layout))


def asked_for(mesh: tuple[int, int], layout: str) -> bool:
    given = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model, whole, seen = shard(layers(), layout=layout, mesh=given), layers(), Recorded()
    for unit in model.modules():
        if isinstance(unit, fullshard.FSDPModule):
            unit.set_custom_reduce_scatter(seen)
    x = torch.ones(2, 4, dtype=torch.float64)
    model(x).sum().backward()
    whole(x).sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    assert seen.asked
    wrong = [(size, op) for size, op in seen.asked if size == 1 and op != dist.ReduceOp.SUM]
    assert not wrong, wrong
    return True


class Seen(TorchDispatchMode):
    """Counts what is dispatched below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


# Loading from rank 0.


class Peak(TorchDispatchMode):
    """The most bytes of tensors of some size that were made inside it and alive at once."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.alive, self.most = at_least, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.at_least:
                    self.alive[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        self.alive = {
            key: (weak, size) for key, (weak, size) in self.alive.items() if not torch.UntypedStorage._expired(weak)
        }
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


@pytest.mark.parametrize("front_end", [*EVERY_LAYOUT, *WRAPPERS], ids=str)
def test_broadcast_from_rank_0_holds_a_tensor_at_a_time(run_ranks, front_end):
    """On the other ranks two whole tensors at once will do; today's 32 all stay until the last one is there."""
    peaks = run_ranks(loaded_from_rank_0, front_end)
    biggest = 64 * 64 * 8
    assert all(peak <= 4 * biggest for peak in peaks[1:]), f"{peaks} bytes; a tensor has {biggest}"


def loaded_from_rank_0(front_end: Any) -> int:
    def many() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32))).double()

    if isinstance(front_end, bool):
        parts = [wrap(part, use_orig_params=front_end) for part in many()]
        model = wrap(nn.Sequential(*parts), use_orig_params=front_end)
    else:
        model = shard(many(), layout=front_end)
    whole = {name: value + 1.0 for name, value in many().state_dict().items()}
    given = whole if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    gc.collect()
    with Peak(64 * 64 * 8) as peak:
        fullshard.state_dict.set_model_state_dict(model, given, options=options)
    x = torch.ones(1, 64, dtype=torch.float64)
    expected = many()
    expected.load_state_dict(whole)
    torch.testing.assert_close(model(x), expected(x))
    return peak.most


# Copies of many tensors in one call.


class Mixed(nn.Module):
    """Plain weights, and one that lies in another order in memory if `strided`."""

    def __init__(self, strided: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, width) for width in range(8, 24)])
        self.conv = nn.Conv2d(8, 8, 3)
        if strided:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        total = self.conv(x.view(-1, 8, 1, 1).expand(-1, 8, 3, 3)).sum()
        return total + sum(layer(x).sum() for layer in self.layers)


@every_layout
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_strided_parameter_costs_one_copy_more(fake_world, precision, layout):
    """The copies of all others stay one fused call each: `_foreach_copy_` takes a slow loop if one pair is strided."""
    fake_world(2)
    counts = []
    for strided in (False, True):
        model = Mixed(strided)
        policy = MixedPrecisionPolicy(param_dtype=precision, cast_forward_inputs=False)
        fully_shard(model, layout=layout, mp_policy=policy)
        x = torch.ones(2, 8, dtype=precision)
        for _ in range(2):
            model(x).backward()
        with Pairs() as pairs:
            model(x).backward()
        counts.append(pairs)
    plain, mixed = counts
    assert not mixed.slow, f"{mixed.slow} pairs went through a copy of many that the strided one made slow"
    assert mixed.copies <= plain.copies + 4, (plain.copies, mixed.copies)


class Pairs(TorchDispatchMode):
    """Counts copies, and pairs in a `_foreach_copy_` that holds a pair of different strides beside ones without."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.slow = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.copies += name in ("copy_", "_foreach_copy_")
        if name == "_foreach_copy_":
            alike = [a.stride() == b.stride() and fused(a) and fused(b) for a, b in zip(*args[:2], strict=True)]
            self.slow += sum(alike) if not all(alike) else 0
        return func(*args, **(kwargs or {}))


def fused(tensor: Tensor) -> bool:
    """Whether the fused path takes it: elements without gaps and without overlap."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


# Collectives by the size of the axis.


@pytest.mark.parametrize("width", [512, 1024])
def test_a_large_blocks_collectives_at_world_64(fake_world, width):
    """Whether a copy is dearer than a collective depends on how many ranks it takes: at 64 a block is one or two."""
    fake_world(64)
    counts = {}
    for count in (2, 64):
        mesh = init_device_mesh("cpu", (64 // count, count), mesh_dim_names=("replicate", "shard"))
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        fully_shard(block, mesh=mesh)
        block(torch.ones(1, 2, width)).sum().backward()  # in which ranks compare what they train
        with fullshard.record_events() as events, Seen() as seen:
            block(torch.ones(1, 2, width)).sum().backward()
        gathers = sum(n for name, n in seen.counts.items() if "allgather" in name or "all_gather" in name)
        asked = sum(event.verb == "gather" for event in events)
        counts[count] = gathers / max(asked, 1)
    assert counts[64] <= 2, f"collectives a gather, by ranks of the axis: {counts}"
    assert counts[64] <= counts[2]


# Hybrid meshes: the slow link works beside what follows.


class Waits(fullshard.RecordingComm):
    """Notes when reductions of gradients are issued, and when they are waited for."""

    def __init__(self) -> None:
        super().__init__(fullshard.TorchComm())
        self.noted: list[str] = []

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        return self.note("reduce", super().reduce(axis, out, buffer, mean))

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        pending = super().all_reduce(axis, tensor, mean)
        return self.note("all_reduce", pending) if tensor.is_floating_point() else pending

    def note(self, what: str, pending: Any) -> Any:
        name = f"{what} {sum(line.startswith(f'{what} ') for line in self.noted)}"
        self.noted.append(name)
        return Noted(pending, self.noted, name)


class Noted:
    """A collective in flight whose wait is written down."""

    def __init__(self, pending: Any, noted: list[str], name: str) -> None:
        self.pending, self.noted, self.name = pending, noted, name

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.noted.append(f"wait for {self.name}")
        self.pending.wait()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_an_all_reduce_is_waited_for_after_the_next_reduction_was_issued(fake_world, layout, in_flight):
    fake_world(4)
    mesh, comm = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), Waits()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    for unit in (*model, model):
        fully_shard(unit, layout=layout, mesh=mesh, comm=comm)
    model.set_reduce_scatter_max_input_buffers(in_flight)
    for _ in range(2):
        comm.noted.clear()
        model(torch.ones(2, 4)).sum().backward()
    at = {line: place for place, line in enumerate(comm.noted)}
    assert len(at) == len(comm.noted) == 4 * 5, comm.noted
    for unit in range(5):
        assert at[f"wait for reduce {unit}"] < at[f"all_reduce {unit}"] < at[f"wait for all_reduce {unit}"]
        if unit < 4:
            assert at[f"wait for all_reduce {unit}"] > at[f"reduce {unit + 1}"], comm.noted


# The host waits for nothing.


class Branches(nn.Module):
    """Uses as many of its heads as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
        self.used = [0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return sum(self.heads[i](x).sum() for i in self.used)


@pytest.mark.parametrize("front_end", [*EVERY_LAYOUT, *WRAPPERS], ids=str)
@pytest.mark.parametrize("units", ["one", "each head"])
def test_unused_parameters_make_the_host_wait_once_at_most(run_ranks, units, front_end):
    for waits, names in run_ranks(steps_with_unused, units, front_end):
        assert waits <= 1, f"{waits} reads of a device value by the host in one backward ({names})"


HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero")


def steps_with_unused(units: str, front_end: Any) -> tuple[int, dict[str, int]]:
    model = Branches()
    if units == "each head":
        model.heads = nn.ModuleList([one(head, front_end) for head in model.heads])
    model = one(model, front_end)
    inner = model.module if isinstance(front_end, bool) else model
    most: Counter[str] = Counter()
    for step in range(4):
        inner.used = [step % 8, 7]
        loss = model(torch.ones(2, 4))
        with Seen() as seen:
            loss.backward()
        waits = Counter({name: seen.counts[name] for name in HOST_READS})
        most = max(most, waits, key=Counter.total)
        for parameter in model.parameters():
            parameter.grad = None
    return most.total(), dict(most)


def one(module: nn.Module, front_end: Any) -> nn.Module:
    """`module` as a unit, or wrapped."""
    if isinstance(front_end, bool):
        return wrap(module, use_orig_params=front_end)
    return fully_shard(module, layout=front_end)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("originals", WRAPPERS)
def test_the_wrapper_on_an_axis_of_one_rank(run_ranks, strategy, originals):
    assert all(run_ranks(wrapper_on_one, strategy, originals))


def wrapper_on_one(strategy: str, originals: bool) -> bool:
    x = torch.ones(2, 4, dtype=torch.float64) * (1 + dist.get_rank())
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = wrap(
            layers(), device_mesh=mesh, sharding_strategy=ShardingStrategy[strategy], use_orig_params=originals
        )
        model(x).sum().backward()
        whole = layers()
        for rank in range(2):
            (whole(torch.ones(2, 4, dtype=torch.float64) * (1 + rank)).sum() / 2).backward()
        with fullshard.FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
    return True
