"""From modules to a unit: which parameters it takes, how they are classed into buckets, and what replaces them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..comm import Comm
from ..errors import ConfigError, LayoutError
from ..layout import ALIGN_BYTES, Blocks, Layout, ParameterSpec, plan_blocks, plan_flat, plan_owner, plan_rows
from ..mesh import MeshAxes, resolve_mesh
from ..policies import MixedPrecisionPolicy
from .bucket import Bucket
from .checks import check_device, check_type
from .extension import ExtensionBucket, is_extension, weak_module
from .flat_shard import FlatShard
from .local_bucket import HiddenParameter
from .member import Draft
from .offload import Home
from .parameter import OWNER_KEY, attributes_of, retire, successor_of
from .tensor_parallel import SpmdMesh, TensorParallel, local_part
from .unit import Unit, owner_of

logger = logging.getLogger("fullshard")


class AttributePlace(dict[str, Any]):
    """Stands for a module's `_parameters` where the module's class watches its attributes (`nn.LSTM` does)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.module, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self.module._parameters.get(key, default)


@dataclass
class Found:
    """A parameter in the modules of a unit to be.

    Attributes:
        name: qualified, from the module that fully_shard was given.
        parameter: the object.
        places: where it is registered.
        owner: the unit that already shards it, if it is tied to a parameter of that unit.
        placement, axes: what `shard_placement_fn` chose for it, once it was asked.
    """

    name: str
    parameter: Any
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    owner: Unit | None = None
    placement: Shard | None = None  # what `shard_placement_fn` chose
    axes: MeshAxes | None = None
    module: nn.Module | None = None  # the first that has it


UnitOf = Callable[[nn.Module], Unit | None]
"""The unit that a module is (one of) the modules of, or None."""


def walk(
    module: nn.Module, unit_of: UnitOf, path: str = "", unit: Unit | None = None
) -> Iterator[tuple[str, nn.Module, Unit | None]]:
    """`module` and all below it, each with its name and the unit that runs it (None: no unit below the top does)."""
    yield path, module, unit
    for name, child in module.named_children():
        yield from walk(child, unit_of, f"{path}.{name}" if path else name, unit_of(child) or unit)


def find_parameters(modules: Sequence[nn.Module], unit_of: UnitOf, ignored: set[int]) -> list[Found]:
    """The parameters that a unit of `modules` takes.

    These are the parameters in them that no unit has, and those that units below share with each other or with the
    rest of `modules`: a tied weight belongs to the innermost unit around all of its uses. A parameter shared with a
    unit outside `modules` is left to that unit, until a unit around both is made.

    Args:
        modules: the unit's modules.
        unit_of: the unit of a module.
        ignored: ids of parameters to leave alone.
    """
    found: dict[int, Found] = {}
    users: dict[int, set[int]] = {}  # by parameter: ids of the units that run it; 0 for the one to be made
    inside: set[int] = set()  # ids of the units below
    seen: set[int] = set()
    for module in modules:
        for path, owner, unit in walk(module, unit_of):
            again = id(owner) in seen  # a module that several others hold: each unit that runs it counts
            seen.add(id(owner))
            inside.add(id(unit))
            hidden = [(key, value) for key, value in owner.__dict__.items() if type(value) is HiddenParameter]
            for key, registered in [*owner._parameters.items(), *hidden]:
                if registered is None or id(registered) in ignored:
                    continue
                parameter = successor_of(registered)
                name = f"{path}.{key}" if path else key
                item = found.setdefault(id(parameter), Found(name, parameter, owner=owner_of(parameter), module=owner))
                users.setdefault(id(parameter), set()).add(id(unit) if unit is not None else 0)
                if unit is None and not again and type(registered) is not HiddenParameter:
                    item.places.append((_place_of(owner), key))
    taken = []
    for identity, item in found.items():
        if item.owner is None:
            taken.append(item)
        elif id(item.owner) not in inside:
            item.owner.add_places(item.parameter, item.places)
        elif users[identity] != {id(item.owner)}:
            taken.append(item)
    return taken


