"""Run any optimizer on whole parameters: each is assembled on one rank, its owner, which steps it and has its state."""

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
from torch.distributed.tensor import DTensor

from ..comm import objects_of_all
from ..containers import leaves_in
from ..errors import CheckpointError, ConfigError, message
from ..forms import NAME_KEY, PART_KEY, FlatShard, owner_of
from ..forms.run import Run
from ..mesh import Axis, device_of
from ..torch_private.local_tensor import inside
from .owners import Cut, OtherCut, Owners, balanced, check_alike, check_gradient, cut_of, keep, piece_of, places_of
from .probe import treats_parameters

State = dict[str, Any]  # of one parameter, by key
Entry = tuple[torch.Tensor, str, torch.dtype]
"""A tensor to exchange: its parameter; "value", "gradient" or a key of the state; its dtype."""
Classes = dict[str, tuple[Any, ...]]
"""By key, how to rebuild a tensor subclass from its inner tensors: its class, context, size and stride."""


class OwnerOptimizer(torch.optim.Optimizer):
    """Run an optimizer that needs whole tensors (Shampoo, SOAP, Adafactor, LAMB, ...) on sharded parameters.

        optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)

    Each parameter is assembled on one rank of its shard axis, its owner, and `optimizer_class` steps it there, as in
    a single process. Owners are balanced by number of elements. In a step, owners receive the pieces of parameters and
    gradients and send back the new values, without padding: 12 bytes per float32 element of a rank's shards. During a
    step, a rank needs additional memory of three times its shards of parameters, and what `optimizer_class` needs.
    `DTensor`s that are split over two mesh axes (tensor parallelism) are gathered and stepped on all ranks.

    Between steps, `state` has each parameter's state on its owner. `state_dict()`, `fullshard.save` and similar
    functions show it sharded, like that of other optimizers: a checkpoint loads on any number of ranks and, if keys
    match, into the same optimizer without owners. State of any other shape than its parameter stays on the owner.

    `add_param_group`, `step`, `state_dict`, `load_state_dict` and copying are collective: ranks must have gradients for
    the same parameters.

    Owners of whole parameters: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), section 5, stage 1, by parameter.

    Args:
        params: parameters of `fully_shard` in any layout, or plain ones, or groups of them.
        optimizer_class: the optimizer to run. It must step parameters independently, and only in `step()`.
        settings: arguments of `optimizer_class`.

    Raises:
        ConfigError: `optimizer_class` cannot step parameters one by one, or a parameter is a flat run of elements (of
            FullyShardedDataParallel or `optimizer_view`).
    """

    _inner: torch.optim.Optimizer  # of `optimizer_class`, on `_wholes`; unset while __init__ adds the first groups

    def __init__(self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], **settings: Any) -> None:
        _check_class(optimizer_class)
        self.optimizer_class, self._arguments = optimizer_class, settings
        self._shared = False  # whether `state` is sharded
        # By id of the parameter:
        self._wholes: dict[int, nn.Parameter] = {}  # the whole parameters that the inner optimizer steps
        self._owner_of: dict[int, int] = {}  # of parameters that have an owner; empty until `_assign_owners`
        self._cuts: dict[int, Cut | OtherCut | None] = {}
        self._classes: dict[int, Classes] = {}  # of the state of parameters that this rank owns
        self._plans: dict[Any, list[tuple[Owners, torch.device, list[int]]]] = {}  # by the exchanged entries
        self._in_order: list[torch.Tensor] = []  # see `_parameters`
        self._knows_classes = False  # whether `_classes` is complete, the same on all ranks
        super().__init__(params, {})
        self._inner = optimizer_class(
            [{**_settings(group), "params": self._new_wholes(group)} for group in self.param_groups], **settings
        )
        self.defaults = self._inner.defaults
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
            ConfigError: a parameter is a flat run of elements.
        """
        is_built = hasattr(self, "_inner")
        if is_built:
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
                    "OwnerOptimizer: a parameter is a flat run of elements, which cannot be assembled on an owner.",
                    parameter=parameter.__dict__.get(NAME_KEY, "?"),
                    expected="parameters of fully_shard",
                    got=str(parameter.__dict__[PART_KEY]),
                    remedy="shard the model with fully_shard, and pass model.parameters()",
                    topic="optimizer-on-shards",
                )
        if is_built:
            self._inner.add_param_group({**_settings(group), "params": self._new_wholes(group)})
            self._copy_settings_back()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Collective among the ranks of each shard axis.

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
                self._arguments,
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
        """Whole parameters for the inner optimizer, one per parameter of a group. They have values only in steps."""
        for parameter in group["params"]:
            local = inside(parameter.detach())
            whole = nn.Parameter(local.new_zeros(()).expand(parameter.shape), parameter.requires_grad)
            self._wholes[id(parameter)] = whole
        return [self._wholes[id(parameter)] for parameter in group["params"]]

    def _copy_settings_back(self) -> None:
        """Copy the group settings of the inner optimizer, which may change in its steps."""
        for inner_group, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(_settings(inner_group))

    # Owners.

    def _cut(self, parameter: torch.Tensor) -> Cut | OtherCut | None:
        """How a parameter is sharded. `OtherCut` for one in no unit, whose shard axis is unknown."""
        if id(parameter) not in self._cuts:
            cut = cut_of(parameter)
            self._cuts[id(parameter)] = OtherCut() if cut is not None and _axes(parameter) is None else cut
        return self._cuts[id(parameter)]

    def _assign_owners(self) -> None:
        """Choose owners unless they are chosen: balance the elements of all parameters with the same ranks."""
        if self._owner_of:
            return
        by_ranks: dict[Any, list[tuple[int, Cut]]] = {}
        for parameter in self._parameters():
            cut = self._cut(parameter)
            if cut is not None and not isinstance(cut, OtherCut):
                by_ranks.setdefault(cut.group, []).append((id(parameter), cut))
        for entries in by_ranks.values():
            owners = balanced([cut.shape.numel() for _, cut in entries], entries[0][1].world)
            self._owner_of |= {key: owner for (key, _), owner in zip(entries, owners, strict=True)}

    def _exchanges(self, entries: Sequence[Entry]) -> Iterator[tuple[Owners, torch.device, list[Entry]]]:
        """The exchanges that transfer the tensors of all entries: for each its owners, device and entries in order."""
        self._assign_owners()
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
            if cut is None:
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
        """Copy the new values from the owners into the shards. Collective."""
        owned = []
        for parameter in stepped:
            cut, whole = self._cut(parameter), self._wholes[id(parameter)].detach()
            if isinstance(cut, OtherCut):
                inside(parameter.detach()).copy_(piece_of(parameter, whole))
            elif cut is None:
                target = inside(parameter.detach())
                if whole.data_ptr() != target.data_ptr():
                    target.copy_(whole)
            else:
                owned.append((parameter, "value", parameter.dtype))
        for owners, home, entries in self._exchanges(owned):
            targets = [inside(parameter.detach()) for parameter, *_ in entries]
            wholes = [self._wholes[id(entries[at][0])].detach() for at in owners.mine]
            for target, piece in zip(targets, owners.scatter(wholes, [t.to(home) for t in targets]), strict=True):
                target.copy_(piece)
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
        return state

    def _descriptions(self, flat: Mapping[int, Any]) -> dict[int, dict[str, tuple[str, Any]]]:
        """Descriptions of all parameters' state from its owners: by id and key, see `_describe`. Collective."""
        parameters = self._parameters()
        descriptions: dict[int, Any] = {}  # by index in `_parameters`, which is the same on all ranks
        for number, parameter in enumerate(parameters):
            state = flat[id(parameter)]
            failed = isinstance(state, Exception)
            descriptions[number] = state if failed else {key: _describe(parameter, v) for key, v in state.items()}
        groups: dict[Any, list[int]] = {}
        for number, parameter in enumerate(parameters):
            if id(parameter) in self._owner_of:
                cut: Any = self._cut(parameter)
                groups.setdefault(cut.group, []).append(number)
        for ranks, numbers in groups.items():
            local = {number: descriptions[number] for number in numbers if descriptions[number]}
            for owned in objects_of_all(local, ranks, "optimizers' state"):
                descriptions |= owned
        for description in descriptions.values():
            if isinstance(description, Exception):
                raise description
        return {id(parameters[number]): description for number, description in descriptions.items()}

    def _blank(self, parameter: torch.Tensor, value: Any, kind: str, detail: Any) -> Any:
        """The sharded form of a state value. One shaped like a parameter with an owner is zero, and filled later."""
        if kind == "value":
            return detail
        device = inside(parameter).device
        if kind == "number":
            number, on_cpu = detail
            return number if on_cpu else number.to(device)
        owner = self._owner_of.get(id(parameter))
        if kind == "element":
            return _sharded_like(parameter, None if owner is not None else value, detail)
        axes = _axes(parameter)
        if owner is None or axes is None:
            return value
        shape, dtype = detail  # a rank other than the owner has no value
        local = torch.empty(0, dtype=dtype, device=device) if value is None else value.detach().reshape(-1)
        name, numel = parameter.__dict__.get(NAME_KEY, "?"), torch.Size(shape).numel()
        return FlatShard(local, Run(name, tuple(shape), tuple(range(len(shape))), owner * numel, numel, *axes))

    def _owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank steps a parameter."""
        cut: Any = self._cut(parameter)
        return id(parameter) not in self._owner_of or bool(cut.rank == self._owner_of[id(parameter)])

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

    def _unshare_state(self) -> None:
        """Pass the sharded state, which may have been loaded, to the inner optimizers of the owners. Collective."""
        self._assign_owners()
        states: dict[int, State] = {}
        elements = []
        for parameter in self._parameters():
            for key, value in (self.state.get(parameter) or {}).items():
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
    else:
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
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


def _axes(parameter: torch.Tensor) -> tuple[Axis, Axis | None] | None:
    """The shard axis and the replicate axis of a parameter; None if it is in no unit."""
    if isinstance(parameter, FlatShard):
        return parameter._run.axis, parameter._run.replicas
    unit: Any = owner_of(parameter)
    for bucket in unit.buckets if unit is not None else ():
        if any(member.sharded is parameter for member in bucket.members):
            return bucket.axes.shard, bucket.axes.replicate
    return None


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


def _describe(parameter: torch.Tensor, value: Any) -> tuple[str, Any]:
    """The kind of a state value, and the details that ranks without it need to show it."""
    if not isinstance(value, torch.Tensor):
        return "value", value
    if value.dim() == 0:
        return "number", (value.detach().cpu(), value.is_cpu)
    if value.shape == parameter.shape:
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
