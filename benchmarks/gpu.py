"""One GPU: a Llama-like model of about 1B parameters in bf16, with `torch.compile` per block and without.

    python benchmarks/gpu.py                            both modes, about ten minutes on an H100 or H200
    python benchmarks/gpu.py --mode nccl                NCCL, one rank: time of a step, peak memory, losses
    python benchmarks/gpu.py --mode fake                fake group, world 64: peak memory, host cost
    python benchmarks/gpu.py --device cpu --size tiny   the same logic; its figures mean nothing

Peers take turns: each is built, warmed up, measured and freed, in a new order every round, so that the peak
memory is one peer's alone. On one rank FSDP1 turns itself into NO_SHARD, and Fullshard copies where FSDP2 calls NCCL
(unless --collectives); the fake group shows all of them sharding.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import OUR_PEERS, TORCH_PEERS, VIEW, adamw, choose, fake_world, interleaved, quiet, wrap
from report import FSDP1, Quantity, Series, Target, dump
from run import children, show
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PEERS = ("plain", *TORCH_PEERS, *OUR_PEERS, "rows" + VIEW, "flat" + VIEW)
COMPILED = ", compiled"  # appended to a peer's name
FAKE_WORLD = 64


@dataclass(frozen=True)
class Size:
    """A Llama-like model and its batch. Widths in elements."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # of the MLP
    vocabulary: int
    batch: int  # sequences per step
    time: int  # tokens per sequence


SIZES = {
    "tiny": Size(2, 64, 4, 2, 128, 256, batch=2, time=16),
    "narrow": Size(16, 256, 4, 2, 512, 1024, batch=1, time=128),  # little for the GPU to do: shows the host
    "1b": Size(16, 2048, 32, 8, 8192, 32000, batch=4, time=2048),  # 1.10e9 parameters
    "3b": Size(28, 3072, 24, 8, 8192, 32000, batch=2, time=2048),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in fp32. [..., width] -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv:2104.09864, 3.2). x [B, H, T, D], angles [T, D / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm grouped-query attention with RoPE, and SwiGLU. [B, T, width] -> same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        head = size.width // size.heads
        self.head, self.kv_heads = head, size.kv_heads
        self.norm_attention = RMSNorm(size.width)
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.kv = nn.Linear(size.width, 2 * size.kv_heads * head, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.norm_mlp = RMSNorm(size.width)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        normed = self.norm_attention(x)
        q = rotate(self.q(normed).view(batch, time_, -1, self.head).transpose(1, 2), angles)
        kv = self.kv(normed).view(batch, time_, 2, self.kv_heads, self.head)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, kv_heads, T, head]
        mixed = F.scaled_dot_product_attention(q, rotate(k, angles), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, -1))
        normed = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocabulary]. Embedding, final norm and head belong to the root unit."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.width // size.heads // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("angles", torch.outer(torch.arange(size.time), frequency), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Setting:
    """What all peers of one run share."""

    device: torch.device
    mesh: DeviceMesh
    size: Size
    warm_up: int
    steps: int
    shortcut: bool  # Fullshard, one rank: copy in place of a collective, as it does by default
    mixed: bool  # fp32 shards, bf16 compute; otherwise everything is bf16

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass
class Found:
    """What one turn of one peer measured."""

    milliseconds: list[float]  # per step, by CUDA events (on the CPU: wall clock)
    host: list[float]  # process CPU seconds per step
    loss: float  # the last
    peak: float  # bytes allocated at most in a step, over what was allocated before the peer was built
    growth: int  # bytes allocated after the last step, over those after the first measured one


def build(peer: str, setting: Setting, compiled: bool) -> nn.Module:
    """The model on the device, blocks compiled if asked, wrapped by `peer`; the same weights for everyone.

    A block's `forward` is compiled and its hooks are not, for every peer alike.
    """
    torch.manual_seed(0)
    with setting.device:
        model = Llama(setting.size)
    if not setting.mixed:
        angles = model.angles
        model = model.to(torch.bfloat16)
        model.angles = angles  # positions need fp32
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    dtype = torch.bfloat16 if setting.mixed else None
    return wrap(peer, model, Block, setting.mesh, param_dtype=dtype, local_shortcut=setting.shortcut)


