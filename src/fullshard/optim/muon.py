"""Muon for sharded matrices: momentum on shards, orthogonalization of whole matrices on their owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, MissingStateError
from ..forms import NAME_KEY, PART_KEY
from ..mesh import Axis, device_of
from ..torch_private.local_tensor import inside
from .owners import (
    Cut,
    Finish,
    OtherCut,
    Owner,
    Owners,
    Ownership,
    RowsCut,
    agree,
    axes_of,
    balanced_owners,
    batches_of,
    check_gradient,
    cut_of,
    elements_at_once,
    in_turns,
    keep,
    ownership,
    piece_of,
    places_of,
    refuse_duplicates,
    token_of,
)
from .replicas import spread

Matrix = tuple[torch.Tensor, dict[str, Any]]
"""A parameter to step, and its group."""


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for parameters of `fully_shard` in any layout, and for plain parameters.

        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]  # not the embedding, not the head
        muon = fullshard.Muon(matrices, lr=0.02)
        others = [p for p in model.parameters() if p not in {*matrices}]
        adamw = torch.optim.AdamW(others)

    The momentum is sharded, so its checkpoints load on any number of ranks. In each step, every matrix is assembled on
    one rank, its owner, which orthogonalizes it; owners are balanced over all matrices. A rank sends its pieces to the
    owners and receives the results, both in bfloat16 and without padding: 4 bytes per element of its shards. That
    happens in batches of 16 MiB for each owner, of which the exchanges run while another is orthogonalized. On a mesh
    (replicate, shard) owners are the ranks of both axes: of R replicas, each assembles only the matrices that its ranks
    own, and sends the results, as shards, to the others, 2 (R - 1) / R bytes per element. `DTensor`s that are split
    over two mesh axes (tensor parallelism) are gathered on all ranks instead. Steps are collective: ranks must have
    gradients for the same parameters.

    Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Learning rates: as there, or as in Liu et al.
    2025, "Muon is Scalable for LLM Training" (arXiv:2502.16982), section 2.2.

    Args:
        params: matrices, or parameter groups of them; a group may have its own `split`.
        lr, weight_decay: decoupled, as in AdamW.
        momentum, nesterov: momentum of the gradients.
        ns_coefficients, ns_steps, eps: of the Newton-Schulz iteration; `eps` is the smallest norm it divides by.
        adjust_lr_fn: "original" (None) multiplies the learning rate of an m x n matrix by sqrt(max(1, m / n));
            "match_rms_adamw" by 0.2 sqrt(max(m, n)).
        split: how to split a matrix by rows into parts that are orthogonalized and scaled separately: the number of
            rows of every part (one attention head), or a list with the rows of each part (queries, keys and values in
            one matrix); None: not split.

    Raises:
        ConfigError: a setting is out of range, a parameter is not a matrix, or `split` does not fit its rows.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        split: int | Sequence[int] | None = None,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps, "ns_steps": ns_steps}
        defaults = {**numbers, "nesterov": nesterov, "ns_coefficients": ns_coefficients}
        super().__init__(params, {**defaults, "adjust_lr_fn": adjust_lr_fn, "split": split})
        self._owners: dict[Any, dict[Any, _Owned]] = {}  # by process groups, then by ids of the stepped parameters
        self._axes: dict[int, tuple[Axis, Axis | None] | None] = {}  # see `axes_of`, by id of the parameter
        self._places: dict[int, tuple[int, int]] = {}  # see `places_of`

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like `torch.optim.Optimizer.add_param_group`; checks the settings and the parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(group)
            refuse_duplicates(group["params"], "Muon")
            names = group.get("param_names") or [None] * len(group["params"])
            for parameter, name in zip(group["params"], names, strict=True):
                _check_matrix(parameter, name)
                _part_rows(parameter, group["split"])
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective among the ranks of each mesh.

        Returns:
            The result of `closure`, which is called first, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped: list[Matrix] = []
        for group in self.param_groups:  # checked again before anything changes: programs and loads change settings
            _check_settings(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    check_gradient(parameter, parameter.grad)
                    _part_rows(parameter, group.get("split"))
                    stepped.append((parameter, group))
        if any(id(parameter) not in self._places for parameter, _ in stepped):
            self._places = places_of(parameter for group in self.param_groups for parameter in group["params"])
        stepped.sort(key=lambda each: self._places.get(id(each[0]), (-1, 0)))  # parameters in no unit keep their order
        self._update(stepped)
        return loss

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum and return this rank's piece of the matrix to orthogonalize, in bfloat16."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer, piece = inside(state["momentum_buffer"]), inside(gradient)
        buffer.lerp_(piece, 1 - group["momentum"])
        return (piece.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer).bfloat16()

    def _update(self, stepped: Sequence[Matrix]) -> None:
        """Update the momentum of these matrices, orthogonalize it, and update the matrices."""
        by_ranks, alone = self._by_ranks([parameter for parameter, _ in stepped])
        for index, cut in alone:
            parameter, group = stepped[index]
            piece, is_split = self._momentum(parameter, group), isinstance(cut, OtherCut)
            _apply(
                parameter,
                group,
                _orthogonalized_everywhere(parameter, group, piece)
                if is_split
                else _orthogonalized([piece], [group])[0],
            )
        for (ranks, replicas), (axis, indices, cuts) in by_ranks.items():
            matrices = [stepped[index] for index in indices]
            parameters = [parameter for parameter, _ in matrices]
            key = tuple(map(id, parameters))
            of_ranks = self._owners.setdefault((ranks, replicas), {})
            owned = of_ranks.get(key)
            known = owned is not None and owned.cuts == cuts
            if owned is None or not known:
                owned = _Owned(cuts, axis, token_of(parameters, ""))
                keep(of_ranks, key, owned)
            groups = list({id(group): group for _, group in matrices}.values())
            agree(owned.token, parameters, ranks, replicas, "", known, groups)
            is_alone = cuts[0].world == 1 and axis is None
            home = inside(matrices[0][0]).device if is_alone else device_of(ranks)
            self._step_batches(owned.batches, matrices, axis, home)

    def _step_batches(
        self, batches: Sequence[_MatrixBatch], matrices: Sequence[Matrix], axis: Axis | None, home: torch.device
    ) -> None:
        """Update the momentum of matrices that the same ranks share, orthogonalize it on its owners, and update them.

        Args:
            batches: of the matrices.
            axis: the replicate axis; None if there are no replicas.
            home: the device of the exchanges.
        """
        wholes: dict[_MatrixBatch, list[torch.Tensor]] = {}  # matrices that this rank owns, while their batch is whole

        def gather(batch: _MatrixBatch, ahead: bool) -> Finish:
            """Update the momentum, and start to send it to the owners."""
            pieces = [self._momentum(*matrices[index]).to(home) for index in batch.indices]  # offloaded ones too
            arrive = batch.owners.gather([pieces[at] for at in batch.ours]) if batch.owners is not None else list

            def finish() -> None:
                wholes[batch] = arrive()

            return finish

        def orthogonalize(batch: _MatrixBatch) -> None:
            mine = batch.owners.mine if batch.owners is not None else []
            groups = [matrices[batch.indices[batch.ours[at]]][1] for at in mine]
            wholes[batch] = _orthogonalized(wholes.pop(batch), groups)

        def scatter(batch: _MatrixBatch) -> Finish:
            """Start to return the updates; then send them to other replicas, and update the parameters."""
            updates_here = wholes.pop(batch)
            arrive = batch.owners.scatter(updates_here, torch.bfloat16, home) if batch.owners is not None else list

            def finish() -> None:
                ours = dict(zip(batch.ours, arrive(), strict=True))
                of_batch = [matrices[index] for index in batch.indices]
                sizes = [inside(parameter).numel() for parameter, _ in of_batch]
                updates = [
                    ours[at] if at in ours else torch.empty(size, dtype=torch.bfloat16, device=home)
                    for at, size in enumerate(sizes)
                ]
                if axis is not None:
                    by_replica: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
                    for replica, update in zip(batch.replicas, updates, strict=True):
                        by_replica[replica].append(update)
                    spread(axis, by_replica)
                for (parameter, group), update in zip(of_batch, updates, strict=True):
                    _apply(parameter, group, update)

            return finish

        in_turns(batches, gather, orthogonalize, scatter)

    def _by_ranks(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[dict[Any, tuple[Axis | None, list[int], list[Cut]]], list[tuple[int, OtherCut | None]]]:
        """Which parameters share owners, by index: for the groups of both axes their replicate axis, indices and cuts.

        Also those that have none: whole here, or split in a way that owners do not support.
        """
        by_ranks: dict[Any, tuple[Axis | None, list[int], list[Cut]]] = {}
        alone: list[tuple[int, OtherCut | None]] = []
        for index, parameter in enumerate(parameters):
            cut = cut_of(parameter)
            if id(parameter) not in self._axes:
                self._axes[id(parameter)] = axes_of(parameter)
            axes = self._axes[id(parameter)]
            axis = axes[1] if axes is not None else None
            if cut is None and axes is not None and axis is not None:  # whole on every rank of the replicate axis
                cut = RowsCut(axes[0].group, parameter.shape, 0, 1, 0)
            if cut is None or isinstance(cut, OtherCut):
                alone.append((index, cut))
                continue
            _, indices, cuts = by_ranks.setdefault((cut.group, axis and axis.group), (axis, [], []))
            indices.append(index)
            cuts.append(cut)
        return by_ranks, alone

    def ownerships(self) -> list[Ownership]:
        """Which rank orthogonalizes which matrix, in a step in which all matrices have gradients. No communication."""
        matrices = [parameter for group in self.param_groups for parameter in group["params"]]
        places = places_of(matrices)
        matrices.sort(key=lambda matrix: places.get(id(matrix), (-1, 0)))
        shared = []
        for axis, indices, cuts in self._by_ranks(matrices)[0].values():
            costs, owners = [_cost(cut.shape) for cut in cuts], _Owned(cuts, axis).places
            of_ranks = [matrices[index] for index in indices]
            shared.append(ownership(of_ranks, cuts[0], axis, owners, costs, "multiplications"))
        return shared

    def __getstate__(self) -> dict[str, Any]:
        # These refer to process groups and ids:
        return {**super().__getstate__(), "_owners": {}, "_places": {}, "_axes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check that the state is Muon's; `load_state_dict` calls this once its hooks have run.

        Raises:
            MissingStateError: a parameter's state has no momentum, or a group lacks settings; nothing was changed.
        """
        _check_state(state["param_groups"], state["state"])
        super().__setstate__(state)


