"""The settings of a unit. Frozen: setters replace them as a whole, so that a step sees one consistent state."""

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
    """Which units are gathered ahead.

    Attributes:
        forward, backward: how many units to gather ahead, in the recorded order.
        late: in backward, prefetch only after this unit is freed.
        forward_units, backward_units: prefetch exactly these units instead of the recorded order.
    """

    forward: int = 1
    backward: int = 1
    late: bool = False
    forward_units: tuple[Any, ...] | None = None
    backward_units: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class UnitSettings:
    """All user settings of one unit.

    Attributes:
        comm: collectives.
        policy: mixed precision.
        axes: the mesh of the unit; single parameters may have different ones.
        reshard_after_forward: free after forward; None: True, except for the root.
        reshard_after_backward: free after backward.
        unshard_in_backward: whether backward needs the parameters.
        reduce, prefetch: see `ReduceSettings` and `PrefetchSettings`.
        manual_finalization: whether `finalize_backward` ends each iteration; only the root's value counts.
        group_memory: whether `comm` communicates through memory of the process group's backend.
        ignored: parameters and modules inside the unit's modules to leave alone.
        check: when ranks compare what they are about to run; only the root's value counts. See `policies.Check`.
        unused: how units that only some ranks run are treated; only the root's value counts. See `policies.Unused`.
        share: this rank's weight in the means of the current batch, inside `join`; None: the same as all others.
        in_flight: reductions of several roots that share one communication context, if this is such a root.
        usual: whether the unit is gathered, freed and reduced in the usual way; `step.py` checks only this flag.
        inputs_dtype, outputs_dtype: dtypes to which `policy` casts a forward's inputs and outputs; None: no cast.
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
    # Settings that differ from these in switches only: by the change that leads to them, and all of them in one list.
    _after: dict[Any, UnitSettings] = field(init=False, default_factory=dict, compare=False, repr=False)
    _family: list[UnitSettings] = field(init=False, default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        policy, ahead = self.policy, self.prefetch
        chosen = ahead.late or ahead.forward_units is not None or ahead.backward_units is not None
        object.__setattr__(self, "usual", self.reshard_after_backward and self.unshard_in_backward and not chosen)
        object.__setattr__(self, "inputs_dtype", policy.param_dtype if policy.cast_forward_inputs else None)
        object.__setattr__(self, "outputs_dtype", policy.output_dtype)

    def with_changes(self, changes: dict[str, Any]) -> UnitSettings:
        """Return the settings with these changes; fields of `reduce` and `prefetch` are named `reduce_x`, `prefetch_x`.

        Toggling switches, as each gradient accumulation does with gradient sync, returns to the same objects in
        whatever order: plans made under them stay valid, and nothing grows.
        """
        switches = {*map(type, changes.values())} <= _SWITCH
        key = tuple(changes.items())
        if switches and (cached := self._after.get(key)) is not None:
            return cached
        direct: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {"reduce": {}, "prefetch": {}}
        before: list[tuple[str, Any]] = []
        for name, value in changes.items():
            part, _, rest = name.partition("_")
            inside = part in nested and bool(rest)
            before.append((name, getattr(getattr(self, part), rest) if inside else getattr(self, name)))
            if inside:
                nested[part][rest] = value
            else:
                direct[name] = value
        switches = switches and {type(value) for _, value in before} <= _SWITCH
        parts = {part: replace(getattr(self, part), **values) for part, values in nested.items() if values}
        changed = replace(self, **parts, **direct)
        if switches:
            family = self._family or [self]
            changed = next((relative for relative in family if relative == changed), changed)
            if changed is not self and not changed._family:
                family.append(changed)
            for settings in (self, changed):
                object.__setattr__(settings, "_family", family)
            self._after[key] = changed
        return changed


_SWITCH = {bool, type(None)}
