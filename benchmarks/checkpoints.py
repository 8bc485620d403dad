"""Saving and loading: seconds, bytes and memory, against DCP with PyTorch's FSDP2 and a whole `torch.save` by rank 0.

    python benchmarks/checkpoints.py [--millions 40 200] [--rounds 3] [--folder DIR] [--out FILE.md]

Two gloo ranks on the CPU, fp32 and AdamW (12 bytes per parameter). Ways take turns within each round: a save, and a
load of what it wrote, which is in the page cache then. Memory is the most that a rank held in addition while it saved
or loaded (anonymous and shared pages, looked at every 2 ms); for a save in the background, with the process beside it.

Saves in the background: the call, two training steps right after it, and what is left of the save then; and the same
two steps without a save. `--only-behind` measures these and the save that is waited for alone.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import queue
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard
from models import transformer_stack

SIZES = {40: (6, 768), 200: (16, 1024)}  # millions of parameters: blocks and width
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
WAYS = ("fullshard rows", "fullshard flat", "dcp fsdp2", "torch.save rank 0")
BEHIND: tuple[Any, ...] = (True, "until_step")  # `asynchronous`
TOKENS = 32  # of a training step


def made(way: str, millions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model whose AdamW has stepped once."""
    torch.manual_seed(0)
    blocks, width = SIZES[millions]
    model = transformer_stack(blocks, width)
    for block in model.blocks:
        if way.startswith("fullshard"):
            fullshard.fully_shard(block, layout=way.split()[1])
        else:
            torch_fully_shard(block)
    (fullshard.fully_shard if way.startswith("fullshard") else torch_fully_shard)(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(way: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    if way.startswith("fullshard"):
        fullshard.save(path, model, optimizer, rng=False)
    elif way.startswith("dcp"):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path / "all")
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            with (path / "all.pt").open("wb") as file:
                torch.save({"model": model_state, "optimizer": optimizer_state}, file)
                file.flush()
                os.fsync(file.fileno())


def load(way: str, model: nn.Module, optimizer: Any, path: Path) -> None:
    if way.startswith("fullshard"):
        fullshard.load(path, model, optimizer)
    elif way.startswith("dcp"):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path / "all")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    else:
        found = torch.load(path / "all.pt", weights_only=True, mmap=True) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, found.get("model", {}), options=options)
        set_optimizer_state_dict(model, optimizer, found.get("optimizer", {}), options=options)


