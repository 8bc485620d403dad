"""The random numbers that ranks draw, compared over ranks: whether dropout differs exactly where it should.

Ranks with different batches should drop different elements; ranks that compute one batch together, the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...generators import torch_states
from ...text import plain_path
from .findings import Finding
from .session import Session


@dataclass(frozen=True)
class Draw:
    """A call that drew random numbers for a tensor of more than one element.

    Attributes:
        module: the name of the innermost module that was running; "" outside of all modules.
        call: the function's name.
        shape: of its result.
        state: a digest of the generator's state before the call.
    """

    module: str
    call: str
    shape: tuple[int, ...]
    state: str

    def __str__(self) -> str:
        return f"{self.call} of shape {list(self.shape)} in {self.module or '(root)'!r}"


class _DrawRecorder(TorchFunctionMode):
    """Compares the generators before and after every call of torch's functions. About 5 us a call."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.draws = names, list[Draw]()  # names: by the id of a module
        self.running: list[str] = []  # names of modules, outermost first

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        before = _states(generator)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.numel() > 1 and not isinstance(result, DTensor):
            changed = [a for a, b in zip(before, _states(generator), strict=True) if not torch.equal(a, b)]
            if changed:
                digest = hashlib.blake2b(changed[0].numpy().tobytes(), digest_size=8).hexdigest()
                name = getattr(func, "__name__", str(func))
                module = self.running[-1] if self.running else ""
                self.draws.append(Draw(module, name, tuple(result.shape), digest))
        return result

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.running.append(self.names.get(id(module), ""))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.running:
            self.running.pop()


def _states(generator: Any) -> list[torch.Tensor]:
    return [generator.get_state()] if isinstance(generator, torch.Generator) else list(torch_states().values())


@contextmanager
def recorded_draws(model: nn.Module) -> Iterator[list[Draw]]:
    """The random draws of the block, in order; none if any module is compiled.

    Dynamo would have to trace the recorder, which reads generators.
    """
    if any(getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in model.modules()):
        yield []
        return
    recorder = _DrawRecorder({id(module): plain_path(path) for path, module in model.named_modules()})
    with (
        register_module_forward_pre_hook(recorder.enter),
        register_module_forward_hook(recorder.leave, always_call=True),
        recorder,
    ):
        yield recorder.draws


def compare_draws(session: Session, step: int, draws: list[Draw]) -> list[Finding]:
    """One finding if ranks with different batches draw alike, one if ranks with one batch do not. Collective."""
    by_rank = session.gather(draws)
    findings: dict[bool, Finding] = {}  # by whether the ranks have one batch
    for rank in range(1, session.world):
        for other in range(rank):
            one_batch = session.data_ranks[other] == session.data_ranks[rank]
            for a, b in zip(by_rank[other], by_rank[rank], strict=False):
                if a.call == b.call and (a.state == b.state) != one_batch:
                    findings.setdefault(one_batch, _finding(step, a, other, rank, one_batch))
                    break
    return list(findings.values())


def _finding(step: int, draw: Draw, other: int, rank: int, one_batch: bool) -> Finding:
    if one_batch:
        what = f"ranks {other} and {rank} compute one batch together and draw different random numbers: {draw}."
        expected, got = f"the same generator state as on rank {other}", f"a different one on rank {rank}"
        cause = (
            "dropout differs inside a tensor-parallel group: its ranks' generators were seeded differently, and drop "
            "different elements of one activation; seed by the data-parallel rank: torch.manual_seed(seed + dp_rank)"
        )
    else:
        what = f"ranks {other} and {rank} have different batches and draw the same random numbers: {draw}."
        expected, got = f"a generator state other than on rank {other}", f"the same one on rank {rank}"
        cause = (
            "dropout is the same on every rank: the ranks' generators were seeded alike, and the global batch has one "
            "mask repeated; seed by rank after the model is built: torch.manual_seed(seed + rank)"
        )
    return Finding("draws", what, step, ranks=(rank, other), expected=expected, got=got, cause=cause)
