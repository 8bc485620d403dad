"""One GPU as rank 0 of 64: Fullshard beside plain PyTorch and FSDP2, with communication that takes its time.

    python benchmarks/gpu.py --out lines.jsonl                       all modes, steps alone
    python benchmarks/gpu.py --out lines.jsonl --modes layouts memory --ask steps syncs --compile
    python benchmarks/gpu.py --table lines.jsonl                     the table once more
    python benchmarks/gpu.py --device cpu --size tiny --world 8      the same logic; its figures mean nothing

Peers take turns; each is built, warmed up, asked and freed. The result of a turn is a line of JSON, written before the
next turn begins: whoever ends this keeps the lines so far.

Nothing leaves the process. A collective of n bytes takes n / bandwidth seconds on one queue (`Link`), for Fullshard and
FSDP2 alike, and leaves what it would if all ranks held what this one does; so Fullshard's comparisons of ranks and its
agreement after each backward run as ever. NCCL's own cost, and what it takes from the kernels beside it, do not show.

    steps      milliseconds of N steps as one, and of steps after each of which the host waits; what the host takes to
               issue one; what communication adds (exposed); memory; kernels
    captures   a step as a graph (torch.cuda.graph): the first error, or milliseconds of a replay
    syncs      where the host waits in a step (torch.cuda.set_sync_debug_mode, which does not count waits for events)
    oom        memory runs out in a backward; the next step follows without `zero_grad`, or after an evaluation
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from link import Alike, Link, TorchGather, TorchReduce
from llama import SIZES, Adapted, Block, Llama
from peers import OUR_PEERS, fake_world, interleaved, quiet
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fullshard

PEERS = ("plain", "fsdp2", *OUR_PEERS)
BACKEND = "emulated"  # what Fullshard takes the fake group for: it compares no ranks on one that says it is fake


@dataclass(frozen=True)
class Mode:
    """What is trained, and how."""

    parts: int = 1  # micro-batches, of which the last is reduced
    chunks: int = 1  # of the loss; logits of more than one are computed again in backward
    experts: bool = False  # in place of each MLP
    adapters: bool = False  # of rank 16 on frozen weights
    checkpoints: bool = False  # activations of blocks
    kept: bool = False  # units stay gathered for all micro-batches
    offload: bool = False
    replicas: int = 1
    muon: bool = False  # for matrices of blocks; its exchanges take no time, and bring no values
    inside: bool = False  # the optimizer steps during the backward
    prefetch: int = 1
    ours: str = ""  # a choice of the engine's own, taken back

    @property
    def is_ours(self) -> bool:
        """Whether other peers have no such mode."""
        return bool(self.ours) or self.inside or self.prefetch != 1


MODES = {
    "layouts": Mode(),
    "memory": Mode(chunks=16),
    "memory, prefetch 0": Mode(chunks=16, prefetch=0),
    "memory, prefetch 2": Mode(chunks=16, prefetch=2),
    "checkpointing": Mode(chunks=16, checkpoints=True),
    "experts": Mode(experts=True),
    "accumulation": Mode(parts=4),
    "kept": Mode(parts=4, kept=True),
    "lora": Mode(adapters=True),
    "hybrid": Mode(replicas=4),
    "hybrid, at once": Mode(replicas=4, ours="at once"),  # the all-reduce is waited for where it is issued
    "muon": Mode(muon=True),
    "steps in backward": Mode(chunks=16, checkpoints=True, inside=True),
    "offload": Mode(offload=True),
    "offload, one stream": Mode(offload=True, ours="one stream"),
    "apart": Mode(ours="apart"),  # every parameter has a collective of its own
}


@dataclass(frozen=True)
class Setting:
    """What all turns share."""

    device: torch.device
    link: Link
    arguments: argparse.Namespace

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0


def sharded(peer: str, model: nn.Module, mode: Mode, setting: Setting) -> nn.Module:
    """Each block a unit, and the root."""
    if peer == "plain":
        return model
    world, kind, link = setting.arguments.world, setting.device.type, setting.link
    dims = (mode.replicas, world // mode.replicas) if mode.replicas > 1 else (world,)
    mesh = init_device_mesh(kind, dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
    library: Any = torch_fsdp if peer == "fsdp2" else fullshard
    options: dict[str, Any] = {"reshard_after_forward": False} if mode.kept else {}
    if setting.arguments.mixed or mode.adapters:
        options["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if mode.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=setting.cuda)
    if library is fullshard:
        options["layout"] = fullshard.Blocks() if peer == "blocks" else peer
        options["comm"] = Alike(link, mode.ours == "apart", mode.ours == "at once")
        options["prefetch"] = mode.prefetch
    units: list[Any] = [*(one for one in model.modules() if isinstance(one, Block)), model]
    for unit in units:
        library.fully_shard(unit, mesh=mesh, **options)
    for unit in units if library is torch_fsdp else ():
        unit.set_custom_all_gather(TorchGather(link))
        unit.set_custom_reduce_scatter(TorchReduce(link))
        if mode.replicas > 1:
            unit.set_all_reduce_hook(lambda tensor: link.all_reduce(tensor, 1).wait())
    if mode.kept:
        units[-1].set_reshard_after_backward(False)
    return model


class Training:
    """One peer's model and its steps, on a fixed batch of random tokens."""

    def __init__(self, peer: str, mode: Mode, compiled: bool, setting: Setting) -> None:
        size, device = SIZES[setting.arguments.size], setting.device
        torch.manual_seed(0)
        with device:
            model = Llama(size, size.experts * mode.experts, mode.chunks, mode.checkpoints)
        if not setting.arguments.mixed:
            angles = model.angles
            model = model.to(torch.bfloat16)
            model.angles = angles  # positions need fp32
        if mode.adapters:
            Adapted.put_into(model, model.norm.weight.dtype if peer == "plain" else torch.float32)
        if compiled:
            torch.compiler.reset()  # what other turns compiled counts against the limit of compilations
        for block in model.blocks if compiled else ():  # not the hooks around it, for any peer
            block.forward = torch.compile(block.forward)
        self.model: Any = sharded(peer, model, mode, setting)
        self.parts, self.switches = mode.parts, peer != "plain" and mode.parts > 1
        trained = [one for one in self.model.parameters() if one.requires_grad]
        capturable = setting.cuda and not mode.offload
        matrices = [one for one in self.model.blocks.parameters() if one.ndim == 2] if mode.muon else []
        others = [one for one in trained if one not in {*matrices}]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=1e-3, fused=True, capturable=capturable)
        ]
        self.has_values = not mode.muon  # a fake group leaves what Muon receives uninitialised
        if mode.muon:
            ours = peer in OUR_PEERS
            self.optimizers.append((fullshard.Muon if ours else torch.optim.Muon)(matrices, lr=1e-3))
        if mode.inside:
            fullshard.step_in_backward(self.optimizers[0])
        self.tokens = torch.randint(0, size.vocabulary, (size.batch, size.time + 1), device=device)

    def backward(self) -> Tensor:
        for part in range(self.parts):
            if self.switches:
                self.model.set_requires_gradient_sync(part == self.parts - 1)
            loss: Tensor = self.model(self.tokens)
            loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss


