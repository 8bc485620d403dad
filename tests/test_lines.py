"""Connections of the engine's own: one set for each process group, and on accelerators one for comparisons alone."""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.agreement import meet, meet_jointly
from fullshard.agreement.exchange import ranks_of, rows_of_all, sum_over
from fullshard.api.join import Count
from fullshard.mesh import Axis, MeshAxes, lines, resolve_mesh
from fullshard.shard import TokenCount
from fullshard.torch_private import gloo_group
from fullshard.watcher import RANK

pytestmark = pytest.mark.gloo("connections between processes")

WIDTH, STEPS = 8, 6
TWO = 2


def blocks(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def functional(group: Any, seed: int) -> nn.Module:
    model, mesh = blocks(seed), DeviceMesh.from_group(group, "cpu")
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapper(group: Any, seed: int) -> nn.Module:
    model = blocks(seed)
    for index, block in enumerate(model):
        model[index] = FullyShardedDataParallel(block, process_group=group)
    return FullyShardedDataParallel(model, process_group=group)


def train(model: nn.Module, seed: int) -> list[Tensor]:
    """Outputs and norms of some steps with evaluations between them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    found = []
    for step in range(STEPS):
        output = model(torch.randn(3, WIDTH, generator=data))
        output.square().mean().backward()
        wrapped = isinstance(model, FullyShardedDataParallel)
        norm = model.clip_grad_norm_(1.0) if wrapped else fullshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [output.detach(), norm]
        if step % 3 == 0:
            with torch.no_grad():
                found.append(model(torch.randn(2, WIDTH, generator=data)))
    return found


def test_two_models_in_two_threads(run_ranks):
    """Each with a process group of its own over the same ranks: actor and critic, policy and reference."""
    assert all(run_ranks(side_by_side, functional))
    assert all(run_ranks(side_by_side, wrapper))


def side_by_side(build: Callable[[Any, int], nn.Module]) -> bool:
    expected = [train(build(dist.new_group(), seed), seed) for seed in range(TWO)]
    models = [build(dist.new_group(), seed) for seed in range(TWO)]
    found: list[Any] = [None] * TWO

    def run(seed: int) -> None:
        try:
            found[seed] = train(models[seed], seed)
        except BaseException as error:
            found[seed] = error

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(TWO)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(TWO):
        if isinstance(found[seed], BaseException):
            raise found[seed]
        for mine, other in zip(found[seed], expected[seed], strict=True):
            assert torch.equal(mine, other), seed
    return True


def test_threads_that_open_lines_in_another_order_on_each_rank(run_ranks):
    """Each thread asks the store by itself: a store's connection serves one question, and a gloo group waits in one."""
    assert all(run_ranks(opened_crosswise))


def opened_crosswise() -> bool:
    rank = dist.get_rank()
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [keeper and keeper.port]
    dist.broadcast_object_list(port)
    store = keeper or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    groups = [dist.new_group(range(TWO), timeout=timedelta(seconds=10)) for _ in range(2)]
    opened: dict[int, lines.Lines] = {}

    def run(at: int) -> None:
        opened[at] = lines.open_lines(groups[at], rank, TWO, f"crosswise{at}", True)

    threads = [threading.Thread(target=run, args=(at,)) for at in ((0, 1) if rank == 0 else (1, 0))]
    with mock.patch.object(gloo_group, "default_store", lambda: store):
        for thread in threads:
            thread.start()
            thread.join(1)  # the first waits for the other rank's by now
        for thread in threads:
            thread.join()
    dist.barrier()  # the store stays until all have asked it
    return all(opened[at].all_own for at in range(2))


def test_lines_belong_to_a_group(run_ranks):
    assert all(run_ranks(lines_of_two_groups))


def lines_of_two_groups() -> bool:
    groups = [dist.new_group() for _ in range(TWO)]
    models = [functional(group, seed) for seed, group in enumerate(groups)]
    for model in models:
        model(torch.zeros(1, WIDTH))
    found = [lines.lines_of(group) for group in groups]
    assert all(one.is_open and one.all_own for one in found)
    assert len({id(part) for one in found for part in (one.data, one.side, one.apart)}) == 3 * TWO
    again = functional(groups[0], 7)
    again(torch.zeros(1, WIDTH))
    assert lines.lines_of(groups[0]).side is found[0].side
    return True


# Accelerators: the same, emulated by an axis that says it is one of theirs.


def accelerated() -> Axis:
    return Axis(dist.new_group(), 2, dist.get_rank(), "nccl", (0, 1))


def test_ranks_of_accelerators_compare_on_the_host(run_ranks):
    assert all(run_ranks(compared_on_the_host))


def compared_on_the_host() -> bool:
    axis, comm, device = accelerated(), fullshard.TorchComm(), torch.device("cpu")
    with mock.patch.object(RANK, "idle", False):
        meet(axis, comm, device)
        assert RANK.idle, "the host does not wait there"
    assert axis.lines.data is axis.group and axis.apart is axis
    assert axis.aside is not axis and axis.aside.backend == "gloo"
    nowhere = torch.device("meta")  # what lies on the mesh's device is not read
    rank = dist.get_rank()
    assert rows_of_all([[rank, 5]], [axis], comm, nowhere) == [[0, 5], [1, 5]]
    axes = mock.Mock(spec=MeshAxes, spanning=[axis], device=nowhere)
    assert Count(rank == 1, axes, comm).read() == 1
    return True


def test_ranks_that_cannot_connect_on_the_host_compare_on_the_device(run_ranks):
    assert all(run_ranks(one_cannot_connect))


def one_cannot_connect() -> bool:
    axis, comm, device = accelerated(), fullshard.TorchComm(), torch.device("cpu")
    make = lines.gloo_group
    lost = (lambda *given, **keywords: None) if dist.get_rank() == 1 else make
    with (
        mock.patch.object(RANK, "idle", False),
        mock.patch.object(lines, "gloo_group", lost),
        mock.patch.object(lines, "_CONNECTED", lines.timedelta(seconds=1)),
    ):
        meet(axis, comm, device)
    assert axis.aside is axis
    assert rows_of_all([[dist.get_rank()]], [axis], comm, device) == [[0], [1]]
    return True


def test_lines_of_a_group_that_is_gone_are_let_go(run_ranks):
    assert set(run_ranks(lines_after, True)) == {0}
    assert set(run_ranks(lines_after, False)) == {0}


def lines_after(on_host: bool) -> int:
    before = len(lines._opened)
    group = dist.new_group()
    lines.open_lines(group, dist.get_rank(), 2, f"test{on_host}", on_host)
    assert len(lines._opened) == before + 1
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return len(lines._opened) - before


def test_cut_ends_what_waits_and_no_connection_of_others(run_ranks):
    assert all(run_ranks(cut_beside_others, True))
    assert all(run_ranks(cut_beside_others, False))


def cut_beside_others(on_host: bool) -> bool:
    """A thread opens connections while lines are opened: within the process, to a server, and to the other rank."""
    rank, group = dist.get_rank(), dist.new_group()
    address = [dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)]  # a server and its client
    ends: list[socket.socket] = []

    def open_some() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        ends.extend([*socket.socketpair(), socket.create_connection(listener.getsockname()), listener.accept()[0]])
        address.append(dist.TCPStore("127.0.0.1", address[0].port, 1, False, wait_for_workers=False))
        dist.barrier(beside)

    beside, make = dist.new_group(), lines.gloo_group

    def beside_a_thread(*given: Any, **keywords: Any) -> Any:
        if not ends:
            thread = threading.Thread(target=open_some)
            thread.start()
            thread.join()
            address.append(dist.new_group())  # another gloo group between the same ranks
        return make(*given, **keywords)

    with mock.patch.object(lines, "gloo_group", beside_a_thread):
        opened = lines.open_lines(group, rank, 2, f"cut{on_host}", on_host)
    parts = [opened.data, opened.side, opened.apart] if on_host else [opened.side]
    works = [dist.all_reduce(torch.ones(2), group=part, async_op=True) for part in parts if rank == 0]
    dist.barrier(beside)
    socket.setdefaulttimeout(5.0)
    try:
        if rank == 0:
            lines._opened[group].cut()
    finally:
        socket.setdefaulttimeout(None)
    for work in works:
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=30))
        assert "imed out" not in str(caught.value)
    for sends, receives in (ends[:2], ends[2:]):
        assert sends.getblocking() and os.get_blocking(sends.fileno())
        sends.sendall(b"here")
        assert receives.recv(4) == b"here"
    for number, store in enumerate(address[:2]):
        store.set(f"{number}", "here")
        assert store.get(f"{number}") == b"here"
    for used in (beside, address[2]):
        tensor = torch.full((1,), float(rank))
        dist.all_reduce(tensor, group=used)
        assert tensor.item() == 1.0
    return True


