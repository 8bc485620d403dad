"""`load`: every rank reads its own pieces straight into its shard, once everything is checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.table import settle
from ..errors import CheckpointError, DamagedCheckpointError, DivergenceError, check_switch, message
from ..generators import Generators
from .background import settle_background
from .contents import checked_count, checked_optimizers, contents_of, lacking_state
from .entries import RNG, STATE, Stateful
from .folder import Folder
from .names import MODEL
from .piece import value_pieces
from .ranks import Ranks
from .read import Files
from .reader import Reader
from .remote import folder_at
from .tree import from_json, to_json


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        path: the checkpoint; None if there was none, and `load(missing_ok=True)` loaded nothing.
        step: the step of the checkpoint; 0 if unknown.
        world: the number of ranks that saved it; 0 if unknown.
        state: plain values passed to `save(state=...)`, by name. Of values that differed between ranks, this rank's, if
            the number of ranks is the same, else none.
        of_ranks: values that differed between the saving ranks: for each name a list with the value of every rank.
        untouched: names of tensors in the checkpoint that were not loaded.
    """

    path: Path | str | None
    step: int
    world: int
    state: dict[str, Any] = field(default_factory=dict)
    of_ranks: dict[str, list[Any]] = field(default_factory=dict)
    untouched: tuple[str, ...] = ()


@dataclass
class _Request:
    """The checked arguments of `load`."""

    folder: Folder
    step: int | None
    ranks: Ranks
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    state: dict[str, Any]
    rng: bool
    strict: bool
    hashes: bool
    cast: bool


def load(
    folder: str | os.PathLike[str] | Folder,
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    step: SupportsIndex | None = None,
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

    The model may be sharded differently than when it was saved, on a different number of ranks, or not at all. The
    checkpoint may be Fullshard's, or written by `torch.distributed.checkpoint`. Every rank reads only its own pieces,
    into its shard; beyond that, a load needs memory for the manifest and for at most one tensor. Everything is compared
    and checked on all ranks before anything is changed. Nothing in the checkpoint is executed.

    Args:
        folder: the folder passed to `save`; or a checkpoint in it; or a folder that DCP wrote.
        model, optimizers: objects to load into. An optimizer that has not stepped gets its state; parameters that had
            no state when they were saved lose theirs. Settings (learning rate, ...) become those saved.
        step: the step of the checkpoint; None: the newest checkpoint.
        state: objects to load into, by the names under which they were saved (`load_state_dict` is called).
        rng: restore the random generators. On a different number of ranks they are left unchanged, with a warning.
        strict: whether names must be the same on both sides; False: leave unchanged what the other side lacks, with a
            warning if no name of the model's tensors is in the checkpoint.
        check: verify the hashes of all bytes that are read.
        fall_back: if the newest checkpoint is damaged, load the newest intact one; `Loaded.path` names it.
        cast: round floating-point values to a model's narrower dtype, such as float32 to bfloat16; False: refuse. 8-bit
            floats, which have their own scales, and integers are never cast.
        missing_ok: if there is no checkpoint yet, change nothing and return a `Loaded` of step 0 whose path is None, so
            that the same program starts and restarts a run. The first rank decides for all.
        process_group: the ranks that load; None: all.

    Returns:
        Everything that was read except the state of these objects: see `Loaded`.

    Raises:
        DamagedCheckpointError: files are missing, truncated or changed; the error names the file.
        CheckpointError: there is no checkpoint, or it does not fit; the error names the first tensor.
        DivergenceError: ranks ask for different steps or read different checkpoints, or a rank does not take part.
        ConfigError: an argument is invalid.
    """
    ranks = Ranks(process_group)

    def check_arguments() -> _Request:
        where = folder_at(folder)
        listed = checked_optimizers("load", model, optimizers, state)
        number = None if step is None else checked_count("load", "step", step, 0, ", or None for the newest")
        check_switch("load(strict=)", strict)
        check_switch("load(cast=)", cast, "pass cast=True: values are rounded to the dtype of the model's parameters")
        return _Request(where, number, ranks, model, listed, dict(state or {}), rng, strict, check, cast)

    request = ranks.together("checking the arguments", check_arguments)
    settle_background(ranks)
    steps = ranks.all(request.step)
    if different := next((rank for rank, step_of_rank in enumerate(steps) if step_of_rank != steps[0]), 0):
        raise DivergenceError(
            "Ranks ask for different steps; nothing was loaded.",
            rank=different,
            expected=f"step={steps[0]}, as on rank 0",
            got=f"step={steps[different]}",
            remedy="let a single rank choose, and broadcast its choice (torch.distributed.broadcast_object_list); or "
            "omit step= for the newest",
            topic="ranks-differ",
        )
    removed: CheckpointError | None = None
    for _ in range(_RESTARTS):
        find = partial(_candidates, request.folder, request.step, fall_back, missing_ok, removed)
        candidates = ranks.first("looking for a checkpoint", find)
        if not candidates:
            return Loaded(None, 0, 0)
        result = _first_intact(request, candidates)
        if isinstance(result, Loaded):
            return result
        removed = result
    assert removed is not None
    raise removed


_RESTARTS = 20
"""How often `load` starts again because the checkpoint was removed during the read: another job saved each time."""


def _candidates(
    where: Folder, step: int | None, fall_back: bool, missing_ok: bool, removed: CheckpointError | None
) -> list[str]:
    """The checkpoints to try, in order; "" is the folder itself; empty if there are none and `missing_ok`.

    Args:
        removed: the error to raise if there is no checkpoint: the last one was removed while it was being read.

    Raises:
        CheckpointError: there is no checkpoint.
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
                remedy="omit step to load the newest, or choose one of these steps",
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
            expected="a folder that was passed to save()",
            got=str(where),
            remedy="if this may be a run's first start, pass missing_ok=True",
            topic="checkpoint-missing",
        )
    order = names[::-1] if newest is None else [newest, *(n for n in names[::-1] if n != newest)]
    return order if fall_back else order[:1]


