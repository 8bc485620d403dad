"""Splits each wait into late arrival and transfer, and finds the ranks that are late.

    rank 0   issue |......... w0 [ late ////|==== transfer ] w1
    rank 1                      issue ......|  w0 [ transfer ] w1
                                            ^ the last rank issues the collective: data can be sent from here on

A collective begins when its last rank issues it. The part of a wait [w0, w1] before that moment is late arrival,
caused by that rank; the rest is transfer. The k-th collective of a unit over a group is the same on all its ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median
from typing import NamedTuple

from ...text import counted
from .merge import RankTrace, RunTrace

ENDS = {"wait_gather": ("gathered",), "wait_reduce": ("reduced", "all_reduce")}
"""Verb that begins a wait -> the verbs that end it."""
ROOT = "(root)"
OUTSIDE = "(outside of units)"
"""The place of work while no unit is gathered: data, loss, the optimizer."""
NOISE = 0.005  # share of a step; collectives that cost other ranks less do not make a rank late
TOP = 5  # most units listed per step


class Collective(NamedTuple):
    """Identifies a collective, equally on all its ranks; `number` counts collectives with the same other fields."""

    kind: str
    unit: str
    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class CollectiveWait:
    """A rank's wait for a collective. Times in seconds; `late` + `transfer` = `end` - `begin`.

    Attributes:
        kind: "gather", "reduce" or "all_reduce".
        late: the part of the wait before the last rank issued the collective.
        late_rank: that rank; None if all ranks had issued it.
    """

    step: int
    rank: int
    unit: str
    kind: str
    begin: float
    end: float
    late: float
    late_rank: int | None

    @property
    def transfer(self) -> float:
        return self.end - self.begin - self.late


class Work(NamedTuple):
    """The time between two events in which a rank did not wait; `key` is the event that ended it, and its number."""

    begin: float
    end: float
    place: str  # the unit that was gathered last and is still gathered, or OUTSIDE
    key: tuple[str, str, int]


@dataclass(frozen=True)
class StepTimes:
    """The duration of a step and its parts, in seconds, as means over ranks.

    Attributes:
        time: duration of the step.
        late, transfer: the two parts of all waits.
        units: the units with the longest waits: name, seconds, and the late rank (None: mostly transfer).
        events: number of events of all ranks.
    """

    time: float
    late: float
    transfer: float
    units: list[tuple[str, float, int | None]]
    events: int

    @property
    def compute(self) -> float:
        """The rest: computation, and anything else that the program does."""
        return self.time - self.late - self.transfer


@dataclass(frozen=True)
class UnitWait:
    """A rank's waits for a unit's collectives, in seconds per step; `late_rank` caused most of `late`, or is None."""

    rank: int
    unit: str
    kind: str
    late: float
    transfer: float
    late_rank: int | None


@dataclass(frozen=True)
class LateRank:
    """A rank that other ranks wait for.

    Attributes:
        times: number of collectives that it issued last while another rank waited.
        typical, worst: median and largest delay of these, in seconds after the median of the other ranks.
        longest: seconds per step that the rank which waited most for it did, for all its units: about what a step would
            be shorter by.
        cost: seconds per step that all other ranks together waited for it.
        place: the unit that caused most of the delay: shortly before, the rank took longer there than the others.
    """

    rank: int
    times: int
    typical: float
    worst: float
    longest: float
    cost: float
    place: str


@dataclass(frozen=True)
class Analysis:
    """The result of `analyse`.

    Attributes:
        works: rank -> its work, in order.
        bounds: rank -> the start of each step, and the end of the last.
        issues: collective -> rank -> the time at which the rank issued it.
    """

    steps: list[StepTimes]
    waits: list[CollectiveWait]
    unit_waits: list[UnitWait]
    late_ranks: list[LateRank]
    works: dict[int, list[Work]]
    bounds: dict[int, list[float]]
    issues: dict[Collective, dict[int, float]]

    def in_words(self, run: RunTrace) -> list[str]:
        """The summary, line by line: what was recorded, and which rank is late."""
        ranks, steps = len(run.ranks), len(self.steps)
        error = f"; their clocks agree to within {run.error * 1e6:.0f} us" if ranks > 1 else ""
        lines = [f"{counted(steps, 'step')} of {counted(ranks, 'rank')}{error}"]
        lines += [f"rank {trace.rank} raised {trace.raised.splitlines()[0]}" for trace in run.ranks if trace.raised]
        if not steps:
            return [*lines, "No complete step was recorded on all ranks."]
        time, late = (fmean(getattr(step, name) for step in self.steps) for name in ("time", "late"))
        transfer = fmean(step.transfer for step in self.steps)
        waits = f"{100 * late / time:.0f}% for late ranks and {100 * transfer / time:.0f}% for transfer"
        if idle := sum(not step.events for step in self.steps):
            which = "any step" if idle == steps else f"{idle} of {counted(steps, 'step')}"
            lines.append(f"No event was recorded in {which}: no unit ran, or a captured graph was replayed.")
        if idle == steps:
            return lines
        lines.append(f"A step takes {time * 1e3:.1f} ms, of which ranks wait {waits}.")
        for worst in self.late_ranks[:1]:
            place = "outside of units" if worst.place == OUTSIDE else f"in unit {worst.place}"
            place += " (its own modules, the loss, or code between units)" if worst.place.startswith(ROOT) else ""
            lines.append(f"Rank {worst.rank} is late by up to {worst.worst * 1e3:.1f} ms, which it loses {place}.")
            several = worst.cost > worst.longest
            together = f", all others together {worst.cost * 1e3:.1f} ms" if several else ""
            waits = f"waits{' up to' if several else ''} {worst.longest * 1e3:.1f} ms per step"
            lines.append(f"Another rank {waits} for it{together}.")
        if run.missing:
            lines.append(f"Ranks without a file: {len(run.missing)}. A wait for them counts as transfer.")
        elif not self.late_ranks:
            lines.append("No rank is late.")
        return lines


def analyse(run: RunTrace) -> Analysis:
    """Analyse a run: steps, waits and late ranks. Steps that some ranks did not finish are left out."""
    bounds = {trace.rank: step_bounds(trace) for trace in run.ranks}
    count = min(len(times) for times in bounds.values()) - 1
    bounds = {rank: times[: count + 1] for rank, times in bounds.items()}
    issues: dict[Collective, dict[int, float]] = defaultdict(dict)
    pending = [(trace.rank, *wait) for trace in run.ranks for wait in _waits(trace, issues)]
    waits = []
    for rank, collective, begin, end in pending:
        last = max(issues[collective], key=issues[collective].__getitem__)
        late = min(max(issues[collective][last] - begin, 0.0), end - begin)
        step = bisect_right(bounds[rank], begin) - 1
        if 0 <= step < count:
            at_fault = last if late and last != rank else None
            late = late if at_fault is not None else 0.0
            waits.append(
                (collective, CollectiveWait(step, rank, collective.unit, collective.kind, begin, end, late, at_fault))
            )
    works = {trace.rank: list(_works(trace)) for trace in run.ranks}
    plain = [wait for _, wait in waits]
    events: Counter[int] = Counter()  # by step
    for trace in run.ranks:
        events.update(bisect_right(bounds[trace.rank], row.time) - 1 for row in trace.events)
    steps = [_step(n, bounds, [wait for wait in plain if wait.step == n], events[n]) for n in range(count)]
    late_ranks = _late_ranks(waits, issues, works, steps, run.error) if count else []
    return Analysis(steps, plain, _unit_waits(plain, count), late_ranks, works, bounds, dict(issues))


def step_bounds(trace: RankTrace) -> list[float]:
    """The start of each step, and the end of the last.

    If the program marked no steps, a step begins when the first unit is gathered after all reductions have ended.
    """
    if trace.marks or not trace.events:
        return [trace.begin, *trace.marks]
    first = next((row.unit for row in trace.events if row.verb == "gather"), None)
    starts, reducing, reduced = [trace.events[0].time], set[str](), False
    for row in trace.events:
        if row.verb == "reduce":
            reducing.add(row.unit)
        elif row.verb == "reduced":
            reducing.discard(row.unit)
            reduced = True
        elif row.verb == "gather" and row.unit == first and reduced and not reducing:
            starts.append(row.time)
            reduced = False
    return [*starts, trace.end]


def _waits(trace: RankTrace, issues: dict[Collective, dict[int, float]]) -> Iterator[tuple[Collective, float, float]]:
    """Each wait's collective, start and end. Adds the times at which the rank issued collectives to `issues`."""
    numbers: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    latest: dict[tuple[str, str], Collective] = {}  # by the verb that begins the wait, and the unit
    for row, following in zip_longest(trace.events, trace.events[1:]):
        if row.verb in ("gather", "reduce", "all_reduce"):
            name = row.verb, row.unit, row.ranks
            collective = Collective(*name, numbers[name])
            numbers[name] += 1
            issues[collective][trace.rank] = row.time
            latest["wait_gather" if row.verb == "gather" else "wait_reduce", row.unit] = collective
        elif row.verb in ENDS and following is not None and following.unit == row.unit:
            collective_of_wait = latest.get((row.verb, row.unit))
            if following.verb in ENDS[row.verb] and collective_of_wait is not None:
                yield collective_of_wait, row.time, following.time


