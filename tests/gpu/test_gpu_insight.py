"""What is measured and explained on a GPU: traces, the monitor, memory in words, and what a plan says beforehand.

Communication is that of `benchmarks/link.py`: one process is rank 0 of a fake group, and a collective keeps a stream of
the device busy for as long as its bytes take. So the time of every wait is known, if no other program uses the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from link import Alike, Link
from plan import memory_row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard import explain_memory, fully_shard, memory_use
from fullshard.insight.trace import analyse, html_page, read
from fullshard.text import size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that --gpu=tests shows"),
]

WIDTH, BLOCKS, WORLD = 1024, 5, 8
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
MILLISECONDS = 4.0  # of a gather or a reduction of a block
SENDING = 3 * BLOCKS * MILLISECONDS  # of a step: all blocks are gathered twice and reduced once, one after the other


@pytest.fixture
def link(fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Link:
    """A link on which a block takes `MILLISECONDS`."""
    fake_world(WORLD)
    monkeypatch.setattr("fullshard.mesh.axes.backend_of", lambda group, kind: "emulated")
    return Link(torch.device("cuda"), BLOCK_BYTES / MILLISECONDS / 1e6)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: object) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def training(model: nn.Module) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(64, WIDTH, device="cuda")

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_trace_shows_each_wait_as_long_as_the_device_waited(link: Link, layout: str, tmp_path: Path) -> None:
    """Without prefetching every gather is waited for from its issue on; computation takes next to nothing."""
    model = shard(
        build(), init_device_mesh("cuda", (WORLD,)), layout=layout, comm=Alike(link, False, False), prefetch=0
    )
    step, _ = training(model)
    for _ in range(3):
        step()
    with fullshard.trace(tmp_path) as recording:
        begin = time.perf_counter()
        for _ in range(4):
            step()
            recording.step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / 4
    run = read([tmp_path])
    analysis = analyse(run)
    assert run.ranks[0].clock == "cuda" and len(analysis.steps) == 4
    forward = [wait for wait in analysis.waits if wait.kind == "gather" and wait.step == 2][:BLOCKS]
    assert [wait.unit for wait in forward] == [str(number) for number in range(BLOCKS)]
    for wait in forward:  # in the backward a gather is behind a reduction on the link
        assert wait.transfer * 1e3 == pytest.approx(MILLISECONDS, rel=0.1), wait
    for number in (1, 2, 3):
        assert analysis.steps[number].time == pytest.approx(seconds, rel=0.1)
        assert analysis.steps[number].transfer == pytest.approx(SENDING / 1e3, rel=0.1)
    allocated = [event.allocated for event in run.ranks[0].events if event.allocated >= 0]
    assert min(allocated) > 3 * sum(p.to_local().nbytes for p in model.parameters())
    assert "<svg" in html_page(run, analysis) or "<canvas" in html_page(run, analysis)


def test_tracing_makes_the_host_wait_nowhere_in_a_step(one_rank: DeviceMesh, tmp_path: Path) -> None:
    model = shard(build(), one_rank)
    step, _ = training(model)
    for _ in range(3):
        step()
    with fullshard.trace(tmp_path) as recording:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step()
                recording.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(analyse(read([tmp_path])).steps) == 3


def test_a_monitor_reports_what_the_device_did(link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    model = shard(build(), init_device_mesh("cuda", (WORLD,)), comm=Alike(link, False, False), prefetch=0)
    step, optimizer = training(model)
    step()
    options = {"tokens_per_step": 64, "peak_flops": 1e15, "every": 4, "group": None}
    monitor = fullshard.Monitor(model, optimizer, **options)
    torch.cuda.synchronize()
    begin, reports = time.perf_counter(), []
    for _ in range(8):
        loss = step()
        reports.append(monitor.step(loss=loss))
    seconds = (time.perf_counter() - begin) / 8
    report = reports[-1]
    assert report is not None and report.seconds_per_step == pytest.approx(seconds, rel=0.15)
    assert report.exposed_communication * seconds * 1e3 == pytest.approx(SENDING, rel=0.1)
    assert report.memory.optimizer >= 2 * report.memory.parameters > 0
    assert "communication" in capsys.readouterr().out


def test_a_monitor_waits_for_nothing_in_steps_it_does_not_report(one_rank: DeviceMesh) -> None:
    model = shard(build(), one_rank)
    step, optimizer = training(model)
    step()
    monitor = fullshard.Monitor(model, optimizer, every=4, line=False)
    for number in range(1, 9):
        loss = step()
        torch.cuda.set_sync_debug_mode("error" if number % 4 else "default")
        try:
            report = monitor.step(loss=loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (report is None) == bool(number % 4)


def test_peak_flops_are_known_for_this_device(one_rank: DeviceMesh) -> None:
    from fullshard.insight.monitor.monitor import device_peak_flops

    peak = device_peak_flops(torch.device("cuda"))
    assert peak is None or 1e13 < peak < 1e16
    assert peak or not any(name in torch.cuda.get_device_name() for name in ("H100", "H200", "A100", "B200"))


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """`little_memory(nbytes)`: the allocator takes no more than so many beyond what it has now."""

    def limit(nbytes: int) -> None:
        torch.cuda.empty_cache()
        _free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_in_words_counts_activations(one_rank: DeviceMesh) -> None:
    """What the allocator holds beyond shards, gradients, optimizer and units."""
    base = torch.cuda.memory_allocated()
    model = shard(build(), one_rank)
    step, optimizer = training(model)
    step()
    loss = model(torch.randn(2**14, WIDTH, device="cuda"))
    use = memory_use(model, optimizer)
    rest = torch.cuda.memory_allocated() - use.total
    said = explain_memory(model, optimizer)
    assert f"{size(rest)}" in said, said
    assert rest - base > BLOCKS * 2**14 * WIDTH * 4
    del loss


def test_an_allocation_that_fails_in_a_forward_is_explained(
    one_rank: DeviceMesh, little_memory: Callable[[int], None]
) -> None:
    model = shard(build(), one_rank)
    step, optimizer = training(model)
    step()
    x = torch.randn(2**14, WIDTH, device="cuda")  # 64 MiB, as the output of each layer
    little_memory(3 * 2**26)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(x)
    (note,) = caught.value.__notes__
    assert "64" in note and "activations" in note, note
    del caught
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert step().isfinite()
    assert "sharded parameters" in explain_memory(model, optimizer)


def test_an_allocation_that_fails_in_a_backward_is_explained_on_demand(
    one_rank: DeviceMesh, little_memory: Callable[[int], None]
) -> None:
    model = shard(build(), one_rank)
    step, optimizer = training(model)
    step()
    loss = model(torch.randn(2**14, WIDTH, device="cuda")).square().mean()
    little_memory(2**25)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    said = explain_memory(model, optimizer)
    assert "activations" in said and "optimizer state" in said
    del loss
    torch.cuda.set_per_process_memory_fraction(1.0)
    optimizer.zero_grad()
    assert step().isfinite()


@pytest.mark.parametrize("name", ["GPT", "MoE", "ViT", "LoRA"])
@pytest.mark.parametrize("way", ["rows", "flat, bf16", "checkpointing", "2 replicas", "offload"])
def test_a_peak_is_what_was_planned(name: str, way: str) -> None:
    """Within 1% of what the allocator is asked for, and 1 MiB (a workspace of cuBLAS's) less than it at most.

    Parameters, gradients and optimizer state exactly.
    """
    row = memory_row(name, way, WORLD, "cuda")
    assert row["exact"]
    assert row["planned"] == pytest.approx(row["measured"], rel=0.01, abs=2**20), row
