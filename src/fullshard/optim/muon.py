"""Muon for sharded matrices: momentum on shards, orthogonalization of whole matrices on their owners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, ConfigError, MissingStateError, invalid_argument
from ..forms import NAME_KEY, PART_KEY
from ..mesh import device_of
from ..torch_private.local_tensor import inside
from .on_owners import Entry, OnOwners, Param, ParamBatch, to_replicas
from .owners import Finish, elements_at_once, in_turns, piece_of


class Muon(OnOwners[Param]):
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

    _balanced = "multiplications"

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

    def _check_parameter(self, group: dict[str, Any], parameter: torch.Tensor, name: str | None) -> None:
        _check_settings(group)
        if parameter.ndim != 2 or PART_KEY in parameter.__dict__ or not parameter.is_floating_point():
            raise ConfigError(
                "Muon: a parameter is not a matrix of real numbers.",
                parameter=name or parameter.__dict__.get(NAME_KEY, "?"),
                expected="two dims and a floating-point dtype",
                got=f"shape {tuple(parameter.shape)}, {parameter.dtype}",
                remedy="use AdamW, for example, for this parameter. FullyShardedDataParallel and optimizer_view "
                "flatten matrices: use fully_shard and model.parameters()",
            )
        _part_rows(parameter, group["split"])

    def _new_param(self, parameter: torch.Tensor) -> Param:
        return Param(parameter)

    def _cost(self, param: Param) -> int:
        """Multiplications of a Newton-Schulz step: for m <= n, of m x n with its transpose, m x m and again m x n."""
        small, large = sorted(param.tensor.shape)
        return 2 * small * small * large + small**3

    def _nbytes(self, param: Param) -> int:
        return param.tensor.numel() * torch.bfloat16.itemsize

    def _entries(self, params: Sequence[Param]) -> list[list[Entry[Param]]]:
        return [[(param, "momentum", torch.bfloat16) for param in params]]

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum and return this rank's piece of the matrix to orthogonalize, in bfloat16."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer, piece = inside(state["momentum_buffer"]), inside(gradient)
        buffer.lerp_(piece, 1 - group["momentum"])
        return (piece.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer).bfloat16()

    def _step(self, params: list[Param]) -> None:
        """Update the momentum of these matrices, orthogonalize it on their owners, and update the matrices."""
        groups = {self._param(parameter): group for group in self.param_groups for parameter in group["params"]}
        for group in self.param_groups:  # checked again before anything changes: programs and loads change settings
            _check_settings(group)
        for param in params:
            _part_rows(param.tensor, groups[param].get("split"))
        wholes: dict[Param, torch.Tensor] = {}  # matrices, then their updates, that this rank has of a batch

        def gather(batch: ParamBatch[Param], ahead: bool) -> Finish:
            """Update the momentum, and start to send it to the owners."""
            pieces = {param: self._momentum(param.tensor, groups[param]).to(_home(param)) for param in batch.params}
            arriving = [
                ([entries[at][0] for at in owners.mine], owners.gather([pieces[param] for param, *_ in entries]))
                for owners, _, entries in batch.gathers
            ]
            here = {param: pieces[param] for param in batch.params if param.cut is None and param.in_replica}

            def finish() -> None:
                for param in [*here]:
                    piece = here.pop(param)
                    wholes[param] = _assembled(param.tensor, piece) if param.is_gathered else piece
                for mine, arrive in arriving:
                    wholes.update(zip(mine, arrive(), strict=True))

            return finish

        def orthogonalize(batch: ParamBatch[Param]) -> None:
            mine = [*wholes]
            matrices = [wholes.pop(param) for param in mine]
            wholes.update(zip(mine, _orthogonalized(matrices, [groups[param] for param in mine]), strict=True))

        def scatter(batch: ParamBatch[Param]) -> Finish:
            """Start to return the updates; then send them to other replicas, and update the parameters."""
            leaving = []
            for owners, home, entries in batch.scatters:
                ours = [wholes.pop(entries[at][0]) for at in owners.mine]
                leaving.append(([param for param, *_ in entries], owners.scatter(ours, torch.bfloat16, home)))
            updates = {p: piece_of(p.tensor, whole) if p.is_gathered else whole for p, whole in wholes.items()}
            wholes.clear()

            def finish() -> None:
                for exchanged, arrive in leaving:
                    updates.update(zip(exchanged, arrive(), strict=True))
                for param in batch.params:
                    if param not in updates:  # another replica's
                        updates[param] = torch.empty(param.local.numel(), dtype=torch.bfloat16, device=_home(param))
                to_replicas(((param, updates[param]) for param in batch.params), by_unit=False)
                for param in batch.params:
                    _apply(param.tensor, groups[param], updates.pop(param))

            return finish

        in_turns(self._agreed(params), gather, orthogonalize, scatter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check that the state is Muon's; `load_state_dict` calls this once its hooks have run.

        Raises:
            MissingStateError: a parameter's state has no momentum, or a group lacks settings; nothing was changed.
            CheckpointError: a momentum is not split like its parameter; nothing was changed.
        """
        _check_state(state["param_groups"], state["state"])
        super().__setstate__(state)


