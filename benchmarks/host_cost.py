"""Host cost: processor time that sharding adds to a block's step, and to its evaluation, with little arithmetic in it.

64 blocks of LayerNorm(16) and two Linear(16, 16), each block a unit and the root too, on the fake group at world 64.
Its collectives return at once, so what remains over plain PyTorch is the engine's own work, and the fake group's, which
copies every rank's slice by itself: "collectives alone" is that part, two gathers and a reduce. DDP cannot run there.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter

import torch
import torch.distributed as dist
from peers import OUR_PEERS, TORCH_PEERS, WRAPPERS, choose, fake_world, interleaved, quiet, wrap
from report import Quantity, Series, Target, hand_back, parse_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models import TinyBlock, tiny_stack

BLOCKS, WIDTH, WORLD, WARM_UP = 64, 16, 64, 4
ALONE = "collectives alone"
BUDGET = 50.0  # seconds
METHOD = (
    f"{BLOCKS} blocks, world {WORLD} (fake group), forward + backward; process CPU time less that of plain "
    "PyTorch, one thread, peers shuffled every round, garbage of the warm-up frozen"
)


def cost(model: nn.Module, x: Tensor, steps: int) -> tuple[float, float, float]:
    """Microseconds of processor time per block: of forward, of backward, and of a forward without a graph."""
    forward = backward = evaluation = 0.0
    for _ in range(steps):
        start = time.process_time()
        loss = model(x).sum()
        between = time.process_time()
        loss.backward()
        backward += time.process_time() - between
        forward += between - start
        del loss
        model.zero_grad(set_to_none=True)
        start = time.process_time()
        with torch.no_grad():
            model(x)
        evaluation += time.process_time() - start
    forward, backward, evaluation = (spent / (steps * BLOCKS) * 1e6 for spent in (forward, backward, evaluation))
    return forward, backward, evaluation


def collectives(mesh: DeviceMesh) -> Callable[[int], float]:
    """A function that times the bare collectives of a block and step, in microseconds of processor time."""
    group, numel = mesh.get_group(), sum(p.numel() for p in TinyBlock(WIDTH).parameters())
    full, shard = torch.zeros(numel), torch.zeros(numel // WORLD)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def spent(steps: int) -> float:
        start = time.process_time()
        for _ in range(steps * BLOCKS):
            gather(full, shard, group=group, async_op=True)
            gather(full, shard, group=group, async_op=True)
            reduce(shard, full, group=group, async_op=True)
        return (time.process_time() - start) / (steps * BLOCKS) * 1e6

    return spent


def measure(quick: bool) -> list[Quantity]:
    """Host cost of each peer over plain: of a step, of its phases, and of a forward without a graph."""
    names, _ = choose(["plain", *TORCH_PEERS, *OUR_PEERS, *WRAPPERS])
    torch.set_num_threads(1)
    mesh = fake_world(WORLD)
    models = {name: wrap(name, tiny_stack(BLOCKS, WIDTH), TinyBlock, mesh) for name in names}
    x = torch.randn(4, WIDTH)
    for model in models.values():
        cost(model, x, steps=WARM_UP)
    alone = collectives(mesh)
    gc.collect()
    gc.freeze()  # so that no peer pays for scanning what the others hold
    samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # of forward, backward and evaluation
    bare: list[float] = []
    steps = 1 if quick else 3
    for name in interleaved([*names, ALONE], 4 if quick else 24, BUDGET, least=4):
        if name == ALONE:
            bare.append(alone(steps))
        else:
            samples[name].append(cost(models[name], x, steps))
    targets = (
        *(Target(name, "fsdp2", 0.30) for name in OUR_PEERS),
        *(Target(name, "flat", 1.05) for name in WRAPPERS),
    )
    found = []
    phases: dict[str, Callable[[tuple[float, float, float]], float]] = {
        "": lambda spent: spent[0] + spent[1],
        "forward ": itemgetter(0),
        "backward ": itemgetter(1),
        "evaluation ": itemgetter(2),
    }
    for phase, part in phases.items():
        values = {name: tuple(map(part, samples[name])) for name in names}
        plain = values["plain"]
        series = [Series(name, values[name], baseline=plain) for name in names if name != "plain"]
        if not phase:
            series.append(Series(ALONE, tuple(bare), note="part of every figure above"))
        title = f"host cost {phase}over plain ({statistics.median(plain):.0f})"
        found.append(
            Quantity("host_cost", title, "us / block and step", METHOD, tuple(series), targets=() if phase else targets)
        )
    return found


def main() -> None:
    arguments = parse_arguments(__doc__)
    with quiet():
        hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
