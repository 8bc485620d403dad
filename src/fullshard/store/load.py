"""`load`: every rank reads what it owns, straight into its shard, after everything was checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.names import settle
from ..errors import CheckpointError, ConfigError, DamagedCheckpointError, DivergenceError, message
from .background import settle_background
from .contents import Contents, check_given, contents_of, lacking_state
from .entries import RNG, STATE, Generators, Stateful
from .folder import Folder
from .piece import value_pieces
from .ranks import Ranks
from .read import Files
from .reader import Reader
from .remote import folder_at
from .source import MODEL
from .tree import from_json, to_json


@dataclass(frozen=True)
class Loaded:
    """What `load` read besides what it filled.

    Attributes:
        path: the checkpoint; None if there was none, and `load(missing_ok=True)` loaded nothing.
        step: at which it was saved; 0 if it does not say.
        world: on how many ranks; 0 if it does not say.
        state: plain values that were given to `save(state=...)`, by name; of those that differed between ranks this
            rank's, if there are as many ranks now, else none.
        of_ranks: values that differed between the ranks which saved: for each name a list, one of each rank.
        untouched: names of tensors in the checkpoint that nothing here asked for.
    """

    path: Path | str | None
    step: int
    world: int
    state: dict[str, Any] = field(default_factory=dict)
    of_ranks: dict[str, list[Any]] = field(default_factory=dict)
    untouched: tuple[str, ...] = ()


@dataclass
class Wanted:
    """What a user asks to be loaded; see `load`."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    state: dict[str, Any]
    rng: bool
    strict: bool
    hashes: bool
    cast: bool


def read(wanted: Wanted, folder: Folder, name: str, ranks: Ranks) -> Loaded:
    """Load one checkpoint. Collective.

    Raises:
        DamagedCheckpointError: it is not what was written; nothing was changed.
        CheckpointError: it does not fit; nothing was changed.
    """
    lacking = lacking_state(wanted.optimizers, ranks)
    with ExitStack() as opened:
        reader, loaded = ranks.together(
            "comparing a checkpoint with the model",
            lambda: _planned(wanted, opened, folder, name, ranks, lacking),
            files=True,
        )
        _compare_checkpoints(reader.files, loaded, ranks)
        ranks.together("checking a checkpoint's files", lambda: reader.files.check(reader.copies), files=True)
        with torch.no_grad():
            reading = "reading a checkpoint's files (the model may be partially loaded)"
            ranks.together(reading, lambda: reader.files.fill(reader.copies), files=True)
            ranks.together("taking over what a checkpoint holds", reader.take_over)
    return loaded


def _compare_checkpoints(files: Files, loaded: Loaded, ranks: Ranks) -> None:
    """All ranks read the same checkpoint, each from wherever it sees it. Collective.

    Raises:
        DivergenceError: they do not: each would fill its part of the model from a different one.
    """
    checkpoints = ranks.all((files.digest, str(loaded.path)))
    different = next((rank for rank, (digest, _) in enumerate(checkpoints) if digest != checkpoints[0][0]), None)
    if different is not None:
        raise DivergenceError(
            "Ranks read different checkpoints; nothing was loaded.",
            rank=different,
            expected=f"the checkpoint that rank 0 reads: {checkpoints[0][1]}",
            got=f"a different one: {checkpoints[different][1]}",
            remedy="give all ranks a folder in a file system that all of them see, or a whole copy of the same "
            "checkpoint each",
            topic="folders-differ",
        )