class _Owned:
    """The owners of matrices that the ranks of one mesh share.

    Args:
        cuts: how each matrix is sharded.
        axis: the replicate axis; None if there are no replicas.
        token: see `token_of`.

    Attributes:
        cuts, token: see above.
        places: the owner of each matrix.
        batches: the matrices that are whole at a time.
    """

    def __init__(self, cuts: Sequence[Cut], axis: Axis | None, token: int = 0) -> None:
        self.cuts, self.token = cuts, token
        self.places = balanced_owners([_cost(cut.shape) for cut in cuts], cuts[0], axis)
        numbers = batches_of([cut.shape.numel() * torch.bfloat16.itemsize for cut in cuts], self.places)
        self.batches = [
            _MatrixBatch(cuts, self.places, [index for index, of in enumerate(numbers) if of == number], axis)
            for number in range(max(numbers) + 1)
        ]


class _MatrixBatch:
    """Matrices that are whole at the same time.

    Attributes:
        indices: of the matrices.
        replicas: of each matrix, the replica that its owner is in.
        ours: positions in `indices` of those that an owner in this replica has.
        owners: in this replica, of these matrices; None if there are none.
    """

    def __init__(self, cuts: Sequence[Cut], places: Sequence[Owner], indices: Sequence[int], axis: Axis | None) -> None:
        self.indices, own_replica = indices, axis.rank if axis is not None else 0
        self.replicas = [places[index][0] for index in indices]
        self.ours = [at for at, replica in enumerate(self.replicas) if replica == own_replica]
        ours = [indices[at] for at in self.ours]
        self.owners = Owners([cuts[index] for index in ours], [places[index][1] for index in ours]) if ours else None


