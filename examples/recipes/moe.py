"""A mixture of experts, whose experts have a mesh of their own: each rank holds some of them, and tokens travel.

    torchrun --standalone --nproc-per-node=2 examples/recipes/moe.py

    ranks 0 ... W - 1    everything else: sharded over all of them, gradients averaged over all of them
    mesh of experts      [W / E ways, E ways]: experts are spread over the last dim, each sharded over the first

What is an expert's is a DTensor split over the ways of experts (`Shard(0)`) before `fully_shard` shards it further, so
that checkpoints know whose it is. Tokens go to their experts and back by two all-to-alls.
"""

import argparse

import job
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard

WIDTH, EXPERTS = 32, 4


class Exchange(torch.autograd.Function):
    """Rows go to other ranks, as many to each as `sent` says; gradients come back the same way."""

    @staticmethod
    def forward(context, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        context.sizes, context.group = (sent, received), group
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = context.sizes
        found = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), sent, received, group=context.group)
        return found, None, None, None


class Experts(nn.Module):
    """EXPERTS layers [WIDTH, WIDTH], of which this rank runs those that lie on it. A unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [sum(counts), WIDTH], sorted by expert; counts: of each expert that lies here."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight  # [here, WIDTH, WIDTH]
        parts = [F.gelu(part @ one) for part, one in zip(rows.split(counts), weight, strict=True)]
        return torch.cat(parts)


class Mixture(nn.Module):
    """Each token goes to the expert that a router chooses, and what that gives is weighed by the router's certainty."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.group, self.ways = mesh.get_group("expert"), mesh["expert"].size()

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] -> [tokens, WIDTH]."""
        certainty, chosen = self.router(x).softmax(-1).max(-1)  # each [tokens]
        order = chosen.argsort(stable=True)
        mine = chosen.bincount(minlength=EXPERTS)  # tokens of this rank, by expert
        theirs = torch.empty_like(mine)  # [ways * here]: tokens for the experts here, by rank that sends them
        dist.all_to_all_single(theirs, mine, group=self.group)
        here = EXPERTS // self.ways
        sent, received = mine.view(self.ways, here).sum(1).tolist(), theirs.view(self.ways, here).sum(1).tolist()
        arrived = Exchange.apply(x[order], sent, received, self.group)  # sorted by rank, then by expert
        expert = torch.arange(here, device=x.device).repeat(self.ways).repeat_interleave(theirs)
        by_expert = expert.argsort(stable=True)
        done = self.experts(arrived[by_expert], theirs.view(self.ways, here).sum(0).tolist())
        done = done[by_expert.argsort()]
        back = Exchange.apply(done, received, sent, self.group)
        return x + back[order.argsort()] * certainty[:, None]


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mixture(mesh) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Experts over their own mesh, everything else over all ranks."""
    world = dist.get_world_size()
    for block in model.blocks:
        whole = block.experts.weight
        block.experts.weight = nn.Parameter(distribute_tensor(whole.detach(), mesh["expert"], [Shard(0)]))
        fullshard.fully_shard(block.experts, mesh=mesh["data"])
        block.experts.set_gradient_divide_factor(world)  # tokens of all ranks went through it
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)


def rows(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and targets, [16, WIDTH] and [16, 1]."""
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.square().mean(1, keepdim=True)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)

    device = job.start()
    rank, world = dist.get_rank(), dist.get_world_size()
    ways = next(ways for ways in (4, 2, 1) if world % ways == 0)
    mesh = init_device_mesh(device.type, (world // ways, ways), mesh_dim_names=("data", "expert"))
    model = Model(mesh).to(device)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        inputs, targets = (part.to(device) for part in rows(step, rank))
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(job.mean_over_ranks(loss))
        if step % 10 == 0:
            job.say(f"step {step}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
