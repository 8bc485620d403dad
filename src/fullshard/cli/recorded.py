"""One rank on one side of `fullshard compare`: runs the program and records its losses, times and parameters.

Started as `python -m fullshard.cli.recorded SIDE FOLDER STEPS SCRIPT ARGS...`. It imports nothing of Fullshard that
could affect a program on PyTorch's FSDP. Losses are the scalars on which `backward` is called. A step ends with the
first optimizer step after a backward, or with the backward itself if optimizers step within it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import resource
import runpy
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import adopt
from .ranks import TURN

UNITS = {"FSDPModule", "FullyShardedDataParallel"}
"""Names of the classes that make a module a unit, in PyTorch and in Fullshard."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Turns:
    """Steps in turns with the same rank on the other side, so that both see the same load of the machine.

    A byte through a socket says that it is the other's turn; so does the end of the other side. PyTorch's begins. On an
    accelerator, whose memory may not hold two models, the turn ends with the program.

    Args:
        begins: whether this side begins.
        descriptor: the socket's.
    """

    def __init__(self, begins: bool, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._alone = torch.accelerator.is_available()
        if not begins:
            self._wait()

    def _wait(self) -> None:
        if not self._socket.recv(1):
            self._alone = True

    def take(self) -> None:
        """Let the other side take its step, and wait until it has."""
        if self._alone:
            return
        try:
            self._socket.send(b"x")
            self._wait()
        except OSError:  # the other side has ended
            self._alone = True


class Recorder:
    """Records one rank, step by step.

    Args:
        turns: of this rank and the other side's.
        folder: the folder for `rank-0.json` and so on, and for the parameters after the first and last step, `1.pt`.
        steps: the program is stopped after this step.
    """

    def __init__(self, turns: Turns, folder: Path, steps: int) -> None:
        self.turns, self.folder, self.steps = turns, folder, steps
        self.losses: list[list[torch.Tensor]] = []
        self.phases: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "optimizer": []}
        self._pending: list[torch.Tensor] = []  # losses of the step in progress
        self._spent = dict.fromkeys(self.phases, 0.0)  # seconds in the step in progress
        self._depth = 0  # of nested backwards
        self._trained = False  # whether a backward ran after the last step
        self._within: torch.optim.Optimizer | None = None  # that stepped within the current backward
        self._mark = self._begun = time.perf_counter()
        self.memory = 0
        self.units = 0
        self.engines: list[str] = []
        self._forget_peak()

    def install(self) -> None:
        """Start to observe backwards and optimizers."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._depth == 0:
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                self._pending += [root.detach().clone() for root in roots if root.numel() == 1]
                self._end_phase("forward")
            self._depth += 1
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
            self._trained = True
            if self._depth == 0:
                self._end_phase("backward")
                if self._within is not None:
                    self._end_step(self._within)

        torch.autograd.backward = backward
        register_optimizer_step_pre_hook(lambda *_: None if self._depth else self._end_phase(None))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))

    def _end_phase(self, phase: str | None) -> None:
        """Add the time since the last mark to a phase; None: to no phase."""
        current = time.perf_counter()
        if phase is not None:
            self._spent[phase] += current - self._mark
        self._mark = current

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._depth:
            self._within = optimizer  # the step ends with the backward
            return
        self._end_phase("optimizer")
        if self._trained:  # False: a second optimizer of the same step
            self._end_step(optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._spent["step"] = time.perf_counter() - self._begun
        for phase, seconds in self._spent.items():
            self.phases[phase].append(seconds)
        self.losses.append(self._pending)
        self.memory = max(self.memory, self._peak())
        if (step := len(self.losses)) in (1, self.steps):
            self._save_parameters(optimizer, step)
            if step == self.steps:
                sys.exit(0)
            self._forget_peak()
        self._pending, self._trained, self._within = [], False, None
        self._spent = dict.fromkeys(self.phases, 0.0)
        (self.folder / f"rank-{os.environ['RANK']}.steps").write_text(str(step))
        self.turns.take()
        self._mark = self._begun = time.perf_counter()

    def _save_parameters(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write full parameters and buffers of the models that the optimizer trains, on rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        # PyTorch's wrapper crashes if it offloads to the CPU from a CPU.
        options = StateDictOptions(full_state_dict=True, cpu_offload=torch.accelerator.is_available())
        state: dict[str, torch.Tensor] = {}
        models = list(_models_of({id(p) for group in optimizer.param_groups for p in group["params"]}))
        for number, model in enumerate(models):
            full_state = get_model_state_dict(model, options=options)
            prefix = f"model {number}: " if len(models) > 1 else ""
            state |= {f"{prefix}{name}": value for name, value in full_state.items() if isinstance(value, torch.Tensor)}
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(state, self.folder / f"{step}.pt")
        self.units = sum(_engine_of(part) is not None for model in models for part in model.modules())
        every = [_engine_of(obj) for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
        self.engines = sorted({engine for engine in every if engine is not None})

    def _peak(self) -> int:
        """Peak bytes allocated on the accelerator; without one, peak resident memory."""
        if torch.accelerator.is_available():
            return int(torch.accelerator.max_memory_allocated())
        if not STATUS.exists():  # not Linux: the peak since the process started
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line[:6] == "VmHWM:")

    def _forget_peak(self) -> None:
        """Restart the measurement, so that the full parameters of `_save_parameters` do not count."""
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        elif CLEAR.exists():
            CLEAR.write_text("5")

    def write(self) -> None:
        """Write the recording."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        recording = {
            "losses": [[loss.item() for loss in losses] for losses in self.losses],
            "phases": self.phases,
            "memory": self.memory,
            "units": self.units,
            "engines": self.engines,
            "device": "cpu" if accelerator is None else accelerator.type,
        }
        (self.folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(recording))


def _engine_of(module: nn.Module) -> str | None:
    """The package that made a module a unit, "torch" or "fullshard"; None: it is none."""
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ in UNITS)
    return next((kind.__module__.partition(".")[0] for kind in kinds), None)


def _models_of(parameters: set[int]) -> Iterator[nn.Module]:
    """The outermost modules that contain some of these parameters (ids), in order of creation."""
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    for module in modules:
        if id(module) not in inner and any(id(parameter) in parameters for parameter in module.parameters()):
            yield module


def main(side: str, folder: str, steps: str, script: str, *arguments: str) -> None:
    """Run the program on one side, with the same random seeds on both."""
    recorder = Recorder(Turns(side == "torch", int(os.environ.pop(TURN))), Path(folder), int(steps))
    recorder.install()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        if side == "fullshard":
            adopt.run([script, *arguments])
        else:
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    recorder.write()
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # running threads of gloo may abort a normal interpreter exit


if __name__ == "__main__":
    main(*sys.argv[1:])
