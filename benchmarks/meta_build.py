"""Building a 200M-parameter model from meta: time and peak memory, each peer in a fresh process of its own.

Meta model, sharding, storage, initial values: for the functional interfaces `fully_shard`, `to_empty`, then
normal values on each parameter; for FSDP1 a `param_init_fn` that does the same to each unit, which is how
it takes meta.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from peers import OUR_PEERS, TORCH_PEERS, choose, fake_world, interleaved, quiet, wrap
from report import Quantity, Series, Target, hand_back
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models import TransformerBlock, transformer_stack

BLOCKS, WIDTH, WORLD = 64, 512, 8
ROUNDS, BUDGET = 3, 45.0  # BUDGET: seconds after which no further round is begun
METHOD = (
    f"{BLOCKS} transformer blocks of width {WIDTH} ({BLOCKS * 12 * WIDTH**2 / 1e6:.0f}M parameters, fp32), "
    f"world {WORLD} (fake group), one fresh process per sample"
)


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Normal values for every parameter, DTensor or plain."""
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.02)


def materialise(module: nn.Module) -> None:
    """FSDP1's `param_init_fn`: storage and values for one module's own meta parameters."""
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.normal_(0.0, 0.02)


def build(peer: str, mesh: DeviceMesh, blocks: int, width: int) -> nn.Module:
    """The model, sharded and initialised."""
    with torch.device("meta"):
        model: nn.Module = transformer_stack(blocks, width)
    if peer.startswith("fsdp1-"):
        return wrap(peer, model, TransformerBlock, mesh, param_init_fn=materialise)
    model = wrap(peer, model, TransformerBlock, mesh)
    model.to_empty(device="cpu")
    initialise(model)
    return model


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (most so far) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def child(peer: str, tracked: bool) -> dict[str, float]:
    """Build once: seconds, and resident high-water over the shard; if `tracked`, the allocator's peak too."""
    from allocations import mark, watch

    torch.set_num_threads(1)
    mesh = fake_world(WORLD)
    with torch.device("meta"):
        shard = sum(p.numel() * 4 for p in transformer_stack(BLOCKS, WIDTH).parameters()) / WORLD
    with quiet():
        build(peer, mesh, blocks=1, width=64)  # imports what is lazily imported
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before, start = resident("VmRSS"), time.perf_counter()
        model = build(peer, mesh, BLOCKS, WIDTH)
        found = {"seconds": time.perf_counter() - start, "resident": (resident("VmHWM") - before) / shard}
        if any(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError(f"{peer}: parameters still on meta after the build")
        if tracked:
            del model
            gc.collect()
            with watch() as watched, torch.no_grad():
                with mark("build"):
                    model = build(peer, mesh, BLOCKS, WIDTH)
                with mark("first"):
                    model(torch.zeros(1, 1, WIDTH))
            found["tracked"] = watched.windows["build"].peak / shard
            found["first"] = watched.windows["first"].peak / shard
    return found


def run_child(peer: str, tracked: bool) -> dict[str, float]:
    """`child` in a fresh process whose allocator returns large blocks at once: resident then means alive."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "child.json")
        command = [sys.executable, __file__, "--child", peer, "--json", str(path), *["--tracked"] * tracked]
        subprocess.run(command, check=True, env=environment, timeout=120)
        found: dict[str, float] = json.loads(path.read_text())
    return found


def measure(quick: bool) -> list[Quantity]:
    """Four quantities: seconds; allocator's peak, resident peak and the first forward's peak over the shard."""
    names, _ = choose([*TORCH_PEERS, *OUR_PEERS])
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for count, name in enumerate(interleaved(names, 1 if quick else ROUNDS, BUDGET)):
        for key, value in run_child(name, tracked=count < len(names)).items():
            samples[key][name].append(value)

    def series(key: str) -> tuple[Series, ...]:
        ideal = () if key == "seconds" else (Series("shard", (1.0,)),)
        return (*ideal, *(Series(name, tuple(samples[key][name])) for name in names))

    over = tuple(Target(name, "shard", 1.1) for name in OUR_PEERS)
    peak, high = "peak over shard (allocator)", "peak over shard (resident)"
    tracked_method = METHOD + "; peak live bytes reported by the allocator (torch.profiler), over the shard's bytes"
    resident_method = METHOD + "; growth of the process's resident high-water mark, Python objects and all"
    first_method = "allocator's peak in the first forward after it, one token, gathered units included: no debts left"
    return [
        Quantity("meta_build", "build time", "s", METHOD + "; wall time", series("seconds")),
        Quantity("meta_build", peak, "x", tracked_method, series("tracked"), ("shard", "fsdp2"), over),
        Quantity("meta_build", high, "x", resident_method, series("resident"), ("shard", "fsdp2"), over),
        Quantity("meta_build", "peak of first forward", "x", first_method, series("first"), ("shard", "fsdp2")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a 200M-parameter model from meta.")
    parser.add_argument("--quick", action="store_true", help="one sample per peer")
    parser.add_argument("--json", type=Path, help="also write the samples there")
    parser.add_argument("--child", help="build this peer once, in this process")
    parser.add_argument("--tracked", action="store_true", help="with --child: also the allocator's peak")
    arguments = parser.parse_args()
    if arguments.child:
        arguments.json.write_text(json.dumps(child(arguments.child, arguments.tracked)))
    else:
        hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