def _planned(
    wanted: Wanted, opened: ExitStack, folder: Folder, name: str, ranks: Ranks, lacking: set[tuple[int, int]]
) -> tuple[Reader, Loaded]:
    """Open a checkpoint's files, which stay open as long as `opened`, and compare them with what is to be filled."""
    files = opened.enter_context(Files(folder.storage(name), wanted.hashes))
    reader = Reader(files, wanted.cast)
    settle(wanted.model)
    contents = contents_of(wanted.model, wanted.optimizers, ranks.is_first)
    reader.model(contents)
    reader.add_new_states(contents, wanted.optimizers, lacking, ranks.is_first)
    reader.optimizers(contents, wanted.strict)
    state = _State(wanted, reader, contents, ranks)
    state.plan()
    left = reader.close(contents, wanted.strict)
    manifest = files.manifest
    step, world = (0, 0) if manifest is None else (manifest.step, manifest.world)
    if name and step != folder.step_of(name):
        raise DamagedCheckpointError(
            f"The folder of a checkpoint has the name of another step: the checkpoint is of step {step}.",
            expected=f"step {folder.step_of(name)}",
            got=f"step {step} in {folder.at(name)}",
            remedy="rename the folder back; or load this checkpoint by its own path",
        )
    if manifest is None and wanted.hashes and ranks.is_first:
        warnings.warn(
            message(
                "This checkpoint has no manifest.json, so its values could not be checked: there are no hashes.",
                got=str(folder.at(name)),
                remedy="if another program saved it with torch.distributed.checkpoint, pass check=False; if Fullshard "
                "did, files of it are lost, and another checkpoint may be whole",
            ),
            stacklevel=7,
        )
    loaded = Loaded(folder.at(name), step, world, state.plain, state.of_ranks, tuple(left))
    return reader, loaded


class _State:
    """Values saved beside the tensors of the model and its optimizers.

    Attributes:
        common: as JSON, those that all ranks had, by name.
        ranks_values: as JSON, those of each rank that saved, where they differed.
        plain: plain values, by name.
        of_ranks: those of each rank that saved, where they differed.
    """

    def __init__(self, wanted: Wanted, reader: Reader, contents: Contents, ranks: Ranks) -> None:
        self.wanted, self.reader, self.contents, self.ranks = wanted, reader, contents, ranks
        manifest = reader.files.manifest
        self.common: dict[str, Any] = {} if manifest is None else manifest.values.get("state", {})
        self.ranks_values: list[dict[str, Any]] = [] if manifest is None else manifest.ranks
        self.plain: dict[str, Any] = {}
        self.of_ranks: dict[str, list[Any]] = {}

    def plan(self) -> None:
        """Find what goes where."""
        takers: dict[str, Callable[[Any], object]] = {
            key: value.load_state_dict for key, value in self.wanted.state.items() if isinstance(value, Stateful)
        }
        takers |= {name: module.set_extra_state for name, module in self.contents.extra.items()}
        saved = dict.fromkeys([*self.common, *(key for values in self.ranks_values for key in values)])
        for name in takers:
            if name not in saved and self.wanted.strict:
                raise CheckpointError(
                    "A checkpoint has no state of this name; nothing was loaded.",
                    parameter=name,
                    expected=f"one of {', '.join(saved) or 'none'}",
                    remedy="name it as in save(state=...), leave it out, or pass strict=False",
                    topic="checkpoint-does-not-fit",
                )
        for key in saved:
            if key == RNG:
                self._generators()
            elif key in takers:
                self._give(key, takers[key])
            elif key.startswith(MODEL):
                continue  # extra state of a module that this model has not
            elif key in self.common:
                self.plain[key] = from_json(self.common[key], self.reader.tensor, key)
            else:
                self.of_ranks[key] = [self._of(rank, key) for rank in range(len(self.ranks_values))]
                if len(self.ranks_values) == self.ranks.size:
                    self.plain[key] = self.of_ranks[key][self.ranks.rank]

    def _of(self, rank: int, key: str) -> Any:
        """What a rank saved under a name."""
        return from_json(self.ranks_values[rank].get(key), partial(self.reader.files.read_of_rank, rank), key)

    def _give(self, key: str, take: Callable[[Any], object]) -> None:
        """Plan to hand a state over to the object that it is of."""
        if key in self.common:
            self.reader.objects.append((take, from_json(self.common[key], self._sharded(key), key)))
        elif len(self.ranks_values) == self.ranks.size:
            self.reader.objects.append((take, self._of(self.ranks.rank, key)))
        else:
            every = [self._of(rank, key) for rank in range(len(self.ranks_values))]
            take_all = getattr(self.wanted.state[key], "load_state_dicts", None)
            if take_all is None:
                raise CheckpointError(
                    "A state differed between the ranks that saved it, and there are not as many now; nothing was "
                    "loaded.",
                    parameter=key,
                    expected=f"{len(self.ranks_values)} ranks",
                    got=self.ranks.size,
                    remedy="give the object a method load_state_dicts(states), which is given those of all ranks; or "
                    "leave it out, and use Loaded.of_ranks",
                )
            self.reader.objects.append((take_all, every))

    def _sharded(self, key: str) -> Callable[[str], torch.Tensor]:
        """Gives tensors by name: those that the object holds sharded are read as it splits them."""
        present: dict[str, torch.Tensor] = {}
        if key in self.wanted.state:
            to_json(self.wanted.state[key].state_dict(), f"{STATE}{key}", present)

        def tensor(name: str) -> torch.Tensor:
            like = present.get(name)
            missing = name not in self.reader.files.index.entries  # which raises
            if like is None or missing or not hasattr(like, "full_tensor"):
                return self.reader.tensor(name)
            target = torch.empty_like(like.detach())
            for piece in value_pieces(name, target, 0, False):
                self.reader.want(piece)
            self.reader.asks([name])
            return target

        return tensor

    def _generators(self) -> None:
        if not self.wanted.rng:
            return
        same = RNG in self.common or len(self.ranks_values) == self.ranks.size
        if not same:
            if self.ranks.is_first:
                warnings.warn(
                    message(
                        "The random generators were left as they are: a checkpoint has those of each rank.",
                        expected=f"{len(self.ranks_values)} ranks",
                        got=self.ranks.size,
                        remedy="seed them, or pass rng=False",
                    ),
                    stacklevel=9,
                )
            return
        if RNG in self.common:
            state = from_json(self.common[RNG], self.reader.tensor, RNG)
        else:
            state = self._of(self.ranks.rank, RNG)
        try:
            Generators().check(state)
        except Exception as error:  # generators raise anything for an invalid state
            raise DamagedCheckpointError(
                "The state of the random generators cannot be used; nothing was loaded.",
                got=f"{type(error).__name__}: {error}",
                remedy="pass rng=False to leave them as they are",
            ) from error
        self.reader.objects.append((Generators().load_state_dict, state))


