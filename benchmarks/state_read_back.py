"""What a step waits for when AdamW's state has to be read back from disk, and whether reading ahead helps.

    python benchmarks/state_read_back.py --folder /tmp --seconds 100

As `state_on_disk.py`, but before each step all pages of the file are written and dropped, as the system does when
memory is short. Three kinds of steps take turns: "in memory", where nothing was dropped; "on disk"; and "ahead", in
which each unit's step asks the system for what lies behind its state in the file, the next unit's (`MADV_WILLNEED`,
in pieces of 1 MiB: the kernel reads at most its window for one request). Medians and minima, in seconds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Iterable
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.optim.in_backward import StepsInBackward
from fullshard.optim.state_file import StateFile, elementwise

KINDS = "in memory", "on disk", "ahead"
PIECE = 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=60)
    return parser.parse_args()


def sharded(layers: int, width: int) -> nn.Module:
    """On one rank, a unit per layer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])
    for layer in model:
        fullshard.fully_shard(layer)
    return fullshard.fully_shard(model)


def drop(memory: mmap.mmap, file: int) -> None:
    """Write a file's pages, and drop them."""
    memory.madvise(mmap.MADV_DONTNEED)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    options = arguments()
    files: list[Any] = []
    maps: list[mmap.mmap] = []
    took = {"steps": 0.0}
    kind = KINDS[0]
    open_file, map_file, move, step = tempfile.TemporaryFile, mmap.mmap, StateFile.move, StepsInBackward._step

    def opened(**named: Any) -> Any:
        file = open_file(**named)
        files.append(os.dup(file.fileno()))
        return file

    def mapped(*given: Any) -> mmap.mmap:
        maps.append(map_file(*given))
        return maps[-1]

    def moved(file: StateFile, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        move(file, optimizer, parameters)
        places = [file._places[at] for p in parameters for at, _ in elementwise(p, optimizer.state.get(p) or {})]
        if kind == "ahead" and places:
            begins = [place.data_ptr() - file._memory.data_ptr() for place in places]
            end = max(at + place.numel() for at, place in zip(begins, places, strict=True))
            stop = min(2 * end - min(begins), len(maps[-1]))
            for at in range(end // mmap.PAGESIZE * mmap.PAGESIZE, stop, PIECE):
                maps[-1].madvise(mmap.MADV_WILLNEED, at, min(PIECE, stop - at))

    def timed(steps: StepsInBackward, parameters: Any) -> None:
        began = time.perf_counter()
        step(steps, parameters)
        took["steps"] += time.perf_counter() - began

    model = sharded(options.layers, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fullshard.step_in_backward(optimizer)
    with mock.patch.object(tempfile, "TemporaryFile", opened), mock.patch.object(mmap, "mmap", mapped):
        state = fullshard.optimizer_state_on_disk(optimizer, options.folder)
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    until, number = time.monotonic() + options.seconds, 0
    with mock.patch.object(StateFile, "move", moved), mock.patch.object(StepsInBackward, "_step", timed):
        while time.monotonic() < until:
            kind = KINDS[number % 3]
            if kind != "in memory":
                drop(maps[0], files[0])
            took["steps"], began = 0.0, time.perf_counter()
            model(torch.ones(options.batch, options.width)).square().mean().backward()
            optimizer.step()
            if number >= 6:
                seconds[kind].append((time.perf_counter() - began, took["steps"]))
            number += 1
    print(f"{state.nbytes / 2**20:.0f} MiB of state, {len(seconds['ahead'])} steps of each kind\n")
    print("| state | step, s | least | of which the optimizer's, s | least |\n|---|---|---|---|---|")
    for kind, pairs in seconds.items():
        columns = [f"{of(values):.3f}" for values in zip(*pairs, strict=True) for of in (median, min)]
        print(f"| {kind} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