def _home(param: Param) -> torch.device:
    """Where a matrix is orthogonalized: offloaded ones on their group's device, too."""
    return param.device if param.replicas is None else device_of(param.replicas.group)


def _assembled(parameter: Any, piece: torch.Tensor) -> torch.Tensor:
    """The whole matrix of which ranks have pieces like those of `parameter`, a `DTensor` in any placements."""
    sharded = DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded.full_tensor()


def _check_settings(group: dict[str, Any]) -> None:
    """Refuse settings of a group that are out of range, or missing."""
    if missing := _missing(group):
        raise ConfigError(
            "Muon: an optimizer group lacks settings.",
            expected=", ".join(_SETTINGS),
            got=f"none of {', '.join(missing)}",
        )
    sizes, steps, coefficients = ("lr", "weight_decay", "momentum", "eps"), group["ns_steps"], group["ns_coefficients"]
    is_triple = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    checks = {
        **{name: (_is_size(group[name]), "a number of at least 0") for name in sizes},
        "ns_steps": (isinstance(steps, int) and 0 <= steps < 100, "an integer from 0 to 99"),
        "ns_coefficients": (is_triple and all(isinstance(c, (int, float)) for c in coefficients), "three numbers"),
        "nesterov": (isinstance(group["nesterov"], bool), "True or False"),
        "adjust_lr_fn": (
            group["adjust_lr_fn"] in (None, "original", "match_rms_adamw"),
            '"original", "match_rms_adamw" or None',
        ),
    }
    for name, (is_valid, expected) in checks.items():
        if not is_valid:
            remedy = "omit it for the default, or see torch.optim.Muon, which has the same settings"
            raise invalid_argument(f"Muon({name}=)", group[name], expected, remedy)


def _missing(group: Mapping[str, Any]) -> list[str]:
    return [name for name in _SETTINGS if name not in group]


def _is_size(value: Any) -> bool:
    single = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
    return single and bool(value >= 0)


_SETTINGS = ("lr", "weight_decay", "momentum", "eps", "ns_steps", "ns_coefficients", "nesterov", "adjust_lr_fn")
"""The settings without which no step is possible: torch's Muon has no `split`."""


def _check_state(groups: Sequence[dict[str, Any]], states: Mapping[Any, dict[str, Any]]) -> None:
    """Refuse state that a different optimizer saved."""
    remedy = "load the state of a Muon, fullshard's or torch's; or load none: the momentum then starts at zero"
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            state, name = states.get(parameter), parameter.__dict__.get(NAME_KEY, f"number {index} of group {number}")
            if not state:
                continue
            momentum = state.get("momentum_buffer")
            if not isinstance(momentum, torch.Tensor):
                raise MissingStateError(
                    "Muon: the state to load has no momentum of a parameter; nothing was loaded.",
                    parameter=name,
                    expected="momentum_buffer",
                    got=", ".join(map(str, state)),
                    remedy=remedy,
                    topic="optimizer-state",
                )
            if momentum.shape != parameter.shape or inside(momentum).shape != inside(parameter).shape:
                raise CheckpointError(
                    "Muon: the momentum to load is not split like its parameter; nothing was loaded.",
                    parameter=name,
                    expected=_shapes(parameter),
                    got=_shapes(momentum),
                    remedy="fullshard.load, or set_optimizer_state_dict of fullshard.state_dict, which split state",
                    topic="optimizer-state",
                )
        if missing := _missing(group):
            raise MissingStateError(
                f"Muon: the state to load lacks settings of optimizer group {number}; nothing was loaded.",
                expected=", ".join(_SETTINGS),
                got=f"none of {', '.join(missing)}",
                remedy=remedy,
                topic="optimizer-state",
            )


def _shapes(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, of which this rank has {tuple(inside(tensor).shape)}"


def _part_rows(parameter: torch.Tensor, split: Any) -> list[int]:
    """The number of rows of each part of a matrix."""
    rows = parameter.shape[0]
    if split is None:
        return [rows]
    parts = [split] * (rows // split) if type(split) is int and split > 0 else split
    is_list = isinstance(parts, (list, tuple)) and all(type(part) is int and part > 0 for part in parts)
    if not is_list or sum(parts) != rows:
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