Figures = dict[str, Any]


def ask_steps(training: Training, setting: Setting) -> Figures:
    count, link, synchronise = setting.arguments.steps, setting.link, setting.synchronise

    def as_one() -> tuple[float, float]:
        """Milliseconds of a step, and of issuing it."""
        synchronise()
        start = time.perf_counter()
        for _ in range(count):
            training.step()
        issued = time.perf_counter()
        synchronise()
        return (time.perf_counter() - start) / count * 1e3, (issued - start) / count * 1e3

    figures: Figures = {}
    if not setting.cuda:
        figures["ms"], figures["issue_ms"] = as_one()
    else:
        torch.cuda.reset_peak_memory_stats()
        before, retries = setting.allocated(), torch.cuda.memory_stats()["num_alloc_retries"]
        figures["ms"], figures["issue_ms"] = as_one()
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        figures["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        figures["retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - retries
        figures["growth_bytes"] = setting.allocated() - before
        bandwidth, link.gigabytes = link.gigabytes, float("inf")
        figures["exposed_ms"] = figures["ms"] - as_one()[0]
        link.gigabytes = bandwidth
    fenced = [time.perf_counter()]
    for _ in range(count):
        training.step()
        synchronise()
        fenced.append(time.perf_counter())
    figures["fenced_ms"] = statistics.median(b - a for a, b in itertools.pairwise(fenced)) * 1e3
    link.collectives = link.kernels = 0
    with profile(activities=[ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU]) as seen:
        loss = training.step()
        synchronise()
    kind = torch.autograd.DeviceType.CUDA if setting.cuda else torch.autograd.DeviceType.CPU
    figures["kernels"] = sum(event.device_type == kind for event in seen.events()) - link.kernels
    figures["collectives"] = link.collectives
    if training.has_values:
        figures["loss"] = loss.item()
    return figures


def ask_captures(training: Training, setting: Setting) -> Figures:
    """The first error is the finding: those after it, of ending the capture, are its consequences."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):  # no event from before may be waited for inside
        for _ in range(3):
            training.step()
    try:
        with torch.cuda.graph(graph, stream=side):
            training.step()
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        at = traceback.extract_tb(first.__traceback__)[-1]
        for generator in torch.cuda.default_generators:  # one that took part cannot be used any more
            generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
        return {"finding": f"{type(first).__name__} at {Path(at.filename).name}:{at.lineno}: {first}"}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(setting.arguments.steps):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return {"ms": start.elapsed_time(stop) / setting.arguments.steps, "finding": "captured"}


def ask_syncs(training: Training, setting: Setting) -> Figures:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in seen if "called a synchronizing" in str(one.message)]  # once: that not all are noticed
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in waits)
    return {"finding": ", ".join(f"{place} x{count}" for place, count in places.items()) or "none"}


def ask_oom(training: Training, setting: Setting) -> Figures:
    """What is allocated in vain is a petabyte, in the backward of a block in the middle."""
    model, findings = training.model, []

    def run_out(gradient: Tensor) -> None:
        torch.empty(2**50, dtype=torch.uint8, device=gradient.device)

    def watch(module: nn.Module, given: Any, out: Tensor) -> None:
        out.register_hook(run_out)

    block = model.blocks[len(model.blocks) // 2]
    for evaluates in (False, True):
        setting.synchronise()
        before = setting.allocated()
        handle = block.register_forward_hook(watch)
        try:
            training.backward()
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
            if "allocat" not in str(error):
                raise
        else:
            raise AssertionError("a petabyte was allocated")
        handle.remove()
        left = setting.allocated() - before
        if evaluates:
            with torch.no_grad():
                model(training.tokens)
        words = [f"{left:,} B left"] * setting.cuda + ["NaN"] * (not training.step().isfinite())
        findings.append(f"{'evaluation' if evaluates else 'step'}: {', '.join(['goes on', *words])}")
    return {"finding": "; ".join(findings)}


QUESTIONS: dict[str, Callable[[Training, Setting], Figures]] = {
    "steps": ask_steps,
    "syncs": ask_syncs,
    "oom": ask_oom,
    "captures": ask_captures,
}
CANNOT = {
    # On a CPU, and why.
    "steps": "no queue, hence no exposed time; no caching allocator, hence no bytes; kernels are operators",
    "syncs": "nothing is queued, so nobody waits; tests/device counts waits on a simulated device",
    "oom": "no caching allocator, hence no bytes left",
    "captures": "there are no graphs of kernels",
}


def turn(mode: str, question: str, peer: str, compiled: bool, setting: Setting) -> Figures:
    """Build one peer, warm it up, ask it. What it raises is its result."""
    figures: Figures = {} if setting.cuda else {"cannot": CANNOT[question]}
    if not setting.cuda and question in ("syncs", "captures"):
        return figures
    inline = MODES[mode].ours == "one stream"
    with mock.patch("fullshard.comm.lanes.has_streams", lambda device: False) if inline else contextlib.nullcontext():
        try:
            training = Training(peer, MODES[mode], compiled, setting)
            for _ in range(setting.arguments.warm_up):
                training.step()
            figures |= QUESTIONS[question](training, setting)
        except Exception as error:
            figures["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return figures


def turns(setting: Setting) -> Iterator[Figures]:
    """All lines, mode by mode; in each the peers are shuffled."""
    asked = setting.arguments
    facts = {name: getattr(asked, name) for name in ("gbps", "world", "size", "mixed")}
    facts |= {"torch": torch.__version__, "device": torch.cuda.get_device_name() if setting.cuda else "cpu"}
    ways = (False, True) if asked.compile else (False,)
    for question, mode, compiled in itertools.product(asked.ask, asked.modes, ways):
        peers = [peer for peer in asked.peers if peer in OUR_PEERS or not MODES[mode].is_ours]
        for peer in interleaved(peers, asked.rounds):
            figures = turn(mode, question, peer, compiled, setting)
            yield {"ask": question, "mode": mode, "peer": peer, "compiled": compiled, **facts, **figures}
            gc.collect()
            if setting.cuda:
                torch.cuda.empty_cache()


COLUMNS = ("ms", "fenced_ms", "issue_ms", "exposed_ms", "peak_gb", "reserved_gb", "retries", "collectives")


def table(lines: list[Figures]) -> str:
    """A row for each question, mode and peer: medians over rounds; kernels are those beyond plain's, a unit."""
    by_row: dict[tuple[Any, ...], list[Figures]] = defaultdict(list)
    for line in lines:
        key = (line["ask"], f"{line['mode']}{', compiled' * line['compiled']}", line["gbps"], line["peer"])
        by_row[key].append(line)

    def median(key: tuple[Any, ...], name: str) -> float | None:
        values = [line[name] for line in by_row.get(key, ()) if line.get(name) is not None]
        return statistics.median(values) if values else None

    rows = [["ask", "mode", "GB/s", "peer", "of fsdp2", *COLUMNS, "kernels", ""]]
    for key, found in by_row.items():
        ms, theirs = median(key, "ms"), median((*key[:3], "fsdp2"), "ms")
        kernels, plain = median(key, "kernels"), median((*key[:3], "plain"), "kernels")
        cells = [*map(str, key), "" if ms is None or theirs is None else f"{ms / theirs:.2f}"]
        cells += ["" if (value := median(key, name)) is None else f"{value:.4g}" for name in COLUMNS]
        beyond = kernels is not None and plain is not None and key[-1] != "plain"
        cells.append(f"{(kernels - plain) / (SIZES[found[0]['size']].layers + 1):.1f}" if beyond else "")
        words = [line[name] for line in found for name in ("finding", "error") if name in line]
        words += [f"grows {line['growth_bytes']:,} B" for line in found if line.get("growth_bytes", 0) > 0]
        cells.append("; ".join(dict.fromkeys(words)))
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    cannot = dict.fromkeys(f"not on a CPU: {line['ask']}: {line['cannot']}" for line in lines if "cannot" in line)
    return "\n".join([*text, *cannot])


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fullshard beside plain PyTorch and FSDP2 on one GPU.")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print these lines' table, and measure nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="a line is added for each turn")
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--ask", nargs="+", default=["steps"], choices=QUESTIONS)
    parser.add_argument("--peers", nargs="+", default=["plain", "fsdp2", "rows", "flat"], choices=PEERS)
    parser.add_argument("--compile", action="store_true", help="each turn once more, with compiled blocks")
    parser.add_argument("--mixed", action="store_true", help="fp32 shards, bf16 compute (plain: fp32); else all bf16")
    parser.add_argument("--gbps", type=float, default=100.0, help="gigabytes a second of the link; inf: at once")
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--warm-up", type=int, default=4, help="steps")
    parser.add_argument("--steps", type=int, default=10, help="that are measured as one")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each peer")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    arguments = parse(given)
    if arguments.table is None:
        if arguments.device == "cuda" and not torch.cuda.is_available():
            print("benchmarks/gpu.py: no GPU here (torch.cuda.is_available() is False); nothing was measured.")
            return 2
        fake_world(arguments.world, arguments.device)
        device = torch.device(arguments.device)
        setting = Setting(device, Link(device, arguments.gbps), arguments)
        named = mock.patch("fullshard.mesh.axes.backend_of", lambda group, kind: BACKEND)
        gc.freeze()  # what was imported is not looked at after each turn
        with quiet(), named, arguments.out.open("a") as out:
            for line in turns(setting):
                print(json.dumps(line), file=out, flush=True)
                print(f"  {line['ask']}: {line['mode']}: {line['peer']}", flush=True)
        dist.destroy_process_group()
    lines = [json.loads(line) for line in (arguments.table or arguments.out).read_text().splitlines()]
    print(table(lines))
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
