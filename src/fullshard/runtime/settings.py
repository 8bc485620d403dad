"""What users set for a unit. Frozen: setters replace the whole, so that a step sees one state of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..comm import Comm
from ..forms import Ignored
from ..mesh import MeshAxes
from ..policies import Check, MixedPrecisionPolicy, Unused
from ..shard import ReduceSettings, Share


@dataclass(frozen=True)
class PrefetchSettings:
    """What is gathered ahead.

    Attributes:
        forward, backward: how many units ahead, by the recorded order.
        late: in backward, only once this unit is freed.
        forward_units, backward_units: exactly these units in place of the recorded order.
    """

    forward: int = 1
    backward: int = 1
    late: bool = False
    forward_units: tuple[Any, ...] | None = None
    backward_units: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class UnitSettings:
    """All that users set for one unit.

    Attributes:
        comm: collectives.
        policy: mixed precision.
        axes: the mesh that the unit was given; single parameters may have others.
        reshard_after_forward: free after forward; None: True unless this is the root.
        reshard_after_backward: free after backward.
        unshard_in_backward: whether backward needs the parameters.
        reduce, prefetch: see there.
        manual_finalization: `finalize_backward` ends each iteration; the root's counts.
        group_memory: whether `comm` communicates through memory of the process group's backend.
        ignored: what is in the unit's modules and was to be left alone.
        check: when ranks compare what they are about to run; the root's counts. See `policies.Check`.
        unused: what becomes of units that only some ranks run; the root's counts. See `policies.Unused`.
        share: of this rank in the means of the batch that runs now, inside `join`; None: as all others'.
        in_flight: reductions of several roots that share one communication context, if this one is such a root.
        usual: whether a unit is gathered, freed and reduced as most are: `step.py` then needs not ask for each.
        inputs_dtype, outputs_dtype: what inputs and outputs of a forward are cast to, by `policy`; None: nothing.
    """

    comm: Comm
    policy: MixedPrecisionPolicy
    axes: MeshAxes
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce: ReduceSettings = field(default_factory=ReduceSettings)
    prefetch: PrefetchSettings = field(default_factory=PrefetchSettings)
    manual_finalization: bool = False
    group_memory: bool = False
    ignored: Ignored = field(default_factory=Ignored)
    check: Check = "first"
    unused: Unused = "error"
    share: Share | None = None
    in_flight: Any = None
    usual: bool = field(init=False, default=False)
    inputs_dtype: torch.dtype | None = field(init=False, default=None)
    outputs_dtype: torch.dtype | None = field(init=False, default=None)
    # Settings that differ from these in switches alone: by the change that leads there, and all of them, in one list.
    _after: dict[Any, UnitSettings] = field(init=False, default_factory=dict, compare=False, repr=False)
    _family: list[UnitSettings] = field(init=False, default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        policy, ahead = self.policy, self.prefetch
        chosen = ahead.late or ahead.forward_units is not None or ahead.backward_units is not None
        object.__setattr__(self, "usual", self.reshard_after_backward and self.unshard_in_backward and not chosen)
        object.__setattr__(self, "inputs_dtype", policy.param_dtype if policy.cast_forward_inputs else None)
        object.__setattr__(self, "outputs_dtype", policy.output_dtype)

    def with_changes(self, changes: dict[str, Any]) -> UnitSettings:
        """The settings with these changed; those of `reduce` and `prefetch` are named `reduce_x` and `prefetch_x`.

        Switches that go back and forth, as gradient sync does in each accumulation, lead to the same objects again, by
        whatever way: what was planned under them still holds, and nothing grows.
        """
        switches = {*map(type, changes.values())} <= _SWITCH
        key = tuple(changes.items())
        if switches and (known := self._after.get(key)) is not None:
            return known
        own: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {"reduce": {}, "prefetch": {}}
        before: list[tuple[str, Any]] = []
        for name, value in changes.items():
            part, _, rest = name.partition("_")
            inside = part in nested and bool(rest)
            before.append((name, getattr(getattr(self, part), rest) if inside else getattr(self, name)))
            if inside:
                nested[part][rest] = value
            else:
                own[name] = value
        switches = switches and {type(value) for _, value in before} <= _SWITCH
        parts = {part: replace(getattr(self, part), **values) for part, values in nested.items() if values}
        changed = replace(self, **parts, **own)
        if switches:
            family = self._family or [self]
            changed = next((known for known in family if known == changed), changed)
            if changed is not self and not changed._family:
                family.append(changed)
            for one in (self, changed):
                object.__setattr__(one, "_family", family)
            self._after[key] = changed
        return changed


_SWITCH = {bool, type(None)}
