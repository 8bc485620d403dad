"""Simulates one optimizer step: the order of its events, with the bytes alive and the time at each of them.

    enter   gather, unless prefetched; wait; prefetch the next units      back    the same, in the order of the backward
    leave   free                                                          done    free; finish the oldest reduction;
                                                                                  collect gradients, and reduce them

The same rules as `runtime/step.py` and `runtime/reducer.py`; `tests/planner` compares them event by event.

Time: computation and communication are two queues. A collective starts once it is issued and earlier ones have ended; a
wait lasts until its collective has ended. The part of a collective that computation cannot hide (`Rates.overlap`)
delays computation at once. Copies into and out of collectives count as computation; `Rates.flops` must account for the
model's element-wise operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from .costs import UnitCosts
from .messages import not_a_rate
from .profile import Profile
from .strategy import Strategy

KINDS = ("parameters", "gradients", "optimizer", "gathered", "reducing", "activations")
"""Kinds of memory on the device: shards and buffers; reduced gradients; optimizer state and temporaries of its step;
gathered units and gathers in flight; reductions in flight; activations and unreduced gradients."""

PLACES = {"enter": "forward of", "leave": "forward, after", "back": "backward of", "done": "backward, after"}
"""The words for each kind of moment; the unit's name follows."""

LARGE = 32 * 2**20
"""Bytes of the smallest buffer that is large (`Rates.large`)."""


@dataclass(frozen=True)
class Rates:
    """How fast a rank computes and sends.

    Attributes:
        flops: floating-point operations per second that a model of this kind achieves, not the device's peak.
        bandwidth: bytes per second that a rank sends in a gather among the ranks of one machine.
        between: bytes per second of a rank's own link to other machines. A gather over several machines uses the links
            of all ranks of a machine together (nccl-tests, PERFORMANCE.md).
        latency: seconds per collective.
        host: bytes per second between host and device, for what is offloaded.
        copy: bytes per second that a copy on the device reads and writes.
        reduce: bytes per second that a rank sends in a reduce-scatter within a machine; None: `bandwidth`.
        overlap: fraction of a collective's time that computation can hide. 0 where as many ranks as cores share a CPU:
            the collective's threads take their time from the computation.
        large: factor of the three bandwidths for buffers of 32 MiB and more. Less than 1 on a CPU: malloc maps memory
            of this size anew for each buffer (mallopt(3), M_MMAP_THRESHOLD), and the first access to a page is slow.

    Raises:
        ConfigError: a rate is not a positive number, or `overlap` is not between 0 and 1.
    """

    flops: float
    bandwidth: float
    between: float
    latency: float
    host: float = 20e9
    copy: float = 2e12
    reduce: float | None = None
    overlap: float = 1.0
    large: float = 1.0

    def __post_init__(self) -> None:
        for field_ in fields(self):
            name, value = field_.name, getattr(self, field_.name)
            if value is None and name == "reduce":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (0 <= value <= 1 if name == "overlap" else 0 < value < math.inf):
                raise not_a_rate(name, value)

    def on(self, shard: int, replicate: int, node: int) -> Rates:
        """The rates over axes of these sizes with `node` ranks on a machine: `between` is the replicate axis's."""
        most = node * self.between if shard > node else math.inf
        return replace(
            self,
            bandwidth=min(self.bandwidth, most),
            reduce=min(self.reduce or self.bandwidth, most),
            between=self.between if shard * replicate > node else self.bandwidth,
        )

    def of(self, verb: str, buffer: int) -> float:
        """The bandwidth of a collective whose larger buffer has `buffer` bytes; call it on the result of `on`."""
        bandwidths = {"gather": self.bandwidth, "reduce": self.reduce or self.bandwidth, "all_reduce": self.between}
        return bandwidths[verb] * (self.large if buffer >= LARGE else 1.0)


@dataclass
class Timeline:
    """What `run` found.

    Attributes:
        peak: bytes by kind at the moment when most are alive.
        where: that moment, in words.
        most: by kind, its own largest number of bytes.
        sent: bytes that this rank sends, by verb.
        collectives: their number, by verb.
        compute, exposed: seconds of computation, and of waiting for communication.
        waits: seconds of waiting by unit.
        events: verb, unit, and the bytes of gathered units and reductions then; see `fullshard.record_events`.
    """

    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    where: str = ""
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    sent: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    compute: float = 0.0
    exposed: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    events: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