def held() -> int:
    """Bytes of this process that are no files' pages."""
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return 1024 * sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and megabytes that were held in addition at most."""
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator kept for itself would hide what is taken
    most, before, over = held(), held(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    return seconds, (most - before) / 1e6


def check(model: nn.Module, optimizer: Any, want: list[torch.Tensor]) -> None:
    """That what was loaded is what was saved."""
    for got, expected in zip(tensors(model, optimizer), want, strict=True):
        assert torch.equal(got, expected)


def tensors(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    found = [p.to_local().clone() for p in model.parameters()]
    return found + [optimizer.state[p]["exp_avg"].to_local().clone() for p in model.parameters()]


def spoil(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
            optimizer.state[p]["exp_avg"].zero_()


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    for _ in range(2):
        model(torch.ones(1, TOKENS, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def rank_main(rank: int, store: str, folder: str, millions: int, rounds: int, ways: list[str], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(300))
    models = {way: made(way, millions) for way in ways if not way.startswith("torch.save")}
    if "torch.save rank 0" in ways:
        models["torch.save rank 0"] = models["dcp fsdp2"]
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):  # the first warms up
        root = Path(folder) / str(turn)
        kept: dict[str, tuple[float, float]] = {}
        for way, (model, optimizer) in models.items():
            kept[f"save/{way}"] = measured(lambda w=way, m=model, o=optimizer, r=root: save(w, m, o, r / w))
            want = tensors(model, optimizer) if turn == 0 else []
            spoil(model, optimizer)
            kept[f"load/{way}"] = measured(lambda w=way, m=model, o=optimizer, r=root: load(w, m, o, r / w))
            if want:
                check(model, optimizer, want)
            if rank == 0:
                size = sum(f.stat().st_size for f in (root / way).rglob("*") if f.is_file())
                samples[f"bytes/{way}"].append(size / 1e6)
                shutil.rmtree(root / way)
        model, optimizer = models["fullshard rows"]
        steps = partial(two_steps, model, optimizer, SIZES[millions][1])
        for how in BEHIND:
            saving: list[Any] = []
            kept[f"call/{how}"] = measured(
                lambda m=model, o=optimizer, r=root, s=saving, h=how: s.append(
                    fullshard.save(r / str(h), m, o, rng=False, asynchronous=h)
                )
            )
            kept[f"steps/{how}"] = measured(steps)
            kept[f"rest/{how}"] = measured(lambda s=saving: s[0].wait())
            dist.barrier()
            if rank == 0:
                shutil.rmtree(root / str(how))
        kept["steps/alone"] = measured(steps)
        if turn:
            for name, (seconds, megabytes) in kept.items():
                samples[f"{name}/s"].append(seconds)
                samples[f"{name}/MB"].append(megabytes)
    results.put((rank, dict(samples)))
    dist.barrier()
    dist.destroy_process_group()


def run(millions: int, rounds: int, folder: Path, ways: list[str]) -> dict[int, dict[str, list[float]]]:
    context = get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        store = f"{inside}/store"
        given = [(rank, store, inside, millions, rounds, ways, results) for rank in range(2)]
        processes = [context.Process(target=rank_main, args=one) for one in given]
        for process in processes:
            process.start()
        found = {}
        while len(found) < len(processes):
            assert all(process.exitcode in (None, 0) for process in processes), "a rank failed"
            try:
                rank, samples = results.get(timeout=1.0)
                found[rank] = samples
            except queue.Empty:
                continue
        for process in processes:
            process.join()
    return found


def table(millions: int, found: dict[int, dict[str, list[float]]], ways: list[str]) -> str:
    """Rows of medians over rounds; of memory, the larger of the two ranks'."""

    def seconds(name: str) -> float:
        return statistics.median(found[0][f"{name}/s"])

    def spread(name: str) -> str:
        each = found[0][f"{name}/s"]
        return f"{seconds(name):.2f} ({min(each):.2f} to {max(each):.2f})"

    def memory(name: str) -> str:
        return f"{max(statistics.median(one[f'{name}/MB']) for one in found.values()):,.0f}"

    head = "save s (spread) | of DCP's | memory MB | load s (spread) | of DCP's | memory MB | files MB"
    rows = [f"| {millions}M parameters | {head} |", "|---" * 8 + "|"]
    for way in ways:
        cells = [way]
        for verb in ("save", "load"):
            name = f"{verb}/{way}"
            of_dcp = f"{seconds(name) / seconds(f'{verb}/dcp fsdp2'):.2f}" if "dcp fsdp2" in ways else ""
            cells += [spread(name), of_dcp, memory(name)]
        cells.append(f"{found[0][f'bytes/{way}'][0]:,.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    rows.append(
        "\n| in the background (rows) | the call, s | of a save | memory MB | two steps after it, s | rest, s |"
    )
    rows.append("|---" * 6 + "|")
    for how in BEHIND:
        share = seconds(f"call/{how}") / seconds("save/fullshard rows")
        cells = [f"`asynchronous={how!r}`", spread(f"call/{how}"), f"{share:.0%}", memory(f"call/{how}")]
        rows.append(f"| {' | '.join([*cells, spread(f'steps/{how}'), spread(f'rest/{how}')])} |")
    rows.append(f"| no save | | | | {spread('steps/alone')} | |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-behind", action="store_true")
    options = parser.parse_args()
    title = f"# Checkpoints, {datetime.date.today()}\n\n`python benchmarks/checkpoints.py --rounds {options.rounds}`; "
    text = f"{title}torch {torch.__version__}, {os.cpu_count()} cores ({platform.machine()}), two gloo ranks.\n"
    ways = ["fullshard rows"] if options.only_behind else list(WAYS)
    for millions in options.millions:
        text += f"\n{table(millions, run(millions, options.rounds, options.folder, ways), ways)}\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