def _first_intact(request: _Request, candidates: list[str]) -> Loaded | CheckpointError:
    """Load the first of these checkpoints that is intact. Collective.

    Returns:
        The result; or an error if a checkpoint was removed during the read, by another job's save with keep_last=.

    Raises:
        DamagedCheckpointError: none is intact.
    """
    where, ranks = request.folder, request.ranks
    for number, name in enumerate(candidates):
        try:
            return _load(request, name)
        except DamagedCheckpointError as error:
            if not ranks.first("looking for a checkpoint", partial(where.has, name)):
                return CheckpointError(
                    "The checkpoint was removed while it was being read; nothing was loaded.",
                    expected=f"{where.at(name)} to stay",
                    got=str(error).partition("\n")[0],
                    remedy="load the newest (omit step=), which retries; or save with a larger keep_last=",
                )
            if number == len(candidates) - 1:
                raise
            if ranks.is_first:
                warnings.warn(
                    message(
                        f"{where.at(name)} is damaged; trying the checkpoint before it. {error}",
                        topic="checkpoint-damaged",
                    ),
                    stacklevel=3,
                )
    raise AssertionError("no candidates")


def _load(request: _Request, name: str) -> Loaded:
    """Load a checkpoint. Collective.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged; nothing was changed.
        CheckpointError: it does not fit the model; nothing was changed.
    """
    ranks = request.ranks
    lacking = lacking_state(request.optimizers, ranks)
    with ExitStack() as opened:
        reader, loaded = ranks.together(
            "comparing a checkpoint with the model", lambda: _plan(request, opened, name, lacking)
        )
        _compare_checkpoints(reader.files, loaded, ranks)
        ranks.together("checking a checkpoint's files", lambda: reader.files.check(reader.copies))
        with torch.no_grad():
            reading = "reading a checkpoint's files (the model may be partially loaded)"
            ranks.together(reading, lambda: reader.files.fill(reader.copies))
            ranks.together("assigning a checkpoint's state", reader.take_over)
    return loaded


