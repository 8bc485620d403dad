"""FULL_SHARD against HYBRID_SHARD on two nodes of two ranks, with a slow wire between them.

    python benchmarks/multi_node.py [--width 1024] [--layers 8] [--steps 8] [--rate 1gbit 200mbit]

The nodes are network namespaces on this machine (`two_nodes.py`; needs root). Bytes are counted by the kernel at each
node's end of the wire, around steps after the first two; strategies take turns in one run. Writes a dated page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from two_nodes import launch, why_not, wire

STRATEGIES = ("full", "hybrid")
RANKS = 2  # a node
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def theory(parameters: int, nodes: int = 2, ranks: int = RANKS) -> dict[str, float]:
    """Bytes that a node receives in a step, of `parameters` bytes, by gloo's algorithms.

    Two gathers by rings of all W ranks, in the order of nodes: a ring enters a node once, with (W - 1) / W of the
    whole. One reduction by recursive halving: each of a node's G ranks receives (N - 1) / N of the whole from ranks of
    other nodes (a ring would pass (W - 1) / W once). Hybrid: each rank's shard, 1 / G of the whole, is all-reduced over
    N nodes by a ring of its own, which receives 2 (N - 1) / N of it; G ranks of a node do so.
    """
    gathers, halving = 2 * (nodes * ranks - 1) / (nodes * ranks), ranks * (nodes - 1) / nodes
    return {"full": parameters * (gathers + halving), "hybrid": parameters * 2 * (nodes - 1) / nodes}


def received() -> int:
    """Bytes that came over the wire to this node so far."""
    device = os.environ["NODE_DEVICE"]
    return int(Path(f"/sys/class/net/{device}/statistics/rx_bytes").read_text())


def rank(options: argparse.Namespace) -> None:
    """One rank: both strategies in turns; the first rank prints what all found."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import torch.distributed as dist
    from multi_node import batch, build, mesh_of, start

    device = start()
    torch.set_num_threads(1)
    nodes = dist.get_world_size() // RANKS
    models = {one: build(options.width, options.layers, mesh_of(one, nodes, device)) for one in STRATEGIES}
    optimizers = {one: torch.optim.SGD(model.parameters(), lr=0.1) for one, model in models.items()}
    bytes_of: dict[str, list[int]] = {one: [] for one in STRATEGIES}
    seconds: dict[str, list[float]] = {one: [] for one in STRATEGIES}
    losses: dict[str, list[float]] = {one: [] for one in STRATEGIES}
    for step in range(options.steps + 2):
        for one in STRATEGIES:
            inputs = batch(step, options.width, device)
            dist.barrier()
            before, begun = received(), time.perf_counter()
            loss = (models[one](inputs) - inputs.roll(1, 1)).square().mean()
            loss.backward()
            optimizers[one].step()
            optimizers[one].zero_grad()
            dist.barrier()
            took, came = time.perf_counter() - begun, received() - before
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses[one].append(total.item() / dist.get_world_size())
            if step >= 2:  # before that ranks compare what they are about to do, and connections are made
                bytes_of[one].append(came)
                seconds[one].append(took)
    mine = {"bytes": bytes_of, "seconds": seconds, "losses": losses}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() * p.element_size() for p in models["full"].parameters())
        print(json.dumps({"parameters": parameters, "ranks": everyone}), flush=True)
    dist.destroy_process_group()


def measure(width: int, layers: int, steps: int, rate: str, timeout: float = 600) -> dict[str, Any]:
    """By strategy: bytes received by a node per step (median; the larger node's), seconds per step (median), losses."""
    with wire(rate) as connected:
        given = ["--rank", "--width", str(width), "--layers", str(layers), "--steps", str(steps)]
        said = launch(connected, RANKS, Path(__file__).resolve(), *given, timeout=timeout)
    told = json.loads(next(line for line in said.splitlines() if line.startswith('{"parameters"')))
    found: dict[str, Any] = {"parameters": told["parameters"], "theory": theory(told["parameters"])}
    first = [told["ranks"][node * RANKS] for node in range(2)]
    for one in STRATEGIES:
        found[one] = {
            "bytes": max(statistics.median(node["bytes"][one]) for node in first),
            "seconds": statistics.median(first[0]["seconds"][one]),
            "spread": [min(first[0]["seconds"][one]), max(first[0]["seconds"][one])],
            "losses": first[0]["losses"][one],
        }
    return found


def rows_of(found: dict[str, Any], rate: str) -> list[str]:
    """The results at one rate, as rows of a table."""
    rows = []
    for one, name in zip(STRATEGIES, ("FULL_SHARD", "HYBRID_SHARD"), strict=True):
        got, expected = found[one], found["theory"][one]
        low, high = got["spread"]
        rows.append(
            f"| {rate} | {name} | {got['bytes'] / 1e6:.1f} MB | {expected / 1e6:.1f} MB "
            f"| {got['bytes'] / expected:.2f} | {got['seconds']:.2f} s ({low:.2f} to {high:.2f}) "
            f"| {got['losses'][-1]:.7f} |"
        )
    return rows


def page(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """The results at all rates, for readers."""
    size = next(iter(found.values()))["parameters"]
    asked = f"--width {options.width} --layers {options.layers} --steps {options.steps} --rate {' '.join(found)}"
    lines = [
        f"# Two nodes, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/multi_node.py {asked}`",
        "",
        f"Two network namespaces of {RANKS} gloo ranks each on one machine ({os.cpu_count()} cores, "
        f"{platform.machine()}, {platform.system()} {platform.release().partition('-')[0]}; load average "
        f"{os.getloadavg()[0]:.1f} at the end), and between them a veth pair that `tc tbf` shapes to the rate. "
        f"{options.layers} layers of width {options.width}, fp32, {size / 1e6:.1f} MB of parameters, SGD. Bytes are "
        f"`rx_bytes` of a node's end of the wire, headers included, the larger node's median over {options.steps} "
        "steps; the theory is of gloo's "
        "algorithms (`theory` in the script).",
        "",
        "| wire | strategy | received by a node, a step | theory | measured / theory | step, median (least to most) "
        "| last loss |",
        "|---|---|---|---|---|---|---|",
        *[row for rate, one in found.items() for row in rows_of(one, rate)],
        "",
    ]
    for rate, one in found.items():
        less = one["full"]["bytes"] / one["hybrid"]["bytes"]
        faster = one["full"]["seconds"] / one["hybrid"]["seconds"]
        lines.append(
            f"At {rate}, HYBRID_SHARD receives {less:.2f} times less; FULL_SHARD's step takes {faster:.2f} of its."
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rate", nargs="+", default=["1gbit", "200mbit"], help="of the wire, each way, as tc has it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # what torchrun starts
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    if (reason := why_not()) is not None:
        raise SystemExit(f"multi_node.py: {reason}")
    found = {rate: measure(options.width, options.layers, options.steps, rate) for rate in options.rate}
    text = page(found, options)
    print(text)
    (options.out / f"{datetime.date.today().isoformat()}-multi-node.md").write_text(text)


if __name__ == "__main__":
    main()