def _works(trace: RankTrace) -> Iterator[Work]:
    """A rank's work between its waits."""
    numbers: Counter[tuple[str, str]] = Counter()
    gathered: list[str] = []
    begin, waiting = trace.begin, False
    for row in trace.events:
        name = row.verb, row.unit
        if not waiting:
            yield Work(begin, row.time, gathered[-1] if gathered else OUTSIDE, (*name, numbers[name]))
        numbers[name] += 1
        begin, waiting = row.time, row.verb in ENDS
        if row.verb in ("gathered", "free") and row.unit in gathered:
            gathered.remove(row.unit)
        if row.verb == "gathered":
            gathered.append(row.unit)
    yield Work(begin, trace.end, gathered[-1] if gathered else OUTSIDE, ("", "", 0))


def _step(number: int, bounds: dict[int, list[float]], waits: list[CollectiveWait], events: int) -> StepTimes:
    ranks = len(bounds)
    times: dict[str, float] = defaultdict(float)
    for wait in waits:
        times[wait.unit] += (wait.end - wait.begin) / ranks
    longest = sorted(times, key=times.__getitem__, reverse=True)[:TOP]
    return StepTimes(
        time=fmean(begins[number + 1] - begins[number] for begins in bounds.values()),
        late=sum(wait.late for wait in waits) / ranks,
        transfer=sum(wait.transfer for wait in waits) / ranks,
        units=[(unit, times[unit], _at_fault([wait for wait in waits if wait.unit == unit])) for unit in longest],
        events=events,
    )