def stepper(peer: str, model: nn.Module, setting: Setting) -> Callable[[], Tensor]:
    """One full training step on a fixed batch of random tokens."""
    size = setting.size
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.time + 1), device=setting.device)
    optimizer = adamw(peer, model)

    def step() -> Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def turn(name: str, setting: Setting) -> Found:
    """Build one peer, warm it up, measure it."""
    peer, compiled = name.removesuffix(COMPILED), name.endswith(COMPILED)
    cuda = setting.device.type == "cuda"
    base = torch.cuda.memory_allocated() if cuda else 0
    model = build(peer, setting, compiled)
    step = stepper(peer, model, setting)
    for _ in range(setting.warm_up):
        loss = step()
    setting.synchronise()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    found, events, settled = Found([], [], 0.0, 0.0, 0), [], 0
    for index in range(setting.steps):
        setting.synchronise()
        host, wall = time.process_time(), time.perf_counter()
        if cuda:
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
        loss = step()
        if cuda:
            events[-1][1].record()
        found.host.append(time.process_time() - host)
        setting.synchronise()
        found.milliseconds.append((time.perf_counter() - wall) * 1e3)
        if cuda and index == 0:
            settled = torch.cuda.memory_allocated()
    found.loss = loss.item()
    if cuda:
        found.milliseconds = [start.elapsed_time(stop) for start, stop in events]
        found.peak = float(torch.cuda.max_memory_allocated() - base)
        found.growth = torch.cuda.memory_allocated() - settled
    return found


def rounds(names: list[str], setting: Setting, count: int) -> dict[str, list[Found]]:
    """Every peer's turns, shuffled; memory of one is returned before the next begins."""
    found: dict[str, list[Found]] = defaultdict(list)
    for name in interleaved(names, count):
        found[name].append(turn(name, setting))
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        last = found[name][-1]
        print(
            f"  {name}: {min(last.milliseconds):.1f} ms, {last.peak / 1e9:.2f} GB, loss {last.loss:.4f}",
            flush=True,
        )
    return found


def series(turns: dict[str, list[Found]], values: Callable[[Found], list[float]]) -> tuple[Series, ...]:
    """One series per peer, in the order of `PEERS`: the values of all its turns."""
    return tuple(
        _series(peer, tuple(value for found in turns[peer] for value in values(found)), turns[peer])
        for peer in PEERS
        if peer in turns
    )


def _series(peer: str, samples: tuple[float, ...], turns: list[Found]) -> Series:
    grown = max(found.growth for found in turns)
    note = f"grows {grown:,} B" if grown > 0 else ""
    return Series(peer, samples, note=note, grows=grown > 0 and peer.removesuffix(VIEW) in OUR_PEERS)


def by_compilation(found: dict[str, list[Found]]) -> dict[str, dict[str, list[Found]]]:
    """Suffix -> peer -> turns: compiled peers are compared with compiled ones."""
    split: dict[str, dict[str, list[Found]]] = defaultdict(dict)
    for name, turns in found.items():
        split[COMPILED if name.endswith(COMPILED) else ""][name.removesuffix(COMPILED)] = turns
    return split


def measure_nccl(setting: Setting, names: list[str], count: int) -> list[Quantity]:
    """Time, peak memory and losses with real communication over one rank."""
    method = (
        f"one rank, {setting.size}, {'fp32 shards, bf16 compute' if setting.mixed else 'all bf16'}; full "
        f"step with fused AdamW; {setting.steps} steps after {setting.warm_up}, in {count} turns per peer; "
        f"Fullshard by {'local copies' if setting.shortcut else 'collectives'}"
    )
    quantities = []
    for suffix, turns in by_compilation(rounds(names, setting, count)).items():
        times = series(turns, lambda t: t.milliseconds)
        plain = turns["plain"][0].loss
        away = series(turns, lambda t: [abs(t.loss - plain)])  # noqa: B023 (called before the next round)
        quantities += [
            Quantity("gpu one rank", f"training step{suffix}", "ms", method, times, speed=True),
            Quantity("gpu one rank", f"peak memory{suffix}", "GB", method, series(turns, _gigabytes)),
            Quantity("gpu one rank", f"loss, distance from plain's{suffix}", "absolute", method, away, ()),
        ]
    return quantities


