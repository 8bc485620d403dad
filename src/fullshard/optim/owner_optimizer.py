"""Run any optimizer so that a single rank, the owner, steps each parameter or element and holds its state."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from ..forms.flat_shard import Run
from ..mesh import Axis, device_of
from ..optimizers import group_settings
from ..torch_private.fake_tensors import is_fake
from ..torch_private.local_tensor import inside
from ..torch_private.step_hooks import needs_closure, step_part
from .owners import (
    Finish,
    OtherCut,
    Owners,
    Ownership,
    agree,
    axes_of,
    balanced_owners,
    batches_of,
    check_alike,
    check_gradient,
    cut_of,
    fits_a_batch,
    in_turns,
    keep,
    ownership,
    ownership_of_elements,
    piece_of,
    places_of,
    refuse_duplicates,
    token_of,
)
from .probe import steps_in_parts, treats_elements, treats_parameters
from .replicas import element_bounds, is_dense, like_order, run_of, spread

State = dict[str, Any]  # of one parameter, by key
Classes = dict[str, tuple[Any, ...]]
"""By key, how to rebuild a tensor subclass from its inner tensors: its class, context, size and stride."""


@dataclass(eq=False)
class _Param:
    """A parameter, and who steps it.

    Attributes:
        tensor: the parameter.
        elementwise: whether elements are stepped where they are.
        whole: the whole parameter, or the run of elements, that the inner optimizer steps. Has values only in steps.
        owner: the owner's rank on the shard axis; None if the parameter is not split along it.
        replica: the owner's rank on the replicate axis; None if there is no such axis, or if elementwise.
        bounds: if elementwise: see `element_bounds`, of this rank's part.
        classes: of the state, if this rank owns it.
    """

    tensor: torch.Tensor
    elementwise: bool
    whole: nn.Parameter = field(init=False)
    owner: int | None = None
    replica: int | None = None
    bounds: Sequence[int] = ()
    classes: Classes = field(default_factory=dict)

    @cached_property
    def axes(self) -> tuple[Axis, Axis | None] | None:
        """The shard axis, and the replicate axis if that has several ranks; None if the parameter is in no unit."""
        return axes_of(self.tensor)

    @cached_property
    def is_gathered(self) -> bool:
        """Whether all ranks gather and step it: it is split over two mesh axes, or in no unit (its axis is unknown)."""
        cut = None if self.elementwise else cut_of(self.tensor)
        return isinstance(cut, OtherCut) or (cut is not None and self.axes is None)

    @cached_property
    def cut(self) -> Any:
        """The layout of the pieces that its owner assembles; None if it is whole, elementwise or gathered."""
        return None if self.elementwise or self.is_gathered else cut_of(self.tensor)

    @property
    def device(self) -> torch.device:
        """The device on which it is stepped; parameters in host memory are assembled on their group's device."""
        return self.local.device if self.cut is None else device_of(self.cut.group)

    @property
    def replicas(self) -> Axis | None:
        """The replicate axis along which the parameter has owners."""
        return None if self.axes is None or self.is_gathered else self.axes[1]

    @property
    def name(self) -> str:
        """The parameter's name, for errors."""
        return str(self.tensor.__dict__.get(NAME_KEY, "?"))

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter; shares memory."""
        return inside(self.tensor).detach()

    @property
    def in_replica(self) -> bool:
        """Whether a rank of this replica owns the parameter; if elementwise: elements of this rank's part."""
        axis, bounds = self.replicas, self.bounds
        if axis is None:
            return True
        if not self.elementwise:
            return self.replica == axis.rank
        return bounds[axis.rank] < bounds[axis.rank + 1] or (bounds[-1] == 0 and axis.rank == 0)

    @property
    def is_owned(self) -> bool:
        """Whether this rank steps the parameter; if elementwise: elements of it."""
        return self.in_replica and (self.owner is None or bool(self.cut.rank == self.owner))

    def run(self, local: torch.Tensor) -> torch.Tensor:
        """If elementwise: the run that this rank owns in a tensor like `self.local`; shares memory."""
        if local.dim() == 0:
            return local
        replica = self.replicas.rank if self.replicas is not None else 0
        return run_of(local, self.bounds[replica], self.bounds[replica + 1])

    def runs(self, local: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The parts of a tensor like `self.local` that each replica's ranks own, as (replica, view)."""
        if self.elementwise:
            bounds = enumerate(pairwise(self.bounds))
            return [(replica, run_of(local, start, stop)) for replica, (start, stop) in bounds if start < stop]
        assert self.replica is not None
        return [(self.replica, local)] if local.numel() else []

    def is_split_like(self, value: Any) -> bool:
        """Whether a state value is sharded exactly like the parameter, which has an owner."""
        parameter = self.tensor
        if self.owner is None or not isinstance(value, (DTensor, FlatShard)):
            return False
        same = isinstance(value, FlatShard) and isinstance(parameter, FlatShard) and value._run.same_as(parameter._run)
        return same or cut_of(value) == self.cut

    def whole_state(self, value: Any) -> Any:
        """A whole state value; None on other ranks if the owner has it, else gathered on all ranks. Collective."""
        if not isinstance(value, (DTensor, FlatShard)):
            return value
        owner = -1 if self.owner is None else self.owner
        on_owner = isinstance(value, FlatShard) and _only_rank(value._run) == owner
        if on_owner or not value.numel() or (self.cut is None and not self.is_gathered):
            return inside(value).view(value.shape) if self.is_owned else None
        return value.full_tensor()

    def run_of_state(self, value: Any) -> Any:
        """If elementwise: this rank's run of a sharded or whole state value; a copy.

        Raises:
            CheckpointError: the value has the shape of neither the parameter nor this rank's part.
        """
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, FlatShard)):
            return value
        parameter, local, part = self.tensor, self.local, inside(value)
        if part is value and isinstance(parameter, DTensor) and value.shape == parameter.shape:
            part = piece_of(parameter, value)
        elif part is value and isinstance(parameter, FlatShard) and value.shape == parameter.shape:
            part = parameter._run.cut(value)
        if part.numel() != local.numel():
            raise CheckpointError(
                "Optimizer state does not have one value per element, so that it cannot be stepped by elements.",
                parameter=self.name,
                expected=f"shape {tuple(parameter.shape)}",
                got=f"shape {tuple(value.shape)}",
                remedy="load it into the optimizer that saved it",
                topic="optimizer-state",
            )
        return self.run(like_order(part, local)).clone()

    def flat(self, nested: Mapping[str, Any]) -> State | Exception:
        """The flattened state of the parameter, which this rank owns, or the error that prevents it."""
        state: State = {}
        try:
            for key, value in nested.items():
                _flatten(value, key, state, self.classes)
        except CheckpointError as error:
            return error
        shape = self.whole.shape
        for key, value in state.items() if self.elementwise else ():
            if isinstance(value, torch.Tensor) and value.dim() and (value.shape != shape or "<" in str(key)):
                return CheckpointError(
                    f"Optimizer state {key!r} does not have one value per element, so that it cannot be sharded.",
                    parameter=self.name,
                    expected=f"a plain tensor of shape {tuple(shape)} or ()",
                    got=f"shape {tuple(value.shape)}",
                    remedy="save only the model, or build the optimizer without elementwise=True",
                    topic="optimizer-state",
                )
        return state

    def sharded(self, value: Any, kind: str, detail: Any) -> Any:
        """The sharded form of a state value, of the kind that `_describe` found. Others' parts are filled later."""
        if kind == "value":
            return detail
        device = self.local.device
        if kind == "number":
            number, on_cpu = detail
            return number if on_cpu else number.to(device)
        if kind == "element":
            is_whole = self.owner is None and not self.elementwise
            return _sharded_like(self.tensor, value if is_whole else None, detail)
        shape, dtype = detail  # a rank other than the owner has no value
        if self.owner is None or self.axes is None:
            return torch.empty(shape, dtype=dtype, device=device) if value is None else value
        numel = torch.Size(shape).numel()
        empty = torch.empty(numel if self.axes[0].rank == self.owner else 0, dtype=dtype, device=device)
        local = empty if value is None else value.detach().reshape(-1)
        order = tuple(range(len(shape)))
        return FlatShard(local, Run(self.name, tuple(shape), order, self.owner * numel, numel, *self.axes))


