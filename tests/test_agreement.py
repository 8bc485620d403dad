"""What ranks compare at the end of a backward: how often, over which groups, and when the host of a device reads it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.mesh import axes as mesh_axes
from fullshard.wrap import ModuleWrapPolicy

USE, EXCHANGE, STALE = (importlib.import_module(f"fullshard.agreement.{name}") for name in ("use", "exchange", "stale"))
WIDTH, BLOCKS = 4, 5


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def block_by_block(**keywords: Any) -> nn.Module:
    """As users write it."""
    model = plain()
    for block in model:
        fully_shard(block, **keywords)
    return fully_shard(model, **keywords)


def own_mesh_each() -> nn.Module:
    """Every call with another `DeviceMesh` of the same ranks."""
    model = plain()
    for block in (*model, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def own_group_each() -> nn.Module:
    """Every call with another process group of the same ranks."""
    model = plain()
    for block in (*model, model):
        fully_shard(block, mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
    return model


def by_policy() -> nn.Module:
    return fully_shard(plain(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def wrapped(**keywords: Any) -> nn.Module:
    model = plain()
    for index, block in enumerate(model):
        model[index] = FullyShardedDataParallel(block, **keywords)
    return FullyShardedDataParallel(model, **keywords)


def wrapped_with_a_mesh() -> nn.Module:
    return wrapped(device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def partly_replicated() -> nn.Module:
    model = plain()
    model[0] = FullyShardedDataParallel(model[0], sharding_strategy=fullshard.ShardingStrategy.NO_SHARD)
    return FullyShardedDataParallel(model)


def hybrid(**keywords: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return block_by_block(mesh=mesh, **keywords)


def wrapped_hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return wrapped(device_mesh=mesh, sharding_strategy=fullshard.ShardingStrategy.HYBRID_SHARD)


def wrapped_with_two_groups() -> nn.Module:
    """Hybrid by the user's own groups: of consecutive ranks to shard over, across these to replicate."""
    shards, copies = ([dist.new_group(ranks) for ranks in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    groups = shards[dist.get_rank() // 2], copies[dist.get_rank() % 2]
    return wrapped(process_group=groups, sharding_strategy=fullshard.ShardingStrategy._HYBRID_SHARD_ZERO2)


def out_of_order() -> nn.Module:
    return block_by_block(mesh=DeviceMesh("cpu", [[2, 3], [0, 1]]))


def partly_hybrid() -> nn.Module:
    """Some units have copies of their shards, others are split over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = plain()
    for index, block in enumerate(model):
        fully_shard(block, mesh=mesh if index < 2 else None)
    return fully_shard(model, mesh=mesh)


def beside_another_dim() -> nn.Module:
    """The data-parallel dims of a mesh that has one more: each half of the ranks trains apart."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    return block_by_block(mesh=mesh["replicate", "shard"])


def dense_and_experts() -> nn.Module:
    """The first two blocks belong to a pair of ranks each, the rest to all four."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    model = plain()
    for index, block in enumerate(model):
        fully_shard(block, mesh=pairs["edp"] if index < 2 else None)
    return fully_shard(model)


def loss_of(model: nn.Module, number: int) -> Tensor:
    data = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return model(torch.randn(2, WIDTH, generator=data)).square().mean()


def train(model: nn.Module, steps: int, lr: float = 0.1, after: Callable[[int], None] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


# How often.

TWO = (block_by_block, own_mesh_each, own_group_each, by_policy, wrapped, wrapped_with_a_mesh, partly_replicated)
FOUR = (hybrid, wrapped_hybrid, wrapped_with_two_groups, out_of_order, partly_hybrid)
own = pytest.mark.gloo("connections between processes")
worlds = pytest.mark.parametrize(
    ("builds", "world", "count"),
    [
        pytest.param(TWO, 2, 1, id="two"),
        pytest.param((dense_and_experts,), 4, 2, id="experts"),
        pytest.param(FOUR, 4, 1, id="four", marks=own),
        pytest.param((beside_another_dim,), 8, 1, id="eight", marks=own),
        pytest.param(FOUR[:3], 4, None, id="no connections"),
    ],
)


@worlds
def test_one_small_all_reduce_a_backward_and_set_of_ranks(run_ranks, builds, world, count):
    if count is None:  # threads cannot connect; on torch 2.11 and with --gloo ranks are processes of a pool
        count = 1 if hasattr(run_ranks, "__self__") else 2
    for build in builds:
        assert run_ranks(counted_in_steps, build, world=world) == [[count] * 3] * world, build.__name__


def counted_in_steps(build: Callable[[], nn.Module]) -> list[int]:
    """All-reduces of integers in each of three steps after the first."""
    counts, all_reduce = [0], fullshard.TorchComm.all_reduce

    def counted(self: Any, axis: Any, tensor: Tensor, mean: bool) -> Any:
        counts[-1] += not tensor.is_floating_point()
        return all_reduce(self, axis, tensor, mean)

    with mock.patch.object(fullshard.TorchComm, "all_reduce", counted):
        train(build(), 4, after=lambda step: counts.append(0))
    return counts[1:-1]  # the first compares more


@own
def test_a_hybrid_mesh_compares_as_often_as_others(run_ranks):
    expected = run_ranks(compared_in_steps, block_by_block, world=4)
    assert min(map(min, expected)) > 0
    assert run_ranks(compared_in_steps, hybrid, world=4) == expected


def compared_in_steps(build: Callable[..., nn.Module]) -> list[int]:
    """Gathers of integers in each of three steps after the first, of a model that compares all that it issues."""
    counts, gather = [0], fullshard.TorchComm.gather

    def counted(self: Any, axis: Any, out: Tensor, shard: Tensor) -> Any:
        counts[-1] += out.dtype is torch.int64
        return gather(self, axis, out, shard)

    with mock.patch.object(fullshard.TorchComm, "gather", counted):
        train(build(check="every"), 4, after=lambda step: counts.append(0))
    return counts[1:-1]


# An accelerator's host is ahead of its device.


class Late:
    """A copy that arrives when the host waits for it, and not before."""

    def __init__(self, values: Tensor, out: Tensor) -> None:
        self.values, self.out = values.clone(), out
        out.fill_(-7)

    def synchronize(self) -> None:
        self.out.copy_(self.values)


@contextlib.contextmanager
def on_a_device() -> Iterator[list[Late]]:
    """Answers come as on an accelerator. Gives the copies that were made."""
    copies: list[Late] = []

    def copy(values: Tensor, out: Tensor) -> Late:
        copies.append(Late(values, out))
        return copies[-1]

    with (
        mock.patch.object(USE, "has_streams", lambda device: True),
        mock.patch.object(STALE, "has_streams", lambda device: True),
        mock.patch.object(EXCHANGE, "host_buffer", lambda numel: torch.full((numel,), -7)),
        mock.patch.object(EXCHANGE, "begin_copy_to_host", copy),
    ):
        yield copies


@worlds
def test_late_answers_raise_nothing(run_ranks, builds, world, count):
    assert all(run_ranks(late_answers, builds, world=world))


def late_answers(builds: Any) -> bool:
    for build in builds:
        expected, model = build(), build()
        train(expected, 5)
        with on_a_device() as copies:
            train(model, 5)
        assert len(copies) in (5, 10), build.__name__  # one a backward and mesh
        assert len({copy.out.data_ptr() for copy in copies}) <= 4, "two buffers a mesh, for good"
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other), build.__name__
    return True


def test_unused_parameters_are_agreed_on_at_once(run_ranks):
    assert all(run_ranks(unused_on_a_device))


def unused_on_a_device() -> bool:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.sometimes(self.always(x)) if dist.get_rank() == 0 else self.always(x)

    model = fully_shard(Skips())
    with on_a_device():
        for step in range(4):
            loss_of(model, step).backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
    return True


@pytest.mark.parametrize(
    ("build", "world"), [(block_by_block, 2), (dense_and_experts, 4), pytest.param(hybrid, 4, marks=own)]
)
def test_ranks_that_really_differ_are_told_so(run_ranks, build, world):
    assert set(run_ranks(different_steps, build, world=world)) == {
        ("optimizers stepped differently on different ranks", 3)
    }


def different_steps(build: Any) -> tuple[str, int]:
    """Learning rates that differ: seen in the second backward, read two later."""
    done: list[int] = []
    with on_a_device(), pytest.raises(fullshard.DivergenceError) as raised:
        train(build(), 6, lr=0.1 + 0.1 * (dist.get_rank() % 2), after=done.append)
    return raised.value.what.partition(":")[0], len(done)


def stepped_later() -> str:
    """Rank 1 leaves a step out and makes up for it: by the time that the ranks read it, all have taken the same."""
    model = block_by_block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_a_device(), pytest.raises(fullshard.DivergenceError) as raised:
        for number in range(6):
            loss_of(model, number).backward()
            for _ in range(1 if dist.get_rank() == 0 else (1, 0, 2, 1, 1, 1)[number]):
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return str(raised.value)


def test_ranks_that_stepped_at_different_times(run_ranks):
    for text in run_ranks(stepped_later, world=2):
        assert "the others: the same by now, but not when a backward began" in text, text


# One object for one mesh, and groups that are made once.


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_smaller_groups_are_made_once(fake_world):
    fake_world(4)
    block_by_block(reshard_after_forward=2)
    count = groups()
    again = block_by_block(reshard_after_forward=2)
    assert groups() == count <= 1 + 2  # the default one, and the two dims of the smaller mesh
    assert len({id(runner.kept_axis) for runner in [block._runner().unit for block in again]}) == 1


def test_a_smaller_group_that_was_destroyed_is_made_again(fake_world):
    fake_world(4)
    axes = mesh_axes.resolve_mesh(None)
    first = mesh_axes.subdivide(axes, 2)
    assert mesh_axes.subdivide(axes, 2) is first
    dist.destroy_process_group(first.group)
    assert mesh_axes.subdivide(axes, 2) is not first


def test_node_groups_are_made_once(fake_world):
    fake_world(4)

    def everyone(found: list[Any], value: Any, *given: Any, **keywords: Any) -> None:
        found[:] = ["a", "a", "b", "b"]

    with mock.patch.object(dist, "all_gather_object", everyone):
        first = mesh_axes.axes_of_groups(None, hybrid=True)
        count = groups()
        assert mesh_axes.axes_of_groups(None, hybrid=True) is first and groups() == count


def test_a_mesh_has_one_object_by_its_groups(fake_world):
    fake_world(4)
    axes = mesh_axes.resolve_mesh(None)
    assert mesh_axes.resolve_mesh(init_device_mesh("cpu", (4,))) is axes
    assert mesh_axes.axes_of_groups(None, hybrid=False) is axes
    other = dist.new_group()
    same_ranks = mesh_axes.resolve_mesh(DeviceMesh.from_group(other, "cpu"))
    assert same_ranks is not axes and same_ranks.shard.group is other
    assert mesh_axes.axes_of_groups(other, hybrid=False) is same_ranks


def test_nothing_holds_a_group_that_was_destroyed(fake_world):
    """Asked of the second: torch's caches (on 2.11 a leak) keep the first mesh of its kind, and serve equal ones."""
    for _ in range(2):
        fake_world(4)
        model = block_by_block(reshard_after_forward=2)
        model.set_separate_reduce_scatter_group()
        model(torch.zeros(1, WIDTH)).sum().backward()
        world, axes = weakref.ref(dist.group.WORLD), weakref.ref(mesh_axes.resolve_mesh(None))
        dist.destroy_process_group()
        del model
        gc.collect()
        assert axes() is None
    assert world() is None
    fake_world(2)
    assert mesh_axes.resolve_mesh(None).shard.size == 2


# Units that stay gathered, on an accelerator: hosts say what they know of changes; values are compared late.


@contextlib.contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Where values are read to the host."""
    reads: list[str] = []
    names = ("item", "tolist", "__bool__", "__int__", "__float__")
    kept = {name: getattr(Tensor, name) for name in names}

    def counting(name: str) -> Any:
        def read(self: Tensor, *given: Any) -> Any:
            if self.dtype is not torch.int64:  # of which hosts tell each other, and late sums are
                reads.append(f"{name} of {self.dtype} {tuple(self.shape)}")
            return kept[name](self, *given)

        return read

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(Tensor, name, counting(name)))
        yield reads


def test_kept_units_make_no_host_wait_and_follow_their_shards(run_ranks):
    assert all(run_ranks(kept_on_a_device))


def kept_on_a_device() -> bool:
    expected, model = block_by_block(), block_by_block(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    changes: list[Callable[[Any], object]] = [
        lambda model: None,  # accumulation
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
        lambda model: DataSGD(model.parameters()).step(),
        lambda model: [parameter.detach().mul_(0.9) for parameter in model.parameters()],
        lambda model: [p.to_local().detach().mul_(0.5) for p in model.parameters() if dist.get_rank() == 1],
        lambda model: model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}),
        lambda model: None,
        lambda model: None,
    ]
    with on_a_device():
        with torch.no_grad():
            loss_of(model, 0)  # a first pass compares more
        loss_of(model, 0).backward(), loss_of(expected, 0).backward()
        for number, change in enumerate(changes):
            for each in (expected, model):
                change(each)
            with counted_reads() as reads, torch.no_grad():
                got = loss_of(model, number)
            assert not reads, (number, reads)
            with torch.no_grad():
                assert torch.equal(got, loss_of(expected, number)), number
    return True


class DataSGD(torch.optim.Optimizer):
    """Writes through `.data`, as optimizers did before `torch.no_grad`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad.data, alpha=-0.1)


def test_a_change_that_nobody_saw_is_an_error_some_forwards_later(run_ranks):
    """The values of one unit are looked at in each, and read two forwards later."""
    (what, done), other = run_ranks(unseen_on_a_device)
    assert (
        (what, done) == tuple(other) and "changed in a way that cannot be detected" in what and 2 <= done <= 2 + BLOCKS
    )


def unseen_on_a_device() -> list[Any]:
    model = block_by_block(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    done = 0
    with on_a_device():
        with torch.no_grad():
            loss_of(model, 0)  # a first pass compares more
        loss_of(model, 0).backward()
        next(iter(model.parameters())).detach().to_local().numpy()[:] *= 2  # as a kernel that torch knows nothing of
        with pytest.raises(fullshard.FullshardError, match=r"0\.0\.weight") as raised:
            for number in range(3 + BLOCKS):
                with torch.no_grad():
                    loss_of(model, number)
                done += 1
    model.reshard()
    return [raised.value.what, done]
