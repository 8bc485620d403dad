"""Training with 8-bit gathers and exchanges, and PowerSGD: loss, bytes and time beside float32 and bfloat16.

    python benchmarks/eight_bits.py --rounds 400    # the demo's GPT on two ranks over gloo on this machine, in turns

Every run has the same weights and batches of the standard library's source. Nats per byte of the last 50 training
steps and of held-out files; megabytes that collectives of parameters and gradients carry in a step, all ranks' buffers
together (an all-reduce counts twice, as the reduction and the gather that it is); milliseconds of a step, medians, of
runs that take turns. "Replicas" are not sharded.
"""

from __future__ import annotations

import sys
import time
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from demo_ranks import BATCH, CONTEXT, demo_model, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm_hooks import PowerSGDState, powerSGD_hook

from corpus import held_out_offsets, read_corpus, rows_of_rank, standard_library, training_offsets, windows  # isort: skip

INT8, E4M3, E5M2, BF16 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 (computed in it, too)": {"param_dtype": BF16, "reduce_dtype": BF16},
    "gathered in int8": {"gather_dtype": INT8},
    "gathered in float8_e4m3fn": {"gather_dtype": E4M3},
    "exchanged in int8": {"scatter_dtype": INT8},
    "exchanged in float8_e5m2": {"scatter_dtype": E5M2},
    "exchanged in int8, error feedback": {"scatter_dtype": INT8, "error_feedback": True},
    "exchanged in float8_e5m2, error feedback": {"scatter_dtype": E5M2, "error_feedback": True},
    "both in int8": {"gather_dtype": INT8, "scatter_dtype": INT8},
    "replicas, float32": {},
    "replicas, int8": {"all_reduce_dtype": INT8},
    "replicas, float8_e5m2": {"all_reduce_dtype": E5M2},
    "replicas, int8, error feedback": {"all_reduce_dtype": INT8, "error_feedback": True},
    "replicas, PowerSGD of rank 1": {"rank": 1},
    "replicas, PowerSGD of rank 4": {"rank": 4},
    "replicas, PowerSGD of rank 16": {"rank": 16},
}
TIMES = {"gather": 1, "reduce": 1, "exchange": 1, "all_reduce": 2}
WARM_UP, RATE, HELD_OUT, LAST = 50, 3e-3, 256, 50


def run_of(name: str, rank: int = 0, **policy: Any) -> dict[str, Any]:
    """A sharded model, what trains it, and what is noted of it. `rank`: of PowerSGD after the warm-up; 0: without."""
    model, comm = demo_model(), fullshard.RecordingComm(fullshard.TorchComm())
    precision = fullshard.MixedPrecisionPolicy(**policy)
    shape = (dist.get_world_size(), 1) if name.startswith("replicas") else (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for unit in (*model.blocks, model):
        fullshard.fully_shard(unit, mesh=mesh, mp_policy=precision, comm=comm)
    if rank:
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=WARM_UP)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return {"model": model, "comm": comm, "optimizer": optimizer, "losses": [], "seconds": []}


def rank(rounds: int) -> None:
    """One rank; the first prints the table."""
    runs = {name: run_of(name, **policy) for name, policy in WAYS.items()}
    corpus = read_corpus(standard_library(), CONTEXT)
    here, world, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    for step in range(rounds):
        offsets = training_offsets(corpus.training, CONTEXT, BATCH * world, 0, step)
        batch = windows(corpus.training, rows_of_rank(offsets, here, world), CONTEXT, cpu)
        for run in runs.values():
            run["comm"].calls.clear()
            for group in run["optimizer"].param_groups:
                group["lr"] = RATE * min((step + 1) / WARM_UP, 1 - 0.9 * step / rounds)
            dist.barrier()
            began = time.perf_counter()
            loss = run["model"](*batch)
            loss.backward()
            fullshard.clip_grad_norm_(run["model"].parameters(), 1.0)
            run["optimizer"].step()
            run["optimizer"].zero_grad()
            dist.barrier()
            run["seconds"].append(time.perf_counter() - began)
            run["losses"].append(loss.item())
    rows = []
    for name, run in runs.items():
        calls = [call for call in run["comm"].calls if call.world > 1 and call.dtype != torch.int64]
        carried = sum(call.nbytes * TIMES.get(call.verb, 0) for call in calls)
        held_out = []
        with torch.no_grad():
            for offsets in held_out_offsets(corpus.held_out, CONTEXT, HELD_OUT).split(BATCH * world):
                batch = windows(corpus.held_out, rows_of_rank(offsets, here, world), CONTEXT, cpu)
                held_out.append(run["model"](*batch).item())
        losses = torch.tensor([mean(run["losses"][-LAST:]), mean(held_out)])
        dist.all_reduce(losses)
        training, validation = (losses / world).tolist()
        milliseconds = median(run["seconds"][2:]) * 1e3
        rows.append(f"| {name} | {training:.3f} | {validation:.3f} | {carried / 1e6:.2f} | {milliseconds:.1f} |")
    if here == 0:
        print("| sent | training | held out | MB a step | step, ms |\n|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    sys.exit(on_ranks(__file__, __doc__, rank, rounds=400))