# All ranks of a hybrid mesh.


def crossing(world: int = 4) -> MeshAxes:
    return resolve_mesh(init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))


def joined() -> MeshAxes:
    axes, comm = crossing(), fullshard.TorchComm()
    for axis in axes.all:
        meet(axis, comm, axes.device)
    meet_jointly(axes, comm)
    return axes


def test_ranks_of_a_hybrid_mesh_compare_at_once(run_ranks):
    assert all(run_ranks(compared_at_once, world=4))


def compared_at_once() -> bool:
    axes, comm, rank = joined(), fullshard.TorchComm(), dist.get_rank()
    (joint,) = axes.spanning
    assert joint.ranks == (0, 1, 2, 3) and not axes.lacks_joint
    assert joint.lines.is_open and joint.lines.data is not joint.lines.side
    assert len(lines._opened[joint.group].listening) > 0
    assert rows_of_all([[rank]], axes.spanning, comm, axes.device) == [[other] for other in ranks_of(axes)]
    assert Count(rank != 1, axes, comm).read() == 3
    sum_over(total := torch.tensor([rank]), axes, comm)
    assert total.item() == 6
    recording = fullshard.RecordingComm(comm)
    assert TokenCount(torch.tensor([rank]), 1, axes, recording).total(torch.float32).item() == 6
    assert len(recording.calls) == 1
    groups = [weakref.ref(joint.lines.data), weakref.ref(joint.lines.side)]
    opened = len(lines._opened)
    for axis in axes.all:
        dist.destroy_process_group(axis.group)
    del axes, joint, axis
    gc.collect()
    assert [group() for group in groups] == [None, None] and len(lines._opened) == opened - 3
    return True


