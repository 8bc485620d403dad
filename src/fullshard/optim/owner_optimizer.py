"""Run any optimizer so that one rank of all steps each parameter, or each element, and has its state: its owner."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..comm import objects_of_all
from ..containers import leaves_in
from ..errors import CheckpointError, ConfigError, message
from ..forms import NAME_KEY, PART_KEY, FlatShard, owner_of
from ..forms.run import Run
from ..mesh import Axis, device_of
from ..torch_private.fake_tensors import is_fake
from ..torch_private.local_tensor import inside
from ..torch_private.step_hooks import needs_closure
from .owners import (
    Cut,
    OtherCut,
    Owners,
    Ownership,
    axes_of,
    balanced,
    check_alike,
    check_gradient,
    cut_of,
    keep,
    ownership,
    ownership_of_elements,
    piece_of,
    places_of,
)
from .probe import treats_elements, treats_parameters
from .replicas import element_bounds, is_dense, like_order, run_of, spread

State = dict[str, Any]  # of one parameter, by key
Entry = tuple[torch.Tensor, str, torch.dtype]
"""A tensor to exchange: its parameter; "value", "gradient" or a key of the state; its dtype."""
Classes = dict[str, tuple[Any, ...]]
"""By key, how to rebuild a tensor subclass from its inner tensors: its class, context, size and stride."""


class OwnerOptimizer(torch.optim.Optimizer):
    """Run an optimizer that needs whole tensors (Shampoo, SOAP, Adafactor, LAMB, ...) on sharded parameters.

        optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)

    Each parameter is assembled on one rank, its owner, and `optimizer_class` steps it there, as in a single process.
    Owners are balanced by number of elements. In a step, owners receive the pieces of parameters and gradients and send
    back the new values, without padding: 12 bytes per float32 element of a rank's shards. During a step, a rank needs
    additional memory of three times its shards of parameters, and what `optimizer_class` needs.

    On a mesh (replicate, shard) owners are the ranks of both axes, so that no step is repeated and no state is held
    twice: a replica assembles only the parameters that its ranks own, and sends their new values, as shards, to the
    other replicas. With R replicas, the exchange within a replica is 1/R of the above, and 4 (R - 1) / R bytes for each
    float32 element of a rank's shards go over the replicate axis, in one collective per unit.

    With `elementwise=True`, nothing is assembled: of the elements of its shards, each rank steps the 1/R that its
    replica owns, and only the exchange between replicas remains. This is for element-wise optimizers (AdamW, SGD, Lion,
    ...) on meshes with replicas, and for parameters of any front-end and of `optimizer_view`. Results are the same, to
    the bit, as if each replica stepped all its elements.

        optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW, elementwise=True, lr=1e-3)

    `DTensor`s that are split over two mesh axes (tensor parallelism) are gathered and stepped on all ranks, unless
    `elementwise`.

    Between steps, `state` has each parameter's state on its owner. `state_dict()`, `fullshard.save` and similar
    functions show it sharded, like that of other optimizers, until the next step: a checkpoint loads on any number of
    ranks and, if keys match, into the same optimizer without owners. Replicas then hold the same state. State of any
    other shape than its parameter stays on the owner and the ranks in its place in other replicas.

    `add_param_group`, `step`, `state_dict`, `load_state_dict` and copying are collective: ranks must have gradients for
    the same parameters.

    Owners of whole parameters: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 5, stage 1, by parameter;
    with `elementwise`, as there, by elements.

    Args:
        params: parameters of `fully_shard` in any layout, or plain ones, or groups of them. With `elementwise`, also
            those of `FullyShardedDataParallel`, and views from `optimizer_view`.
        optimizer_class: the optimizer to run. It must step parameters independently, and only in `step()`.
        elementwise: whether to step elements where they are. `optimizer_class` must step each element independently;
            this is tried once on small tensors.
        settings: arguments of `optimizer_class`.

    Raises:
        ConfigError: `optimizer_class` cannot step parameters one by one, or elements if `elementwise`; a parameter is a
            flat run of elements (of FullyShardedDataParallel or `optimizer_view`) and `elementwise` is false; or a
            parameter's shard is a tensor subclass and `elementwise` is true.
    """

    _inner: torch.optim.Optimizer  # of `optimizer_class`, on `_wholes`; unset while __init__ adds the first groups

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        elementwise: bool = False,
        **settings: Any,
    ) -> None:
        _check_class(optimizer_class)
        if not isinstance(elementwise, bool):
            raise ConfigError(
                "OwnerOptimizer: elementwise is invalid.", expected="True or False", got=repr(elementwise)
            )
        self.elementwise = elementwise
        self.optimizer_class, self._arguments = optimizer_class, settings
        self._shared = False  # whether `state` is sharded
        # By id of the parameter:
        self._wholes: dict[int, nn.Parameter] = {}  # whole parameters, or runs, that the inner optimizer steps
        self._owner_of: dict[int, int] = {}  # the owner's rank on the shard axis, of parameters split along it
        self._replica_of: dict[int, int] = {}  # the owner's rank on the replicate axis, of parameters that have one
        self._bounds: dict[int, list[int]] = {}  # if elementwise: see `element_bounds`, of this rank's part
        self._ownerships: list[Ownership] = []  # see `ownerships`
        self._are_assigned = False  # whether `_assign_owners` has filled these four
        self._places: dict[int, tuple[Axis, Axis | None] | None] = {}  # see `_axes_of`
        self._cuts: dict[int, Cut | OtherCut | None] = {}
        self._classes: dict[int, Classes] = {}  # of the state of parameters that this rank owns
        self._plans: dict[Any, Any] = {}  # of exchanges, by what they exchange
        self._in_order: list[torch.Tensor] = []  # see `_parameters`
        self._knows_classes = False  # whether `_classes` is complete, the same on all ranks
        super().__init__(params, {})
        self._inner = optimizer_class(
            [{**_settings(group), "params": self._new_wholes(group)} for group in self.param_groups], **settings
        )
        self.defaults = self._inner.defaults
        if elementwise:
            self._check_elements()
        else:
            self._check_coupling(settings)
        for parameter in self._parameters():
            state = self._inner.state.get(self._wholes[id(parameter)])
            if state and any(isinstance(value, torch.Tensor) for value in leaves_in(state)):
                raise ConfigError(
                    f"OwnerOptimizer: {optimizer_class.__name__} creates state in its constructor.",
                    expected="an optimizer that creates its state in step()",
                    got=f"state {sorted(map(str, state))}",
                    remedy="if it is element-wise, like Adagrad, it needs no owners: build it from model.parameters()",
                    topic="optimizer-on-shards",
                )
            if state:
                self.state[parameter] = state
        self._copy_settings_back()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like `torch.optim.Optimizer.add_param_group`. Collective once the optimizer has stepped.

        Raises:
            ConfigError: see the class.
        """
        is_built = hasattr(self, "_inner")
        if is_built:
            self.share_state()
            self._are_assigned = False
            self._plans.clear()
        super().add_param_group(param_group)
        self._in_order = []
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if (error := self._why_not(parameter)) is not None:
                self.param_groups.pop()
                raise error
        if is_built:
            self._inner.add_param_group({**_settings(group), "params": self._new_wholes(group)})
            if self.elementwise:
                self._check_elements()
            self._copy_settings_back()

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
        inner = self._inner
        if self._shared:
            self._unshare_state()
        for inner_group, group in zip(inner.param_groups, self.param_groups, strict=True):
            wholes = inner_group["params"]
            inner_group.clear()
            inner_group.update({**_settings(group), "params": wholes})
        stepped = [parameter for parameter in self._parameters() if parameter.grad is not None]
        self._agree(stepped)
        try:
            self._gather(stepped)
            inner.step()
            for parameter in stepped:
                self._wholes[id(parameter)].grad = None  # before the pieces to return are allocated
            self._scatter(stepped)
        finally:
            for parameter in stepped:
                _empty(self._wholes[id(parameter)])
        for parameter in stepped:
            state = inner.state.get(self._wholes[id(parameter)])
            self.state[parameter] = {} if state is None else state
        self._copy_settings_back()
        self._knows_classes = True
        return loss

    @torch.no_grad()
    def share_state(self) -> None:
        """Shard the state in `state`, like that of other optimizers, until the next step. Collective.

        Raises:
            CheckpointError: the state has values other than tensors, numbers, and lists, tuples and dicts of them;
                raised on all ranks.
        """
        if self._shared:
            return
        self._assign_owners()
        flat: dict[int, Any] = {
            id(parameter): self._flat(parameter) if self._owns(parameter) else {} for parameter in self._parameters()
        }
        descriptions = self._descriptions(flat)
        shared = {
            id(parameter): {
                key: self._blank(parameter, flat[id(parameter)].get(key), kind, detail)
                for key, (kind, detail) in descriptions[id(parameter)].items()
            }
            for parameter in self._parameters()
        }
        elements = [
            (parameter, key, detail)
            for parameter in self._parameters()
            if id(parameter) in self._owner_of
            for key, (kind, detail) in descriptions[id(parameter)].items()
            if kind == "element"
        ]
        for owners, home, entries in self._exchanges(elements):
            wholes = [flat[id(entries[at][0])][entries[at][1]].detach() for at in owners.mine]
            targets = [inside(shared[id(parameter)][key]) for parameter, key, _ in entries]
            pieces = owners.scatter(wholes, [target.to(home) for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)
        tensors = []
        for parameter in self._parameters():
            for key, (kind, _) in descriptions[id(parameter)].items():
                if kind in ("element", "whole"):
                    target = inside(shared[id(parameter)][key])
                    if self.elementwise and self._owns(parameter):
                        self._run(parameter, target).copy_(flat[id(parameter)][key])
                    tensors.append((parameter, target))
        self._spread(tensors)
        self._inner.state.clear()
        self.state.clear()
        for parameter in self._parameters():
            if shared[id(parameter)]:
                self.state[parameter] = shared[id(parameter)]
        self._shared = True

    def state_dict(self) -> dict[str, Any]:
        """Like `torch.optim.Optimizer.state_dict`, with sharded state; see `share_state`. Collective."""
        self.share_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like `torch.optim.Optimizer.load_state_dict`, for sharded or whole state. Keeps its dtypes. Collective.

        Raises:
            CheckpointError: the state has tensor subclasses and this optimizer has not stepped yet; use
                `fullshard.load` instead.
        """
        if not self._knows_classes and any("<" in key for state in state_dict["state"].values() for key in state):
            raise CheckpointError(
                "Cannot load state with tensor subclasses into an optimizer that has not stepped yet.",
                remedy="use fullshard.load(folder, model, optimizer), or take a step before load_state_dict",
                topic="optimizer-state",
            )
        self.share_state()
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for parameter, key in zip(self._listed(), keys, strict=True):
            if key in state_dict["state"]:  # torch casts 8-bit state to the parameter's dtype
                self.state[parameter] = dict(state_dict["state"][key])
        self._inner.state.clear()
        self._shared = True

    def __getstate__(self) -> dict[str, Any]:
        self.share_state()
        return {
            **super().__getstate__(),
            "_copied": (
                self.optimizer_class,
                {"elementwise": self.elementwise, **self._arguments},
                [self._classes.get(id(parameter), {}) for parameter in self._listed()],
            ),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_copied" in state:
            optimizer_class, settings, classes = state.pop("_copied")
            self.__init__([dict(group) for group in state["param_groups"]], optimizer_class, **settings)  # type: ignore[misc]
            self._classes = dict(zip(map(id, self._listed()), classes, strict=True))
            state = {**state, "_shared": True, "_knows_classes": True}
        super().__setstate__(state)

    def _check_coupling(self, settings: Mapping[str, Any]) -> None:
        """Refuse an optimizer whose step of a parameter depends on others; warn if that cannot be determined."""
        name = self.optimizer_class.__name__
        verdict = treats_parameters(self.optimizer_class, settings, self.param_groups)
        if verdict is False:
            raise _not_one_by_one(
                f"{name}, whose step of a parameter depends on other parameters", "use another optimizer"
            )
        if verdict is None:
            warnings.warn(
                message(
                    f"OwnerOptimizer steps parameters one by one. It cannot determine whether {name} does, too.",
                    remedy="ignore this warning if the step of a parameter depends only on its own gradient and state, "
                    "and on random numbers",
                    topic="optimizer-on-shards",
                ),
                stacklevel=3,
            )

    def _check_elements(self) -> None:
        """Refuse an optimizer that does not step each element independently; warn if that cannot be determined."""
        name, verdict = self.optimizer_class.__name__, treats_elements(self._inner)
        if verdict is False:
            raise ConfigError(
                "OwnerOptimizer(elementwise=True) needs an optimizer that steps each element independently.",
                expected="an element-wise optimizer (SGD, Adam, AdamW, ...)",
                got=f"{name}, whose step of an element depends on other elements",
                remedy="omit elementwise=True: owners then step whole parameters",
                topic="optimizer-on-shards",
            )
        if verdict is None:
            warnings.warn(
                message(
                    f"OwnerOptimizer(elementwise=True) cannot determine whether {name} steps each element alone.",
                    remedy="ignore this warning if it does; else omit elementwise=True",
                    topic="optimizer-on-shards",
                ),
                stacklevel=4,
            )

    def _why_not(self, parameter: torch.Tensor) -> ConfigError | None:
        """The error for a parameter that this optimizer cannot step; None if it can."""
        local = inside(parameter.detach())
        is_plain = type(local) in (torch.Tensor, nn.Parameter) or is_fake(local)  # fake: of a planned step
        if self.elementwise and not (is_plain and is_dense(local)):
            what = "OwnerOptimizer(elementwise=True): a parameter's shard cannot be cut into runs of elements."
            expected, got = "a dense plain tensor", f"{type(local).__name__}, strides {local.stride()}"
            remedy = "step this parameter with an optimizer of its own, without OwnerOptimizer"
        elif not self.elementwise and PART_KEY in parameter.__dict__:
            what = "OwnerOptimizer: a parameter is a flat run of elements, which cannot be assembled on an owner."
            expected, got = "parameters of fully_shard", str(parameter.__dict__[PART_KEY])
            remedy = "shard the model with fully_shard, and pass model.parameters(); for an element-wise optimizer: "
            remedy += "elementwise=True"
        else:
            return None
        return ConfigError(
            what,
            parameter=parameter.__dict__.get(NAME_KEY, "?"),
            expected=expected,
            got=got,
            remedy=remedy,
            topic="optimizer-on-shards",
        )

    # Parameters and settings of the inner optimizer.

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters, in an order that ranks share, whatever the order in their groups."""
        if not self._in_order:
            parameters = self._listed()
            places = places_of(parameters)
            self._in_order = sorted(parameters, key=lambda parameter: places.get(id(parameter), (-1, 0)))
        return self._in_order

    def _listed(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _new_wholes(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        """Parameters for the inner optimizer, one per parameter of a group. They have values only in steps."""
        for parameter in group["params"]:
            local = inside(parameter.detach())
            shape = parameter.shape if not self.elementwise else (0,) if local.dim() else ()
            whole = nn.Parameter(local.new_zeros(()).expand(shape), parameter.requires_grad)
            self._wholes[id(parameter)] = whole
        return [self._wholes[id(parameter)] for parameter in group["params"]]

    def _copy_settings_back(self) -> None:
        """Copy the group settings of the inner optimizer, which may change in its steps."""
        for inner_group, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(_settings(inner_group))

    # Owners.

    def _axes_of(self, parameter: torch.Tensor) -> tuple[Axis, Axis | None] | None:
        """The shard axis of a parameter, and its replicate axis if that has several ranks; None if it is in no unit."""
        if id(parameter) not in self._places:
            self._places[id(parameter)] = axes_of(parameter)
        return self._places[id(parameter)]

    def _replicas(self, parameter: torch.Tensor) -> Axis | None:
        """The replicate axis along which a parameter has owners."""
        axes = self._axes_of(parameter)
        return None if axes is None or isinstance(self._cut(parameter), OtherCut) else axes[1]

    def _cut(self, parameter: torch.Tensor) -> Cut | OtherCut | None:
        """How a parameter is assembled. `OtherCut` for one in no unit, whose shard axis is unknown."""
        if self.elementwise:
            return None
        if id(parameter) not in self._cuts:
            cut = cut_of(parameter)
            self._cuts[id(parameter)] = OtherCut() if cut is not None and self._axes_of(parameter) is None else cut
        return self._cuts[id(parameter)]

    def _assign_owners(self) -> None:
        """Choose owners unless they are chosen: balance the elements of all parameters with the same ranks."""
        if self._are_assigned:
            return
        self._are_assigned = True
        self._owner_of, self._replica_of, self._bounds, self._ownerships = {}, {}, {}, []
        by_ranks: dict[Any, list[tuple[torch.Tensor, Any, Axis | None]]] = {}
        for parameter in self._parameters():
            cut, axis = self._cut(parameter), self._replicas(parameter)
            if self.elementwise:
                ranks: Any = owner_of(parameter), axis and axis.group, parameter.dtype
            elif isinstance(cut, OtherCut) or (cut is None and axis is None):
                continue
            else:
                ranks = cut and cut.group, axis and axis.group
            by_ranks.setdefault(ranks, []).append((parameter, cut, axis))
        for entries in by_ranks.values():
            _, cut, axis = entries[0]
            shards, replicas = cut.world if cut else 1, axis.size if axis else 1
            if self.elementwise:
                bounds = element_bounds([inside(parameter.detach()).numel() for parameter, *_ in entries], replicas)
                self._bounds |= {id(parameter): b for (parameter, *_), b in zip(entries, bounds, strict=True)}
                if axis is not None:
                    self._ownerships.append(ownership_of_elements([p for p, *_ in entries], bounds))
                continue
            numels = [parameter.numel() for parameter, *_ in entries]
            owners = balanced(numels, shards * replicas)
            of_ranks = [parameter for parameter, *_ in entries]
            self._ownerships.append(ownership(of_ranks, cut, axis, owners, numels, "elements"))
            for (parameter, cut, axis), owner in zip(entries, owners, strict=True):
                if cut is not None:
                    self._owner_of[id(parameter)] = owner // replicas
                if axis is not None:
                    self._replica_of[id(parameter)] = owner % replicas

    def ownerships(self) -> list[Ownership]:
        """Which rank steps which parameter, or how many elements if `elementwise`, by unit. No communication."""
        self._assign_owners()
        return self._ownerships

    def _agree(self, stepped: Sequence[torch.Tensor]) -> None:
        """Check that replicas are about to step the same parameters, once for each set of them. Collective then.

        If elementwise, ranks of a shard axis exchange nothing, and may have gradients of different parts.
        """
        self._assign_owners()
        key = "stepped", tuple([id(parameter) for parameter in stepped])
        if key in self._plans:
            return
        by_ranks: dict[tuple[Any, Any], list[torch.Tensor]] = {}
        chosen = {id(parameter) for parameter in stepped}
        for parameter in self._parameters():
            axes, axis = self._axes_of(parameter), self._replicas(parameter)
            if axes is not None and axis is not None:
                groups = (axis.group, None) if self.elementwise else (axes[0].group, axis.group)
                parameters = by_ranks.setdefault(groups, [])
                parameters += [parameter] if id(parameter) in chosen else []
        how = f", by {self.optimizer_class.__name__}{', elementwise' if self.elementwise else ''}"
        for (group, replicas), parameters in by_ranks.items():
            check_alike(parameters, group, replicas, how)
        keep(self._plans, key, [])

    def _in_replica(self, parameter: torch.Tensor) -> bool:
        """Whether a rank of this replica owns a parameter; if elementwise: elements of this rank's part."""
        axis = self._replicas(parameter)
        if axis is None:
            return True
        if not self.elementwise:
            return self._replica_of[id(parameter)] == axis.rank
        bounds = self._bounds[id(parameter)]
        return bounds[axis.rank] < bounds[axis.rank + 1] or (bounds[-1] == 0 and axis.rank == 0)

    def _run(self, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """If elementwise: the run that this rank owns in a tensor like its part of a parameter; shares memory."""
        if local.dim() == 0:
            return local
        axis, bounds = self._replicas(parameter), self._bounds[id(parameter)]
        replica = axis.rank if axis is not None else 0
        return run_of(local, bounds[replica], bounds[replica + 1])

    def _runs(self, parameter: torch.Tensor, local: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """What ranks of each replica own in a tensor like this rank's part of a parameter: replica, view."""
        if self.elementwise:
            bounds = enumerate(pairwise(self._bounds[id(parameter)]))
            return [(replica, run_of(local, start, stop)) for replica, (start, stop) in bounds if start < stop]
        return [(self._replica_of[id(parameter)], local)] if local.numel() else []

    def _spread(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy what each replica's ranks own to the other replicas: one collective per unit and dtype.

        Args:
            tensors: parameters, each with a tensor like this rank's part of it, or with one that only its owner has.
        """
        key = "spread", tuple([(id(parameter), tensor.dtype) for parameter, tensor in tensors])
        plan = self._plans.get(key)
        if plan is None:
            by_unit: dict[Any, tuple[Any, list[int]]] = {}
            for index, (parameter, tensor) in enumerate(tensors):
                if (axis := self._replicas(parameter)) is not None:
                    unit = owner_of(parameter), axis.group, tensor.dtype
                    by_unit.setdefault(unit, (axis, []))[1].append(index)
            plan = list(by_unit.values())
            keep(self._plans, key, plan)
        for axis, indices in plan:
            by_replica: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
            for index in indices:
                for replica, run in self._runs(*tensors[index]):
                    by_replica[replica].append(run)
            if any(by_replica):
                spread(axis, by_replica)

    def _exchanges(self, entries: Sequence[Entry]) -> Iterator[tuple[Owners, torch.device, list[Entry]]]:
        """The exchanges in this replica, of entries whose owner is in it: for each its owners, device and entries."""
        self._assign_owners()
        entries = [entry for entry in entries if self._in_replica(entry[0])]
        key = tuple([(id(parameter), kind, dtype) for parameter, kind, dtype in entries])
        plans = self._plans.get(key)
        if plans is None:
            by_kind: dict[Any, list[int]] = {}  # values and gradients separately, to save memory
            for index, (parameter, kind, dtype) in enumerate(entries):
                cut: Any = self._cut(parameter)
                by_kind.setdefault((cut.group, kind, dtype), []).append(index)
            plans = []
            for (group, *_), indices in by_kind.items():
                parameters = [entries[index][0] for index in indices]
                check_alike(parameters, group)
                cuts: list[Any] = [self._cut(parameter) for parameter in parameters]
                owners = Owners(cuts, [self._owner_of[id(parameter)] for parameter in parameters])
                plans.append((owners, device_of(group), indices))
            keep(self._plans, key, plans)
        for owners, home, indices in plans:
            yield owners, home, [entries[index] for index in indices]

    # The exchanges of a step.

    def _gather(self, stepped: Sequence[torch.Tensor]) -> None:
        """Fill the whole parameters that this rank owns with values and gradients. Collective."""
        owned = []
        for parameter in stepped:
            cut, gradient = self._cut(parameter), parameter.grad
            assert gradient is not None
            check_gradient(parameter, gradient)
            whole = self._wholes[id(parameter)]
            if not self._in_replica(parameter):
                continue
            if self.elementwise:
                local = inside(parameter.detach())
                whole.data = self._run(parameter, local)
                whole.grad = self._run(parameter, like_order(inside(gradient), local))
            elif cut is None:
                whole.data, whole.grad = inside(parameter.detach()), inside(gradient)
            elif isinstance(cut, OtherCut):
                full: Any = parameter.detach()
                whole.data, whole.grad = full.full_tensor().clone(), gradient.full_tensor()  # type: ignore[attr-defined]
            else:
                owned += [(parameter, "value", parameter.dtype), (parameter, "gradient", gradient.dtype)]
        for owners, home, entries in self._exchanges(owned):
            sources = [p.detach() if kind == "value" else p.grad for p, kind, _ in entries]
            wholes = owners.gather([inside(source).to(home) for source in sources])
            for at, value in zip(owners.mine, wholes, strict=True):
                parameter, kind, _ = entries[at]
                if kind == "value":
                    self._wholes[id(parameter)].data = value
                else:
                    self._wholes[id(parameter)].grad = value

    def _scatter(self, stepped: Sequence[torch.Tensor]) -> None:
        """Copy the new values from the owners into the shards of all replicas. Collective."""
        owned = []
        for parameter in stepped:
            cut, whole = self._cut(parameter), self._wholes[id(parameter)].detach()
            if not self._in_replica(parameter):
                continue
            if isinstance(cut, OtherCut):
                inside(parameter.detach()).copy_(piece_of(parameter, whole))
            elif cut is None:
                target = inside(parameter.detach())
                target = self._run(parameter, target) if self.elementwise else target
                if whole.data_ptr() != target.data_ptr():
                    target.copy_(whole)
            else:
                owned.append((parameter, "value", parameter.dtype))
        for owners, home, entries in self._exchanges(owned):
            targets = [inside(parameter.detach()) for parameter, *_ in entries]
            wholes = [self._wholes[id(entries[at][0])].detach() for at in owners.mine]
            for target, piece in zip(targets, owners.scatter(wholes, [t.to(home) for t in targets]), strict=True):
                target.copy_(piece)
        self._spread([(parameter, inside(parameter.detach())) for parameter in stepped])
        for parameter in stepped:
            increment_version(parameter)

    # State: whole on owners, or sharded.

    def _flat(self, parameter: torch.Tensor) -> State | Exception:
        """The flattened state of a parameter that this rank owns, or the error that prevents it."""
        state: State = {}
        try:
            for key, value in self._inner.state.get(self._wholes[id(parameter)], {}).items():
                _flatten(value, key, state, self._classes.setdefault(id(parameter), {}))
        except CheckpointError as error:
            return error
        shape = self._wholes[id(parameter)].shape
        for key, value in state.items() if self.elementwise else ():
            if isinstance(value, torch.Tensor) and value.dim() and (value.shape != shape or "<" in str(key)):
                return CheckpointError(
                    f"Optimizer state {key!r} does not have one value per element, so that it cannot be sharded.",
                    parameter=parameter.__dict__.get(NAME_KEY, "?"),
                    expected=f"a plain tensor of shape {tuple(shape)} or ()",
                    got=f"shape {tuple(value.shape)}",
                    remedy="save only the model, or build the optimizer without elementwise=True",
                    topic="optimizer-state",
                )
        return state

    def _descriptions(self, flat: Mapping[int, Any]) -> dict[int, dict[str, tuple[str, Any]]]:
        """Descriptions of all parameters' state from its owners: by id and key, see `_describe`. Collective."""
        parameters = self._parameters()
        descriptions: dict[int, Any] = {}  # by index in `_parameters`, which is the same on all ranks
        for number, parameter in enumerate(parameters):
            state = flat[id(parameter)]
            shape, failed = self._wholes[id(parameter)].shape, isinstance(state, Exception)
            descriptions[number] = state if failed else {key: _describe(shape, v) for key, v in state.items()}
        groups: dict[Any, list[int]] = {}
        for number, parameter in enumerate(parameters):
            if id(parameter) in self._owner_of:
                cut: Any = self._cut(parameter)
                groups.setdefault(cut.group, []).append(number)
        replicas: dict[Any, list[int]] = {}  # after the shard axis: ranks of one replica then have the same to tell
        for number, parameter in enumerate(parameters):
            if (axis := self._replicas(parameter)) is not None:
                replicas.setdefault(axis.group, []).append(number)
        for ranks, numbers in (*groups.items(), *replicas.items()):
            local = {number: descriptions[number] for number in numbers if descriptions[number]}
            for owned in objects_of_all(local, ranks, "optimizers' state"):
                descriptions |= owned
        for description in descriptions.values():
            if isinstance(description, Exception):
                raise description
        return {id(parameters[number]): description for number, description in descriptions.items()}

    def _blank(self, parameter: torch.Tensor, value: Any, kind: str, detail: Any) -> Any:
        """The sharded form of a state value. What another rank owns is filled later."""
        if kind == "value":
            return detail
        device = inside(parameter).device
        if kind == "number":
            number, on_cpu = detail
            return number if on_cpu else number.to(device)
        owner = self._owner_of.get(id(parameter))
        if kind == "element":
            is_whole = owner is None and not self.elementwise
            return _sharded_like(parameter, value if is_whole else None, detail)
        shape, dtype = detail  # a rank other than the owner has no value
        axes = self._axes_of(parameter)
        if owner is None or axes is None:
            return torch.empty(shape, dtype=dtype, device=device) if value is None else value
        name, numel = parameter.__dict__.get(NAME_KEY, "?"), torch.Size(shape).numel()
        empty = torch.empty(numel if axes[0].rank == owner else 0, dtype=dtype, device=device)
        local = empty if value is None else value.detach().reshape(-1)
        return FlatShard(local, Run(name, tuple(shape), tuple(range(len(shape))), owner * numel, numel, *axes))

    def _owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank steps a parameter; if elementwise: elements of it."""
        cut: Any = self._cut(parameter)
        is_rank = id(parameter) not in self._owner_of or bool(cut.rank == self._owner_of[id(parameter)])
        return is_rank and self._in_replica(parameter)

    def _is_split_like(self, parameter: torch.Tensor, value: Any) -> bool:
        """Whether a state value is sharded exactly like its parameter, which has an owner."""
        if id(parameter) not in self._owner_of or not isinstance(value, (DTensor, FlatShard)):
            return False
        same = isinstance(value, FlatShard) and isinstance(parameter, FlatShard) and value._run.same_as(parameter._run)
        return same or cut_of(value) == self._cut(parameter)

    def _whole_state(self, parameter: torch.Tensor, value: Any) -> Any:
        """A whole state value; None on other ranks if the owner has it, else gathered on all ranks. Collective."""
        if not isinstance(value, (DTensor, FlatShard)):
            return value
        is_plain = self._cut(parameter) is None
        on_owner = isinstance(value, FlatShard) and _only_rank(value._run) == self._owner_of.get(id(parameter), -1)
        if is_plain or on_owner or not value.numel():
            return inside(value).view(value.shape) if self._owns(parameter) else None
        return value.full_tensor()

    def _state_run(self, parameter: torch.Tensor, value: Any) -> Any:
        """If elementwise: this rank's run of a sharded or whole state value; a copy.

        Raises:
            CheckpointError: the value has the shape of neither the parameter nor this rank's part.
        """
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, FlatShard)):
            return value
        local, part = inside(parameter.detach()), inside(value)
        if part is value and isinstance(parameter, DTensor) and value.shape == parameter.shape:
            part = piece_of(parameter, value)
        elif part is value and isinstance(parameter, FlatShard) and value.shape == parameter.shape:
            part = parameter._run.cut(value)
        if part.numel() != local.numel():
            raise CheckpointError(
                "Optimizer state does not have one value per element, so that it cannot be stepped by elements.",
                parameter=parameter.__dict__.get(NAME_KEY, "?"),
                expected=f"shape {tuple(parameter.shape)}",
                got=f"shape {tuple(value.shape)}",
                remedy="load it into the optimizer that saved it",
                topic="optimizer-state",
            )
        return self._run(parameter, like_order(part, local)).clone()

    def _unshare_state(self) -> None:
        """Pass the sharded state, which may have been loaded, to the inner optimizers of the owners. Collective."""
        self._assign_owners()
        states: dict[int, State] = {}
        elements = []
        for parameter in self._parameters():
            state: State = self.state.get(parameter) or {}
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):  # ranks may list keys differently
                if self.elementwise:
                    if self._owns(parameter):
                        states.setdefault(id(parameter), {})[key] = self._state_run(parameter, value)
                    continue
                if self._is_split_like(parameter, value):
                    elements.append((parameter, key, value.dtype))
                    continue
                whole = self._whole_state(parameter, value)
                if self._owns(parameter):
                    states.setdefault(id(parameter), {})[key] = whole
        for owners, home, entries in self._exchanges(elements):
            wholes = owners.gather([inside(self.state[p][key]).to(home) for p, key, _ in entries])
            for at, whole in zip(owners.mine, wholes, strict=True):
                parameter, key, _ = entries[at]
                states.setdefault(id(parameter), {})[key] = whole
        for parameter in self._parameters():
            if self.state.get(parameter):
                state = _nested(states.get(id(parameter), {}), self._classes.get(id(parameter), {}))
                self.state[parameter] = state
                if state:
                    self._inner.state[self._wholes[id(parameter)]] = state
        self._shared = False


def _check_class(optimizer_class: Any) -> None:
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    got, remedy = None, "an element-wise optimizer needs no owners: build it from model.parameters()"
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        got, remedy = repr(optimizer_class), "OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)"
    elif hasattr(optimizer_class, "train") and hasattr(optimizer_class, "eval"):
        got = f"{name}, which also changes parameters in train() and eval()"
    elif needs_closure(optimizer_class):
        got, remedy = f"{name}, whose step() computes gradients", "use another optimizer"
    if got is not None:
        raise _not_one_by_one(got, remedy)


def _not_one_by_one(got: str, remedy: str) -> ConfigError:
    return ConfigError(
        "OwnerOptimizer needs an optimizer class that steps parameters one by one.",
        expected="a subclass of torch.optim.Optimizer",
        got=got,
        remedy=remedy,
        topic="optimizer-on-shards",
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _empty(whole: nn.Parameter) -> None:
    """Free a parameter's values and gradient, but keep its shape."""
    whole.grad = None
    whole.data = whole.new_zeros(()).expand(whole.shape)


def _only_rank(run: Run) -> int | None:
    """The only rank that holds elements of a tensor; None if several do."""
    ranks = [rank for rank in range(run.axis.size) if range(*run.bounds(rank))]
    return ranks[0] if len(ranks) == 1 else None


def _sharded_like(parameter: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A state tensor sharded like `parameter`, with this rank's piece of the whole `value`; zero without one."""
    sharded = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if value is not None:
        piece = value if cut_of(parameter) is None else piece_of(parameter, value)
        inside(sharded).copy_(piece.view(inside(sharded).shape))
    return sharded


def _describe(shape: torch.Size, value: Any) -> tuple[str, Any]:
    """The kind of a state value of a stepped tensor of `shape`, and what ranks without it need to show it."""
    if not isinstance(value, torch.Tensor):
        return "value", value
    if value.dim() == 0:
        return "number", (value.detach().cpu(), value.is_cpu)
    if value.shape == shape:
        return "element", value.dtype
    return "whole", (tuple(value.shape), value.dtype)


_STEP = re.compile(r"\[(\d*)\]|\((\d*)\)|\{([^}]*)\}|<(\w+)>")
"""One step into a nested value: `[index]` of a list, `(index)` of a tuple, `{key}` of a dict, `<name>` of a tensor
inside a tensor subclass. Empty brackets stand for an empty container."""


def _flatten(value: Any, key: Any, state: State, classes: Classes) -> None:
    """Add a value to `state`. Items of lists, tuples, dicts and tensor subclasses get their own keys."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        for index, item in enumerate(value):
            _flatten(item, f"{key}{left}{index}{right}", state, classes)
        if not value:
            state[f"{key}{left}{right}"] = 0
    elif type(value) is dict and all(type(name) in (str, int) and "}" not in str(name) for name in value):
        for name, item in value.items():
            _flatten(item, f"{key}{{{name!r}}}", state, classes)
        if not value:
            state[f"{key}{{}}"] = 0
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        classes[key] = type(value), context, value.size(), value.stride()
        for name in names:
            _flatten(getattr(value, name), f"{key}<{name}>", state, classes)
    elif type(key) is str and (value is None or type(value) in (torch.Tensor, nn.Parameter, bool, int, float, str)):
        state[key] = value
    else:
        raise CheckpointError(
            "The state of an optimizer cannot be saved in a checkpoint.",
            parameter=str(key),
            expected="tensors and numbers, in lists, tuples and dicts",
            got=type(value).__name__,
            remedy="this optimizer can train, but its state cannot be saved: save only the model",
            topic="optimizer-state",
        )


def _nested(flat: State, classes: Classes) -> State:
    """The inverse of `_flatten`, for keys in any order."""
    state: dict[Any, Any] = {}
    for key, value in flat.items():
        steps = list(_STEP.finditer(key))
        container, name = state, key[: steps[0].start()] if steps else key
        for step in steps:
            container = container.setdefault(name, _Container(step[0][0]))
            list_index, tuple_index, dict_key, attribute = step.groups()
            name = attribute or ast.literal_eval(list_index or tuple_index or dict_key or "None")
        if name is not None:  # None stands for an empty container
            container[name] = value
    return {key: _as_container(value, key, classes) for key, value in state.items()}


class _Container(dict[Any, Any]):
    """The items of a list, tuple, dict or tensor subclass by index or key; its kind is the opening `bracket`."""

    def __init__(self, bracket: str) -> None:
        super().__init__()
        self.bracket = bracket


def _as_container(value: Any, key: str, classes: Classes) -> Any:
    if not isinstance(value, _Container):
        return value
    if value.bracket == "{":
        return {name: _as_container(item, f"{key}{{{name!r}}}", classes) for name, item in value.items()}
    if value.bracket == "<":
        tensor_class, context, size, stride = classes[key]
        inner = {name: _as_container(item, f"{key}<{name}>", classes) for name, item in value.items()}
        return tensor_class.__tensor_unflatten__(inner, context, size, stride)
    left, right = "[]" if value.bracket == "[" else "()"
    items = [_as_container(value[index], f"{key}{left}{index}{right}", classes) for index in sorted(value)]
    return items if left == "[" else tuple(items)
