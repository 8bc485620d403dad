"""Whether what stayed gathered between two passes is still what the ranks' shards hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..comm import Comm, has_streams
from ..forms import Member
from ..shard import Unit
from .aside import rows_of_all
from .first_pass import differing, largest
from .late import LateSums
from .messages import changed_unseen


class Stale:
    """Finds units that stayed gathered though their shards changed since, on any rank. One per root.

    On a CPU values are compared, which tells of every change. On an accelerator that would make the host wait for the
    device in every pass that begins with gathered units (each token that is generated, each micro-batch): there the
    hosts compare what they know of changes. The values of one unit a pass, in turn, are compared as well, and read late
    (`late.py`): what nobody knew of, a write by a kernel that torch did not see, is then an error.

    Args:
        units: all under the root.
        comm: collectives.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self.comm = comm
        self._on_device = any([has_streams(bucket.axes.device) for unit in units for bucket in unit.buckets])
        self._late: LateSums | None = None
        self._most = max([len(unit.members) for unit in units], default=0)
        self._turn = 0  # of the unit whose values are compared next

    def changes(self, units: Sequence[Unit]) -> list[tuple[bool, list[Member]]]:
        """For each of these gathered units, whether it changed, and what was written to while gathered. Collective.

        Args:
            units: all of a root that are gathered, which have parameters.

        Raises:
            UsageError: the values of one have changed, and nobody knew; on an accelerator only.
        """
        axes = largest(units)
        if not self._on_device:
            found = differing(units, self.comm)
            return [(bool(some), unit.written() if some else []) for unit, some in zip(units, found, strict=True)]
        late = self._late
        if late is None or late.axes is not axes:
            late = self._late = LateSums(axes, self.comm)
        if (old := late.due()) is not None:
            _refuse(*old, units[0].rank)
        written = [unit.written() for unit in units]
        mine = [self._turn, *[_changed(unit) or bool(some) for unit, some in zip(units, written, strict=True)]]
        rows = rows_of_all([mine], axes.all, self.comm, axes.device) if self.comm.communicates else [mine]
        turns, *flags = zip(*rows, strict=True)
        self._turn, changed = max(turns) + 1, [any(some) for some in flags]  # a rank may have forgotten its turn
        if same := [unit for unit, flag in zip(units, changed, strict=True) if not flag]:
            unit = same[self._turn % len(same)]
            with torch.no_grad():
                counts = unit.differs().long()
                late.send(pad(counts, (0, self._most - counts.numel())), _comparable(unit))
        return list(zip(changed, written, strict=True))

    def begin(self, units: Sequence[Unit]) -> None:
        """A pass begins: optimizers' steps until now are in what it gathers, however they change weights."""
        if self._on_device:
            for unit in units:
                unit.touched.seen = unit.touched.count

    def forget(self) -> None:
        """After an exception, or where ranks know nothing of each other any more."""
        self._late = None


def _changed(unit: Unit) -> bool:
    return unit.changed_since_gather() or unit.touched.seen != unit.touched.count


def _comparable(unit: Unit) -> list[str]:
    """The names of its members; empty for those of a subclass, which may gather something else than its values."""
    return [member.name if bucket.form.plain else "" for bucket in unit.buckets for member in bucket.members]


def _refuse(counts: torch.Tensor, names: Sequence[str], rank: int) -> None:
    wrong = [name for name, count in zip(names, counts.tolist(), strict=False) if count and name]  # the rest is padding
    if wrong:
        raise changed_unseen(wrong, rank)
