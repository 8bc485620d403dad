"""Copies in host memory of everything that an optimizer's step changes, to undo the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..comm import copy_to_host, has_streams
from ..containers import tensors_in
from ..forms import note_change, owner_of
from ..torch_private.local_tensor import plain_access, plain_tensors, read_grad, write_grad

_ALIGN = 16  # bytes


class StepUndo:
    """The values, gradients and optimizer state of some parameters before a step, to undo it.

    Ownership: the copies lie in one buffer of host memory (page-locked beside an accelerator), which is allocated at
    the first `record` and used again by the next. Copies are queued on the current stream, before the step; the host
    waits only in `undo`.

    Attributes:
        memory: the buffer, [bytes], uint8.
        parameters: those of the last `record`; empty after `forget`.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.forget()

    def forget(self) -> None:
        """Drop all references to parameters and state; the buffer stays."""
        self.parameters: list[torch.Tensor] = []
        self._states: list[dict[str, Any] | None] = []  # by parameter; None: it had none
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies, and the plain tensors of values and state
        self._gradients: list[tuple[torch.Tensor, torch.device]] = []  # by parameter, copies and where they were
        self._events: list[torch.Event] = []

    def record(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Copy everything that a step of these parameters changes; all have gradients."""
        self.parameters = list(parameters)
        states: list[Any] = [optimizer.state.get(parameter) for parameter in parameters]
        # Containers are rebuilt, as the step may change them; tensors are the same, as the step may replace them.
        self._states = [None if state is None else tree_map(lambda leaf: leaf, dict(state)) for state in states]
        with plain_access(), torch.no_grad():
            changed = [*parameters, *[tensor for state in self._states for tensor in tensors_in(state)]]
            values = [plain for tensor in changed for plain in plain_tensors(tensor)]
            gradients = [plain for p in parameters for plain in plain_tensors(read_grad(p))]
            locked = any(has_streams(plain.device) for plain in (*values, *gradients))
            copies = [*self._views([*values, *gradients], locked)]
            self._events = copy_to_host(zip(copies, (*values, *gradients), strict=True), locked)
        self._values = [*zip(copies, values, strict=False)]
        self._gradients = [(copy, plain.device) for copy, plain in zip(copies[len(values) :], gradients, strict=True)]

    def _views(self, tensors: Sequence[torch.Tensor], locked: bool) -> Iterator[torch.Tensor]:
        """Yield a contiguous tensor in the buffer for each of these, with its shape and dtype."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
        if self.memory.numel() < starts[-1]:
            self.memory = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=locked)
        for tensor, start, size in zip(tensors, starts, sizes, strict=False):
            yield self.memory[start : start + size].view(tensor.dtype).view(tensor.shape)

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore values and state, in the same tensors as before the step; gradients stay None."""
        for event in self._events:
            event.synchronize()
        with plain_access(), torch.no_grad():
            for copy, plain in self._values:
                plain.copy_(copy)
        for parameter, state in zip(self.parameters, self._states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                current = optimizer.state[parameter]
                current.clear()
                current.update(state)
        note_change(self.parameters)

    def show_gradients(self) -> None:
        """Give each parameter its gradient again, as a copy on its device. After `undo`."""
        places = {
            id(member.sharded): (bucket, member)
            for unit in {owner_of(parameter): None for parameter in self.parameters}
            for bucket in unit.buckets
            for member in bucket.members
        }
        for parameter, (copy, device) in zip(self.parameters, self._gradients, strict=True):
            bucket, member = places[id(parameter)]
            part = member.part
            local = torch.empty_strided(part.shape, part.stride, dtype=copy.dtype, device=device)
            with plain_access(), torch.no_grad():
                write_grad(parameter, bucket.shown(local.copy_(copy), member))