def _place_of(owner: nn.Module) -> dict[str, Any]:
    watches = type(owner).__setattr__ is not nn.Module.__setattr__
    return AttributePlace(owner) if watches else owner._parameters


def check_ties(module: nn.Module, unit_of: UnitOf, within: Callable[[Unit, nn.Module], bool]) -> None:
    """Refuse a parameter that is used outside the unit that gathers it.

    Args:
        module: the root.
        unit_of: the unit of a module.
        within: whether a module lies in a unit's modules.

    Raises:
        LayoutError: names the parameter and where it is used.
    """
    for path, user, _ in walk(module, unit_of):
        for key, registered in user._parameters.items():
            if registered is None:
                continue
            parameter = successor_of(registered)
            unit = owner_of(parameter)
            if unit is not None and (parameter is not registered or not within(unit, user)):
                raise LayoutError(
                    f"A weight of unit {unit.name!r} is also used outside of it, where it is not gathered.",
                    parameter=f"{path}.{key}" if path else key,
                    expected="one unit around all uses of a tied weight",
                    remedy="apply fully_shard to the innermost module that contains all of them, after its parts",
                )


def check_parameters(found: Sequence[Found], axes: MeshAxes, layout: str | Blocks, wrapper: bool = False) -> None:
    """Refuse what cannot be sharded, before anything changes.

    Args:
        wrapper: for `LocalBucket`s, which take DTensors but no tensor subclasses with a gather of their own.

    Raises:
        ConfigError: a parameter on another device, a DTensor in another layout than rows.
        LayoutError: two parameters that share memory without being the same object, a tensor-parallel tie.
    """
    by_address: dict[int, str] = {}
    for item in found:
        parameter = item.parameter
        if item.owner is not None:
            held = [(b, m) for b in item.owner.buckets for m in b.members if m.sharded is parameter]
            if any(m.slot.name in b.parallel or not b.plain for b, m in held):
                raise LayoutError(
                    "A tensor-parallel parameter, or one of a tensor subclass, is tied between units.",
                    parameter=item.name,
                    remedy="let one fully_shard call take all modules that use it: shard the module around them, "
                    "or a list of them, before any of them by itself",
                )
            continue
        check_type(item.name, parameter, extensions=not wrapper)
        if isinstance(parameter, DTensor) and layout != "rows" and not wrapper:
            raise ConfigError(
                "fully_shard was given a parameter that is a DTensor already (tensor parallelism).",
                parameter=item.name,
                expected='layout="rows", whose sharded parameters say how they are split twice',
                got=f"layout={layout!r}",
                remedy='use layout="rows" for this unit, or pass the parameter in ignored_params',
            )
        check_device(item.name, parameter.device, axes.device)
        if local_part(parameter).numel() and not parameter.is_meta and not is_extension(parameter):
            other = by_address.setdefault(local_part(parameter).data_ptr(), item.name)
            if other != item.name:
                raise LayoutError(
                    "Two Parameter objects share one memory: sharded separately they would drift apart.",
                    parameter=f"{other} and {item.name}",
                    remedy="tie them by assigning the same Parameter object to both modules",
                )


@dataclass(frozen=True)
class BuildSettings:
    """How a unit is built; the arguments of `fully_shard` that shape it."""

    axes: MeshAxes
    comm: Comm
    policy: MixedPrecisionPolicy
    layout: str | Blocks
    placement: Callable[[nn.Parameter], Any] | None = None
    spmd: SpmdMesh | None = None  # the mesh that `axes` are some dims of
    bucket: Any = Bucket  # the class, or a function with its arguments
    home: Home | None = None  # memory of shards and gradients, if not the mesh's device


