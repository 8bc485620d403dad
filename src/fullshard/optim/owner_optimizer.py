"""Any optimizer on whole parameters: each is whole on one rank, its owner, which steps it and keeps its state."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, distribute_tensor

from ..comm import objects_of_all
from ..containers import leaves_in
from ..errors import CheckpointError, ConfigError, message
from ..forms import NAME_KEY, PART_KEY, FlatShard, owner_of
from ..forms.run import Run
from ..mesh import Axis, device_of
from .owners import (
    Cut,
    OtherCut,
    Owners,
    balanced,
    check_alike,
    check_gradient,
    cut_of,
    keep,
    local_piece,
    places_of,
)
from .probe import treats_parameters

State = dict[str, Any]  # of one parameter, by key
Classes = dict[str, tuple[Any, ...]]
"""By key, what makes a tensor subclass of the tensors inside it: its class, context, size and stride."""


class OwnerOptimizer(torch.optim.Optimizer):
    """Run an optimizer that needs whole tensors (Shampoo, SOAP, Adafactor, LAMB, ...) on sharded parameters.

        optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)

    Each parameter is whole on one rank of its shard axis, its owner, and `optimizer_class` steps it there, as in one
    process. Owners are balanced by numbers of elements. In a step the owners get a parameter's and its gradient's
    pieces and send the new values back: 12 bytes for each of a rank's float32 elements, without padding. During a step
    a rank holds three times the bytes of its shards of parameters more, and what `optimizer_class` needs. `DTensor`s
    that are split over two mesh axes (tensor parallelism) are gathered, and stepped, on all ranks.

    Between steps, `state` holds each parameter's state on its owner. `state_dict()`, `fullshard.save` and the like show
    it sharded, as that of other optimizers: a checkpoint loads on other numbers of ranks, and, where keys are the same,
    into the optimizer without owners. State that is not of a parameter's shape stays whole on the owner.

    `add_param_group`, `step`, `state_dict`, `load_state_dict` and copying are collective: ranks must have gradients of
    the same parameters.

    Owners of whole parameters: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 5, stage 1, by parameter.

    Args:
        params: of `fully_shard` in any layout, or plain ones; or groups of them.
        optimizer_class: what steps them. It must treat parameters one by one, in `step()` alone.
        settings: of `optimizer_class`.

    Raises:
        ConfigError: `optimizer_class` is not an optimizer that parameters can be stepped one by one with, or a
            parameter is a run of elements (of FullyShardedDataParallel or `optimizer_view`).
    """

    def __init__(self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], **settings: Any) -> None:
        _check_class(optimizer_class)
        self.optimizer_class = optimizer_class
        self._inner: torch.optim.Optimizer | None = None
        self._shared = False  # whether `state` is sharded now
        self._wholes: dict[int, nn.Parameter] = {}  # by the id of a parameter: what the inner optimizer steps
        self._owner_of: dict[int, int] = {}  # by the id of a parameter that has an owner
        self._plans: dict[Any, list[tuple[Owners, torch.device, list[int]]]] = {}  # by what is exchanged
        self._in_order: list[torch.Tensor] = []  # see `_parameters`
        self._cuts: dict[int, Cut | OtherCut | None] = {}
        self._classes: dict[int, Classes] = {}  # by the id of a parameter that this rank owns
        self._knows_classes = False  # the same on all ranks
        super().__init__(params, {})
        self._inner = optimizer_class(
            [{**_settings(group), "params": self._stand_ins(group)} for group in self.param_groups], **settings
        )
        self.defaults = self._inner.defaults
        self._check_coupling(settings)
        for parameter in self._parameters():
            state = self._inner.state.get(self._wholes[id(parameter)])
            if state and any(isinstance(value, torch.Tensor) for value in leaves_in(state)):
                raise ConfigError(
                    f"OwnerOptimizer: {optimizer_class.__name__} makes state when it is built, without values.",
                    expected="an optimizer that makes its state in step()",
                    got=f"state {sorted(map(str, state))}",
                    remedy="an element-wise optimizer (Adagrad) needs no owners: build it from model.parameters()",
                    topic="optimizer-on-shards",
                )
            if state:
                self.state[parameter] = state
        self._settings_back()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer`'s; checks the parameters. Collective once the optimizer has stepped."""
        if self._inner is not None:
            self.share_state()
            self._owner_of.clear()
            self._plans.clear()
        super().add_param_group(param_group)
        self._in_order = []
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if PART_KEY in parameter.__dict__:
                self.param_groups.pop()
                raise ConfigError(
                    "OwnerOptimizer: a parameter is a run of elements, of which owners cannot make a whole.",
                    parameter=parameter.__dict__.get(NAME_KEY, "?"),
                    expected="parameters of fully_shard",
                    got=str(parameter.__dict__[PART_KEY]),
                    remedy="shard the model with fully_shard, and pass model.parameters()",
                    topic="optimizer-on-shards",
                )
        if self._inner is not None:
            self._inner.add_param_group({**_settings(group), "params": self._stand_ins(group)})
            self._settings_back()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective among the ranks of each shard axis.

        Returns:
            What `closure` returns, which is called first, with gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self._inner
        assert inner is not None
        if self._shared:
            self._take_over()
        for group, own in zip(inner.param_groups, self.param_groups, strict=True):
            stand_ins = group["params"]
            group.clear()
            group.update({**_settings(own), "params": stand_ins})
        stepped = [parameter for parameter in self._parameters() if parameter.grad is not None]
        try:
            self._lend(stepped)
            inner.step()
            for parameter in stepped:
                self._wholes[id(parameter)].grad = None  # before what goes back is allocated
            self._return(stepped)
        finally:
            for parameter in stepped:
                _empty(self._wholes[id(parameter)])
        for parameter in stepped:
            state = inner.state.get(self._wholes[id(parameter)])
            self.state[parameter] = {} if state is None else state
        self._settings_back()
        self._knows_classes = True
        return loss

    @torch.no_grad()
    def share_state(self) -> None:
        """Show the state sharded in `state`, as that of other optimizers, until the next step. Collective.

        Raises:
            CheckpointError: state other than tensors and numbers, and lists, tuples or dicts of them; on all ranks.
        """
        inner = self._inner
        if self._shared or inner is None:
            return
        if not self._owner_of:
            self._assign()
        flat: dict[int, Any] = {
            id(parameter): self._flat(parameter) if self._owns(parameter) else {} for parameter in self._parameters()
        }
        described = self._described(flat)
        shared = {
            id(parameter): {
                key: self._shown(parameter, flat[id(parameter)].get(key), what, detail)
                for key, (what, detail) in described.get(id(parameter), {}).items()
            }
            for parameter in self._parameters()
        }
        elements = [
            (parameter, key, detail)
            for parameter in self._parameters()
            if id(parameter) in self._owner_of
            for key, (what, detail) in described.get(id(parameter), {}).items()
            if what == "element"
        ]
        for owners, home, entries in self._exchanges(elements):
            wholes = [flat[id(entries[at][0])][entries[at][1]].detach() for at in owners.mine]
            targets = [local_piece(shared[id(parameter)][key]) for parameter, key, _ in entries]
            pieces = owners.scatter(wholes, [target.to(home) for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)
        inner.state.clear()
        self.state.clear()
        for parameter in self._parameters():
            if shared.get(id(parameter)):
                self.state[parameter] = shared[id(parameter)]
        self._shared = True

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`; see `share_state`. Collective."""
        self.share_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.load_state_dict`, of what `state_dict` gave, sharded or whole. Dtypes stay.

        Collective.

        Raises:
            CheckpointError: state of tensor subclasses, and this optimizer has not stepped; `fullshard.load` loads it.
        """
        if not self._knows_classes and any("<" in key for own in state_dict["state"].values() for key in own):
            raise CheckpointError(
                "State of tensor subclasses was to be loaded into an optimizer that has made none yet.",
                remedy="fullshard.load(folder, model, optimizer); or take a step before load_state_dict",
                topic="optimizer-state",
            )
        self.share_state()
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for parameter, key in zip(self._listed(), keys, strict=True):
            if key in state_dict["state"]:  # torch casts 8-bit state to the parameter's dtype
                self.state[parameter] = dict(state_dict["state"][key])
        assert self._inner is not None
        self._inner.state.clear()
        self._shared = True

    def __getstate__(self) -> dict[str, Any]:
        self.share_state()
        return {
            **super().__getstate__(),
            "_copied": (
                self.optimizer_class,
                _named(self.defaults, self.optimizer_class),
                [self._classes.get(id(parameter), {}) for parameter in self._listed()],
            ),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("_copied", None)
        if copied is not None:
            groups = [dict(group) for group in state["param_groups"]]
            self.__init__(groups, copied[0], **copied[1])  # type: ignore[misc]
            self._classes = dict(zip(map(id, self._listed()), copied[2], strict=True))
            state = {**state, "_shared": True, "_knows_classes": True}
        super().__setstate__(state)

    def _check_coupling(self, settings: Mapping[str, Any]) -> None:
        """Refuse an optimizer whose step of one parameter depends on others; warn where that is not known."""
        name = self.optimizer_class.__name__
        verdict = treats_parameters(self.optimizer_class, settings, self.param_groups)
        if verdict is False:
            raise _not_one_by_one(
                f"{name}, whose step of a parameter depends on other parameters", "use another optimizer"
            )
        if verdict is None:
            warnings.warn(
                message(
                    f"OwnerOptimizer steps parameters one by one; whether {name} does could not be found out.",
                    remedy="nothing is to be done if a parameter's step depends on its own gradient and state, or on "
                    "random numbers, alone",
                    topic="optimizer-on-shards",
                ),
                stacklevel=3,
            )

    # What the inner optimizer has.

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters, in an order that ranks share, in whatever order each was given them."""
        if not self._in_order:
            given = self._listed()
            places = places_of(given)
            self._in_order = sorted(given, key=lambda parameter: places.get(id(parameter), (-1, 0)))
        return self._in_order

    def _listed(self) -> list[torch.Tensor]:
        """All parameters, as they stand in the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _stand_ins(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        """What the inner optimizer has for a group's parameters: of their shapes, with values during steps only."""
        for parameter in group["params"]:
            local = local_piece(parameter.detach())
            whole = nn.Parameter(local.new_zeros(()).expand(parameter.shape), parameter.requires_grad)
            self._wholes[id(parameter)] = whole
        return [self._wholes[id(parameter)] for parameter in group["params"]]

    def _settings_back(self) -> None:
        """Take over the settings of the inner optimizer, some of which count steps there."""
        assert self._inner is not None
        for group, own in zip(self._inner.param_groups, self.param_groups, strict=True):
            own.update(_settings(group))

    # Who owns what.

    def _cut(self, parameter: torch.Tensor) -> Cut | OtherCut | None:
        """How a parameter is cut; one of no unit, which does not say its axis, as one that has no owner."""
        if id(parameter) not in self._cuts:
            cut = cut_of(parameter)
            owned = cut is not None and _axis(parameter) is not None
            self._cuts[id(parameter)] = cut if owned or cut is None else OtherCut()
        return self._cuts[id(parameter)]

    def _assign(self) -> None:
        """Choose owners: of all parameters of the same ranks, by their numbers of elements."""
        by_ranks: dict[Any, list[tuple[int, Cut]]] = {}
        for parameter in self._parameters():
            cut = self._cut(parameter)
            if cut is not None and not isinstance(cut, OtherCut):
                by_ranks.setdefault(cut.group, []).append((id(parameter), cut))
        for entries in by_ranks.values():
            owners = balanced([cut.shape.numel() for _, cut in entries], entries[0][1].world)
            self._owner_of |= {key: owner for (key, _), owner in zip(entries, owners, strict=True)}

    def _exchanges(
        self, entries: Sequence[tuple[torch.Tensor, str, torch.dtype]]
    ) -> Iterator[tuple[Owners, torch.device, list[tuple[torch.Tensor, str, torch.dtype]]]]:
        """The exchanges that carry a tensor for each entry (parameter, what, dtype); its entries, in its order."""
        if not self._owner_of:
            self._assign()
        key = tuple([(id(parameter), what, dtype) for parameter, what, dtype in entries])
        plans = self._plans.get(key)
        if plans is None:
            together: dict[Any, list[int]] = {}  # values apart from gradients, which takes less memory at once
            for index, (parameter, what, dtype) in enumerate(entries):
                cut: Any = self._cut(parameter)
                together.setdefault((cut.group, what, dtype), []).append(index)
            plans = []
            for (group, *_), indices in together.items():
                parameters = [entries[index][0] for index in indices]
                check_alike(parameters, group)
                cuts: list[Any] = [self._cut(parameter) for parameter in parameters]
                owners = Owners(cuts, [self._owner_of[id(parameter)] for parameter in parameters])
                plans.append((owners, device_of(group), indices))
            keep(self._plans, key, plans)
        for owners, home, indices in plans:
            yield owners, home, [entries[index] for index in indices]

    # A step.

    def _lend(self, stepped: Sequence[torch.Tensor]) -> None:
        """Give the inner optimizer values and gradients of what this rank owns. Collective."""
        owned = []
        for parameter in stepped:
            cut, gradient = self._cut(parameter), parameter.grad
            assert gradient is not None
            check_gradient(parameter, gradient)
            whole = self._wholes[id(parameter)]
            if cut is None:
                whole.data, whole.grad = local_piece(parameter.detach()), local_piece(gradient)
            elif isinstance(cut, OtherCut):
                full: Any = parameter.detach()
                whole.data, whole.grad = full.full_tensor().clone(), gradient.full_tensor()  # type: ignore[attr-defined]
            else:
                owned += [(parameter, "value", parameter.dtype), (parameter, "gradient", gradient.dtype)]
        for owners, home, entries in self._exchanges(owned):
            sources = [p.detach() if what == "value" else p.grad for p, what, _ in entries]
            wholes = owners.gather([local_piece(source).to(home) for source in sources])  # type: ignore[arg-type]
            for at, value in zip(owners.mine, wholes, strict=True):
                parameter, what, _ = entries[at]
                if what == "value":
                    self._wholes[id(parameter)].data = value
                else:
                    self._wholes[id(parameter)].grad = value

    def _return(self, stepped: Sequence[torch.Tensor]) -> None:
        """Put the values that owners made into the shards. Collective."""
        owned = []
        for parameter in stepped:
            cut, whole = self._cut(parameter), self._wholes[id(parameter)].detach()
            if isinstance(cut, OtherCut):
                local_piece(parameter.detach()).copy_(_cut_like(parameter, whole))
            elif cut is None:
                target = local_piece(parameter.detach())
                if whole.data_ptr() != target.data_ptr():
                    target.copy_(whole)
            else:
                owned.append((parameter, "value", parameter.dtype))
        for owners, home, entries in self._exchanges(owned):
            targets = [local_piece(parameter.detach()) for parameter, *_ in entries]
            wholes = [self._wholes[id(entries[at][0])].detach() for at in owners.mine]
            for target, piece in zip(targets, owners.scatter(wholes, [t.to(home) for t in targets]), strict=True):
                target.copy_(piece)
        for parameter in stepped:
            increment_version(parameter)

    # State, whole on owners and sharded.

    def _flat(self, parameter: torch.Tensor) -> State | Exception:
        """The state of a parameter that this rank owns, nested values by keys of their own."""
        assert self._inner is not None
        state: State = {}
        try:
            for key, value in self._inner.state.get(self._wholes[id(parameter)], {}).items():
                _flatten(value, key, state, self._classes.setdefault(id(parameter), {}))
        except CheckpointError as error:
            return error
        return state

    def _described(self, flat: Mapping[int, Any]) -> dict[int, dict[str, tuple[str, Any]]]:
        """What every parameter's state consists of, whoever owns it: by key, its kind and details. Collective."""
        parameters = self._parameters()
        here: dict[int, Any] = {}  # by number, which is the same on all ranks
        for number, parameter in enumerate(parameters):
            state = flat[id(parameter)]
            broken = isinstance(state, Exception)
            here[number] = state if broken else {key: _kind(parameter, value) for key, value in state.items()}
        groups: dict[Any, list[int]] = {}
        for number, parameter in enumerate(parameters):
            if id(parameter) in self._owner_of:
                cut: Any = self._cut(parameter)
                groups.setdefault(cut.group, []).append(number)
        for ranks, numbers in groups.items():
            mine = {number: here[number] for number in numbers if here[number]}
            for theirs in objects_of_all(mine, ranks, "optimizers' state"):
                here |= theirs
        for described in here.values():
            if isinstance(described, Exception):
                raise described
        return {id(parameters[number]): described for number, described in here.items()}

    def _shown(self, parameter: torch.Tensor, value: Any, what: str, detail: Any) -> Any:
        """A value of a parameter's state in `state`; one like a parameter with an owner is filled afterwards."""
        if what == "value":
            return detail
        device = local_piece(parameter).device
        if what == "number":
            number, on_host = detail
            return number if on_host else number.to(device)
        owner = self._owner_of.get(id(parameter))
        if what == "element":
            return _sharded_like(parameter, None if owner is not None else value, detail)
        axes = _axis(parameter)
        if owner is None or axes is None:
            return value
        shape, dtype = detail  # of what only the owner has
        local = torch.empty(0, dtype=dtype, device=device) if value is None else value.detach().reshape(-1)
        name, numel = parameter.__dict__.get(NAME_KEY, "?"), torch.Size(shape).numel()
        return FlatShard(local, Run(name, tuple(shape), tuple(range(len(shape))), owner * numel, numel, *axes))

    def _owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank steps a parameter."""
        cut: Any = self._cut(parameter)
        return id(parameter) not in self._owner_of or bool(cut.rank == self._owner_of[id(parameter)])

    def _is_cut_alike(self, parameter: torch.Tensor, value: Any) -> bool:
        """Whether a value of its state is split as a parameter that has an owner."""
        if id(parameter) not in self._owner_of or not isinstance(value, (DTensor, FlatShard)):
            return False
        same = isinstance(value, FlatShard) and isinstance(parameter, FlatShard) and value._run.same_as(parameter._run)
        return same or cut_of(value) == self._cut(parameter)

    def _whole_state(self, parameter: torch.Tensor, value: Any) -> Any:
        """A value of a parameter's state, whole; of what lies on the owner, None elsewhere. Collective for others."""
        if not isinstance(value, (DTensor, FlatShard)):
            return value
        alone = self._cut(parameter) is None
        on_owner = isinstance(value, FlatShard) and _only_on(value._run) == self._owner_of.get(id(parameter), -1)
        if alone or on_owner or not value.numel():
            return local_piece(value).view(value.shape) if self._owns(parameter) else None
        return value.full_tensor()

    def _take_over(self) -> None:
        """Give the inner optimizer the state that is sharded, or was loaded. Collective."""
        assert self._inner is not None
        if not self._owner_of:
            self._assign()
        states: dict[int, State] = {}
        elements = []
        for parameter in self._parameters():
            for key, value in (self.state.get(parameter) or {}).items():
                if self._is_cut_alike(parameter, value):
                    elements.append((parameter, key, value.dtype))
                    continue
                whole = self._whole_state(parameter, value)
                if self._owns(parameter):
                    states.setdefault(id(parameter), {})[key] = whole
        for owners, home, entries in self._exchanges(elements):
            wholes = owners.gather([local_piece(self.state[p][key]).to(home) for p, key, _ in entries])
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
        got = f"{name}, which changes parameters in train() and eval(), too"
    else:
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            got, remedy = f"{name}, whose step() computes gradients", "use another optimizer"
    if got is not None:
        raise _not_one_by_one(got, remedy)


def _not_one_by_one(got: str, remedy: str) -> ConfigError:
    return ConfigError(
        "OwnerOptimizer: not a class of optimizers that step parameters one by one.",
        expected="a subclass of torch.optim.Optimizer",
        got=got,
        remedy=remedy,
        topic="optimizer-on-shards",
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _named(defaults: Mapping[str, Any], optimizer_class: type) -> dict[str, Any]:
    """Those of an optimizer's defaults that its class takes as arguments."""
    known = inspect.signature(optimizer_class).parameters
    return {key: value for key, value in defaults.items() if key in known}


def _empty(whole: nn.Parameter) -> None:
    """Let go of a parameter's values and gradient; its shape stays."""
    whole.grad = None
    whole.data = whole.new_zeros(()).expand(whole.shape)


def _axis(parameter: torch.Tensor) -> tuple[Axis, Axis | None] | None:
    """The shard axis and the replicate axis of a unit's parameter; None for others."""
    if isinstance(parameter, FlatShard):
        return parameter._run.axis, parameter._run.replicas
    unit: Any = owner_of(parameter)
    for bucket in unit.buckets if unit is not None else ():
        if any(member.sharded is parameter for member in bucket.members):
            return bucket.axes.shard, bucket.axes.replicate
    return None


def _only_on(run: Run) -> int | None:
    """The only rank that holds any of a tensor; None if several do."""
    holders = [rank for rank in range(run.axis.size) if range(*run.bounds(rank))]
    return holders[0] if len(holders) == 1 else None


def _cut_like(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a whole tensor, as of a parameter that is a `DTensor`."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return local_piece(distribute_tensor(whole.contiguous(), mesh, placements, src_data_rank=None))


def _sharded_like(parameter: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of state in a parameter's form; with values where this rank has the whole, and nobody owns it."""
    made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if value is not None:
        piece = value if cut_of(parameter) is None else _cut_like(parameter, value)
        local_piece(made).copy_(piece.view(local_piece(made).shape))
    return made


def _kind(parameter: torch.Tensor, value: Any) -> tuple[str, Any]:
    """What a value of a parameter's state is, and what a rank without it has to know."""
    if not isinstance(value, torch.Tensor):
        return "value", value
    if value.dim() == 0:
        return "number", (value.detach().cpu(), value.is_cpu)
    if value.shape == parameter.shape:
        return "element", value.dtype
    return "whole", (tuple(value.shape), value.dtype)


_STEP = re.compile(r"\[(\d*)\]|\((\d*)\)|\{([^}]*)\}|<(\w+)>")
"""One step into a value: `[index]` of a list, `(index)` of a tuple, `{key}` of a dict, empty for one without any; and
`<name>` of a tensor inside a tensor subclass."""


def _flatten(value: Any, key: Any, state: State, classes: Classes) -> None:
    """Add a value to `state`; what is within lists, tuples, dicts and tensor subclasses under keys of its own."""
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
            "State of an optimizer cannot be kept in a checkpoint.",
            parameter=str(key),
            expected="tensors and numbers, in lists, tuples and dicts",
            got=type(value).__name__,
            remedy="this optimizer trains, but its state is not saved: save the model alone",
            topic="optimizer-state",
        )


def _nested(flat: State, classes: Classes) -> State:
    """The reverse of `_flatten`, of keys in any order."""
    state: dict[Any, Any] = {}
    for key, value in flat.items():
        steps = list(_STEP.finditer(key))
        within, name = state, key[: steps[0].start()] if steps else key
        for step in steps:
            within = within.setdefault(name, _Container(step[0][0]))
            index, at, named, inner = step.groups()
            name = inner or ast.literal_eval(index or at or named or "None")
        if name is not None:  # which the one key of an empty container is
            within[name] = value
    return {key: _as_container(value, key, classes) for key, value in state.items()}


class _Container(dict[Any, Any]):
    """A list, tuple, dict or tensor subclass that is being put together, by index or key; `bracket` says which."""

    def __init__(self, bracket: str) -> None:
        super().__init__()
        self.bracket = bracket


def _as_container(value: Any, key: str, classes: Classes) -> Any:
    if not isinstance(value, _Container):
        return value
    if value.bracket == "{":
        return {name: _as_container(item, f"{key}{{{name!r}}}", classes) for name, item in value.items()}
    if value.bracket == "<":
        kind, context, size, stride = classes[key]
        inner = {name: _as_container(item, f"{key}<{name}>", classes) for name, item in value.items()}
        return kind.__tensor_unflatten__(inner, context, size, stride)
    left, right = "[]" if value.bracket == "[" else "()"
    items = [_as_container(value[index], f"{key}{left}{index}{right}", classes) for index in sorted(value)]
    return items if left == "[" else tuple(items)
