"""`optimizer_state_on_disk`: an optimizer whose state lies in memory-mapped files."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint.optimizer_state import blank_states
from ..comm import objects_of_all
from ..forms import NAME_KEY, owner_of
from ..optim import OwnerOptimizer
from ..optim.state_file import AFTER_STEP_KEY, ALIGN, StateFile, elementwise
from ..optimizers import parameters_of
from ..text import size
from ..torch_private.local_tensor import plain_access
from . import messages

logger = logging.getLogger("fullshard")


class StateOnDisk:
    """An optimizer's state in memory-mapped files, as made by `optimizer_state_on_disk`.

    Attributes:
        folder: where the files are.
        nbytes: bytes that are reserved there, of this rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, folder: Path, file: StateFile) -> None:
        self.folder, self._optimizer, self._file = folder, weakref.ref(optimizer), file
        optimizer.__dict__[AFTER_STEP_KEY] = partial(_move, weakref.ref(optimizer), file)
        self._handle = optimizer.register_step_post_hook(_after_step)
        _after_step(optimizer, (), {})

    @property
    def nbytes(self) -> int:
        """See the class."""
        return self._file.nbytes

    def __repr__(self) -> str:
        return f"{size(self.nbytes)} of optimizer state in {self.folder}"

    def remove(self) -> None:
        """Undo `optimizer_state_on_disk`: copy the state back into memory, and let the files go."""
        self._handle.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        optimizer.__dict__.pop(AFTER_STEP_KEY, None)
        with plain_access(), torch.no_grad():
            for parameter in _parameters(optimizer):
                for _, plain in elementwise(parameter, optimizer.state.get(parameter) or {}):
                    plain.data = plain.clone()


def optimizer_state_on_disk(optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> StateOnDisk:
    """Keep an optimizer's state in memory-mapped files, which the system pages out when memory is short.

        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        fullshard.step_in_backward(optimizer)
        fullshard.optimizer_state_on_disk(optimizer, "/local/nvme")

    Each rank has a file with the state tensors that have an element for each element of a parameter (moments, not step
    counts; parameters of one element are left out). The system writes it in the background, and reads what a step
    needs. The file has no name: when the process ends, however it ends, the system frees it, so nothing is left that a
    later run could take for state. Checkpoints (`save`, `state_dict`) are the only way to continue; they work as
    without. Results are the same bits.

    New state is created in memory by the optimizer and moves after the step: with `step_in_backward` a unit's at a
    time, otherwise all of it after the first step. Collective: every rank calls it, and all raise if one cannot.

    Args:
        optimizer: of parameters in host memory (offloaded, or on a CPU); it may have stepped.
        folder: a directory on a local disk. Memory-mapped files on a network are slow; `/dev/shm` is memory.

    Returns:
        The files' size, and `remove()`, which brings the state back into memory.

    Raises:
        ConfigError: on some rank the folder is missing or not writable, or the disk has no room for the state (room is
            reserved here); or the optimizer is an `OwnerOptimizer`, has its state on disk already, or has parameters on
            a device. Nothing has changed then.
        OSError: from a later step: state became larger than expected, and the disk is full.
    """
    problem, file = _why_not(optimizer), None
    if problem is None and not (isinstance(folder, (str, os.PathLike)) and os.fspath(folder)):
        problem = f"folder={folder!r}, which is not the path of a directory"
    where = Path("" if problem else folder)
    expected = 0 if problem else _expected_bytes(optimizer)
    if problem is None:
        try:
            file = StateFile(where, expected)
        except (OSError, ValueError) as error:
            problem = f"{expected:,} bytes in {where}: {error}"
    problems = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = objects_of_all(problem, None, "optimizers' state")
    for rank, text in enumerate(problems):
        if text is not None:
            raise messages.state_not_on_disk(rank, text)
    assert file is not None
    logger.info("optimizer_state_on_disk: %s in %s", size(file.nbytes), where)
    return StateOnDisk(optimizer, where, file)


def _why_not(optimizer: Any) -> str | None:
    """Why an optimizer's state cannot be on disk; None if it can."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"not an optimizer: {type(optimizer).__name__}"
    if isinstance(optimizer, OwnerOptimizer):
        return "OwnerOptimizer, whose state moves between ranks"
    if AFTER_STEP_KEY in optimizer.__dict__:
        return "the state of this optimizer is on disk already"
    for parameter in _parameters(optimizer):
        if parameter.device.type != "cpu":
            name = parameter.__dict__.get(NAME_KEY, "?")
            return f"parameter {name} is on {parameter.device}: offload it (CPUOffloadPolicy)"
    return None


def _expected_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state, or of the state that a first step would create."""
    by_unit: dict[Any, list[torch.Tensor]] = {}
    for parameter in _parameters(optimizer):
        by_unit.setdefault(owner_of(parameter), []).append(parameter)
    expected = 0
    for parameters in by_unit.values():  # a unit's at a time: it is all that is in memory
        new = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
        states = {id(p): state for p, state in zip(new, blank_states(optimizer, new), strict=True)} if new else {}
        with plain_access():
            for parameter in parameters:
                state = states.get(id(parameter)) or optimizer.state.get(parameter) or {}
                sizes = [plain.numel() * plain.element_size() for _, plain in elementwise(parameter, state)]
                expected += sum(-(-size // ALIGN) * ALIGN for size in sizes)
    return expected


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return parameters_of([optimizer])


def _move(reference: weakref.ref[torch.optim.Optimizer], file: StateFile, parameters: Iterable[torch.Tensor]) -> None:
    if (optimizer := reference()) is not None:
        file.move(optimizer, parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.__dict__[AFTER_STEP_KEY](_parameters(optimizer))
