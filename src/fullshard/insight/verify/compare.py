"""The parts that ranks hold against whole values that the first rank has; and what ranks found, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from ...checkpoint.names import Named
from .apart import Difference, difference, exact, index_of, rms
from .held import Held
from .report import Finding
from .session import Raised, Session

Allowed = Callable[[Named, torch.Tensor], float]
"""From this rank's part of what is expected, [numel] in double, to the root mean square difference allowed."""
Cause = Callable[[Named, torch.Tensor, torch.Tensor], str | None]
"""Of a difference, from this rank's parts of what there is and of what is expected, likewise."""


def compare(
    session: Session,
    held: Held,
    template: Finding,
    wanted: Mapping[str, torch.Tensor | None] | None,
    got: Callable[[Named], torch.Tensor | None],
    allowed: Allowed,
    cause: Cause = lambda row, mine, want: None,
) -> tuple[list[Finding], int]:
    """One set of tensors, such as all gradients of a step: sent by the first rank, cut and compared by every rank.

    At most one whole tensor at a time is held besides what ranks have. Collective.

    Args:
        session: the ranks.
        held: this rank's model; alike on all.
        template: what to say of a parameter that differs, a sentence without its end.
        wanted: whole values by name, on the first rank; None of a parameter that is to have none.
        got: this rank's part of the same.
        allowed, cause: see there.

    Returns:
        The findings of all ranks, and the number of tensors compared.
    """
    found, compared, rank = list[Finding](), 0, session.rank

    def add(row: Named, expected: str, got: str, gap: Difference | None = None) -> None:
        one = replace(template, parameter=row.name, rank=rank, ranks=(rank,), expected=expected, got=got)
        found.append(replace(one, what=f"{one.what}{'' if gap is None else f' ({gap})'}."))

    sizes = {} if wanted is None else {n: None if t is None else (tuple(t.shape), t.dtype) for n, t in wanted.items()}
    for name, size in session.told(sizes).items():
        row = held.rows[name]
        if not held.comparable(row):
            continue
        mine = got(row)
        compared += 1
        if size is None:
            # A `FlatParameter` has one gradient for all in it: zeros stand for none.
            of_all = row.bucket is not None and row.bucket.flat_parameter is not None
            if mine is not None and not (of_all and not bool(mine.any())):
                add(row, "None", f"a tensor, root mean square {rms([mine]):.2e}")
            continue
        want = held.cut(row, session.sent(None if wanted is None else wanted[name], *size))
        if not want.numel():
            continue  # this rank has nothing of it, and may show None for that
        if mine is None:
            add(row, "a value", "None")
            continue
        want = want.to(mine.device)
        gap = difference(mine, want, allowed(row, exact(want)))
        if gap is not None:
            add(row, gap.expected, gap.got, gap)
            element = index_of(int(held.numbers(row, session.device)[gap.at]), row.shape)
            found[-1] = replace(found[-1], element=element, cause=cause(row, exact(mine), exact(want)))
    return merged(session, found, held.rows), compared


def merged(session: Session, mine: list[Finding], order: Iterable[str] = ()) -> list[Finding]:
    """The findings of all ranks, one for each kind and parameter, in the order of parameters. Collective."""
    together: dict[tuple[str, str | None], list[Finding]] = {}
    for findings in session.all(mine):
        for finding in findings:
            together.setdefault((finding.kind, finding.parameter), []).append(finding)
    place = {name: i for i, name in enumerate(order)}
    found = []
    for same in together.values():
        ranks = tuple(sorted({rank for one in same for rank in one.ranks}))
        found.append(replace(same[0], ranks=ranks))
    return sorted(found, key=lambda one: place.get(one.parameter or "", -1))


def error_findings(failed: dict[int, Raised], step: int | None, what: str) -> list[Finding]:
    """One finding for each text of an error."""
    ranks_of: dict[Raised, list[int]] = {}
    for rank, error in failed.items():
        ranks_of.setdefault(error, []).append(rank)
    found = []
    for error, ranks in ranks_of.items():
        first = error.text.strip().partition("\n")[0] or error.name
        cause = error.remedy or (None if error.where is None else f"raised at {error.where}")
        at = (error.parameter, None, ranks[0], tuple(ranks), "no error", first, cause)
        found.append(Finding("error", f"{what} {error.name}.", step, *at))
    return found
