"""How far `fullshard.plan` is off: its peak beside the allocator's reports, its times beside a run on two gloo ranks.

    python benchmarks/plan.py                  # memory: four models, fourteen strategies, two worlds
    python benchmarks/plan.py --device cuda    # the same on a GPU, and offload
    python benchmarks/plan.py --time           # step time of seven strategies on two ranks, in turns
    python benchmarks/plan.py --out FILE.md    # write the table too

Memory: one process is rank 0 of a fake group; torch's profiler reports each allocation on the CPU; the peak is that of
the third step, fused AdamW included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from allocations import mark, watch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fullshard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rates,
    Strategy,
    fully_shard,
    measure_rates,
    memory_use,
    plan,
    step_in_backward,
)

PLAIN = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Attention(nn.Module):
    """Self-attention, [B, T, C] -> the same."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A switch layer (Fedus et al. 2021, section 2.2) in which each expert gets the same number of tokens."""

    def __init__(self, width: int, count: int = 8) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, width, 2 * width))
        self.down = nn.Parameter(torch.empty(count, 2 * width, width))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, C]
        weights = self.router(tokens).softmax(-1)  # [N, E]
        chosen = weights.topk(len(tokens) // self.count, dim=0).indices  # [N / E, E]
        taken = tokens[chosen.t()]  # [E, N / E, C]
        hidden = torch.bmm(F.relu(torch.bmm(taken, self.up)), self.down) * weights.gather(0, chosen).t().unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, chosen.t().flatten(), hidden.flatten(0, 1)).view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, causal: bool, experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, width // 32, causal)
        self.mlp: nn.Module = Experts(width) if experts else MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, blocks: int, width: int, vocabulary: int = 2048, experts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, True, experts) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Images [B, 3, S, S] in patches of 8 -> logits [B, 100] (Dosovitskiy et al. 2020)."""

    def __init__(self, blocks: int, width: int, side: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(torch.zeros(1, (side // 8) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, False, False) for _ in range(blocks))
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Adapter(nn.Module):
    """A frozen linear layer and a trained low-rank one (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(blocks: int, width: int) -> nn.Module:
    model = GPT(blocks, width).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv, block.attention.out = Adapter(block.attention.qkv), Adapter(block.attention.out)
        block.mlp.up, block.mlp.down = Adapter(block.mlp.up), Adapter(block.mlp.down)
    return model


def language(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def images(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    logits = model(torch.zeros(micro_batch, 3, 64, 64))
    return F.cross_entropy(logits.float(), torch.zeros(micro_batch, dtype=torch.int64))


Step = Callable[[nn.Module, int, int], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "GPT": (partial(GPT, 6, 256), language),
    "MoE": (partial(GPT, 4, 128, experts=True), language),
    "ViT": (partial(ViT, 6, 256), images),
    "LoRA": (partial(lora, 6, 256), language),
}


@dataclass(frozen=True)
class Way:
    strategy: Strategy
    policy: MixedPrecisionPolicy = PLAIN
    tensor: int = 1  # ranks of a tensor-parallel group


BATCH, SEQUENCE = 4, 128
BASE = Strategy(micro_batch=BATCH)
WAYS = {
    "rows": Way(BASE),
    "flat, bf16": Way(replace(BASE, layout="flat"), MIXED),
    "kept": Way(replace(BASE, reshard_after_forward=False)),
    "checkpointing": Way(replace(BASE, checkpointing=True)),
    "2 replicas": Way(replace(BASE, replicate=2)),
    "2 tensor-parallel ranks": Way(BASE, tensor=2),
    "4 micro-batches, flat": Way(replace(BASE, micro_batch=1, layout="flat")),
    "slices kept among 4": Way(replace(BASE, reshard_after_forward=4)),
    "4 micro-batches, accumulated whole": Way(replace(BASE, micro_batch=1, accumulate="whole")),
    "2 replicas, 4 micro-batches, accumulated in part": Way(
        replace(BASE, replicate=2, micro_batch=1, accumulate="partial")
    ),
    "steps in the backward": Way(replace(BASE, step_in_backward=True)),
    "8 bits": Way(BASE, MixedPrecisionPolicy(gather_dtype=torch.int8, scatter_dtype=torch.int8)),
    "error feedback": Way(BASE, MixedPrecisionPolicy(scatter_dtype=torch.int8, error_feedback=True)),
    "2 replicas, 8 bits": Way(replace(BASE, replicate=2), MixedPrecisionPolicy(all_reduce_dtype=torch.int8)),
    "2 replicas, 8 bits, error feedback": Way(
        replace(BASE, replicate=2), MixedPrecisionPolicy(all_reduce_dtype=torch.int8, error_feedback=True)
    ),
}
ON_A_GPU = {"offload": Way(replace(BASE, offload=True))}  # a CPU has no memory beside its own
WORLDS = (8, 64)
SPLIT = ("GPT", "ViT")  # of which `split` knows how to split the blocks


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism within the blocks of a GPT or ViT (Shoeybi et al. 2019)."""
    for block in model.blocks:
        block.attention.heads //= mesh.size()
        columns = dict.fromkeys(("attention.qkv", "mlp.up"), ColwiseParallel())
        parallelize_module(block, mesh, columns | dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel()))


def rows_of(ways: Iterable[str]) -> list[tuple[str, str]]:
    """Each model with each of the ways that there are for it."""
    return [(name, way) for name in MODELS for way in ways if WAYS.get(way, Way(BASE)).tensor == 1 or name in SPLIT]


def apply(model: nn.Module, way: Way, world: int, device: str = "cpu") -> nn.Module:
    """Shard a model whose blocks are units."""
    strategy = way.strategy
    sizes = {"replicate": strategy.replicate, "shard": world // strategy.replicate // way.tensor, "tensor": way.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if way.tensor > 1:
        split(model, mesh["tensor"])
        mesh = mesh["shard"]
    how = {"mesh": mesh, "layout": strategy.layout, "mp_policy": way.policy, "prefetch": strategy.prefetch}
    if strategy.offload:
        how["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks if strategy.units == "auto" else ():
        if strategy.checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(block, reshard_after_forward=strategy.reshard_after_forward, **how)
    return fully_shard(model, **how)


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def requested(device: str) -> int:
    """Bytes that a GPU's allocator was asked for and holds; warms up the library of matrix products before.

    It keeps memory of its own for each thread that calls it: the backward's, which also recomputes, is another.
    """
    if device != "cuda":
        return 0
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(64, 64, dtype=dtype, device="cuda", requires_grad=True)
        checkpoint(F.linear, square, square, square[0], use_reentrant=False).sum().backward()
        del square
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def memory_row(name: str, way_name: str, world: int, device: str = "cpu") -> dict[str, object]:
    """Planned and measured bytes of one model, strategy and world; on a CPU in a process of its own."""
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    (build, step), way = MODELS[name], (WAYS | ON_A_GPU)[way_name]
    began = time.perf_counter()
    planned = plan(
        build,
        ranks=world // way.tensor,
        batch=BATCH,
        sequence=SEQUENCE,
        step=step,
        strategy=way.strategy,
        tensor_parallel=way.tensor,
        parallelize=split if way.tensor > 1 else None,
        mp_policy=way.policy,
        optimizer=fused,
        device="cuda",  # the fake group has the layouts of accelerators, and none of gloo's scratch memory
    ).best
    seconds = time.perf_counter() - began
    on_cuda = device == "cuda"
    before = requested(device)
    with nullcontext() if on_cuda else watch() as watched:
        with torch.device(device):
            model = build()
        model = apply(model, way, world, device)
        optimizer = fused([p for p in model.parameters() if p.requires_grad])
        if way.strategy.step_in_backward:
            step_in_backward(optimizer)
        for index in range(3):
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            with mark(str(index)):
                for left in reversed(range(BATCH // way.strategy.micro_batch)):
                    model.set_requires_gradient_sync(not left or way.strategy.accumulate != "whole")
                    model.set_requires_all_reduce(not left or way.strategy.accumulate != "partial")
                    with torch.device(device):
                        loss = step(model, way.strategy.micro_batch, SEQUENCE)
                    loss.backward()
                    del loss
                use = memory_use(model, optimizer)
                optimizer.step()  # does nothing if it stepped in the backward
                optimizer.zero_grad()
    exact = {"parameters": use.parameters, "gradients": use.gradients, "optimizer": use.optimizer}
    if way.strategy.step_in_backward:
        del exact["gradients"], exact["optimizer"]  # those of one unit at a time, and the optimizer's temporaries
    if way.strategy.offload:
        exact = dict.fromkeys(exact, 0)  # on the device
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    state = {kind: planned.most[kind] - (buffers if kind == "parameters" else 0) for kind in exact}
    if watched is not None:
        peak = watched.windows["2"].peak
    else:
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    torch.distributed.destroy_process_group()
    return {
        "model": name, "strategy": way_name, "world": world, "planned": planned.peak, "measured": peak,
        "exact": state == exact, "where": planned.where, "seconds": seconds,
    }  # fmt: skip


def memory_table(workers: int, device: str) -> tuple[list[str], float]:
    """The table of memory, and the worst error of a peak in percent."""
    ways = [*WAYS, *(ON_A_GPU if device == "cuda" else ())]
    rows = [(name, way, world, device) for name, way in rows_of(ways) for world in WORLDS]
    # On a CPU each row is a process: the profiler must have seen all of its memory.
    each, context = (None, get_context("spawn")) if device == "cuda" else (1, get_context("forkserver"))
    context.set_forkserver_preload(["fullshard", "torch.profiler"])
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=each) as pool:
        results = list(pool.map(memory_row, *zip(*rows, strict=True)))
    lines = [
        "| model | strategy | ranks | planned peak, MB | measured, MB | off by | kinds |",
        "|---|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for row in results:
        off = 100 * (row["planned"] / row["measured"] - 1)
        worst = max(worst, abs(off))
        kinds = "exact" if row["exact"] else "NOT EXACT"
        lines.append(
            f"| {row['model']} | {row['strategy']} | {row['world']} | {row['planned'] / 1e6:.3f} | "
            f"{row['measured'] / 1e6:.3f} | {off:+.2f}% | {kinds} |"
        )
    return lines, worst


# Step time on two real ranks.

TIMED = {
    "flat": replace(BASE, layout="flat"),
    "rows": BASE,
    "flat, kept": replace(BASE, layout="flat", reshard_after_forward=False),
    "flat, checkpointing": replace(BASE, layout="flat", checkpointing=True),
    "flat, 4 micro-batches": replace(BASE, layout="flat", micro_batch=1),
    "flat, kept, 4 micro-batches": replace(BASE, layout="flat", micro_batch=1, reshard_after_forward=False),
    "one unit": replace(BASE, layout="flat", units="model", prefetch=0),
}


def time_rank(rounds: int) -> None:
    """One of two ranks: measures rates, then each strategy in turns; rank 0 prints planned and measured seconds."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    build, step = partial(GPT, 6, 512), language
    flops = plan(
        build, ranks=2, batch=BATCH, sequence=SEQUENCE, step=step, strategy=replace(BASE, units="model"), device="cpu"
    ).best.flops
    whole = build()
    rates = measure_rates(lambda: step(whole, BATCH, SEQUENCE).backward(), flops)
    runs = {}
    for name, strategy in TIMED.items():
        torch.manual_seed(0)
        model = apply(build(), Way(strategy), 2)
        runs[name] = model, strategy, []
    for index in range(rounds + 2):
        for model, strategy, seconds in runs.values():
            torch.distributed.barrier()
            began = time.perf_counter()
            for _ in range(BATCH // strategy.micro_batch):
                step(model, strategy.micro_batch, SEQUENCE).backward()
            torch.distributed.barrier()
            if index >= 2:
                seconds.append(time.perf_counter() - began)
            model.zero_grad()
    plans = {
        name: plan(
            build, ranks=2, batch=BATCH, sequence=SEQUENCE, step=step, strategy=strategy, device="cpu", rates=rates
        ).best
        for name, strategy in TIMED.items()
    }
    if torch.distributed.get_rank() == 0:
        result = {name: (plans[name].seconds, median(seconds)) for name, (_, _, seconds) in runs.items()}
        print(json.dumps({"rates": asdict(rates), "seconds": result}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def time_table(rounds: int) -> list[str]:
    """Planned and measured step times, in the order of the measured ones."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = subprocess.run(
        [*command, "--rank", "--rounds", str(rounds)], env=environment, check=True, text=True, stdout=subprocess.PIPE
    )
    result = json.loads(next(line for line in ranks.stdout.splitlines() if line.startswith("{")))
    rates = Rates(**result["rates"])
    lines = [
        f"Rates as measured: {rates.flops / 1e9:.1f} GFLOP/s; gathers {rates.bandwidth / 1e6:,.0f} MB/s, reductions "
        f"{(rates.reduce or rates.bandwidth) / 1e6:,.0f} MB/s, {rates.large:.2f} of it in large buffers; latency "
        f"{rates.latency * 1e6:.0f} us; copies {rates.copy / 1e9:.1f} GB/s; overlap {rates.overlap:.2f}.",
        "",
        "| strategy | planned, ms | measured, ms | planned place | measured place |",
        "|---|---|---|---|---|",
    ]
    seconds = result["seconds"]
    planned = sorted(seconds, key=lambda name: seconds[name][0])
    for place, name in enumerate(sorted(seconds, key=lambda name: seconds[name][1]), 1):
        mine, real = seconds[name]
        lines.append(f"| {name} | {mine * 1e3:.0f} | {real * 1e3:.0f} | {planned.index(name) + 1} | {place} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="step times in place of memory")
    parser.add_argument("--rounds", type=int, default=15, help="of step times")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="whose allocator reports memory")
    parser.add_argument("--most", type=float, default=3.0, help="percent by which a peak may be off")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        time_rank(options.rounds)
        return 0
    worst = 0.0
    if options.time:
        lines = time_table(options.rounds)
    else:
        lines, worst = memory_table(options.workers, options.device)
        lines += ["", f"Worst: {worst:.2f}%."]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(worst > options.most or any("NOT EXACT" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