Entry = tuple[_Param, str, torch.dtype]
"""A tensor to exchange: its parameter; "value", "gradient" or a key of the state; its dtype."""
Exchange = tuple[Owners, torch.device, list[Entry]]
"""Entries of one kind, dtype and group, whose owner is in this replica; where these ranks exchange them."""


@dataclass(eq=False)
class _Batch:
    """Parameters that are whole, and step, at the same time.

    Attributes:
        params: in this order.
        is_last: whether the inner optimizer then takes its own step, which counts.
        gathers, scatters: of values and gradients to the owners; of new values.
    """

    params: list[_Param]
    is_last: bool
    gathers: list[Exchange]
    scatters: list[Exchange]


@dataclass(frozen=True)
class _StepRule:
    """How to step some parameters.

    Attributes:
        batches: at least one.
        compared: of the parameters that the same ranks compare: token, parameters, both groups, and how they are
            stepped (the optimizer, and their number of batches); then indices of their groups. See `agree`.
    """

    batches: list[_Batch]
    compared: list[tuple[int, list[torch.Tensor], Any, Any, str, list[int]]]


class OwnerOptimizer(torch.optim.Optimizer):
    """Run an optimizer that needs whole tensors (Shampoo, SOAP, Adafactor, LAMB, ...) on sharded parameters.

        optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)

    Each parameter is assembled on one rank, its owner, and `optimizer_class` steps it there, as in a single process.
    Owners are balanced by number of elements. In a step, owners receive the pieces of parameters and gradients and send
    back the new values, without padding: 12 bytes per float32 element of a rank's shards. That happens in batches of 16
    MiB for each owner, of which the exchanges run while another steps: a rank needs additional memory of eight batches,
    and what `optimizer_class` needs. An optimizer whose steps of some parameters at a time are not, bit for bit, one
    step (tried once on small tensors) steps all at once: then it is three times the rank's shards of parameters.

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

    _inner: torch.optim.Optimizer  # an `optimizer_class` on `_wholes`; unset while __init__ adds the first groups

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
        self._params: dict[int, _Param] = {}  # by id of the parameter
        self._in_order: list[_Param] = []  # see `_ordered`
        self._ownerships: list[Ownership] = []  # see `ownerships`
        self._are_assigned = False  # whether parameters have owners
        self._plans: dict[Any, Any] = {}  # plans of exchanges, by their contents
        self._known: dict[Any, dict[int, bool]] = {}  # tokens that ranks have compared, by their groups
        self._knows_classes = False  # whether `_Param.classes` are complete, the same on all ranks
        super().__init__(params, {})
        self._inner = optimizer_class(
            [{**group_settings(group), "params": self._new_wholes(group)} for group in self.param_groups], **settings
        )
        self.defaults = self._inner.defaults
        if elementwise:
            self._check_elements()
        else:
            self._check_coupling(settings)
        self._in_parts = self._steps_in_parts()  # tried here: a step may be planned, on fake tensors
        for param in self._ordered():
            state = self._inner.state.get(param.whole)
            if state and any(isinstance(value, torch.Tensor) for value in leaves_in(state)):
                raise ConfigError(
                    f"OwnerOptimizer: {optimizer_class.__name__} creates state in its constructor.",
                    expected="an optimizer that creates its state in step()",
                    got=f"state {sorted(map(str, state))}",
                    remedy="if it is element-wise, like Adagrad, it needs no owners: build it from model.parameters()",
                    topic="optimizer-on-shards",
                )
            if state:
                self.state[param.tensor] = state
        self._copy_settings_back()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like `torch.optim.Optimizer.add_param_group`. Collective once the optimizer has stepped.

        Raises:
            ConfigError: see the class.
        """
        is_built = hasattr(self, "_inner")
        if is_built:
            self.share_state()
            self._copy_settings_in()
            self._are_assigned = False
            self._plans.clear()
            self._known.clear()
        super().add_param_group(param_group)
        self._in_order = []
        group = self.param_groups[-1]
        try:
            refuse_duplicates(group["params"], "OwnerOptimizer")
        except ConfigError:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            if (error := self._why_not(parameter)) is not None:
                self.param_groups.pop()
                raise error
        if is_built:
            self._inner.add_param_group({**group_settings(group), "params": self._new_wholes(group)})
            if self.elementwise:
                self._check_elements()
            self._in_parts = self._steps_in_parts()
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
        self._copy_settings_in()
        # Nothing is stepped in an empty whole parameter, and some optimizers divide by its size.
        stepped = [
            param
            for param in self._ordered()
            if param.tensor.grad is not None and (self.elementwise or param.tensor.numel())
        ]
        for param in stepped:
            assert param.tensor.grad is not None
            check_gradient(param.tensor, param.tensor.grad)
        try:
            in_turns(self._agreed(stepped).batches, self._gather, self._step_batch, self._scatter)
            self._spread([(param, param.local) for param in stepped])
        finally:
            for param in stepped:
                _empty(param.whole)
        for param in stepped:
            increment_version(param.tensor)
            state = inner.state.get(param.whole)
            self.state[param.tensor] = {} if state is None else state
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
        params = self._ordered()
        flat: dict[_Param, Any] = {
            param: param.flat(self._inner.state.get(param.whole, {})) if param.is_owned else {} for param in params
        }
        descriptions = self._descriptions(flat)
        shared = {
            param: {key: param.sharded(flat[param].get(key), *description) for key, description in state.items()}
            for param, state in descriptions.items()
        }
        tensors: list[tuple[_Param, torch.Tensor]] = []
        elements: list[Entry] = []
        for param in params:
            for key, (kind, detail) in descriptions[param].items():
                if kind not in ("element", "whole"):
                    continue
                target = inside(shared[param][key])
                tensors.append((param, target))
                if kind == "element" and param.owner is not None:
                    elements.append((param, key, detail))
                elif self.elementwise and param.is_owned:
                    param.run(target).copy_(flat[param][key])
        for owners, home, entries in self._exchanges(elements):
            wholes = [flat[entries[at][0]][entries[at][1]].detach() for at in owners.mine]
            _scattered(owners, home, wholes, [inside(shared[param][key]) for param, key, _ in entries])()
        self._spread(tensors)
        self._inner.state.clear()
        self.state.clear()
        for param in params:
            if shared[param]:
                self.state[param.tensor] = shared[param]
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
        for param, key in zip(self._listed(), keys, strict=True):
            if key in state_dict["state"]:  # torch casts 8-bit state to the parameter's dtype
                self.state[param.tensor] = dict(state_dict["state"][key])
        self._inner.state.clear()
        self._shared = True

    def __getstate__(self) -> dict[str, Any]:
        self.share_state()
        return {
            **super().__getstate__(),
            "_copied": (
                self.optimizer_class,
                {"elementwise": self.elementwise, **self._arguments},
                [param.classes for param in self._listed()],
            ),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_copied" in state:
            optimizer_class, settings, classes = state.pop("_copied")
            self.__init__([dict(group) for group in state["param_groups"]], optimizer_class, **settings)  # type: ignore[misc]
            for param, of_state in zip(self._listed(), classes, strict=True):
                param.classes = of_state
            state = {**state, "_shared": True, "_knows_classes": True}
        super().__setstate__(state)

    def _check_coupling(self, settings: Mapping[str, Any]) -> None:
        """Refuse an optimizer whose step of a parameter depends on others; warn if that cannot be determined."""
        name = self.optimizer_class.__name__
        verdict = treats_parameters(self.optimizer_class, settings, self.param_groups)
        if verdict is False:
            raise _not_one_by_one(
                f"{name}, whose step of a parameter depends on others, or fails if another has no gradient",
                "skip parameters whose .grad is None, as torch's optimizers do, or use a different optimizer",
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
        local = inside(parameter).detach()
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

    def _ordered(self) -> list[_Param]:
        """All parameters, in an order that ranks share, whatever the order in their groups."""
        if not self._in_order:
            params = self._listed()
            places = places_of(param.tensor for param in params)
            self._in_order = sorted(params, key=lambda param: places.get(id(param.tensor), (-1, 0)))
        return self._in_order

    def _listed(self) -> list[_Param]:
        """All parameters, in the order of the groups."""
        return [self._params[id(parameter)] for group in self.param_groups for parameter in group["params"]]

    def _new_wholes(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        """Parameters for the inner optimizer, one per parameter of a group."""
        wholes = []
        for parameter in group["params"]:
            local = inside(parameter).detach()
            shape = parameter.shape if not self.elementwise else (0,) if local.dim() else ()
            param = self._params[id(parameter)] = _Param(parameter, self.elementwise)
            param.whole = nn.Parameter(local.new_zeros((), device=param.device).expand(shape), parameter.requires_grad)
            wholes.append(param.whole)
        return wholes

    def _copy_settings_in(self) -> None:
        """Copy the group settings, which a scheduler may have changed, to the inner optimizer."""
        for inner_group, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            wholes = inner_group["params"]
            inner_group.clear()
            inner_group.update({**group_settings(group), "params": wholes})

    def _copy_settings_back(self) -> None:
        """Copy the group settings of the inner optimizer, which may change in its steps."""
        for inner_group, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(group_settings(inner_group))

    # Owners.

    def _assign_owners(self) -> None:
        """Choose owners unless they are chosen: balance the elements of all parameters with the same ranks."""
        if self._are_assigned:
            return
        self._are_assigned = True
        self._ownerships = []
        by_ranks: dict[Any, list[_Param]] = {}
        for param in self._ordered():
            cut, axis = param.cut, param.replicas
            if self.elementwise:
                ranks: Any = owner_of(param.tensor), axis and axis.group, param.tensor.dtype
            elif cut is None and axis is None:
                continue
            else:
                ranks = cut and cut.group, axis and axis.group
            by_ranks.setdefault(ranks, []).append(param)
        for params in by_ranks.values():
            cut, axis = params[0].cut, params[0].replicas
            tensors = [param.tensor for param in params]
            if self.elementwise:
                bounds = element_bounds([param.local.numel() for param in params], axis.size if axis else 1)
                for param, of_param in zip(params, bounds, strict=True):
                    param.bounds = of_param
                if axis is not None:
                    self._ownerships.append(ownership_of_elements(tensors, bounds))
                continue
            numels = [tensor.numel() for tensor in tensors]
            owners = balanced_owners(numels, cut, axis)
            self._ownerships.append(ownership(tensors, cut, axis, owners, numels, "elements"))
            for param, (replica, rank) in zip(params, owners, strict=True):
                param.owner = rank if cut is not None else None
                param.replica = replica if axis is not None else None

    def ownerships(self) -> list[Ownership]:
        """Which rank steps which parameter, or how many elements if `elementwise`, by unit. No communication."""
        self._assign_owners()
        return self._ownerships

    def _agreed(self, stepped: Sequence[_Param]) -> _StepRule:
        """How to step these parameters, once ranks are found to be about to step the same ones. Collective.

        If elementwise, ranks of a shard axis exchange nothing, and may have gradients of different parts.
        """
        self._assign_owners()
        key = "step", *[(param, param.tensor.grad.dtype) for param in stepped]  # type: ignore[union-attr]
        if key not in self._plans:
            keep(self._plans, key, self._new_step(stepped))
        step: _StepRule = self._plans[key]
        for token, parameters, group, replicas, how, settings in step.compared:
            # By group: its ranks may share others with different ranks, for which a step is new to some of them alone.
            known = self._known.setdefault((group, replicas), {})
            stepped_groups = [self.param_groups[index] for index in settings]
            agree(token, parameters, group, replicas, how, token in known, stepped_groups)
            if token not in known:
                keep(known, token, True)
        return step

    def _new_step(self, stepped: Sequence[_Param]) -> _StepRule:
        numbers = self._numbers(stepped)
        how = f", by {self.optimizer_class.__name__}{', elementwise' if self.elementwise else ''}"
        by_ranks: dict[tuple[Any, Any], list[_Param]] = {}
        for param in self._ordered():
            cut, axis = param.cut, param.replicas
            if axis is None and cut is None:
                continue  # nothing is exchanged, or by its own collectives
            groups: tuple[Any, Any] = (cut and cut.group, axis and axis.group)
            if axis is not None:
                assert param.axes is not None
                groups = (axis.group, None) if self.elementwise else (param.axes[0].group, axis.group)
            by_ranks.setdefault(groups, []).extend([param] if param in numbers else [])
        compared = []
        for (group, replicas), params in by_ranks.items():
            tensors, count = [param.tensor for param in params], len({numbers[param] for param in params})
            how_these = f"{how}, in {count} batches" if count > 1 else how
            ids = set(map(id, tensors))
            settings = [at for at, of in enumerate(self.param_groups) if not ids.isdisjoint(map(id, of["params"]))]
            compared.append((token_of(tensors, how_these), tensors, group, replicas, how_these, settings))
        batches: list[list[_Param]] = [[] for _ in range(max(numbers.values(), default=0) + 1)]
        for param, number in numbers.items():
            batches[number].append(param)
        last = len(batches) - 1
        of_step = [_Batch(params, at == last, *self._step_exchanges(params)) for at, params in enumerate(batches)]
        return _StepRule(of_step, compared)

    def _numbers(self, stepped: Sequence[_Param]) -> dict[_Param, int]:
        """The batch of each parameter; batches of the same ranks are consecutive. See `in_turns` on their order.

        All are in one if the inner optimizer has to step all at once.
        """
        if not self._in_parts:
            return dict.fromkeys(stepped, 0)
        by_ranks: dict[Any, list[_Param]] = {}
        for param in stepped:
            tensor: Any = param.tensor
            cut, axis = param.cut, param.replicas
            ranks: Any = tensor.device_mesh if param.is_gathered else cut and (cut.group, axis and axis.group)
            by_ranks.setdefault(ranks, []).append(param)
        numbers: dict[_Param, int] = {}
        for ranks, params in by_ranks.items():
            nbytes = [0 if ranks is None else param.tensor.numel() * param.tensor.itemsize for param in params]
            owners = [(param.owner, param.replica) for param in params]
            numbers |= zip(params, batches_of(nbytes, owners), strict=True)
        return numbers

    def _step_exchanges(self, params: Sequence[_Param]) -> tuple[list[Exchange], list[Exchange]]:
        """The exchanges of a step of these parameters: values and gradients to owners, and new values."""
        exchanged = [param for param in params if param.cut is not None]
        values: list[Entry] = [(param, "value", param.tensor.dtype) for param in exchanged]
        gradients: list[Entry] = [(param, "gradient", param.tensor.grad.dtype) for param in exchanged]  # type: ignore[union-attr]
        return self._by_kind([*values, *gradients]), self._by_kind(values)

    def _steps_in_parts(self) -> bool:
        """Whether the inner optimizer may step a batch alone, with the same bits; False if there is only one.

        Ranks may differ in the latter, which only saves the trial: where all parameters of a rank fit into a batch, so
        do those that it shares with any other rank, and these are in one batch on both.
        """
        if self.elementwise or fits_a_batch(param.tensor.numel() * param.tensor.itemsize for param in self._listed()):
            return False
        return steps_in_parts(self.optimizer_class, self._arguments, self.param_groups) is True

    def _spread(self, tensors: Sequence[tuple[_Param, torch.Tensor]]) -> None:
        """Copy what each replica's ranks own to the other replicas: one collective per unit and dtype.

        Args:
            tensors: parameters, each with a tensor like this rank's part of it, or with one that only its owner has.
        """
        key = "spread", tuple([(param, tensor.dtype) for param, tensor in tensors])
        plan = self._plans.get(key)
        if plan is None:
            by_unit: dict[Any, tuple[Axis, list[int]]] = {}
            for index, (param, tensor) in enumerate(tensors):
                if (axis := param.replicas) is not None:
                    unit = owner_of(param.tensor), axis.group, tensor.dtype
                    by_unit.setdefault(unit, (axis, []))[1].append(index)
            plan = list(by_unit.values())
            keep(self._plans, key, plan)
        for axis, indices in plan:
            by_replica: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
            for param, tensor in [tensors[index] for index in indices]:
                for replica, run in param.runs(tensor):
                    by_replica[replica].append(run)
            if any(by_replica):
                spread(axis, by_replica)

    def _exchanges(self, entries: Sequence[Entry]) -> list[Exchange]:
        """The exchanges of these entries of the state. Collective if they are new."""
        self._assign_owners()
        key = tuple(entries)
        if key not in self._plans:
            keep(self._plans, key, self._by_kind(entries))
            for owners, _, those in self._plans[key]:
                check_alike([param.tensor for param, *_ in those], owners.group)
        exchanges: list[Exchange] = self._plans[key]
        return exchanges

    def _by_kind(self, entries: Sequence[Entry]) -> list[Exchange]:
        """The exchanges of entries whose owner is in this replica: values and gradients separately, to save memory."""
        by_kind: dict[Any, list[Entry]] = {}
        for entry in entries:
            param, kind, dtype = entry
            if param.in_replica:
                by_kind.setdefault((param.cut.group, kind, dtype), []).append(entry)
        exchanges = []
        for (group, *_), those in by_kind.items():
            ranks: list[Any] = [param.owner for param, *_ in those]
            exchanges.append((Owners([param.cut for param, *_ in those], ranks), device_of(group), those))
        return exchanges

    # The exchanges of a step.

    def _gather(self, batch: _Batch, ahead: bool) -> Finish:
        """Start to fill the whole parameters of a batch that this rank owns with values and gradients. Collective.

        Args:
            ahead: whether the exchanges may be under way together; otherwise in sequence, which takes less memory.
        """
        arriving: list[tuple[Exchange, Callable[[], list[torch.Tensor]]]] = []
        for exchange in batch.gathers:
            owners, home, entries = exchange
            sources: list[Any] = [
                param.tensor.detach() if kind == "value" else param.tensor.grad for param, kind, _ in entries
            ]
            arriving.append((exchange, owners.gather([inside(source).to(home) for source in sources])))
            if not ahead:
                _fill(*arriving.pop())

        def finish() -> None:
            for exchange, arrive in arriving:
                _fill(exchange, arrive)
            for param in batch.params if not self.elementwise else ():
                if param.in_replica and param.cut is None:
                    param.whole.data, param.whole.grad = _whole(param.tensor)
            for param in batch.params if self.elementwise else ():
                local, gradient = param.local, inside(param.tensor.grad)
                if param.in_replica:
                    param.whole.data, param.whole.grad = param.run(local), param.run(like_order(gradient, local))

        return finish

    def _step_batch(self, batch: _Batch) -> None:
        """Step the whole parameters of a batch, and free their gradients."""
        if batch.is_last:
            self._inner.step()  # settings and attributes that count steps change in this one
        elif owned := [param.whole for param in batch.params if param.whole.grad is not None]:
            step_part(self._inner, owned)
        for param in batch.params:
            param.whole.grad = None  # before the pieces to return are allocated

    def _scatter(self, batch: _Batch) -> Finish:
        """Start to copy the new values of a batch from the owners into the shards of this replica. Collective."""
        for param in batch.params:
            cut, whole = param.cut, param.whole.detach()
            if not param.in_replica:
                continue
            if param.is_gathered:
                param.local.copy_(piece_of(param.tensor, whole))
            elif cut is None:
                target = param.run(param.local) if self.elementwise else param.local
                if whole.data_ptr() != target.data_ptr():
                    target.copy_(whole)
        leaving = []
        for owners, home, entries in batch.scatters:
            wholes = [entries[at][0].whole.detach() for at in owners.mine]
            targets = [param.local for param, *_ in entries]
            leaving.append(_scattered(owners, home, wholes, targets))
        for param in batch.params:
            _empty(param.whole)

        def finish() -> None:
            for leave in leaving:
                leave()

        return finish

    # State: whole on owners, or sharded.

    def _descriptions(self, flat: Mapping[_Param, Any]) -> dict[_Param, dict[str, tuple[str, Any]]]:
        """Descriptions of all parameters' state from its owners, by key; see `_describe`. Collective."""
        params = self._ordered()
        descriptions: dict[int, Any] = {}  # by index in `params`, which is the same on all ranks
        groups: dict[Any, list[int]] = {}
        replicas: dict[Any, list[int]] = {}  # exchanged after the shard axis: ranks of one replica then agree
        for number, param in enumerate(params):
            state, shape = flat[param], param.whole.shape
            failed = isinstance(state, Exception)
            descriptions[number] = state if failed else {key: _describe(shape, v) for key, v in state.items()}
            if param.owner is not None:
                groups.setdefault(param.cut.group, []).append(number)
            if (axis := param.replicas) is not None:
                replicas.setdefault(axis.group, []).append(number)
        for ranks, numbers in (*groups.items(), *replicas.items()):
            local = {number: descriptions[number] for number in numbers if descriptions[number]}
            for owned in objects_of_all(local, ranks, "optimizers' state"):
                descriptions |= owned
        for description in descriptions.values():
            if isinstance(description, Exception):
                raise description
        return {params[number]: description for number, description in descriptions.items()}

    def _unshare_state(self) -> None:
        """Pass the sharded state, which may have been loaded, to the inner optimizers of the owners. Collective."""
        self._assign_owners()
        states: dict[_Param, State] = {param: {} for param in self._ordered()}
        elements: list[Entry] = []
        for param in self._ordered():
            state: State = self.state.get(param.tensor) or {}
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):  # ranks may list keys differently
                if not self.elementwise and param.is_split_like(value):
                    elements.append((param, key, value.dtype))
                    continue
                if not self.elementwise:
                    value = param.whole_state(value)  # collective: on ranks that do not own it too
                if param.is_owned:
                    states[param][key] = param.run_of_state(value) if self.elementwise else value
        for owners, home, entries in self._exchanges(elements):
            wholes = owners.gather([inside(self.state[p.tensor][key]).to(home) for p, key, _ in entries])()
            for at, whole in zip(owners.mine, wholes, strict=True):
                param, key, _ = entries[at]
                states[param][key] = whole
        for param, flat in states.items():
            if self.state.get(param.tensor):
                self.state[param.tensor] = state = _nested(flat, param.classes)
                if state:
                    self._inner.state[param.whole] = state
        self._shared = False


def _check_class(optimizer_class: Any) -> None:
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    got, remedy = None, "an element-wise optimizer needs no owners: build it from model.parameters()"
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        got, remedy = repr(optimizer_class), "OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)"
    elif hasattr(optimizer_class, "train") and hasattr(optimizer_class, "eval"):
        got = f"{name}, which also changes parameters in train() and eval()"
    elif needs_closure(optimizer_class):
        got, remedy = f"{name}, whose step() computes gradients", "use a different optimizer"
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


def _empty(whole: nn.Parameter) -> None:
    """Free a parameter's values and gradient, but keep its shape."""
    whole.grad = None
    whole.data = whole.new_zeros(()).expand(whole.shape)


def _fill(exchange: Exchange, arrive: Callable[[], list[torch.Tensor]]) -> None:
    """Give whole parameters that this rank owns the values or gradients that arrive."""
    owners, _, entries = exchange
    for at, value in zip(owners.mine, arrive(), strict=True):
        param, kind, _ = entries[at]
        if kind == "value":
            param.whole.data = value
        else:
            param.whole.grad = value


def _whole(parameter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of a parameter that is whole on this rank, or which all ranks that share it gather."""
    if cut_of(parameter) is None:
        return inside(parameter).detach(), inside(parameter.grad)
    return parameter.detach().full_tensor().clone(), parameter.grad.full_tensor()


def _scattered(
    owners: Owners, home: torch.device, wholes: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Finish:
    """Start to copy this rank's pieces of the owners' whole tensors into `targets`. Collective."""
    arrive = owners.scatter(wholes, targets[0].dtype, home)

    def finish() -> None:
        for target, piece in zip(targets, arrive(), strict=True):
            target.copy_(piece.view(target.shape))

    return finish


def _only_rank(run: Run) -> int | None:
    """The only rank that holds elements of a tensor; None if several do."""
    ranks = [rank for rank in range(run.axis.size) if range(*run.bounds(rank))]
    return ranks[0] if len(ranks) == 1 else None


def _sharded_like(parameter: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A state tensor sharded like `parameter`, with this rank's piece of the whole `value`; zeros if that is None."""
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


_STEP = re.compile(r"\[\d*\]|\(\d*\)|\{[^}]*\}|<\w+>")
"""A step into a nested value: `[index]` of a list, `(index)` of a tuple, `{key}` of a dict, `<name>` of a tensor
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
    tree = _Node()
    for key, value in flat.items():
        steps = [step[0] for step in _STEP.finditer(key)]
        node, last = tree, key.removesuffix("".join(steps))
        for step in steps:
            node, last = node.setdefault(last, _Node()), step
        node[last] = value
    return {key: _built(node, key, classes) for key, node in tree.items()}


class _Node(dict[str, Any]):
    """The items of a container, by the step to each."""


def _built(node: Any, key: str, classes: Classes) -> Any:
    """The list, tuple, dict or tensor subclass at a key; for a value that is none of these, the value."""
    if not isinstance(node, _Node):
        return node
    bracket = next(iter(node))[0]
    items = {step[1:-1]: _built(item, key + step, classes) for step, item in node.items()}
    if bracket == "<":
        tensor_class, context, size, stride = classes[key]
        return tensor_class.__tensor_unflatten__(items, context, size, stride)
    items.pop("", None)  # stands for an empty container
    if bracket == "{":
        return {ast.literal_eval(name): item for name, item in items.items()}
    ordered = [items[index] for index in sorted(items, key=int)]
    return ordered if bracket == "[" else tuple(ordered)
