"""What dumps of PyTorch's flight recorder say side by side: the first collective that does not match.

Pure. Collectives of a process group are numbered alike on all its ranks, so number n has to be the same call on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .evidence import Dump, Entry


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group that is not the same on all ranks, or that none of them got past.

    Attributes:
        name: of the group, in words.
        number: of the collective in it.
        issued: what ranks issued, by rank.
        missing: ranks that issued nothing by then; with what they issued last.
        time: when it was first issued.
        stacks: of the program, by rank, of the collective or of what was issued last.
    """

    name: str
    number: int
    issued: dict[int, str]
    missing: dict[int, str]
    time: float
    stacks: dict[int, tuple[str, ...]]

    @property
    def agrees(self) -> bool:
        """Whether all ranks issued it alike; it is only stuck."""
        return not self.missing and len(set(self.issued.values())) == 1

    @property
    def to_blame(self) -> tuple[int, ...]:
        """Who issued nothing; else who is in the minority; empty if that cannot be said."""
        if self.missing:
            return tuple(sorted(self.missing))
        counts = {text: list(self.issued.values()).count(text) for text in self.issued.values()}
        most = max(counts.values())
        if len(counts) == 1 or list(counts.values()).count(most) > 1:
            return ()
        return tuple(rank for rank, text in sorted(self.issued.items()) if counts[text] != most)


def mismatches(dumps: Sequence[Dump]) -> list[Mismatch]:
    """The first of each group that has one: those with a rank to blame before others, earliest first."""
    found = [mismatch for group in _groups(dumps) if (mismatch := _first(dumps, group)) is not None]
    return sorted(found, key=lambda mismatch: (mismatch.agrees, mismatch.time))


def without_dump(dumps: Sequence[Dump]) -> list[int]:
    """Ranks of groups of which there is no dump."""
    members = {rank for dump in dumps for ranks in dump.members.values() for rank in ranks}
    return sorted(members - {dump.rank for dump in dumps})


def _groups(dumps: Sequence[Dump]) -> list[str]:
    return sorted({entry.group for dump in dumps for entry in dump.entries})


def _first(dumps: Sequence[Dump], group: str) -> Mismatch | None:
    members = {rank for dump in dumps for rank in dump.members.get(group, ())}
    by_rank: dict[int, dict[int, list[Entry]]] = {}
    for dump in dumps:
        if dump.rank in members or (not members and any([entry.group == group for entry in dump.entries])):
            calls = by_rank.setdefault(dump.rank, {})
            for entry in dump.entries:
                if entry.group == group:
                    calls.setdefault(entry.number, []).append(entry)
    begun = [min(calls) for calls in by_rank.values() if calls]  # a ring: what came before is forgotten
    for number in sorted({number for calls in by_rank.values() for number in calls if number >= max(begun)}):
        here = {rank: calls[number] for rank, calls in by_rank.items() if number in calls}
        done = [entry.done for entries in here.values() for entry in entries]
        texts = {rank: " + ".join([entry.what for entry in entries]) for rank, entries in here.items()}
        differs = len(set(texts.values())) > 1
        # All issued it and none got past it: what comes later says nothing of it.
        if differs or not any(done) or (len(here) < len(by_rank) and not all(done)):
            return _mismatch(dumps, group, number, by_rank, texts)
    return None


def _mismatch(
    dumps: Sequence[Dump], group: str, number: int, by_rank: dict[int, dict[int, list[Entry]]], texts: dict[int, str]
) -> Mismatch:
    missing, stacks = {}, {}
    for rank, calls in by_rank.items():
        before = [n for n in calls if n <= number]
        at = calls[max(before)][-1] if before else None
        if at is not None:
            stacks[rank] = at.stack
        if rank not in texts:
            missing[rank] = f"{at.what} ({at.number})" if at is not None else "nothing"
    name = next((dump.names[group] for dump in dumps if group in dump.names), "")
    times = [calls[number][0].time for calls in by_rank.values() if number in calls]
    return Mismatch(f"{group} ({name})" if name else group, number, texts, missing, min(times), stacks)
