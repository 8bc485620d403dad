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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .costs import GatherCosts, UnitCosts
from .messages import not_a_rate
from .profile import Live, Moment, Profile
from .strategy import Strategy

KINDS = ("parameters", "gradients", "optimizer", "gathered", "reducing", "activations", "logits")
"""Kinds of memory on the device: shards and buffers; reduced gradients, and what error feedback keeps; optimizer state
and temporaries of its step; gathered units, kept slices and gathers in flight; reductions in flight and gradients that
wait for one; activations and gradients that are not collected yet; the model's output, and what is computed from it
before the backward of a unit."""

PLACES = {"enter": "forward of", "leave": "forward, after", "back": "backward of", "done": "backward, after"}
"""The words for each kind of moment; the unit's name follows."""

WHOLE = "optimizer.step()"
"""The key of the optimizer's whole step among those of units."""

NOTHING = Live()

FIRST = 3
"""The number of micro-batches, at each end of a step, that are simulated separately."""

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


@dataclass(frozen=True)
class Axes:
    """How many ranks there are, and where.

    Attributes:
        shard, replicate, tensor: ranks of the axes. Those of the tensor axis are neighbours, then those of the shard
            axis.
        node: ranks of one machine.
    """

    shard: int
    replicate: int = 1
    tensor: int = 1
    node: int = 8

    def bandwidth(self, rates: Rates, verb: str, buffer: int = 0, among: int = 0) -> float:
        """Bytes per second that a rank sends in a collective.

        Args:
            rates: of the links.
            verb: "gather", "reduce", "all_reduce" (over the replicate axis) or "tensor".
            buffer: bytes of its larger buffer.
            among: ranks of a gather, if not all of the shard axis.
        """
        here = max(1, self.node // self.tensor)  # ranks of the shard axis on one machine
        ranks = {"all_reduce": self.shard * self.replicate, "tensor": self.tensor}.get(verb, among or self.shard)
        within = (rates.reduce or rates.bandwidth) if verb == "reduce" else rates.bandwidth
        if ranks <= (self.node if verb == "tensor" else here):
            bandwidth = within
        elif verb == "all_reduce":
            bandwidth = rates.between
        else:
            bandwidth = min(within, (self.node if verb == "tensor" else here) * rates.between)
        return bandwidth * (rates.large if buffer >= LARGE else 1.0)


class Timeline:
    """Simulates one optimizer step: forwards, backwards, reductions, and the optimizer. Its attributes are the results.

    Args:
        profile: of a single micro-batch, without sharding.
        units: costs of all units of the profile, including the root.
        strategy: how the training loop runs them. With offloading, a gather first copies the shard to the device, in
            the dtype it is gathered in, and a reduced slice is copied to the host.
        micro_batches: forwards and backwards before the optimizer's step.
        rates: None: no times.
        axes: over which collectives run.
        besides: bytes of buffers and parameters outside of units.
        state: bytes of the optimizer's state on the device.
        temporary: bytes of temporary tensors in the optimizer's step, by unit; under `WHOLE`, of a step of all.
        hosted: bytes of the optimizer's state in host memory, by unit in the order of steps: on the device is that of
            four units at most (`optim/state_on_host.py`).
        exchanges: bytes that the optimizer's step sends, and in how many collectives: to "owners", and to "replicas".

    Attributes:
        peak: bytes by kind at the moment when most are alive.
        where: that moment, in words.
        most: by kind, its own largest number of bytes.
        sent: bytes that this rank sends, by verb; "tensor": in tensor-parallel collectives.
        collectives: their number, by verb.
        compute, exposed: seconds of computation, and of waiting for communication.
        waits: seconds of waiting by unit.
        events: verb, unit, and the bytes of gathered units and reductions then; see `fullshard.record_events`. Of many
            micro-batches, without those in the middle.
    """

    def __init__(
        self,
        profile: Profile,
        units: Sequence[UnitCosts],
        strategy: Strategy,
        micro_batches: int,
        rates: Rates | None = None,
        axes: Axes = Axes(1),
        *,
        besides: int = 0,
        state: int = 0,
        temporary: Mapping[str, int] | None = None,
        hosted: Mapping[str, int] | None = None,
        exchanges: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.profile, self.strategy, self.rates, self.axes = profile, strategy, rates, axes
        self.units = {costs.name: costs for costs in units}
        self.temporary, self.hosted = temporary or {}, hosted or {}
        self.peak, self.most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self.where = ""
        self.sent: dict[str, int] = defaultdict(int)
        self.collectives: dict[str, int] = defaultdict(int)
        self.compute = self.exposed = 0.0
        self.waits: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, str, int]] = []
        self.now = dict.fromkeys(KINDS, 0)
        self.now["parameters"] = besides + sum(costs.parameters for costs in units if not costs.strategy.offload)
        self.now["gradients"] = self.residuals = sum(costs.residuals for costs in units)
        self.now["optimizer"] = state
        self.gathers: dict[str, float] = {}  # units in flight, and when each arrives
        self.gathered: set[str] = set()
        self.kept: set[str] = set()  # units whose slices are kept for the backward
        self.whole: set[str] = set()  # units whose gradients of earlier micro-batches wait for a reduction
        self.copied: set[str] = set()  # units whose sums over micro-batches are copied into new gradients
        self.partial: dict[str, int] = {}  # bytes of slices that wait, reduced over the shard axis only, by unit
        # The reduction in flight: its unit, its bytes besides the buffer, and when it ends.
        self.reducing: tuple[UnitCosts, int, float] | None = None
        self.replicating: list[tuple[UnitCosts, int, float]] = []  # the same, for all-reduces
        self.ahead: set[str] = set()  # prefetched in the forward, not yet entered
        self.free_at = 0.0  # when the network has sent all that was issued
        self.waiting = dict(self.hosted)  # units that were not on the device in this step
        self.leaving: list[int] = []  # bytes of the last two units that stepped
        self.copied_at = 0.0  # when state that was on the device is on the host again
        self.live = NOTHING  # at the current moment
        self.sets_aside = False  # whether slices are not reduced over the replicate axis in this micro-batch
        self.run(micro_batches)
        if self.hosted and not strategy.step_in_backward:
            for unit in self.hosted:
                self.step(unit)
        elif not strategy.step_in_backward:
            self.now["optimizer"] += self.temporary.get(WHOLE, 0)
            self.note("optimizer's step")
        self.wait(self.copied_at, WHOLE)
        for verb, (nbytes, count) in (exchanges or {}).items():
            self.exchange(verb, nbytes, count)

    @property
    def seconds(self) -> float:
        """Until now."""
        return self.compute + self.exposed

    # Account.

    def note(self, where: str, live: Live = NOTHING, extra: int = 0) -> None:
        """Update the peaks. `extra`: gathered bytes alive only at this moment."""
        now = self.now
        now["activations"], now["logits"] = live.activations, live.logits
        now["gathered"] += extra
        for kind, nbytes in now.items():
            self.most[kind] = max(self.most[kind], nbytes)
        if sum(now.values()) > sum(self.peak.values()):
            self.peak, self.where = dict(now), where
        now["gathered"] -= extra

    def send(self, costs: UnitCosts, verb: str, gather: GatherCosts | None = None) -> float:
        """Issue a unit's collectives, `gather`'s or those of a reduction; returns the time at which they end."""
        nbytes, count = costs.sent.get(verb, (0, 0)) if gather is None else (gather.sent, gather.collectives)
        self.sent[verb] += nbytes
        self.collectives[verb] += count
        seconds = 0.0
        if self.rates is not None:
            buffer = {"gather": costs.gathered, "reduce": costs.buffer, "all_reduce": costs.gradients}[verb]
            among = costs.strategy.kept_ranks if gather is not None and gather is costs.regather else 0
            bandwidth = self.axes.bandwidth(self.rates, verb, buffer, among)
            seconds = count * self.rates.latency + nbytes / bandwidth
            self.lose((1 - self.rates.overlap) * seconds, costs.name)
            seconds *= self.rates.overlap
            if costs.strategy.offload and not among:
                seconds += (costs.computed if verb == "gather" else costs.gradients) / self.rates.host
        self.free_at = max(self.seconds, self.free_at) + seconds
        return self.free_at

    def send_tensors(self, moment: Moment) -> None:
        """Wait for the tensor-parallel collectives of an interval: what is computed next needs them."""
        if not moment.collectives:
            return
        self.sent["tensor"] += moment.sent
        self.collectives["tensor"] += moment.collectives
        if self.rates is not None:
            bandwidth = self.axes.bandwidth(self.rates, "tensor", moment.sent // moment.collectives)
            self.lose(moment.collectives * self.rates.latency + moment.sent / bandwidth, moment.unit)

    def exchange(self, verb: str, nbytes: int, count: int) -> None:
        """Wait for exchanges of the optimizer's step."""
        self.sent[verb], self.collectives[verb] = nbytes, count
        if self.rates is not None:
            bandwidth = self.axes.bandwidth(self.rates, "gather" if verb == "owners" else "all_reduce")
            self.lose(count * self.rates.latency + nbytes / bandwidth, WHOLE)

    def wait(self, until: float, unit: str) -> None:
        self.lose(max(0.0, until - self.seconds), unit)

    def lose(self, seconds: float, unit: str) -> None:
        """Add time in which the rank does not compute because of this unit's communication."""
        if seconds:
            self.exposed += seconds
            self.waits[unit] += seconds

    def compute_copy(self, nbytes: int) -> None:
        if self.rates is not None:
            self.compute += 2 * nbytes / self.rates.copy

    def event(self, verb: str, unit: str) -> None:
        live = self.now["gathered"] + self.now["reducing"] - sum(self.partial.values())
        self.events.append((verb, unit, live))

    # Units.

    def gather_of(self, costs: UnitCosts) -> GatherCosts:
        """The unit's next gather."""
        return costs.regather if costs.regather is not None and costs.name in self.kept else costs.gather

    def issue(self, unit: str) -> None:
        costs = self.units[unit]
        gather = self.gather_of(costs)
        self.now["gathered"] += self.in_flight(costs, gather)
        self.gathers[unit] = self.send(costs, "gather", gather)
        self.event("gather", unit)

    def in_flight(self, costs: UnitCosts, gather: GatherCosts) -> int:
        """Bytes while a gather is in flight; with offloading, casts happen on the way to the device."""
        on_the_way = costs.strategy.offload and gather is costs.gather
        return gather.in_flight - gather.cast + costs.computed if on_the_way else gather.in_flight

    def open(self, unit: str, where: str, live: Live) -> None:
        """Wait for a unit's gather; issues it first if it is not in flight."""
        costs = self.units[unit]
        if unit in self.gathered or not costs.elements:
            return
        if unit not in self.gathers:
            self.issue(unit)
        gather = self.gather_of(costs)
        self.note(where, live)
        self.wait(self.gathers.pop(unit), unit)
        self.note(where, live, gather.opening - gather.in_flight)  # freed at the same time
        self.now["gathered"] += costs.gathered - self.in_flight(costs, gather)
        self.compute_copy(gather.opening - gather.in_flight)
        if costs.kept and unit not in self.kept:
            self.kept.add(unit)
            self.now["gathered"] += costs.kept
        self.gathered.add(unit)
        self.event("gathered", unit)

    def free(self, unit: str, backward: bool = False) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.now["gathered"] -= self.units[unit].gathered
            if backward and unit in self.kept:
                self.kept.remove(unit)
                self.now["gathered"] -= self.units[unit].kept
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
        scratch -= costs.received
        if self.sets_aside:
            self.now["reducing"] -= scratch
            if costs.name not in self.partial:
                self.partial[costs.name] = costs.partial
                self.now["reducing"] += costs.partial
            self.replicating.append((costs, 0, 0.0))
        else:
            if costs.name in self.partial:
                self.now["reducing"] -= self.partial.pop(costs.name)
                self.copied.add(costs.name)
            self.now["reducing"] += costs.between + costs.passing
            self.note(f"gradients of {costs.name or 'the root'} are reduced between replicas", self.live)
            self.now["reducing"] -= costs.passing
            self.replicating.append((costs, scratch + costs.between, self.send(costs, "all_reduce")))
            if costs.passing:  # a hook waits for its collectives
                self.wait(self.free_at, costs.name)
        while len(self.replicating) > costs.replicating:
            self.deliver(*self.replicating.pop(0))

    def deliver(self, costs: UnitCosts, scratch: int, until: float) -> None:
        self.wait(until, costs.name)
        if not self.sets_aside and costs.name in self.copied:
            self.copied.remove(costs.name)
            self.now["gradients"] += costs.gradients
            self.note(f"gradients of {costs.name or 'the root'} are delivered", self.live)
        self.now["reducing"] -= scratch
        self.event("reduced", costs.name)
        if self.strategy.step_in_backward and not self.sets_aside:
            self.step(costs.name)
            self.now["gradients"] -= 0 if costs.strategy.offload else costs.gradients

    def step(self, unit: str) -> None:
        """Step one unit; its state is copied in before and out after, if it is in host memory, both ways at once."""
        alive = self.temporary[unit]
        if self.hosted:
            own = self.waiting.pop(unit, 0)
            alive += sum(self.leaving) + own + max(self.waiting.values(), default=0)
            self.leaving = [*self.leaving, own][-2:]
            if self.rates is not None:
                self.copied_at = max(self.seconds, self.copied_at) + own / self.rates.host
        self.now["optimizer"] += alive
        self.note(f"optimizer's step of {unit or 'the root'}", self.live)
        self.now["optimizer"] -= alive

    def reduce(self, unit: str, again: bool, last: bool, live: Live) -> None:
        """Collect a unit's gradients, and reduce them, unless they are accumulated whole.

        Args:
            again: whether they are added to those of an earlier micro-batch that are reduced.
            last: whether the micro-batch is the last.
            live: bytes alive.
        """
        costs, offload = self.units[unit], self.units[unit].strategy.offload
        if not costs.gradients:
            return
        aside = self.strategy.accumulate == "whole" and not last
        if not aside:
            self.finish_reduction()
        self.compute_copy(costs.buffer)
        if unit not in self.whole:
            self.now["reducing"] += costs.buffer
        self.note(f"gradients of {unit or 'the root'} are collected", live)
        if aside:
            self.whole.add(unit)
            return
        self.whole.discard(unit)
        scratch = costs.scratch_again if again else costs.scratch
        if offload and not again:
            scratch += costs.gradients  # the slice, until it is on the host
        self.now["reducing"] += scratch
        if not again and not offload:
            self.now["gradients"] += costs.gradients
        self.reducing = costs, scratch, self.send(costs, "reduce")
        self.event("reduce", unit)

    # The step.

    def run(self, micro_batches: int) -> None:
        """Run all micro-batches. Those in the middle are alike: one is simulated, and counted for all."""
        alike = max(micro_batches - 2 * FIRST, 0)
        for index in range(min(micro_batches, FIRST)):
            self.micro_batch(index, micro_batches)
        if alike:
            compute, exposed = self.compute, self.exposed
            counts: list[dict[str, Any]] = [self.waits, self.sent, self.collectives]
            before = [dict(count) for count in counts]
            self.micro_batch(FIRST, micro_batches)
            more = alike - 1
            self.free_at += more * (self.seconds - compute - exposed)
            self.compute += more * (self.compute - compute)
            self.exposed += more * (self.exposed - exposed)
            for count, earlier in zip(counts, before, strict=True):
                for name, value in count.items():
                    count[name] += more * (value - earlier.get(name, 0))
        for index in range(max(FIRST, FIRST + alike), micro_batches):
            self.micro_batch(index, micro_batches)

    def prefetch(self, forward: Sequence[str], following: int, most: int) -> int:
        """Prefetch the units of a forward from index `following` on; returns the index of the first not prefetched."""
        while following < len(forward) and len(self.ahead) < most:
            if not self.is_sharded(forward[following]):
                break
            self.issue(forward[following])
            self.ahead.add(forward[following])
            following += 1
        return following

    def micro_batch(self, index: int, count: int) -> None:
        moments, strategy, last = self.profile.moments, self.strategy, index == count - 1
        again = index > 0 and strategy.accumulate != "whole"
        self.sets_aside = strategy.accumulate == "partial" and not last
        if self.partial:
            self.now["gradients"] = self.residuals  # the slices that were set aside are copies
        forward = [moment.unit for moment in moments if moment.kind == "enter" and self.units[moment.unit].elements]
        backward = [moment.unit for moment in moments if moment.kind == "back"]
        entered = following = returned = 0
        for moment in moments:
            unit, self.live = moment.unit, moment.live
            how = self.units[unit].strategy
            where = f"{PLACES[moment.kind]} {unit or 'the root'}"
            if moment.kind == "enter":
                self.open(unit, where, moment.live)
                entered += bool(self.units[unit].elements)
                self.ahead.discard(unit)
                following = self.prefetch(forward, max(following, entered), how.prefetch)
            elif moment.kind == "leave":
                if how.reshard:
                    self.free(unit)
            elif moment.kind == "back":
                returned += 1
                self.open(unit, where, moment.live)
                for upcoming in backward[returned : returned + how.prefetch]:
                    if self.is_sharded(upcoming):
                        self.issue(upcoming)
            else:
                self.free(unit, backward=True)
                if unit not in backward[returned:]:  # the last backward of a unit that is called several times
                    self.reduce(unit, again, last, moment.live)
            self.note(where, moment.peak)
            self.send_tensors(moment)
            if self.rates is not None:
                self.compute += moment.flops / self.rates.flops
        self.end_backward(forward)

    def end_backward(self, forward: Sequence[str]) -> None:
        """Free units that had no backward (frozen, before all that trains), and finish reductions."""
        self.live = NOTHING
        for unit in reversed(forward):
            self.free(unit, backward=True)
        self.finish_reduction()
        while self.replicating:
            self.deliver(*self.replicating.pop(0))
        self.now["gathered"] -= sum(self.units[unit].kept for unit in self.kept)
        self.kept.clear()