def _check_matrix(parameter: torch.Tensor, name: str | None) -> None:
    """Refuse a parameter that is not a whole or sharded matrix of real numbers."""
    if parameter.ndim != 2 or PART_KEY in parameter.__dict__ or not parameter.is_floating_point():
        raise ConfigError(
            "Muon: a parameter is not a matrix of real numbers.",
            parameter=name or parameter.__dict__.get(NAME_KEY, "?"),
            expected="two dims and a floating-point dtype",
            got=f"shape {tuple(parameter.shape)}, {parameter.dtype}",
            remedy="use AdamW, for example, for this parameter. FullyShardedDataParallel and optimizer_view flatten "
            "matrices: use fully_shard and model.parameters()",
        )


def _check_settings(group: dict[str, Any]) -> None:
    """Refuse settings of a group that are out of range."""
    expected_by_name: dict[str, str] = {}  # only settings that are out of range
    for name in ("lr", "weight_decay", "momentum", "eps"):
        value = group[name]
        single = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
        if not (single and value >= 0):
            expected_by_name[name] = "a number of at least 0"
    if not (isinstance(group["ns_steps"], int) and 0 <= group["ns_steps"] < 100):
        expected_by_name["ns_steps"] = "an integer from 0 to 99"
    coefficients = group["ns_coefficients"]
    is_triple = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    if not (is_triple and all(isinstance(number, (int, float)) for number in coefficients)):
        expected_by_name["ns_coefficients"] = "three numbers"
    if not isinstance(group["nesterov"], bool):
        expected_by_name["nesterov"] = "True or False"
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        expected_by_name["adjust_lr_fn"] = '"original", "match_rms_adamw" or None'
    for name, expected in expected_by_name.items():
        raise ConfigError(
            f"Muon: {name} is out of range.",
            expected=expected,
            got=repr(group[name]),
            remedy="omit it for the default, or see torch.optim.Muon, which has the same settings",
        )