def build_unit(found: Sequence[Found], settings: BuildSettings) -> Unit:
    """Make the buckets and put the sharded parameters in the originals' places.

    Everything that can be refused is refused before the first place is written.

    Raises:
        LayoutError: a parameter that the layout cannot hold.
    """
    classes: dict[tuple[Any, ...], list[Found]] = {}
    meshes: dict[DeviceMesh, MeshAxes] = {settings.axes.mesh: settings.axes}
    for item in found:
        parameter = item.parameter
        item.placement, item.axes = choose_placement(item, settings, meshes)
        alone = item.name if is_extension(parameter) else None  # a bucket of its own
        key = (parameter.dtype, parameter.requires_grad, parameter.is_meta, id(item.axes), alone)
        classes.setdefault(key, []).append(item)
    planned = []
    for items in classes.values():
        own = replace(settings, axes=items[0].axes or settings.axes)
        if is_extension(items[0].parameter):
            own = replace(own, layout="rows", bucket=partial(ExtensionBucket, policy=settings.policy))
        plan = partial(_plan, dtype=items[0].parameter.dtype, settings=own)
        layout = plan([_spec(item, own) for item in items])
        if layout.note:
            logger.info("%s: %s", layout.name, layout.note)
        planned.append((items, layout, own, plan))
    made: dict[int, Bucket] = {}
    # Subclasses first: they may be refused, and units below have given nothing up yet.
    for index in sorted(range(len(planned)), key=lambda i: not is_extension(planned[i][0][0].parameter)):
        items, layout, own, plan = planned[index]
        parallel = _parallel(items, own)
        if parallel and settings.home is not None:
            raise ConfigError(
                "CPU offload does not work with tensor-parallel parameters yet.",
                parameter=next(iter(parallel)),
                remedy="shard their unit without CPUOffloadPolicy",
            )
        drafts = [_draft(item, parallel.get(item.name), settings.bucket.keeps_originals) for item in items]
        compute_dtype = _compute_dtype(items[0].parameter.dtype, settings.policy)
        made[index] = own.bucket(drafts, layout, own.axes, compute_dtype, plan, settings.home)
    buckets = [made[index] for index in range(len(planned))]
    unit = Unit(buckets, settings.policy.reduce_dtype)
    unit.rank = settings.axes.global_rank
    for (items, *_), bucket in zip(planned, buckets, strict=True):
        for item, member in zip(items, bucket.members, strict=True):
            member.sharded.__dict__[OWNER_KEY] = weakref.ref(unit)
            for place, attribute in member.places:
                place[attribute] = member.sharded
            if member.sharded is item.parameter:
                continue
            if item.owner is not None:
                item.parameter.__dict__["_fullshard_successor"] = member.sharded
            else:
                retire(item.parameter, item.name, member.sharded)
    return unit


def _parallel(items: Sequence[Found], settings: BuildSettings) -> dict[str, TensorParallel]:
    """How those of `items` that are DTensors already are split, by name."""
    found = {}
    for item in items:
        if item.owner is None and isinstance(item.parameter, DTensor):
            dim = _spec(item, settings).dim
            apart = settings.layout == "flat"  # of the wrapper: its sharded parameters are plain tensors
            found[item.name] = TensorParallel.of(item.parameter, item.name, settings.axes, dim, settings.spmd, apart)
    return found


def _draft(item: Found, parallel: TensorParallel | None, keep_object: bool) -> Draft:
    """A tied parameter that a unit below had taken comes back whole, with the places it had there."""
    if item.owner is None:
        return Draft(item.name, item.parameter, item.places, parallel, weak_module(item.module))
    item.parameter = successor_of(item.parameter)  # another one that left its unit may have moved it
    places, full = item.owner.give_up(item.parameter)
    if keep_object:
        original = item.parameter
        original.data = full
    else:
        original = nn.Parameter(full, requires_grad=item.parameter.requires_grad)
        original.__dict__.update(attributes_of(item.parameter))
    return Draft(item.name, original, [*places, *item.places])


