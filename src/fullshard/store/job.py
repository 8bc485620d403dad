"""What is left of a save once it is planned: each rank writes its file, then the first puts the whole in its place.

The same in the rank's own process and in one beside it (`background.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from .folder import Folder
from .hashed import FileFacts
from .manifest import NAME as MANIFEST
from .manifest import Manifest
from .packed import Packed
from .piece import Piece
from .write import Planner


@dataclass
class Job:
    """What one rank is to write.

    Attributes:
        folder: where checkpoints are kept.
        name: of the one being written, as `Folder.begin` gave it.
        plan: this rank's.
        values: what is no tensor, for PyTorch's readers; on the first rank.
    """

    folder: Folder
    name: str
    plan: Packed[SavePlan]
    values: dict[str, Any]


@dataclass
class Ending:
    """What the first rank does when all have written.

    Attributes:
        metadata: DCP's, without where things lie.
        manifest: without files.
        keep_last, keep_every: see `Folder.prune`.
    """

    metadata: Packed[Metadata]
    manifest: Manifest
    keep_last: int | None
    keep_every: int | None


@dataclass
class Written:
    """What one rank wrote.

    Attributes:
        results: where each piece lies, as DCP has it.
        facts: of the files.
    """

    results: list[Any]
    facts: dict[str, FileFacts]

    @property
    def nbytes(self) -> int:
        """Of the files."""
        return sum(facts.nbytes for facts in self.facts.values())


def write(job: Job, pieces: Iterable[Piece], progress: Callable[[int], None] | None = None) -> Written:
    """Write this rank's file, and wait until it is on the disk."""
    writer = job.folder.writer(job.name)
    writer.progress = progress
    results = writer.write_data(job.plan.value, Planner(pieces, job.values)).wait()
    return Written(results, writer.facts)


def end(folder: Folder, name: str, ending: Ending, written: Sequence[Written]) -> str:
    """Write metadata and manifest, and let the checkpoint take its place; its name."""
    writer = folder.writer(name)
    writer.facts, writer.ties = {}, ending.manifest.ties
    writer.finish(ending.metadata.value, [one.results for one in written])
    facts: Mapping[str, FileFacts] = writer.facts
    for one in written:
        facts = {**facts, **one.facts}
    time = folder.time_of_next(ending.manifest.time)
    manifest = dataclasses.replace(ending.manifest, time=time, files=dict(facts))
    final = folder.publish(name, {MANIFEST: manifest.text()})
    folder.prune(ending.keep_last, ending.keep_every)
    return final