_SETTINGS = ("lr", "weight_decay", "momentum", "eps", "ns_steps", "ns_coefficients", "nesterov", "adjust_lr_fn")
"""The settings without which no step is possible: torch's Muon has no `split`."""


def _check_state(groups: Sequence[dict[str, Any]], states: Mapping[Any, dict[str, Any]]) -> None:
    """Refuse state that a different optimizer saved."""
    remedy = "load the state of a Muon, fullshard's or torch's; or load none: the momentum then starts at zero"
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            state = states.get(parameter)
            if state and "momentum_buffer" not in state:
                raise MissingStateError(
                    "Muon: the state to load has no momentum of a parameter; nothing was loaded.",
                    parameter=parameter.__dict__.get(NAME_KEY, f"number {index} of group {number}"),
                    expected="momentum_buffer",
                    got=", ".join(map(str, state)),
                    remedy=remedy,
                    topic="optimizer-state",
                )
        if missing := [name for name in _SETTINGS if name not in group]:
            raise MissingStateError(
                f"Muon: the state to load lacks settings of optimizer group {number}; nothing was loaded.",
                expected=", ".join(_SETTINGS),
                got=f"none of {', '.join(missing)}",
                remedy=remedy,
                topic="optimizer-state",
            )


def _cost(shape: Sequence[int]) -> int:
    """Multiplications of a Newton-Schulz step: for m <= n, of m x n with its transpose, m x m and again m x n."""
    small, large = sorted(shape)
    return 2 * small * small * large + small**3


