"""Compares the ranks' dumps of PyTorch's flight recorder: the first collective that does not match.

Pure. All ranks of a process group number its collectives in the same way, so number n must be the same call on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .evidence import Dump, DumpedCollective


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group that differs between ranks, or that no rank got past.

    Attributes:
        name: the group's name and description.
        number: the collective's number in the group.
        issued: rank -> call, for the ranks that issued a collective of this number.
        missing: rank -> last call, for the ranks that did not.
        time: when a rank first issued it, seconds since the epoch.
        stacks: rank -> the program's frames at the collective, or at the rank's last call before it.
    """

    name: str
    number: int
    issued: dict[int, str]
    missing: dict[int, str]
    time: float
    stacks: dict[int, tuple[str, ...]]

    @property
    def agrees(self) -> bool:
        """Whether all ranks issued the same call, which is stuck."""
        return not self.missing and len(set(self.issued.values())) == 1

    @property
    def to_blame(self) -> tuple[int, ...]:
        """The ranks that issued nothing, or else the minority; empty if there is none."""
        if self.missing:
            return tuple(sorted(self.missing))
        counts = {text: list(self.issued.values()).count(text) for text in self.issued.values()}
        most = max(counts.values())
        if len(counts) == 1 or list(counts.values()).count(most) > 1:
            return ()
        return tuple(rank for rank, text in sorted(self.issued.items()) if counts[text] != most)


def mismatches(dumps: Sequence[Dump]) -> list[Mismatch]:
    """The first mismatch of each group that has one: those with ranks to blame come first, then by time."""
    groups = sorted({entry.group for dump in dumps for entry in dump.entries})
    firsts = [mismatch for group in groups if (mismatch := _first(dumps, group)) is not None]
    return sorted(firsts, key=lambda mismatch: (mismatch.agrees, mismatch.time))


def without_dump(dumps: Sequence[Dump]) -> list[int]:
    """The members of groups that wrote no dump."""
    members = {rank for dump in dumps for ranks in dump.members.values() for rank in ranks}
    return sorted(members - {dump.rank for dump in dumps})


def _first(dumps: Sequence[Dump], group: str) -> Mismatch | None:
    members = {rank for dump in dumps for rank in dump.members.get(group, ())}
    by_rank: dict[int, dict[int, list[DumpedCollective]]] = {}  # rank -> number of a collective -> its entries
    for dump in dumps:
        entries = [entry for entry in dump.entries if entry.group == group]
        if dump.rank in members or (not members and entries):
            numbered = by_rank.setdefault(dump.rank, {})
            for entry in entries:
                numbered.setdefault(entry.number, []).append(entry)
    oldest = [min(numbered) for numbered in by_rank.values() if numbered]  # a ring buffer: older entries are lost
    for number in sorted({number for numbered in by_rank.values() for number in numbered if number >= max(oldest)}):
        issued = {rank: numbered[number] for rank, numbered in by_rank.items() if number in numbered}
        done = [entry.done for entries in issued.values() for entry in entries]
        calls = {rank: " + ".join([entry.call for entry in entries]) for rank, entries in issued.items()}
        differs = len(set(calls.values())) > 1
        # If no rank got past a collective, later ones say nothing about it.
        if differs or not any(done) or (len(issued) < len(by_rank) and not all(done)):
            return _mismatch(dumps, group, number, by_rank, calls)
    return None


def _mismatch(
    dumps: Sequence[Dump],
    group: str,
    number: int,
    by_rank: dict[int, dict[int, list[DumpedCollective]]],
    calls: dict[int, str],
) -> Mismatch:
    missing, stacks = {}, {}
    for rank, numbered in by_rank.items():
        last = max((n for n in numbered if n <= number), default=None)
        entry = None if last is None else numbered[last][-1]
        if entry is not None:
            stacks[rank] = entry.stack
        if rank not in calls:
            missing[rank] = f"{entry.call} ({entry.number})" if entry is not None else "nothing"
    name = next((dump.names[group] for dump in dumps if group in dump.names), "")
    time = min(numbered[number][0].time for numbered in by_rank.values() if number in numbered)
    return Mismatch(f"{group} ({name})" if name else group, number, calls, missing, time, stacks)
