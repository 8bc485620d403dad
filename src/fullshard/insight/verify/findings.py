"""The results of `verify`: plain records that print themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import starmap

from ...text import counted

SHOWN = 8  # findings that a report prints in full


@dataclass(frozen=True)
class Finding:
    """A difference between the sharded model and the reference.

    Attributes:
        kind: "error", "structure", "tie", "dtype", "buffer", "value" (of a parameter before the first step), "draws"
            (random numbers), "loss", "output" (of a chosen module), "gradient", "step" (the optimizer's), "parameter"
            (after a step), "autograd" (of the unsharded model itself).
        what: one sentence.
        step: counted from 0; None before the first.
        parameter: the name of the parameter or buffer in the unsharded model.
        element: index of the first element that differs, in the whole tensor.
        ranks: all that see the difference; `got` is from the first of them.
        expected, got: the values there, or whatever else was compared.
        cause: the likely cause, and the remedy.
    """

    kind: str
    what: str
    step: int | None = None
    parameter: str | None = None
    element: tuple[int, ...] | None = None
    ranks: tuple[int, ...] = ()
    expected: str | None = None
    got: str | None = None
    cause: str | None = None

    @property
    def rank(self) -> int | None:
        """The first of `ranks`."""
        return self.ranks[0] if self.ranks else None

    def __str__(self) -> str:
        when = "before the first step" if self.step is None else f"step {self.step}"
        facts = {
            "parameter": self.parameter,
            "element": None if self.element is None else list(self.element),
            "rank": self.rank if len(self.ranks) < 2 else f"{self.rank} (and {len(self.ranks) - 1} more)",
            "expected": self.expected,
            "got": self.got,
            "cause": self.cause,
        }
        lines = [f"  {key + ':':<11}{value}" for key, value in facts.items() if value is not None]
        return "\n".join([f"{when}: {self.what}", *lines])


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` compared, and every difference; equal on all ranks.

    Attributes:
        findings: in the order in which training met them; the run ends with the step of the first.
        world: number of ranks.
        steps: completed without a difference.
        compared: number of tensors compared, over all steps, on the first rank.
        tolerances: relative to the tensor's root mean square, by what was compared and in which dtype.
        notes: what was not compared, and why.
    """

    findings: tuple[Finding, ...]
    world: int
    steps: int
    compared: int
    tolerances: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The first difference."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        counts = ((self.world, "rank"), (self.steps, "step"), (self.compared, "tensor"))
        scope = "{}, {} equal, {} compared".format(*starmap(counted, counts))
        allowed = ", ".join(f"{what} {value:.1e}" for what, value in self.tolerances)
        head = f"verify: {'ok' if self.ok else 'DIFFERENT'} ({scope}{'; allowed: ' + allowed if allowed else ''})"
        lines, causes = [head], set[str | None]()
        for finding in self.findings[:SHOWN]:
            lines.append(str(replace(finding, cause="as above") if finding.cause in causes else finding))
            causes |= {finding.cause} - {None}
        if len(self.findings) > SHOWN:
            lines.append(f"... and {len(self.findings) - SHOWN} more of this step")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
