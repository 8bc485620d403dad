"""Train on several machines: sharded over all ranks, or within each machine with replicas across them.

On each of two machines with eight GPUs, the first of which is HOST:

    torchrun --nnodes=2 --node-rank=RANK --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
             examples/multi_node.py --strategy hybrid --out SHARED/run

full     FULL_SHARD: one axis of all ranks. The least memory; parameters cross between machines in every forward and
         backward.
hybrid   HYBRID_SHARD: a mesh [machines, ranks of a machine]. Parameters are gathered within a machine; between
         machines go reduced gradients only. Needs memory for one whole sharded model on each machine.

`examples/cluster/` has the same for SLURM and Kubernetes. `--machines 2` makes two of one machine, to try it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard


def start() -> torch.device:
    """Join the job that torchrun describes; the device of this rank."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    if not dist.is_initialized():
        dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def mesh_of(strategy: str, machines: int, device: torch.device) -> DeviceMesh:
    """One axis to shard over; or two, of which the first is replicated. Ranks are numbered machine by machine."""
    world = dist.get_world_size()
    if strategy == "full":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (machines, world // machines), mesh_dim_names=("replicate", "shard"))


def build(width: int, layers: int, mesh: DeviceMesh) -> nn.Sequential:
    """The sharded model; every rank starts from the same seed."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
    model = model.to(mesh.device_type)
    for block in model:
        fullshard.fully_shard(block, mesh=mesh)
    return fullshard.fully_shard(model, mesh=mesh)


def batch(step: int, width: int, device: torch.device) -> Tensor:
    """This rank's rows [8, width]."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, width, generator=generator).to(device)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", choices=("full", "hybrid"), default="full")
    machines = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    parser.add_argument("--machines", type=int, default=machines, help="[as torchrun says]")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/multi_node"), help="a folder that all machines see")
    options = parser.parse_args(arguments)

    device = start()
    mesh = mesh_of(options.strategy, options.machines, device)
    model = build(options.width, options.layers, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if dist.get_rank() == 0:
        print(fullshard.describe(model).partition("\n")[0], flush=True)

    losses = []  # after a restart, of as many machines or others, training goes on from the newest checkpoint
    done = fullshard.load(options.out, model, optimizer, fall_back=True, rng=False, missing_ok=True).step
    for step in range(done, options.steps):
        inputs = batch(step, options.width, device)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        fullshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if step % 10 == 9 or step == options.steps - 1:
            fullshard.save(options.out, model, optimizer, step=step + 1, rng=False, keep_last=2)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