def measure_fake(setting: Setting, names: list[str], count: int) -> list[Quantity]:
    """Peak memory of the model at world 64, and host cost of a narrow one of as many blocks."""
    world = f"fake group, world {FAKE_WORLD}"
    found = rounds([name for name in names if not name.startswith("plain")], setting, count)
    targets = tuple(Target(peer, FSDP1, 1.0) for peer in OUR_PEERS)
    quantities = []
    for suffix, turns in by_compilation(found).items():
        name, method = f"peak memory{suffix}", f"{world}, {setting.size}; torch.cuda.max_memory_allocated"
        quantities.append(Quantity("gpu world 64", name, "GB", method, series(turns, _gigabytes), targets=targets))
    narrow = setting if setting.size == SIZES["tiny"] else replace(setting, size=SIZES["narrow"])
    eager = [name for name in names if not name.endswith((COMPILED, VIEW))]
    if eager:
        turns = rounds(eager, replace(narrow, steps=2 * setting.steps), count)
        quantities.append(host_cost(turns, narrow, world))
    return quantities


def host_cost(turns: dict[str, list[Found]], setting: Setting, world: str) -> Quantity:
    """Processor time of each peer's step over plain's."""
    every = series(turns, lambda t: [seconds / setting.size.layers * 1e6 for seconds in t.host])
    plain = every[0].samples
    over = tuple(replace(peer, baseline=plain) for peer in every[1:])
    targets = tuple(Target(peer, "fsdp2", 0.30) for peer in OUR_PEERS)
    method = f"{world}, {setting.size}; process CPU time of a full step with fused AdamW, less plain's"
    return Quantity("gpu world 64", "host cost", "us / block and step", method, over, targets=targets)


def _gigabytes(found: Found) -> list[float]:
    return [found.peak / 1e9]


def child(arguments: argparse.Namespace) -> list[Quantity]:
    """One mode, in this process."""
    device = torch.device(arguments.device)
    if arguments.mode == "fake":
        mesh = fake_world(FAKE_WORLD, device.type)
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
    setting = Setting(
        device,
        mesh,
        SIZES[arguments.size],
        warm_up=arguments.warm_up,
        steps=arguments.steps,
        shortcut=not arguments.collectives,
        mixed=arguments.mixed,
    )
    peers, _ = choose(["plain", *(peer for peer in arguments.peers or PEERS if peer != "plain")])
    suffixes = {"off": [""], "on": [COMPILED], "both": ["", COMPILED]}[arguments.compile]
    names = [peer + suffix for suffix in suffixes for peer in peers]
    measure = measure_fake if arguments.mode == "fake" else measure_nccl
    with quiet():
        quantities = measure(setting, names, arguments.rounds)
    dist.destroy_process_group()
    return quantities


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fullshard beside plain PyTorch, FSDP2 and FSDP1 on one GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--mode", choices=("nccl", "fake"), help="only this one")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="plain and these")
    parser.add_argument("--compile", default="both", choices=("off", "on", "both"))
    parser.add_argument("--mixed", action="store_true", help="fp32 shards with bf16 compute, not all bf16")
    parser.add_argument("--collectives", action="store_true", help="Fullshard calls NCCL even for one rank")
    parser.add_argument("--warm-up", type=int, default=4, help="steps")
    parser.add_argument("--steps", type=int, default=10, help="measured steps in a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns per peer")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-gpu.json and .md")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)  # set: this is the child that measures
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: no GPU here (torch.cuda.is_available() is False); nothing was measured.")
        print("To test its logic: python benchmarks/gpu.py --device cpu --size tiny")
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dump(child(arguments))))
        return 0
    modes = [arguments.mode] if arguments.mode else ["nccl", "fake"]
    quantities = children([__file__, *sys.argv[1:], "--mode", mode] for mode in modes)
    show(quantities, "gpu" if arguments.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