def load(
    folder: str | os.PathLike[str] | Folder,
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
    rng: bool = True,
    strict: bool = True,
    check: bool = True,
    fall_back: bool = False,
    cast: bool = False,
    missing_ok: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fill a model, its optimizers and `state` from a checkpoint. Collective.

    The model may be sharded in another way than the one that was saved, on another number of ranks, or not at all;
    the checkpoint may be Fullshard's or any that `torch.distributed.checkpoint` wrote. Every rank reads only what it
    owns, into its shard; besides that it takes the memory of the manifest and of one tensor at most. Everything is
    compared and checked on all ranks before anything is changed. Nothing in the checkpoint is executed.

    Args:
        folder: as given to `save`; or one checkpoint in it; or a folder that DCP wrote.
        model, optimizers: what to fill. An optimizer that has not stepped gets its state; one whose parameters had none
            when they were saved loses it. Settings (learning rate, ...) become those saved.
        step: which checkpoint; None: the newest.
        state: objects to fill, by the names under which they were saved (`load_state_dict` is called).
        rng: whether the random generators become what they were. On another number of ranks they are left, with a
            warning.
        strict: whether names must be the same on both sides; False: what one side lacks is left as it is.
        check: whether the hashes of all bytes that are read are compared.
        fall_back: take the newest checkpoint that is whole, if the newest one is damaged; which, `Loaded.path` says.
        cast: round floating-point values to a dtype of fewer digits that the model has, such as float32 to bfloat16;
            False: refuse. 8-bit floats, which have scales of their own, and integers are never cast.
        missing_ok: where nothing was saved yet, change nothing and return a `Loaded` of step 0 whose path is None: the
            first start of a run and a restart are then one program. The first rank looks, for all.
        process_group: the ranks that load; None: all.

    Returns:
        What was read besides: see `Loaded`.

    Raises:
        DamagedCheckpointError: files are missing, truncated, or not what was written: says which.
        CheckpointError: there is no checkpoint, or it does not fit: names the first tensor.
        DivergenceError: a rank did not come, asked for another step, or reads another checkpoint.
        ConfigError: an argument is of another type.
    """
    ranks = Ranks(process_group)

    def look() -> tuple[Folder, Wanted]:
        where = folder_at(folder)
        listed = check_given("load", model, optimizers, state)
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise ConfigError(
                "load(step=) is a count, or None for the newest.",
                expected="an int of at least 0",
                got=repr(step),
                remedy="pass an int, as in step=1, or leave it out",
            )
        return where, Wanted(model, listed, dict(state or {}), rng, strict, check, cast)

    where, wanted = ranks.together("looking at the arguments", look)
    settle_background(ranks)
    steps = ranks.all(step)
    if other := next((rank for rank, one in enumerate(steps) if one != steps[0]), 0):
        raise DivergenceError(
            "Ranks ask for different steps; nothing was loaded.",
            rank=other,
            expected=f"step={steps[0]}, as on rank 0",
            got=f"step={steps[other]}",
            remedy="let one rank choose, and tell the others (torch.distributed.broadcast_object_list); or leave step= "
            "out for the newest",
            topic="ranks-differ",
        )
    removed: CheckpointError | None = None
    for _ in range(_RESTARTS):
        look_for = partial(_candidates, where, step, fall_back, missing_ok, removed)
        candidates = ranks.first("looking for a checkpoint", look_for, files=True)
        if not candidates:
            return Loaded(None, 0, 0)
        loaded, removed = _first_whole(wanted, where, candidates, ranks)
        if loaded is not None:
            return loaded
    assert removed is not None
    raise removed


_RESTARTS = 20
"""How often `load` looks again because what it was reading was removed: each time another job has saved since."""


def _first_whole(
    wanted: Wanted, where: Folder, candidates: list[str], ranks: Ranks
) -> tuple[Loaded | None, CheckpointError | None]:
    """Load the first of these that is whole. Collective.

    Returns:
        What was loaded; or None and what is wrong with one that was removed while it was being read, by another job's
        save with keep_last=, say.

    Raises:
        DamagedCheckpointError: none is whole.
    """
    for number, name in enumerate(candidates):
        try:
            return read(wanted, where, name, ranks), None
        except DamagedCheckpointError as error:
            if not ranks.first("looking for a checkpoint", partial(where.has, name), files=True):
                return None, _removed(where, name, error)
            if number == len(candidates) - 1:
                raise
            if ranks.is_first:
                warnings.warn(
                    message(
                        f"{where.at(name)} was passed over, and the one before it is tried. {error}",
                        topic="checkpoint-damaged",
                    ),
                    stacklevel=3,
                )
    raise AssertionError("no candidates")  # `_candidates` raises then


def _removed(where: Folder, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        "The checkpoint was removed while it was being read; nothing was loaded.",
        expected=f"{where.at(name)} to stay",
        got=str(error).partition("\n")[0],
        remedy="load the newest (no step=), for which load looks again; or save with a larger keep_last=",
    )


def _candidates(
    where: Folder, step: int | None, fall_back: bool, missing_ok: bool, removed: CheckpointError | None
) -> list[str]:
    """The checkpoints to try, one after the other; "" is the folder itself; none if there are none and that is right.

    Args:
        removed: what to raise if there is no other: the last one was removed while it was being read.

    Raises:
        CheckpointError: there is none.
    """
    where.refuse_file()
    names = where.names()
    if step is not None:
        of_step = [name for name in names if where.step_of(name) == step]
        if not of_step:
            raise removed or CheckpointError(
                "There is no checkpoint of this step.",
                expected=f"step {step} in {where}",
                got=f"steps {', '.join(sorted({str(where.step_of(n)) for n in names}, key=int)) or 'none'}",
                remedy="leave step out to load the newest, or take one of those that are there",
                topic="checkpoint-missing",
            )
        return of_step[::-1] if fall_back else of_step[-1:]
    newest: str | None = None
    try:
        newest = where.newest()
    except CheckpointError:
        if not fall_back or not names:
            raise
    if newest is None and not names:
        if missing_ok:
            return []
        raise removed or CheckpointError(
            f"There is no checkpoint in {where}." if where.exists else f"There is no folder {where}.",
            expected="a folder that was given to save()",
            got=str(where),
            remedy="if this may be a run's first start, pass missing_ok=True",
            topic="checkpoint-missing",
        )
    order = names[::-1] if newest is None else [newest, *(n for n in names[::-1] if n != newest)]
    return order if fall_back else order[:1]
