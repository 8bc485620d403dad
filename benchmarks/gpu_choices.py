"""What single choices of the engine's save on a GPU: the same training with each taken back.

python benchmarks/gpu_choices.py                            all three
    python benchmarks/gpu_choices.py --choice offload           copies on streams of their own, or on the compute stream
python benchmarks/gpu_choices.py --choice segments          one collective per unit, against one for every parameter,
                                                            in one call of the group and in several
python benchmarks/gpu_choices.py --choice hybrid            the all-reduce over replicas waited for a unit later,
                                                            against at once (four gloo ranks on the one GPU)
python benchmarks/gpu_choices.py --device cpu --size tiny   the same logic; its figures mean nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import interleaved, quiet
from report import Quantity, Series, dump
from run import children, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm import Costs
from gpu import SIZES, Block, Llama

CHOICES = {"offload": 1, "segments": 1, "hybrid": 4}  # and the ranks that each needs


class Apart(fullshard.TorchComm):
    """Says that one more collective costs nothing: every parameter gets its own."""

    def costs(self, axis: Any) -> Costs:
        return Costs(latency=0.0, copy_bandwidth=1.0)


class OneByOne(Apart):
    """In calls of their own."""

    def plan_gathers(self, axis: Any, outs: Any, shards: Any) -> Any:
        return [partial(self.gather, axis, out, shard) for out, shard in zip(outs, shards, strict=True)]

    def plan_reductions(self, axis: Any, outs: Any, buffers: Any, mean: bool) -> Any:
        return [partial(self.reduce, axis, out, buffer, mean) for out, buffer in zip(outs, buffers, strict=True)]


class AtOnce(fullshard.TorchComm):
    """Waits for the all-reduce where it is issued."""

    def all_reduce(self, axis: Any, tensor: torch.Tensor, mean: bool) -> Any:
        pending = super().all_reduce(axis, tensor, mean)
        pending.wait()
        return pending


@contextlib.contextmanager
def no_lanes() -> Iterator[None]:
    """Offload copies on the compute stream, and the host waits for each."""
    with mock.patch("fullshard.comm.lanes.has_streams", return_value=False):
        yield


def ways(choice: str, shortcut: bool) -> dict[str, tuple[dict[str, Any], Callable[[], Any]]]:
    """Name -> arguments of `fully_shard`, and a context that the training runs in; the engine's own choice first."""
    usual = fullshard.TorchComm(local_shortcut=shortcut)
    if choice == "offload":
        given = {"offload_policy": fullshard.CPUOffloadPolicy(), "comm": usual}
        return {"on streams": (given, contextlib.nullcontext), "on the compute stream": (given, no_lanes)}
    if choice == "segments":
        comms = {
            "one collective": usual,
            "apart, one call": Apart(local_shortcut=shortcut),
            "apart": OneByOne(local_shortcut=shortcut),
        }
        return {name: ({"comm": comm}, contextlib.nullcontext) for name, comm in comms.items()}
    return {
        "a unit later": ({"comm": usual}, contextlib.nullcontext),
        "at once": ({"comm": AtOnce(local_shortcut=shortcut)}, contextlib.nullcontext),
    }


def turn(arguments: argparse.Namespace, given: dict[str, Any]) -> list[float]:
    """Milliseconds of each step of one model, built for this."""
    size, device = SIZES[arguments.size], torch.device(arguments.device)
    shape = (2, 2) if arguments.choice == "hybrid" else (1,)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    with device:
        model: nn.Module = Llama(size).to(torch.bfloat16)
    model.angles = model.angles.float()
    for module in list(model.modules()):
        if isinstance(module, Block):
            fullshard.fully_shard(module, mesh=mesh, **given)
    fullshard.fully_shard(model, mesh=mesh, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.time + 1), device=device)
    times = []
    for _ in range(arguments.warm_up + arguments.steps):
        start = time.perf_counter()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times[arguments.warm_up :]


def measure(arguments: argparse.Namespace) -> list[Quantity]:
    """One choice, on every rank of it."""
    alone = arguments.choice != "hybrid"
    known, found = ways(arguments.choice, shortcut=not alone), defaultdict(list)
    for name in interleaved(list(known), arguments.rounds):
        given, context = known[name]
        with context():
            found[name] += turn(arguments, given)
    method = f"{SIZES[arguments.size]}, bf16, {CHOICES[arguments.choice]} rank(s), full step with AdamW, wall clock"
    series = tuple(Series(name, tuple(found[name])) for name in known)
    return [Quantity(f"gpu {arguments.choice}", "training step", "ms", method, series, (next(iter(known)),))]


def rank(arguments: argparse.Namespace) -> None:
    """What one process does; rank 0 writes what was measured."""
    backend = "nccl" if arguments.device == "cuda" and arguments.choice != "hybrid" else "gloo"
    dist.init_process_group(backend)
    with quiet():
        quantities = measure(arguments)
    if dist.get_rank() == 0:
        arguments.json.write_text(json.dumps(dump(quantities)))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--choice", choices=tuple(CHOICES), help="only this one")
    parser.add_argument("--warm-up", type=int, default=3, help="steps")
    parser.add_argument("--steps", type=int, default=8, help="measured steps in a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-gpu-choices.json and .md")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu_choices.py: no GPU here (torch.cuda.is_available() is False); nothing was measured.")
        return 2
    if arguments.json is not None:
        rank(arguments)
        return 0
    launch = ["-m", "torch.distributed.run", "--standalone"]
    chosen = [arguments.choice] if arguments.choice else CHOICES
    quantities = children(
        [*launch, f"--nproc-per-node={CHOICES[choice]}", __file__, *sys.argv[1:], "--choice", choice]
        for choice in chosen
    )
    show(quantities, "gpu-choices" if arguments.save else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
