"""Which random numbers a rank draws: compared over ranks, they tell whether dropout differs where it should.

Ranks with different batches should drop different elements, ranks that compute one batch together the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...names import plain_path
from .report import Finding
from .session import Session, generator_states


@dataclass(frozen=True)
class Draw:
    """One call that drew random numbers for a tensor of more than one element.

    Attributes:
        module: the innermost module that was running, by name; "" outside of all.
        call: the function's name.
        shape: of what it gave.
        state: a digest of the generator before.
    """

    module: str
    call: str
    shape: tuple[int, ...]
    state: str

    def __str__(self) -> str:
        return f"{self.call} of shape {list(self.shape)} in {self.module or '(root)'!r}"


class _Watch(TorchFunctionMode):
    """Compares the generators before and after every call of torch's functions. About 5 us a call."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.draws = names, list[Draw]()
        self.running: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = kwargs.get("generator")
        before = _states(given)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.numel() > 1 and not isinstance(result, DTensor):
            changed = [a for a, b in zip(before, _states(given), strict=True) if not torch.equal(a, b)]
            if changed:
                digest = hashlib.blake2b(changed[0].numpy().tobytes(), digest_size=8).hexdigest()
                name = getattr(func, "__name__", str(func))
                where = self.running[-1] if self.running else ""
                self.draws.append(Draw(where, name, tuple(result.shape), digest))
        return result

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.running.append(self.names.get(id(module), ""))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.running:
            self.running.pop()


def _states(given: Any) -> list[torch.Tensor]:
    return [given.get_state()] if isinstance(given, torch.Generator) else list(generator_states().values())


@contextmanager
def draws_of(model: nn.Module) -> Iterator[list[Draw]]:
    """The draws that happen while the block runs, in order; none of a model of which anything is compiled.

    Dynamo would have to follow the watch, which looks at generators.
    """
    if any(getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod") for module in model.modules()):
        yield []
        return
    watch = _Watch({id(module): plain_path(path) for path, module in model.named_modules()})
    hooks = [
        register_module_forward_pre_hook(watch.enter),
        register_module_forward_hook(watch.leave, always_call=True),
    ]
    try:
        with watch:
            yield watch.draws
    finally:
        for hook in hooks:
            hook.remove()


def compare_draws(session: Session, step: int, mine: Iterable[Draw]) -> list[Finding]:
    """One finding if ranks with different batches draw alike, one if ranks with one batch do not. Collective."""
    by_rank = session.all(list(mine))
    found = []
    for other in range(1, session.world):
        for first in range(other):
            together = session.data_ranks[first] == session.data_ranks[other]
            for a, b in zip(by_rank[first], by_rank[other], strict=False):
                if a.call == b.call and (a.state == b.state) != together:
                    found.append(_finding(step, a, first, other, together))
                    break
    kinds = {finding.cause: finding for finding in reversed(found)}
    return list(reversed(kinds.values()))


def _finding(step: int, draw: Draw, first: int, other: int, together: bool) -> Finding:
    if together:
        what = f"ranks {first} and {other} compute one batch together and draw different random numbers: {draw}."
        cause = (
            "dropout differs inside a tensor-parallel group: its ranks' generators were seeded differently, and drop "
            "different elements of one activation; seed by the data-parallel rank: torch.manual_seed(seed + dp_rank)"
        )
    else:
        what = f"ranks {first} and {other} have different batches and draw the same random numbers: {draw}."
        cause = (
            "dropout is the same on every rank: the ranks' generators were seeded alike, and the global batch sees "
            "one mask repeated; seed by rank after the model is built: torch.manual_seed(seed + rank)"
        )
    return Finding(
        "draws",
        what,
        step,
        parameter=None,
        rank=other,
        ranks=(first, other),
        expected=f"{'the same' if together else 'another'} generator state as on rank {first}",
        got=f"{'another one' if together else 'the same one'} on rank {other}",
        cause=cause,
    )
