"""The parts that ranks hold against whole values that the first rank has, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from ...checkpoint.names import Named
from .apart import difference, exact, rms
from .held import Held
from .report import Finding
from .session import Session

Allowed = Callable[[torch.Tensor], float]
"""From this rank's part of what is expected, in double precision, to the root mean square difference allowed."""


class Comparison:
    """One set of tensors, such as all gradients of a step: sent by the first rank, cut and compared by every rank.

    At most one whole tensor at a time is held besides what ranks have.

    Args:
        session: the ranks.
        held: this rank's model; alike on all.
        kind, what, step: of the findings.
    """

    def __init__(self, session: Session, held: Held, kind: str, what: str, step: int | None) -> None:
        self.session, self.held = session, held
        self.kind, self.what, self.step = kind, what, step
        self.findings: list[Finding] = []
        self.compared = 0

    def run(
        self,
        wanted: Mapping[str, torch.Tensor | None] | None,
        got: Callable[[Named], torch.Tensor | None],
        allowed: Callable[[Named], Allowed],
    ) -> list[Finding]:
        """This rank's findings. Collective.

        Args:
            wanted: whole values by name, on the first rank; None of a parameter that is to have none.
            got: this rank's part of the same.
            allowed: of a parameter.
        """
        facts = (
            {} if wanted is None else {n: None if t is None else (tuple(t.shape), t.dtype) for n, t in wanted.items()}
        )
        for name, fact in self.session.told(facts).items():
            row = self.held.rows[name]
            if not self.held.comparable(row):
                continue
            mine = got(row)
            self.compared += 1
            if fact is None:
                self._none_wanted(row, mine)
                continue
            whole = self.session.sent(None if wanted is None else wanted[name], *fact)
            want = self.held.cut(row, whole)
            if not want.numel():
                continue  # this rank has nothing of it, and may show None for that
            if mine is None:
                self._add(row, None, "a value", "None")
                continue
            want = want.to(mine.device)
            found = difference(mine, want, allowed(row)(exact(want)))
            if found is not None:
                self._add(row, self._element(row, found.at, whole), found.expected, found.got, f" ({found})")
        return self.findings

    def _none_wanted(self, row: Named, mine: torch.Tensor | None) -> None:
        """A `FlatParameter` has one gradient for all in it: zeros stand for none."""
        of_all = row.bucket is not None and row.bucket.flat_parameter is not None
        if mine is not None and not (of_all and not bool(mine.any())):
            self._add(row, None, "None", f"a tensor, root mean square {rms([mine]):.2e}")

    def _element(self, row: Named, at: int, whole: torch.Tensor) -> tuple[int, ...]:
        """Where element `at` of this rank's part is in the whole tensor."""
        numbers = torch.arange(max(whole.numel(), 1), device=whole.device)[: whole.numel()].view(whole.shape)
        at = at // 2 if whole.is_complex() else at
        flat = int(self.held.cut(row, numbers).reshape(-1)[at])
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), whole.shape)) if whole.dim() else ()

    def _add(self, row: Named, element: tuple[int, ...] | None, expected: str, got: str, more: str = "") -> None:
        rank = self.session.rank
        what = f"{self.what}{more}."
        self.findings.append(Finding(self.kind, what, self.step, row.name, element, rank, (rank,), expected, got))


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
        found.append(Finding(**{**same[0].__dict__, "ranks": ranks}))
    return sorted(found, key=lambda one: place.get(one.parameter or "", -1))
