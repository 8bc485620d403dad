"""Whether full buffers that stayed gathered between two passes still match the ranks' shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..comm import Comm, has_streams
from ..forms import Member
from ..shard import Unit
from .exchange import LateSums, rows_of_all
from .first_pass import differing, largest_mesh
from .messages import changed_unseen


class Stale:
    """Finds units that stayed gathered although their shards have changed on any rank. One per root.

    On a CPU it compares values, which detects every change. On an accelerator that would make the host wait for the
    device in every pass that begins with gathered units (each generated token, each micro-batch), so the hosts compare
    the changes that they have recorded. In addition each pass compares the values of a single unit, in turn, and reads
    the result late (`LateSums`): an unrecorded change, such as a write by a kernel that torch did not see, is then an
    error.

    Args:
        units: all units under the root.
        comm: collectives.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self.comm = comm
        self._on_device = any([has_streams(bucket.axes.device) for unit in units for bucket in unit.buckets])
        self._late: LateSums | None = None
        self._most = max([len(unit.members) for unit in units], default=0)
        self._turn = 0  # selects the unit whose values are compared next

    def changes(self, units: Sequence[Unit]) -> list[tuple[bool, list[Member]]]:
        """For each gathered unit, whether it changed, and the parameters written to while gathered. Collective.

        Args:
            units: all gathered units of the root that have parameters.

        Raises:
            UsageError: a unit's values changed without any host knowing; on an accelerator only.
        """
        axes = largest_mesh(units)
        if not self._on_device:
            by_unit = differing(units, self.comm)
            return [(bool(wrong), unit.written() if wrong else []) for unit, wrong in zip(units, by_unit, strict=True)]
        late = self._late
        if late is None or late.axes is not axes:
            late = self._late = LateSums(axes, self.comm)
        if (arrived := late.due()) is not None:
            _refuse(*arrived, units[0].rank)
        written = [unit.written() for unit in units]
        local = [self._turn, *[_changed(unit) or bool(members) for unit, members in zip(units, written, strict=True)]]
        rows = rows_of_all([local], axes.spanning, self.comm, axes.device) if self.comm.communicates else [local]
        turns, *flags = zip(*rows, strict=True)
        self._turn, changed = max(turns) + 1, [any(of_ranks) for of_ranks in flags]  # ranks' turns may differ
        if unchanged := [unit for unit, flag in zip(units, changed, strict=True) if not flag]:
            unit = unchanged[self._turn % len(unchanged)]
            with torch.no_grad():
                counts = unit.differs().long()
                late.send(pad(counts, (0, self._most - counts.numel())), _comparable(unit))
        return list(zip(changed, written, strict=True))

    def begin(self, units: Sequence[Unit]) -> None:
        """Begin a pass: its gathers include all optimizer steps so far, however they change weights."""
        if self._on_device:
            for unit in units:
                unit.touched.seen = unit.touched.count

    def forget(self) -> None:
        """Discard sums under way: after an exception, or when ranks start comparing anew."""
        self._late = None


def _changed(unit: Unit) -> bool:
    return unit.changed_since_gather() or unit.touched.seen != unit.touched.count


def _comparable(unit: Unit) -> list[str]:
    """The names of the unit's members; empty for extensions, which may gather something other than their values."""
    return [member.name if bucket.form.plain else "" for bucket in unit.buckets for member in bucket.members]


def _refuse(counts: torch.Tensor, names: Sequence[str], rank: int) -> None:
    wrong = [name for name, count in zip(names, counts.tolist(), strict=False) if count and name]  # the rest is padding
    if wrong:
        raise changed_unseen(wrong, rank)