def _at_fault(waits: list[CollectiveWait]) -> int | None:
    """The rank that caused the most late arrival, if late arrival is more than half of the waits."""
    by_rank: dict[int, float] = defaultdict(float)
    for wait in waits:
        if wait.late_rank is not None:
            by_rank[wait.late_rank] += wait.late
    if not by_rank or 2 * sum(by_rank.values()) <= sum(wait.end - wait.begin for wait in waits):
        return None
    return max(by_rank, key=by_rank.__getitem__)


def _unit_waits(waits: list[CollectiveWait], steps: int) -> list[UnitWait]:
    """Waits by rank, unit and kind; the longest first."""
    groups: dict[tuple[int, str, str], list[CollectiveWait]] = defaultdict(list)
    for wait in waits:
        groups[wait.rank, wait.unit, wait.kind].append(wait)
    rows = [
        UnitWait(*key, sum(w.late for w in group) / steps, sum(w.transfer for w in group) / steps, _at_fault(group))
        for key, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row.late + row.transfer))


def _late_ranks(
    waits: list[tuple[Collective, CollectiveWait]],
    issues: dict[Collective, dict[int, float]],
    works: dict[int, list[Work]],
    steps: list[StepTimes],
    error: float,
) -> list[LateRank]:
    """The ranks that others wait for; the most costly first."""
    costs: dict[Collective, dict[int, float]] = defaultdict(dict)  # seconds by rank that waited
    for collective, wait in waits:
        if wait.late_rank is not None:
            costs[collective][wait.rank] = wait.late + costs[collective].get(wait.rank, 0.0)
    floor = max(error, NOISE * median(step.time for step in steps))
    excess = _Excess(works)
    arrivals: dict[int, list[tuple[float, str, dict[int, float]]]] = defaultdict(list)  # rank -> delay, place, cost
    for collective, cost in costs.items():
        times = issues[collective]
        last = max(times, key=times.__getitem__)
        delay = times[last] - median(time for rank, time in times.items() if rank != last)
        if sum(cost.values()) > floor and delay > error:
            arrivals[last].append((delay, excess.place(last, times[last], delay), cost))
    late_ranks = (_late_rank(rank, arrivals_of_rank, len(steps)) for rank, arrivals_of_rank in arrivals.items())
    return sorted(late_ranks, key=lambda late: -late.cost)


def _late_rank(rank: int, arrivals: list[tuple[float, str, dict[int, float]]], steps: int) -> LateRank:
    places: dict[str, float] = defaultdict(float)
    for delay, place, _ in arrivals:
        places[place] += delay
    delays = [delay for delay, *_ in arrivals]
    waited: dict[int, float] = defaultdict(float)  # by rank
    for *_, cost in arrivals:
        for waiting, seconds in cost.items():
            waited[waiting] += seconds / steps
    costs = max(waited.values()), sum(waited.values())
    return LateRank(rank, len(arrivals), median(delays), max(delays), *costs, max(places, key=places.__getitem__))


class _Excess:
    """How much longer a rank took for a piece of work than the other ranks for the same work."""

    def __init__(self, works: dict[int, list[Work]]) -> None:
        self.works = works
        self.ends = {rank: [work.end for work in works_of_rank] for rank, works_of_rank in works.items()}
        self.durations: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
        for rank, works_of_rank in works.items():
            for work in works_of_rank:
                self.durations[work.key][rank] = work.end - work.begin

    def place(self, rank: int, time: float, delay: float) -> str:
        """The place of the work, shortly before `time`, that contributed most to a rank's delay in seconds."""
        first, last = (bisect_left(self.ends[rank], moment) for moment in (time - 2 * delay, time))
        return max(self.works[rank][first : last + 1], key=lambda work: self._excess(rank, work)).place

    def _excess(self, rank: int, work: Work) -> float:
        others = [time for other, time in self.durations[work.key].items() if other != rank]
        return work.end - work.begin - (median(others) if others else 0.0)
