"""What goes into chosen modules and comes out of them, forward and backward, noted while they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...containers import map_tensors, tensors_in
from ...torch_private.autograd_task import inside_backward
from . import generators
from .held import buffers_of


@dataclass
class Call:
    """One forward of a chosen module, all tensors on the host.

    Attributes:
        inputs: (args, kwargs) as the module got them.
        outputs: tensors in what it gave; `arrived`: their gradients, by number.
        buffers: before the call; `states`: of the generators, by device type.
    """

    inputs: Any
    buffers: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)


class _Noting:
    """Hooks of one chosen module: notes its calls of a step.

    Attributes:
        calls: those whose backward counts, in order.
        without_grad: calls of which a reentrant checkpoint will do the one that counts in backward.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.without_grad = 0
        self.now: Call | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.now = None
        if not torch.is_grad_enabled():
            self.without_grad += 1
        elif not inside_backward() or self.without_grad:  # otherwise a checkpoint's second run of a noted call
            self.without_grad -= inside_backward()
            buffers = {name: _kept(buffer) for name, buffer in buffers_of(module).items()}
            self.now = Call(map_tensors(_kept, (args, kwargs)), buffers, generators.states())

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, self.now = self.now, None
        if call is None:
            return
        self.calls.append(call)
        for number, tensor in enumerate(tensors_in(output)):
            call.outputs.append(_kept(tensor))
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, number=number: _arrive(call, number, grad))


def _arrive(call: Call, number: int, grad: torch.Tensor) -> None:
    call.arrived[number] = call.arrived[number] + _kept(grad) if number in call.arrived else _kept(grad)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def calls_of(chosen: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """The calls of the chosen modules while the block runs, by name."""
    noting = {name: _Noting() for name in chosen}
    handles = [
        handle
        for name, module in chosen.items()
        for handle in (
            module.register_forward_pre_hook(noting[name].before, with_kwargs=True),
            module.register_forward_hook(noting[name].after, with_kwargs=True),
        )
    ]
    try:
        yield {name: one.calls for name, one in noting.items()}
    finally:
        for handle in handles:
            handle.remove()
