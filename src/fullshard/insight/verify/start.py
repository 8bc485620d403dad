"""Before the first step: sharding, and whether both models are the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...torch_private.local_tensor import local_part
from . import causes
from .apart import difference, index_of, rms
from .compare import error_findings
from .held import Held
from .reference import Reference
from .report import Finding
from .session import Session
from .tolerance import unit_roundoff
from .training import Plan, listed

Fact = tuple[tuple[int, ...], torch.dtype]


def sharded(session: Session, plan: Plan) -> tuple[nn.Module, Any] | list[Finding]:
    """The sharded model and its optimizer as the user has them; or the errors that sharding raised. Collective.

    Uninitialised memory is filled with NaN meanwhile, so that what `to_empty()` leaves behind never is right by chance.
    """
    session.seed_with("model")
    model = session.required("model_fn", plan.model_fn)

    def make() -> tuple[nn.Module, Any]:
        session.seed_with("shard")
        with _poisoned():
            made = plan.shard_fn(model)
        found, optimizer = made if isinstance(made, tuple) else (made, None)
        if optimizer is None and isinstance(found, nn.Module):
            optimizer = plan.optimizer_fn(found)
        return found, optimizer

    def check() -> tuple[nn.Module, Any]:
        found, optimizer = made or (None, None)
        if not isinstance(found, nn.Module):
            raise ConfigError(f"shard_fn must return a module, or a module and its optimizer; it gave {found!r}")
        listed(optimizer)
        return found, optimizer

    made, failed = session.attempt(make)
    if failed:
        return error_findings(failed, None, "sharding raised")
    return session.required("shard_fn or optimizer_fn", check)


@contextmanager
def _poisoned() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill


@dataclass(frozen=True)
class Structure:
    """What exists in a model, without values.

    Attributes:
        parameters, buffers: whole shape and dtype, by name.
        ties: names of each parameter that has several.
        trained: names of parameters that require a gradient.
    """

    parameters: dict[str, Fact]
    buffers: dict[str, Fact]
    ties: frozenset[tuple[str, ...]]
    trained: frozenset[str]

    @classmethod
    def of(cls, held: Held) -> Structure:
        return cls(
            {name: (row.shape, held.dtype(row)) for name, row in held.rows.items()},
            {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in held.buffers.items()},
            frozenset(held.ties),
            frozenset(name for name, row in held.rows.items() if row.parameter.requires_grad),
        )


def compare(session: Session, want: Structure, held: Held) -> list[Finding]:
    """Differences of this rank's model from the unsharded one's structure."""
    got, rank = Structure.of(held), session.rank
    found: list[Finding] = []

    def add(kind: str, what: str, name: str, expected: object, was: object, cause: str | None = None) -> None:
        found.append(Finding(kind, what, None, name, None, rank, (rank,), str(expected), str(was), cause))

    changed: set[str] = set()  # names whose place in a tie is told already
    broken = ("weights that are tied in the unsharded model are not.", "one tensor", "several tensors", causes.TIE)
    made = (f"{causes.UNTIED}.", "several tensors", "one tensor", causes.UNTIED)
    for ties, others, (text, expected, was, cause) in ((want.ties, got.ties, broken), (got.ties, want.ties, made)):
        for names in sorted(ties - others):
            if not any(set(names) <= set(other) for other in others):
                both = " and ".join(names)
                add("tie", text, names[0], f"{expected}: {both}", f"{was}: {both}", cause)
                changed |= set(names)
    for kind, mine, theirs in (("parameter", got.parameters, want.parameters), ("buffer", got.buffers, want.buffers)):
        for name in [*theirs, *(name for name in mine if name not in theirs)]:
            if name in changed:
                continue
            a, b = theirs.get(name), mine.get(name)
            if a is None or b is None:
                text = ["missing from", "added to"][a is None]
                add("structure", f"a {kind} is {text} the sharded model.", name, _told(a), _told(b))
            elif a[0] != b[0]:
                add("structure", f"a {kind} has another shape.", name, _told(a), _told(b))
            elif a[1] != b[1] and kind == "parameter":
                coarser = unit_roundoff(b[1]) > unit_roundoff(a[1])
                cause = causes.MASTER if coarser else causes.OTHER_DTYPE
                add("dtype", "a parameter is stored in another dtype.", name, a[1], b[1], cause)
    return found


def _told(fact: Fact | None) -> str:
    return "none" if fact is None else f"shape {list(fact[0])}, {str(fact[1]).removeprefix('torch.')}"


def with_causes(findings: list[Finding], session: Session) -> list[Finding]:
    """Structure that differs on some ranks only has another cause than one that differs on all."""
    return [
        one
        if one.cause is not None
        else replace(one, cause=causes.ADAPTER if len(one.ranks) < session.world else causes.OTHER_MODEL)
        for one in findings
    ]


@torch.no_grad()
def copy(session: Session, reference: Reference | None, held: Held) -> None:
    """Write the unsharded model's values into the sharded one. Collective."""
    for name, row in held.rows.items():
        if held.comparable(row):
            whole = None if reference is None else reference.parameters[name]
            held.value(row).copy_(held.cut(row, session.sent(whole, row.shape, held.dtype(row))))
    names = session.told(None if reference is None else list(reference.buffers[0]))
    for name in names or []:
        mine = local_part(held.buffers[name])
        mine.copy_(
            session.sent(None if reference is None else reference.buffers[0][name], tuple(mine.shape), mine.dtype)
        )


def compare_buffers(
    session: Session, reference: Reference | None, held: Held, step: int | None, allowed: float
) -> tuple[list[Finding], int]:
    """This rank's buffers against those of the reference after this rank's batches; how many. Collective."""
    facts: dict[str, tuple[tuple[int, ...], torch.dtype, bool]] = {}
    if reference is not None:
        for name, first in reference.buffers[0].items():
            alike = all(torch.equal(own[name], first) for own in reference.buffers[1:])
            facts[name] = (tuple(first.shape), first.dtype, alike)
    found: list[Finding] = []
    facts = session.told(facts)
    for name, (shape, dtype, alike) in facts.items():
        for number in range(1 if alike else session.data_world):
            whole = session.sent(None if reference is None else reference.buffers[number][name], shape, dtype)
            if not alike and number != session.data_rank:
                continue
            mine = local_part(held.buffers[name])
            rounding = 4 * unit_roundoff(mine.dtype)
            limit = max(allowed, rounding) * rms([whole]) if rounding else 0.0
            gap = difference(mine, whole.to(mine.device), limit)
            if gap is not None:
                cause = causes.UNINITIALISED if step is None else causes.BUFFER
                at = (index_of(gap.at, shape), session.rank, (session.rank,), gap.expected, gap.got, cause)
                found.append(Finding("buffer", f"a buffer differs ({gap}).", step, name, *at))
    return found, len(facts)
