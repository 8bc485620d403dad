"""An exponential moving average of the weights, sharded as they are; evaluated, saved, and taken up again.

    torchrun --standalone --nproc-per-node=2 examples/recipes/ema.py --out runs/ema

A deep copy of a sharded model has shards of its own. Averaging is arithmetic on shards: no communication, and as much
memory again as the parameters take on each rank.
"""

import argparse
import copy
from pathlib import Path

import job
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard

WIDTH = 64


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def rows(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets, [8, WIDTH] and [8, 1]."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs.to(device), inputs.mean(1, keepdim=True).to(device)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/ema"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--decay", type=float, default=0.9)
    options = parser.parse_args(arguments)

    device = job.start()
    model = build().to(device)
    for block in model[:3]:
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    loaded = fullshard.load(options.out, model, optimizer, state={"average": average}, rng=False, missing_ok=True)
    done = loaded.step
    for step in range(done, options.steps):
        inputs, targets = rows(step, device)
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - options.decay)
    fullshard.save(options.out, model, optimizer, step=options.steps, state={"average": average}, rng=False)

    inputs, targets = rows(10_000, device)
    with torch.no_grad():
        losses = [job.mean_over_ranks((one(inputs) - targets).square().mean()) for one in (model, average)]
    job.say(f"held out: {losses[0]:.5f} of the weights, {losses[1]:.5f} of their average")
    return losses[0], losses[1]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