def test_ranks_that_cannot_all_connect_compare_over_one_axis_after_the_other(run_ranks):
    assert all(run_ranks(one_cannot_join, world=4))


def one_cannot_join() -> bool:
    make = lines.gloo_group

    def lost(name: str, *given: Any) -> Any:
        return None if "joint" in name and dist.get_rank() == 2 else make(name, *given)

    with mock.patch.object(lines, "gloo_group", lost), mock.patch.object(lines, "_CONNECTED", timedelta(seconds=1)):
        axes = joined()
    assert axes.joint is None and not axes.lacks_joint and axes.spanning == axes.all
    sum_over(total := torch.tensor([dist.get_rank()]), axes, fullshard.TorchComm())
    return total.item() == 6


def test_cut_ends_what_waits_for_all_ranks_of_a_hybrid_mesh(run_ranks):
    assert all(run_ranks(cut_jointly, world=4))


def cut_jointly() -> bool:
    (joint,) = joined().spanning
    parts = [joint.lines.data, joint.lines.side]
    works = [dist.all_reduce(torch.ones(2), group=part, async_op=True) for part in parts if dist.get_rank() == 0]
    dist.barrier()
    if dist.get_rank() == 0:
        lines._opened[joint.group].cut()
    for work in works:
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=30))
        assert "imed out" not in str(caught.value)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item() == 4
