"""One rank on one side of `fullshard compare`: runs the program and records its losses, times and parameters.

Started as `python -m fullshard.cli.recorded SIDE FOLDER STEPS SCRIPT ARGS...`. It imports nothing of Fullshard that
could affect a program on PyTorch's FSDP. Losses are the scalars on which `backward` is called. Optimizers that step
between two backwards, or within one, belong to one step:

    backward  backward  step  step | backward  step | ...
                                   ^ where the step ends is known only here, or at the program's end

Parameters are therefore saved after each of these optimizers, each time in place of what the one before left: all ranks
step together, and the program may close its process group next. Where the next backward begins would be too late: units
are gathered there.
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
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..optim.outer_steps import OuterSteps
from ..optimizers import parameters_of
from . import adopt
from .local_ranks import TURN

UNITS = {"FSDPModule", "FullyShardedDataParallel"}
"""Names of the classes that make a module a unit, in PyTorch and in Fullshard."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class AlternatingSteps:
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

    def take(self) -> float:
        """Wait until the other side has taken its step; returns the seconds that took."""
        begun = time.perf_counter()
        try:
            if not self._alone:
                self._socket.send(b"x")
                self._wait()
        except OSError:  # the other side has ended
            self._alone = True
        return time.perf_counter() - begun


class Recorder:
    """Records one rank, step by step.

    Args:
        turns: of this rank and the other side's.
        folder: the folder for `rank-0.json` and so on, and for the parameters after the first and last step, `1.pt`.
        steps: the program is stopped after this step, where the next one's backward would begin.
    """

    def __init__(self, turns: AlternatingSteps, folder: Path, steps: int) -> None:
        self.turns, self.folder, self.steps = turns, folder, steps
        self.losses: list[list[torch.Tensor]] = []
        self.phases: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "optimizer": []}
        self._pending: list[torch.Tensor] = []  # losses of the step in progress
        self._spent = dict.fromkeys(self.phases, 0.0)  # seconds in the step in progress
        self._backwards = 0  # in progress, one within another
        self._outer = OuterSteps()
        self._trained = False  # whether a backward ran in the step in progress
        self._stepped = False  # whether an optimizer has stepped after it
        self._within = False  # whether an optimizer stepped within the backward in progress
        self._mark = self._begun = time.perf_counter()
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # in order of creation
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers that have stepped
        self.memory = 0
        self.units = 0
        self.engines: list[str] = []
        self._forget_peak()

    def install(self) -> None:
        """Start to observe modules, backwards and optimizers."""
        for name in ("__init__", "__setstate__"):  # the second for copies
            setattr(nn.Module, name, self._noting(getattr(nn.Module, name)))
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._backwards == 0:
                if self._stepped:
                    self._next_step()
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                self._pending += [root.detach().clone() for root in roots if root.numel() == 1]
                self._end_phase("forward")
            self._backwards += 1
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._backwards -= 1
            self._trained = True
            if self._backwards == 0:
                self._end_phase("backward")
                if self._within:
                    self._after_optimizer()

        torch.autograd.backward = backward
        register_optimizer_step_pre_hook(lambda *_: self._before_step())
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))

    def _noting(self, original: Any) -> Any:
        """A method that makes a module, and notes it."""

        @functools.wraps(original)
        def make(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            self._modules.setdefault(module)

        return make

    def _end_phase(self, phase: str | None) -> None:
        """Add the time since the last mark to a phase; None: to no phase."""
        current = time.perf_counter()
        if phase is not None:
            self._spent[phase] += current - self._mark
        self._mark = current

    def _before_step(self) -> None:
        if self._outer.begin() and not self._backwards:
            self._end_phase(None)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        is_outer = self._outer.end()
        self._optimizers.add(optimizer)
        if self._backwards:
            self._within = True  # the backward ends first
        elif is_outer:  # an inner step is part of another optimizer's, perhaps not on all ranks
            self._end_phase("optimizer")
            self._after_optimizer()

    def _after_optimizer(self) -> None:
        """End the step's time and save its parameters, for now: another optimizer may step next."""
        self._within = False
        if not self._trained:  # before the first backward
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._spent["step"] += time.perf_counter() - self._begun
        self.memory = max(self.memory, self._peak())
        if (step := len(self.losses) + 1) in (1, self.steps):
            self._save_parameters(step)
            self._forget_peak()
        self._stepped = True
        (self.folder / f"rank-{os.environ['RANK']}.steps").write_text(str(step))
        self._mark = self._begun = time.perf_counter()

    def _next_step(self) -> None:
        """End the step, and with the last one the program; then it is the other side's turn."""
        self._end_step()
        if len(self.losses) == self.steps:
            sys.exit(0)
        waited = self.turns.take()
        self._mark += waited
        self._begun += waited

    def _end_step(self) -> None:
        for phase, seconds in self._spent.items():
            self.phases[phase].append(seconds)
        self.losses.append(self._pending)
        self._pending, self._trained, self._stepped = [], False, False
        self._spent = dict.fromkeys(self.phases, 0.0)

    def _save_parameters(self, step: int) -> None:
        """Write full parameters and buffers of all models, on rank 0. Collective."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        # PyTorch's wrapper crashes if it offloads to the CPU from a CPU.
        options = StateDictOptions(full_state_dict=True, cpu_offload=torch.accelerator.is_available())
        state: dict[str, torch.Tensor] = {}
        writes = not dist.is_initialized() or dist.get_rank() == 0
        models = self._models()
        for number, model in enumerate(models):
            full_state = get_model_state_dict(model, options=options)
            prefix = f"model {number}: " if len(models) > 1 else ""
            if writes:
                tensors = {name: value for name, value in full_state.items() if isinstance(value, torch.Tensor)}
                state |= {f"{prefix}{name}": value for name, value in tensors.items()}
        if writes:
            torch.save(state, self.folder / f"{step}.pt")
        if dist.is_initialized():
            dist.barrier()  # or the others would wait for the first rank's disk in the next step's time
        engines = [engine for module in [*self._modules] if (engine := _engine_of(module)) is not None]
        self.units, self.engines = len(engines), sorted({*engines})

    def _models(self) -> list[nn.Module]:
        """The outermost modules that have a unit, or a parameter of an optimizer, in an order that ranks share."""
        gc.collect()  # modules that only some ranks have dropped yet
        modules = {module: number for number, module in enumerate([*self._modules])}
        inner = {child for module in modules for child in module.children()}
        trained = set(map(id, parameters_of(self._optimizers)))
        models = [
            module
            for module in modules
            if module not in inner
            and not any(parameter.is_meta for parameter in module.parameters())  # it has no values
            and (
                any(_engine_of(part) is not None for part in module.modules())
                or any(id(parameter) in trained for parameter in module.parameters())
            )
        ]  # by their first part: one rank alone may have a module around a model
        return sorted(models, key=lambda model: min(modules.get(part, len(modules)) for part in model.modules()))

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
        """Write the recording, at the program's end."""
        if self._stepped:
            self._end_step()
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
    """The package that made a module a unit, "torch" or "fullshard"; None if it is not a unit."""
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ in UNITS)
    return next((kind.__module__.partition(".")[0] for kind in kinds), None)


def main(side: str, folder: str, steps: str, script: str, *arguments: str) -> None:
    """Run the program on one side, with the same random seeds on both."""
    recorder = Recorder(AlternatingSteps(side == "torch", int(os.environ.pop(TURN))), Path(folder), int(steps))
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
