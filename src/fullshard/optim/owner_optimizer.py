"""Run any optimizer so that a single rank, the owner, steps each parameter or element and holds its state."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..comm import objects_of_all
from ..containers import leaves_in
from ..errors import CheckpointError, ConfigError, check_switch, class_and_value, message
from ..forms import NAME_KEY, PART_KEY, FlatShard, owner_of
from ..forms.flat_shard import Run
from ..optimizers import group_settings
from ..torch_private.fake_tensors import is_fake
from ..torch_private.local_tensor import inside
from ..torch_private.step_hooks import needs_closure, step_part
from .on_owners import Entry, Exchange, OnOwners, Param, ParamBatch, exchanges_of, to_replicas
from .owners import (
    Finish,
    OtherCut,
    Owners,
    Ownership,
    check_alike,
    cut_of,
    fits_a_batch,
    in_turns,
    ownership_of_elements,
    piece_of,
)
from .probe import steps_in_parts, treats_elements, treats_parameters
from .replicas import element_bounds, like_order

State = dict[str, Any]  # of one parameter, by key
Classes = dict[str, tuple[Any, ...]]
"""By key, how to rebuild a tensor subclass from its inner tensors: its class, context, size and stride."""


@dataclass(eq=False)
class _Param(Param):
    """See `Param`.

    Attributes:
        whole: the whole parameter, or the run of elements, that the inner optimizer steps. Has values only in steps.
        classes: of the state, if this rank owns it.
    """

    whole: nn.Parameter = field(init=False)
    classes: Classes = field(default_factory=dict)

    @cached_property
    def is_gathered(self) -> bool:
        """See `Param`. Also if it is in no unit: its axis is unknown, by which state is sharded."""
        cut = None if self.elementwise else cut_of(self.tensor)
        return isinstance(cut, OtherCut) or (cut is not None and self.axes is None)

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


class OwnerOptimizer(OnOwners[_Param]):
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
        check_switch("OwnerOptimizer(elementwise=)", elementwise)
        self.elementwise = elementwise
        self.optimizer_class, self._arguments = optimizer_class, settings
        self._shared = False  # whether `state` is sharded
        self._step_name = f", by {optimizer_class.__name__}{', elementwise' if elementwise else ''}"
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
        for param in self._listed():
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
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if is_built:
            try:
                self._inner.add_param_group({**group_settings(group), "params": self._new_wholes(group)})
                if self.elementwise:
                    self._check_elements()
                self._in_parts = self._steps_in_parts()
            except BaseException:
                self.param_groups.pop()
                del self._inner.param_groups[len(self.param_groups) :]
                raise
            self._copy_settings_back()

    def _step(self, params: list[_Param]) -> None:
        if self._shared:
            self._unshare_state()
        self._copy_settings_in()
        # Nothing is stepped in an empty whole parameter, and some optimizers divide by its size.
        stepped = [param for param in params if self.elementwise or param.tensor.numel()]
        try:
            in_turns(self._agreed(stepped), self._gather, self._step_batch, self._scatter)
            to_replicas([(param, param.local) for param in stepped], by_unit=True)
        finally:
            for param in stepped:
                _empty(param.whole)
        for param in stepped:
            increment_version(param.tensor)
            state = self._inner.state.get(param.whole)
            self.state[param.tensor] = {} if state is None else state
        self._copy_settings_back()
        self._knows_classes = True

    @torch.no_grad()
    def share_state(self) -> None:
        """Shard the state in `state`, like that of other optimizers, until the next step. Collective.

        Raises:
            CheckpointError: the state has values other than tensors, numbers, and lists, tuples and dicts of them;
                raised on all ranks.
        """
        if self._shared:
            return
        params = self._ordered()
        flat: dict[_Param, Any] = {
            param: param.flat(self._inner.state.get(param.whole, {})) if param.is_owned else {} for param in params
        }
        descriptions = self._descriptions(flat)
        shared = {
            param: {key: param.sharded(flat[param].get(key), *description) for key, description in state.items()}
            for param, state in descriptions.items()
        }
        tensors: list[tuple[Param, torch.Tensor]] = []
        elements: list[Entry[_Param]] = []
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
        for owners, home, entries in _exchanges_of_state(elements):
            wholes = [flat[entries[at][0]][entries[at][1]].detach() for at in owners.mine]
            _scattered(owners, home, wholes, [inside(shared[param][key]) for param, key, _ in entries])()
        to_replicas(tensors, by_unit=True)
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
                `fullshard.load` instead. Or a value is not split like its parameter, or whole, where the current
                state is; nothing was loaded then.
        """
        if not self._knows_classes and any("<" in key for state in state_dict["state"].values() for key in state):
            raise CheckpointError(
                "Cannot load state with tensor subclasses into an optimizer that has not stepped yet.",
                remedy="use fullshard.load(folder, model, optimizer), or take a step before load_state_dict",
                topic="optimizer-state",
            )
        self.share_state()
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(self._listed(), keys, strict=False):  # torch compares their numbers
            _check_loaded(param, self.state.get(param.tensor, {}), state_dict["state"].get(key, {}))
        super().load_state_dict(state_dict)
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

    def _check_parameter(self, group: dict[str, Any], parameter: torch.Tensor, name: str | None) -> None:
        """Refuse a parameter that this optimizer cannot step."""
        local = inside(parameter).detach()
        is_plain = type(local) in (torch.Tensor, nn.Parameter) or is_fake(local)  # fake: of a planned step
        dense = torch.ops.aten.is_non_overlapping_and_dense
        if self.elementwise and not (is_plain and dense(local)):
            what = "OwnerOptimizer(elementwise=True): a parameter's shard cannot be cut into runs of elements."
            expected, got = "a dense plain tensor", f"{type(local).__name__}, strides {local.stride()}"
            remedy = "step this parameter with an optimizer of its own, without OwnerOptimizer"
        elif not self.elementwise and PART_KEY in parameter.__dict__:
            what = "OwnerOptimizer: a parameter is a flat run of elements, which cannot be assembled on an owner."
            expected, got = "parameters of fully_shard", str(parameter.__dict__[PART_KEY])
            remedy = "shard the model with fully_shard, and pass model.parameters(); for an element-wise optimizer: "
            remedy += "elementwise=True"
        else:
            return
        raise ConfigError(
            what,
            parameter=name or parameter.__dict__.get(NAME_KEY, "?"),
            expected=expected,
            got=got,
            remedy=remedy,
            topic="optimizer-on-shards",
        )

    # Parameters and settings of the inner optimizer.

    def _new_param(self, parameter: torch.Tensor) -> _Param:
        local = inside(parameter).detach()
        shape = parameter.shape if not self.elementwise else (0,) if local.dim() else ()
        param = _Param(parameter, self.elementwise)
        param.whole = nn.Parameter(local.new_zeros((), device=param.device).expand(shape), parameter.requires_grad)
        return param

    def _new_wholes(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        """Parameters for the inner optimizer, one per parameter of a group."""
        return [self._param(parameter).whole for parameter in group["params"]]

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

    def _assigned(self, params: Sequence[_Param]) -> list[Ownership]:
        if not self.elementwise:
            return super()._assigned(params)
        by_unit: dict[Any, list[_Param]] = {}
        for param in params:
            axis = param.replicas
            unit = owner_of(param.tensor), axis and axis.group, param.tensor.dtype
            by_unit.setdefault(unit, []).append(param)
        ownerships = []
        for of_unit in by_unit.values():
            axis = of_unit[0].replicas
            bounds = element_bounds([param.local.numel() for param in of_unit], axis.size if axis else 1)
            for param, of_param in zip(of_unit, bounds, strict=True):
                param.bounds = of_param
            if axis is not None:
                ownerships.append(ownership_of_elements([param.tensor for param in of_unit], bounds))
        return ownerships

    def _nbytes(self, param: _Param) -> int:
        is_assembled = param.cut is not None or param.is_gathered
        return param.tensor.numel() * param.tensor.itemsize if is_assembled else 0

    def _entries(self, params: Sequence[_Param]) -> list[list[Entry[_Param]]]:
        values = [(param, "value", param.tensor.dtype) for param in params]
        return [values, [(param, "gradient", param.tensor.grad.dtype) for param in params]]  # type: ignore[union-attr]

    def _steps_in_parts(self) -> bool:
        """Whether the inner optimizer may step a batch alone, with the same bits; False if there is only one.

        Ranks may differ in the latter, which only saves the trial: where all parameters of a rank fit into a batch, so
        do those that it shares with any other rank, and these are in one batch on both.
        """
        if self.elementwise or fits_a_batch(param.tensor.numel() * param.tensor.itemsize for param in self._listed()):
            return False
        return steps_in_parts(self.optimizer_class, self._arguments, self.param_groups) is True

    # The exchanges of a step.

    def _gather(self, batch: ParamBatch[_Param], ahead: bool) -> Finish:
        """Start to fill the whole parameters of a batch that this rank owns with values and gradients. Collective.

        Args:
            ahead: whether the exchanges may be under way together; otherwise in sequence, which takes less memory.
        """
        arriving: list[tuple[Exchange[_Param], Callable[[], list[torch.Tensor]]]] = []
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

    def _step_batch(self, batch: ParamBatch[_Param]) -> None:
        """Step the whole parameters of a batch, and free their gradients."""
        if batch.is_last:
            self._inner.step()  # settings and attributes that count steps change in this one
        elif owned := [param.whole for param in batch.params if param.whole.grad is not None]:
            step_part(self._inner, owned)
        for param in batch.params:
            param.whole.grad = None  # before the pieces to return are allocated

    def _scatter(self, batch: ParamBatch[_Param]) -> Finish:
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
        states: dict[_Param, State] = {param: {} for param in self._ordered()}
        elements: list[Entry[_Param]] = []
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
        for owners, home, entries in _exchanges_of_state(elements):
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


def _exchanges_of_state(entries: Sequence[Entry[_Param]]) -> list[Exchange[_Param]]:
    """The exchanges of these entries, the same on all ranks. Collective."""
    exchanges = exchanges_of(entries)
    for owners, _, those in exchanges:
        check_alike([param.tensor for param, *_ in those], owners.group)
    return exchanges


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


def _check_loaded(param: _Param, current: State, loaded: State) -> None:
    """Refuse values to load that do not fit where the current state is split like its parameter.

    The owner's next step would fail, while other ranks wait for it.
    """
    shape, local = param.tensor.shape, inside(param.tensor).shape
    for key in [key for key, value in current.items() if key in loaded and param.is_split_like(value)]:
        value = loaded[key]
        is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
        if not is_dense or value.shape != shape or inside(value).shape not in (shape, local):
            raise CheckpointError(
                "OwnerOptimizer: state to load does not fit its parameter; nothing was loaded.",
                parameter=f"{param.name}.{key}",
                expected=f"a dense tensor of shape {tuple(shape)}, whole or split like the parameter",
                got=f"shape {tuple(value.shape)}, {value.layout}"
                if isinstance(value, torch.Tensor)
                else class_and_value(value),
                remedy="load the state of the same parameters: fullshard.load fits it to any number of ranks",
                topic="optimizer-state",
            )


def _empty(whole: nn.Parameter) -> None:
    """Free a parameter's values and gradient, but keep its shape."""
    whole.grad = None
    whole.data = whole.new_zeros(()).expand(whole.shape)


def _fill(exchange: Exchange[_Param], arrive: Callable[[], list[torch.Tensor]]) -> None:
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
