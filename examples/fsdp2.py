"""A program for PyTorch's FSDP2, as its users write them: nothing here knows of Fullshard.

torchrun --standalone --nproc-per-node=2 examples/fsdp2.py     # on PyTorch's FSDP2
fullshard compare examples/fsdp2.py --ranks 2                  # on both, side by side: make compare
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A residual block: [B, C] -> [B, C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C] -> [B, C]."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    """Learn a random linear map with a residual network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32, help="rows on each rank")
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dist.init_process_group(dist.get_default_backend_for_device(device))
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())

    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)]).to(device)
    target = torch.randn(options.width, options.width, device=device) / options.width**0.5
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    for step in range(options.steps):
        x = torch.randn(options.batch, options.width, device=device)
        loss = nn.functional.mse_loss(model(x), x @ target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
