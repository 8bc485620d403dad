"""A rank's watcher reads the stacks of its other threads, whatever these do."""

from __future__ import annotations

import threading

import torch
from torch import nn

from fullshard.watcher.process import frames_at


def looked_at_while_compiling() -> tuple[int, bool]:
    """How often another thread read this thread's stack meanwhile, and whether it ever saw Dynamo."""
    main, over, stacks = threading.get_ident(), threading.Event(), []

    def look() -> None:
        while not over.wait(0.0005):
            stacks.append({frame.path for frame in frames_at(main)})

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(3):
            torch.compiler.reset()
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            optimizer = torch.optim.AdamW(model.parameters())

            def step(x, model=model, optimizer=optimizer):
                model(x).sum().backward()
                torch._dynamo.graph_break()
                optimizer.step()

            compiled = torch.compile(step, backend="aot_eager")
            for _ in range(3):
                compiled(torch.randn(4, 8))
    finally:
        over.set()
        thread.join()
    return len(stacks), any("/_dynamo/" in path for paths in stacks for path in paths)


def test_a_thread_that_compiles_can_be_looked_at(in_a_process):
    """Python 3.13 crashed there, when `faulthandler` read the stacks."""
    count, in_dynamo = in_a_process(looked_at_while_compiling)
    assert count > 100
    assert in_dynamo


def test_the_stack_is_no_deeper_than_a_hundred_frames():
    def deeper(times: int) -> int:
        return deeper(times - 1) if times else len(frames_at(threading.get_ident()))

    assert deeper(150) == 100