def _plan(request: _Request, opened: ExitStack, name: str, lacking: set[tuple[int, int]]) -> tuple[Reader, Loaded]:
    """Open a checkpoint's files until `opened` closes, and compare them with the model and its optimizers."""
    folder, ranks = request.folder, request.ranks
    files = opened.enter_context(Files(folder.storage(name), request.hashes))
    settle(request.model)
    contents = contents_of(request.model, request.optimizers, ranks.is_first)
    reader = Reader(files, contents, request.strict, request.cast)
    reader.plan_model()
    reader.plan_optimizers(request.optimizers, lacking, ranks.is_first)
    values = SavedValues(request, reader, contents.extra)
    values.plan()
    untouched = reader.compare_names()
    if ranks.is_first and (nothing_matches := reader.nothing_matches()) is not None:  # `strict` raised before
        warnings.warn(nothing_matches, stacklevel=7)
    step, world = files.manifest.step, files.manifest.world
    if name and step != folder.step_of(name):
        raise DamagedCheckpointError(
            f"A checkpoint's folder is named after a different step: the checkpoint is of step {step}.",
            expected=f"step {folder.step_of(name)}",
            got=f"step {step} in {folder.at(name)}",
            remedy="rename the folder back; or load this checkpoint by its own path",
        )
    if files.is_foreign and request.hashes and ranks.is_first:
        warnings.warn(
            message(
                "This checkpoint has no manifest.json, so its values could not be verified: there are no hashes.",
                got=str(folder.at(name)),
                remedy="if another program saved it with torch.distributed.checkpoint, pass check=False; if Fullshard "
                "saved it, files are lost; a different checkpoint may be complete",
            ),
            stacklevel=7,
        )
    loaded = Loaded(folder.at(name), step, world, values.plain, values.of_ranks, tuple(untouched))
    return reader, loaded


def _compare_checkpoints(files: Files, loaded: Loaded, ranks: Ranks) -> None:
    """Check that all ranks read the same checkpoint, though perhaps from different copies. Collective.

    Raises:
        DivergenceError: they do not.
    """
    checkpoints = ranks.all((files.digest, str(loaded.path)))
    different = next((rank for rank, (digest, _) in enumerate(checkpoints) if digest != checkpoints[0][0]), None)
    if different is not None:
        raise DivergenceError(
            "Ranks read different checkpoints; nothing was loaded.",
            rank=different,
            expected=f"the checkpoint that rank 0 reads: {checkpoints[0][1]}",
            got=f"a different one: {checkpoints[different][1]}",
            remedy="use a folder on a file system that all ranks share, or give each a complete copy of the same "
            "checkpoint",
            topic="folders-differ",
        )


