"""A job that goes on with fewer ranks when one is lost, from its last checkpoint, to the same loss.

    python examples/elastic.py --ranks 4 --out runs/elastic
    python examples/elastic.py --ranks 4 --out runs/elastic --lose 2:7      rank 2 is killed after step 7, to see it

`torchrun` ends all ranks when one dies; with `--max-restarts` it starts as many again. Here the job is started by a few
lines of Python that ask for one rank fewer each time (on several machines, whatever starts jobs does that). A
checkpoint loads on any number of ranks. What has to stay the same is the batch of all ranks together: every rank takes
its share of the same rows, and weighs its loss so that the mean over ranks is the mean over the rows.
"""

import argparse
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard

ROWS = 24  # of a batch, of all ranks together
STEPS = 12
WIDTH = 32


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step: the same on every rank. [ROWS, WIDTH], [ROWS, 1]"""
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(1, keepdim=True).tanh()


def share_of_loss(model: nn.Module, step: int, rank: int, world: int) -> Tensor:
    """What this rank adds to the mean over all rows, times `world`: gradients are averaged over ranks."""
    inputs, targets = (rows[rank::world] for rows in rows_of(step))
    return (model(inputs) - targets).square().sum() * world / ROWS


def train(out: Path, lost: tuple[int, int] | None) -> None:
    """One rank, whichever time the job is started."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    warnings.filterwarnings("ignore", message="The random generators were left")  # there is no dropout here
    model = build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = fullshard.load(out, model, optimizer, fall_back=True, missing_ok=True).step
    for step in range(done + 1, STEPS + 1):
        loss = share_of_loss(model, step, rank, world)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            fullshard.save(out, model, optimizer, step=step, keep_last=2)
        if (rank, step) == lost:
            os.kill(os.getpid(), signal.SIGKILL)
    total = loss.detach() / world
    dist.all_reduce(total)
    if rank == 0:
        print(f"{world} ranks, from step {done}: loss {total.item():.7f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"))
    parser.add_argument("--lose", help="RANK:STEP to kill, the first time")
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        rank, _, step = (options.lose or "").partition(":")
        first = int(os.environ["WORLD_SIZE"]) == options.ranks
        train(options.out, (int(rank), int(step)) if step and first else None)
        return
    for ranks in range(options.ranks, 0, -1):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if subprocess.run([*command, *sys.argv], check=False).returncode == 0:
            return
        print(f"A job of {ranks} ranks has failed; it goes on with {ranks - 1}.", flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
