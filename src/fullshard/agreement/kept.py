"""Whether units that stayed gathered are still what their shards hold, at the beginning of every forward.

The values themselves are compared, on all ranks: nothing else tells of every change. On a CPU the answer is there at
once. On an accelerator reading it would have the host wait for all that is queued, in every micro-batch. There it is
read at once where a change is to be expected: where version counters moved, an optimizer stepped, or the last pass was
of the other kind (an evaluation, around which programs swap weights). Else it is read `_LATE` forwards later, by when
it has long arrived, and a change that nothing had told of is an error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from ..comm import Comm, begin_copy_to_host, has_streams, host_buffer
from ..errors import PhaseError
from ..forms import Member
from ..shard import Unit
from .first_pass import differing, flags_of, members_of_flags

_LATE = 2


@dataclass
class _Sent:
    """What a forward compared. Owns its memory, which a later forward may reuse.

    Attributes:
        units: that were compared.
        result: [members of all], int64, page-locked: not 0 where a value differs, once `arrived`.
        arrived: after the copy into `result`.
    """

    units: list[Unit]
    result: torch.Tensor
    arrived: torch.Event

    def read(self) -> list[list[Member]]:
        self.arrived.synchronize()
        return members_of_flags(self.units, self.result.tolist())


class KeptUnits:
    """See the module's docstring. One per root.

    Args:
        comm: collectives.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._sent: deque[_Sent] = deque()  # oldest first
        self._steps = -1  # of optimizers, when this was asked last

    def reset(self) -> None:
        """After an exception."""
        self._sent.clear()

    def differing(self, units: list[Unit], same_kind: bool) -> list[list[Member]]:
        """For each gathered unit, the parameters that are known not to be what their shards hold. Collective.

        Args:
            units: that stayed gathered; on every rank the same.
            same_kind: whether the last pass, too, was one with gradients, or one without.

        Raises:
            PhaseError: an earlier forward computed with values that had been changed, and nothing had told of it.
        """
        steps, before = sum([unit.touched.count for unit in units]), self._steps
        self._steps = steps
        buckets = [bucket for unit in units for bucket in unit.buckets]
        at_once = not same_kind or steps != before or any([unit.changed_since_gather() for unit in units])
        at_once = at_once or not all([bucket.form.plain for bucket in buckets])  # others count as changed, always
        if at_once or not has_streams(buckets[0].axes.device):
            found = differing(units, self.comm)
            self._check(len(self._sent))
            return found
        flags = flags_of(units, self.comm).to(torch.int64)
        self._check(1 + len(self._sent) - _LATE)
        result = host_buffer(flags.numel())
        self._sent.append(_Sent(units, result, begin_copy_to_host(flags, result)))
        return [[] for _ in units]

    def _check(self, count: int) -> None:
        """Read what the oldest `count` forwards compared."""
        for _ in range(count):
            sent = self._sent.popleft()
            names = [member.name for members in sent.read() for member in members]
            if names:
                self._sent.clear()
                raise PhaseError(
                    "Weights of units that stay gathered were changed in a way that shows nowhere: the last forwards "
                    "computed with the old values.",
                    parameter=", ".join(dict.fromkeys(names)),
                    rank=sent.units[0].rank,
                    expected="changes of the parameters themselves, under torch.no_grad(), or by an optimizer",
                    got="memory that was written to through .data, an alias or a collective, between two forwards",
                    remedy="write to the parameter (parameter.copy_, parameter.mul_), or call reshard() on the units "
                    "after the change; repeat the last forwards",
                    code="P415",
                )