def _compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype | None:
    return policy.param_dtype if dtype.is_floating_point else None


def _plan(specs: Sequence[ParameterSpec], *, dtype: torch.dtype, settings: BuildSettings) -> Layout:
    """The layout of parameters of `dtype`."""
    compute = _compute_dtype(dtype, settings.policy) or dtype
    reduce = settings.policy.reduce_dtype or compute
    narrowest = min(dtype.itemsize, compute.itemsize, reduce.itemsize)
    align, world = max(1, ALIGN_BYTES // narrowest), settings.axes.shard.size
    kind = settings.layout
    if kind == "flat":
        return plan_flat(specs, world, align)
    if kind == "owner":
        return plan_owner(specs, world, align)
    alone = settings.comm.costs(settings.axes.shard).break_even_bytes // compute.itemsize
    if isinstance(kind, Blocks):
        granules = [kind.of(spec.shape, spec.order) for spec in specs]
        label = f"blocks({kind.granule})"
        return plan_blocks(specs, granules, world, align, alone, label, whole_rows=kind.granule == "row")
    return plan_rows(specs, world, align, alone)


def choose_placement(
    item: Found, settings: BuildSettings, meshes: dict[DeviceMesh, MeshAxes]
) -> tuple[Shard | None, MeshAxes]:
    """What `shard_placement_fn` says of a parameter: a placement (None: the default) and the axes of its mesh.

    Args:
        meshes: those met so far, so that parameters of one mesh share a bucket; gains new ones.

    Raises:
        ConfigError: it says something that cannot be used.
    """
    chosen = settings.placement(item.parameter) if settings.placement is not None else None
    placement, mesh = chosen, None
    if chosen is not None and hasattr(
        chosen, "placement"
    ):  # ShardPlacementResult, ours or PyTorch's, whose mesh is in a `mesh_info`
        placement, mesh = chosen.placement, getattr(chosen, "mesh", None)
        mesh = mesh if mesh is not None else getattr(getattr(chosen, "mesh_info", None), "mesh", None)
    if placement is not None and (not isinstance(placement, Shard) or settings.layout != "rows"):
        raise ConfigError(
            "shard_placement_fn returned a placement that cannot be used.",
            parameter=item.name,
            expected='None, torch.distributed.tensor.Shard or ShardPlacementResult; Shard with layout="rows" only',
            got=f"{placement!r} with layout={settings.layout!r}",
        )
    if mesh is None:
        return placement, settings.axes
    if mesh not in meshes:
        axes = resolve_mesh(mesh)
        if axes.device != settings.axes.device:
            raise ConfigError(
                "shard_placement_fn returned a mesh on another device.",
                parameter=item.name,
                expected=settings.axes.device,
                got=axes.device,
            )
        meshes[mesh] = axes
    return placement, meshes[mesh]


def _spec(item: Found, settings: BuildSettings) -> ParameterSpec:
    parameter, placement = item.parameter, item.placement
    if item.owner is None and isinstance(parameter, DTensor):
        parameter = local_part(parameter)
    shape, order = tuple(parameter.shape), None
    if item.owner is not None:  # its sharded form need not have the whole's shape
        slot = next(member.slot for member in item.owner.members if member.sharded is parameter)
        shape, order = slot.shape, slot.spec.order
    dim = placement.dim % max(len(shape), 1) if placement is not None else 0
    return ParameterSpec(item.name, shape, order or memory_order(parameter), dim)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims from outermost to innermost in memory if the tensor has no gaps, else as if contiguous."""
    natural = tuple(range(tensor.dim()))
    if tensor.is_contiguous() or isinstance(tensor, FlatShard):
        return natural if not isinstance(tensor, FlatShard) else tensor._run.order
    strides = tensor.stride()
    order = tuple(sorted(natural, key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else natural