class SavedValues:
    """Values in a checkpoint beside the tensors of the model and its optimizers; `entries.Values` are those of a save.

    Args:
        extra: see `Contents`.

    Attributes:
        common: values that were the same on all saving ranks, as JSON, by name.
        ranks_values: for each saving rank, the values that differed, as JSON, by name.
        plain, of_ranks: see `Loaded`.
    """

    def __init__(self, request: _Request, reader: Reader, extra: Mapping[str, nn.Module]) -> None:
        self.request, self.reader, self.extra, self.ranks = request, reader, extra, request.ranks
        self.common: dict[str, Any] = reader.files.manifest.values.get("state", {})
        self.ranks_values: list[dict[str, Any]] = reader.files.manifest.ranks
        self.plain: dict[str, Any] = {}
        self.of_ranks: dict[str, list[Any]] = {}

    def plan(self) -> None:
        """Plan how objects take their state, and read plain values."""
        setters: dict[str, Callable[[Any], object]] = {
            key: value.load_state_dict for key, value in self.request.state.items() if isinstance(value, Stateful)
        }
        setters |= {name: module.set_extra_state for name, module in self.extra.items()}
        saved = dict.fromkeys([*self.common, *(key for values in self.ranks_values for key in values)])
        for name in setters:
            if name not in saved and self.request.strict:
                raise CheckpointError(
                    "A checkpoint has no state of this name; nothing was loaded.",
                    parameter=name,
                    expected=f"one of {', '.join(saved) or 'none'}",
                    remedy="name it as in save(state=...), omit it, or pass strict=False",
                    topic="checkpoint-does-not-fit",
                )
        if self.request.rng:
            setters[RNG] = Generators().load_state_dict
        for key in saved:
            if key in setters:
                self._set(key, setters[key])
            elif key == RNG or key.startswith(MODEL):
                continue  # not asked for; or extra state of a module that this model does not have
            elif key in self.common:
                self.plain[key] = from_json(self.common[key], self.reader.files.read, key)
            else:
                self.of_ranks[key] = [self._of(rank, key) for rank in range(len(self.ranks_values))]
                if len(self.ranks_values) == self.ranks.size:
                    self.plain[key] = self.of_ranks[key][self.ranks.rank]

    def _of(self, rank: int, key: str) -> Any:
        """The value that a rank saved under a name."""
        return from_json(self.ranks_values[rank].get(key), partial(self.reader.files.read_of_rank, rank), key)

    def _set(self, key: str, setter: Callable[[Any], object]) -> None:
        """Plan to pass a state to its object."""
        if key in self.common:
            present: dict[str, torch.Tensor] = {}  # in the object's state now
            if key in self.request.state:
                to_json(self.request.state[key].state_dict(), f"{STATE}{key}", present)
            state = from_json(self.common[key], partial(self._tensor, present), key)
        elif len(self.ranks_values) == self.ranks.size:
            state = self._of(self.ranks.rank, key)
        elif key == RNG:
            if self.ranks.is_first:
                warnings.warn(
                    message(
                        "The random generators were left unchanged: the checkpoint has a state for each saving rank.",
                        expected=f"{len(self.ranks_values)} ranks",
                        got=self.ranks.size,
                        remedy="seed them, or pass rng=False",
                    ),
                    stacklevel=9,
                )
            return
        else:
            state = [self._of(rank, key) for rank in range(len(self.ranks_values))]
            set_all = getattr(self.request.state.get(key), "load_state_dicts", None)
            if set_all is None:
                raise CheckpointError(
                    "A state differed between the ranks that saved it, and the number of ranks has changed; nothing "
                    "was loaded.",
                    parameter=key,
                    expected=f"{len(self.ranks_values)} ranks",
                    got=self.ranks.size,
                    remedy="give the object a method load_state_dicts(states), which takes the states of all ranks; or "
                    "omit it, and use Loaded.of_ranks. Extra state of modules must be the same on all ranks",
                )
            setter = set_all
        if key == RNG:
            _check_generators(state)
        self.reader.objects.append((setter, state))

    def _tensor(self, present: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Read a tensor of a value; plan to read it in shards if it is sharded in `present`."""
        like = present.get(name)
        missing = name not in self.reader.files.entries  # `Files.read` raises
        if like is None or missing or not hasattr(like, "full_tensor"):
            return self.reader.files.read(name)
        target = torch.empty_like(like.detach())
        for piece in value_pieces(name, target, 0, False):
            self.reader.want(piece)
        self.reader.asks([name])
        return target


def _check_generators(state: Any) -> None:
    """Check that the random generators would take a state."""
    try:
        Generators().check(state)
    except Exception as error:  # generators raise anything for an invalid state
        raise DamagedCheckpointError(
            "The saved state of the random generators is invalid; nothing was loaded.",
            got=f"{type(error).__name__}: {error}",
            remedy="pass rng=False to leave them unchanged",
        ) from error