def _part_rows(parameter: torch.Tensor, split: Any) -> list[int]:
    """The number of rows of each part of a matrix."""
    rows = parameter.shape[0]
    if split is None:
        return [rows]
    parts = [split] * (rows // split) if type(split) is int and split > 0 else split
    if not isinstance(parts, (list, tuple)) or sum(parts) != rows or min(parts) < 1:
        raise ConfigError(
            "Muon: split does not fit a matrix.",
            parameter=parameter.__dict__.get(NAME_KEY, "?"),
            expected=f"rows that add up to {rows}",
            got=f"split={split!r}",
            remedy="pass the rows of each part, the rows of one head, or None for the whole matrix",
        )
    return list(parts)


def _orthogonalized(wholes: list[torch.Tensor], groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """The updates of whole bfloat16 matrices without their learning rates; parts are scaled by their own adjustments.

    Args:
        wholes: the matrices. The list is emptied, so that each is freed once it is orthogonalized.
        groups: of each matrix.
    """
    # .get: state of torch's Muon, which has no split, can be loaded
    parts = [[*m.split(_part_rows(m, g.get("split")))] for m, g in zip(wholes, groups, strict=True)]
    shapes = [whole.shape for whole in wholes]
    wholes.clear()
    alike: dict[Any, list[tuple[int, int]]] = {}
    for index, group in enumerate(groups):
        iteration = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
        for number, part in enumerate(parts[index]):
            alike.setdefault((part.shape, part.device, iteration), []).append((index, number))
    for (shape, _, iteration), places in alike.items():
        most = max(elements_at_once() // max(shape.numel(), 1), 1)
        for some in (places[at : at + most] for at in range(0, len(places), most)):
            stack = [parts[index][number] for index, number in some]
            updates = newton_schulz(torch.stack(stack), *iteration) if most > 1 else [newton_schulz(*stack, *iteration)]
            for (index, number), update in zip(some, updates, strict=True):
                parts[index][number] = update
    return [_joined(*each) for each in zip(parts, shapes, groups, strict=True)]


def _joined(parts: Sequence[torch.Tensor], shape: torch.Size, group: dict[str, Any]) -> torch.Tensor:
    """The update of a matrix of `shape` from the updates of its parts."""
    if len(parts) == 1:
        return parts[0]
    factor = _lr_factor(shape, group)
    return torch.cat([part * (_lr_factor(part.shape, group) / factor) for part in parts])


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """A matrix with the singular vectors of a bfloat16 `matrix` and singular values near 1.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X of Frobenius norm 1 (Jordan et al. 2024, "Newton-Schulz iteration").

    Args:
        matrix: `[m, n]`, or `[batch, m, n]` for several.
    """
    a, b, c = coefficients
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        squared = x @ x.mT
        x = add_product(x, add_product(squared, squared, squared, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _lr_factor(shape: Sequence[int], group: dict[str, Any]) -> float:
    """The factor by which `adjust_lr_fn` changes the learning rate."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _apply(parameter: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
    """Decay the weights, and add this rank's piece of the update."""
    local, lr = inside(parameter).detach(), group["lr"]
    local.mul_(1 - lr * group["weight_decay"])
    local.add_(update.view(local.shape).to(local.device), alpha=-float(lr) * _lr_factor(parameter.shape, group))
    increment_version(parameter)


def _orthogonalized_everywhere(parameter: Any, group: dict[str, Any], piece: torch.Tensor) -> torch.Tensor:
    """This rank's piece of the update of a `DTensor` in any placements. All ranks gather and orthogonalize it."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = DTensor.from_local(
        piece, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return piece_of(parameter, _orthogonalized([sharded.full_tensor()], [group])[0])