class _Step:
    def __init__(self, profile: Profile, units: Sequence[UnitCosts], strategy: Strategy, rates: Rates | None) -> None:
        self.profile, self.strategy, self.rates = profile, strategy, rates
        self.units = {costs.name: costs for costs in units}
        self.timeline = Timeline()
        self.now = dict.fromkeys(KINDS, 0)
        self.now["parameters"] = 0 if strategy.offload else sum(costs.parameters for costs in units)
        self.gathers: dict[str, float] = {}  # units in flight, and when each arrives
        self.gathered: set[str] = set()
        # The reduction in flight: its unit, its bytes besides the buffer, and when it ends.
        self.reducing: tuple[UnitCosts, int, float] | None = None
        self.replicating: list[tuple[UnitCosts, int, float]] = []  # the same, for all-reduces
        self.ahead: set[str] = set()  # prefetched in the forward, not yet entered
        self.free_at = 0.0  # when the network has sent all that was issued

    # Account.

    def note(self, where: str, activations: int = 0, extra: int = 0) -> None:
        """Update the peaks. `extra`: gathered bytes alive only at this moment."""
        now, timeline = self.now, self.timeline
        now["activations"] = activations
        now["gathered"] += extra
        for kind, nbytes in now.items():
            timeline.most[kind] = max(timeline.most[kind], nbytes)
        if sum(now.values()) > timeline.peak_bytes:
            timeline.peak, timeline.where = dict(now), where
        now["gathered"] -= extra

    def send(self, costs: UnitCosts, verb: str) -> float:
        """Issue a unit's collectives; returns the time at which they end."""
        nbytes, count = costs.sent.get(verb, (0, 0))
        self.timeline.sent[verb] = self.timeline.sent.get(verb, 0) + nbytes
        self.timeline.collectives[verb] = self.timeline.collectives.get(verb, 0) + count
        seconds = 0.0
        if self.rates is not None:
            buffer = {"gather": costs.gathered, "reduce": costs.buffer, "all_reduce": costs.gradients}[verb]
            seconds = count * self.rates.latency + nbytes / self.rates.of(verb, buffer)
            self.lose((1 - self.rates.overlap) * seconds, costs.name)
            seconds *= self.rates.overlap
            if self.strategy.offload:
                seconds += (costs.computed if verb == "gather" else costs.gradients) / self.rates.host
        self.free_at = max(self.timeline.seconds, self.free_at) + seconds
        return self.free_at

    def wait(self, until: float, unit: str) -> None:
        self.lose(max(0.0, until - self.timeline.seconds), unit)

    def lose(self, seconds: float, unit: str) -> None:
        """Add time in which the rank does not compute because of this unit's communication."""
        if seconds:
            self.timeline.exposed += seconds
            self.timeline.waits[unit] = self.timeline.waits.get(unit, 0.0) + seconds

    def compute_copy(self, nbytes: int) -> None:
        if self.rates is not None:
            self.timeline.compute += 2 * nbytes / self.rates.copy

    def event(self, verb: str, unit: str) -> None:
        self.timeline.events.append((verb, unit, self.now["gathered"] + self.now["reducing"]))

    # Units.

    def issue(self, unit: str) -> None:
        costs = self.units[unit]
        self.now["gathered"] += self.in_flight(costs)
        self.gathers[unit] = self.send(costs, "gather")
        self.event("gather", unit)

    def in_flight(self, costs: UnitCosts) -> int:
        """Bytes while a gather is in flight; with offloading, casts happen on the way to the device."""
        return costs.in_flight - costs.cast + costs.computed if self.strategy.offload else costs.in_flight

    def open(self, unit: str, where: str, activations: int) -> None:
        """Wait for a unit's gather; issues it first if it is not in flight."""
        costs = self.units[unit]
        if unit in self.gathered or not costs.elements:
            return
        if unit not in self.gathers:
            self.issue(unit)
        self.note(where, activations)
        self.wait(self.gathers.pop(unit), unit)
        self.note(where, activations, costs.opening - costs.in_flight)  # freed at the same time
        self.now["gathered"] += costs.gathered - self.in_flight(costs)
        self.compute_copy(costs.opening - costs.in_flight)
        self.gathered.add(unit)
        self.event("gathered", unit)

    def free(self, unit: str) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.now["gathered"] -= self.units[unit].gathered
            self.event("free", unit)

    def is_sharded(self, unit: str) -> bool:
        return unit not in self.gathered and unit not in self.gathers and self.units[unit].elements > 0

    def finish_reduction(self) -> None:
        if self.reducing is None:
            return
        costs, scratch, until = self.reducing
        self.reducing = None
        self.wait(until, costs.name)
        self.now["reducing"] -= costs.buffer + costs.received
        if not costs.replicating:
            self.deliver(costs, scratch - costs.received, until)
            return
        self.replicating.append((costs, scratch - costs.received, self.send(costs, "all_reduce")))
        while len(self.replicating) > costs.replicating:
            self.deliver(*self.replicating.pop(0))

    def deliver(self, costs: UnitCosts, scratch: int, until: float) -> None:
        self.wait(until, costs.name)
        self.now["reducing"] -= scratch
        self.event("reduced", costs.name)

    def reduce(self, unit: str, again: bool, activations: int) -> None:
        costs = self.units[unit]
        if not costs.gradients:
            return
        self.finish_reduction()
        self.compute_copy(costs.buffer)
        scratch = costs.scratch_again if again else costs.scratch
        if self.strategy.offload and not again:
            scratch += costs.gradients  # the slice, until it is on the host
        self.now["reducing"] += costs.buffer
        self.note(f"gradients of {unit or 'the root'} are collected", activations)
        self.now["reducing"] += scratch
        if not again and not self.strategy.offload:
            self.now["gradients"] += costs.gradients
        self.reducing = costs, scratch, self.send(costs, "reduce")
        self.event("reduce", unit)

    # The step.

    def prefetch(self, forward: Sequence[str], following: int) -> int:
        """Prefetch the units of a forward from index `following` on; returns the index of the first not prefetched."""
        while following < len(forward) and len(self.ahead) < self.strategy.prefetch:
            if not self.is_sharded(forward[following]):
                break
            self.issue(forward[following])
            self.ahead.add(forward[following])
            following += 1
        return following

    def micro_batch(self, again: bool) -> None:
        moments, strategy = self.profile.moments, self.strategy
        forward = [moment.unit for moment in moments if moment.kind == "enter" and self.units[moment.unit].elements]
        backward = [moment.unit for moment in moments if moment.kind == "back"]
        entered = following = returned = 0
        for moment in moments:
            unit = moment.unit
            where = f"{PLACES[moment.kind]} {unit or 'the root'}"
            if moment.kind == "enter":
                self.open(unit, where, moment.live)
                entered += bool(self.units[unit].elements)
                self.ahead.discard(unit)
                following = self.prefetch(forward, max(following, entered))
            elif moment.kind == "leave":
                if unit and strategy.reshard_after_forward:
                    self.free(unit)
            elif moment.kind == "back":
                returned += 1
                self.open(unit, where, moment.live)
                for upcoming in backward[returned : returned + strategy.prefetch]:
                    if self.is_sharded(upcoming):
                        self.issue(upcoming)
            else:
                self.free(unit)
                if unit not in backward[returned:]:  # the last backward of a unit that is called several times
                    self.reduce(unit, again, moment.live)
            self.note(where, moment.peak)
            if self.rates is not None:
                self.timeline.compute += moment.flops / self.rates.flops
        self.finish_reduction()
        while self.replicating:
            self.deliver(*self.replicating.pop(0))


def run(
    profile: Profile,
    units: Sequence[UnitCosts],
    strategy: Strategy,
    micro_batches: int,
    rates: Rates | None = None,
    *,
    besides: int = 0,
    state: int = 0,
    temporary: int = 0,
) -> Timeline:
    """Simulate one optimizer step: forwards, backwards, reductions, and the optimizer.

    Args:
        profile: of a single micro-batch, without sharding.
        units: costs of all units of the profile, including the root.
        strategy: how the units are run. With offloading, a gather first copies the shard to the device, in the dtype it
            is gathered in, and a reduced slice is copied to the host.
        micro_batches: forwards and backwards before the optimizer's step, each of which reduces.
        rates: None: no times.
        besides: bytes of buffers and parameters outside of units.
        state, temporary: bytes of the optimizer's state, and of temporary tensors in its step. With offloading they are
            on the host and do not count.
    """
    step = _Step(profile, units, strategy, rates)
    step.now["parameters"] += besides
    if strategy.offload:
        state = temporary = 0
    step.now["optimizer"] = state
    for index in range(micro_batches):
        step.micro_batch(index > 0)
    step.now["optimizer"] += temporary
    step.note("the optimizer's step")
    return step.timeline
