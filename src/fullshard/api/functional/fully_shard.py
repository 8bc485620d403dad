"""`fully_shard`, the functional front-end: translates arguments; units and their runners do the work."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...agreement import broadcast_states, checked
from ...checkpoint.model import after_state_dict, before_load
from ...comm import Comm, make_comm
from ...errors import check_switch, invalid_argument
from ...forms import Ignored, SpmdMesh
from ...layout import Blocks
from ...mesh import Axis, DataParallelMeshDims, MeshAxes, data_parallel_mesh, refuse_misread, resolve_mesh, subdivide
from ...optim import guard as optimizer_guard
from ...policies import Check, MixedPrecisionPolicy, OffloadPolicy, Unused
from ...runtime import (
    RUNNER_KEY,
    PrefetchSettings,
    Runner,
    UnitSettings,
    find_root,
    is_managed,
    left_alone,
    mark_managed,
    move_buffers,
    name_members,
    notice_torch,
    own_modules,
    runners_in,
    unit_of,
)
from ...shard import (
    BuildSettings,
    ReduceSettings,
    Rehearsal,
    build_unit,
    check_parameters,
    find_parameters,
    find_shared,
    home_of,
    plan_unit,
    show_shared,
)
from ...text import PLAIN, plain_class
from ..gradient_settings import check_reduction
from ..save_pretrained import saving_methods
from . import messages
from .arguments import blocks_of, check_arguments, check_policy, checked_ignored, reshard_of
from .module import FSDPModule, state_of
from .reduce_dtype import log_difference, reduces_as_computed

logger = logging.getLogger("fullshard")
ModuleT = TypeVar("ModuleT", bound="nn.Module | list[nn.Module]")

_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()
"""Module class -> the subclass that its units get. Weak, because programs may create classes without end."""


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    layout: str | Blocks = "rows",
    auto_wrap_policy: Any = None,
    prefetch: int = 1,
    comm: str | Comm = "torch",
    check: Check = "first",
    unused: Unused = "error",
    sync_module_states: bool = False,
    reduction: str = "mean",
) -> ModuleT:
    """Shard a module's parameters, gradients and optimizer state over the ranks of a mesh, in place.

    Each call makes a unit of all parameters in `module` that no earlier call has taken; apply it bottom-up: to each
    block, then to the model. A unit's parameters are gathered together before its forward and freed after it. The
    interface is that of `torch.distributed.fsdp.fully_shard`; the arguments from `layout` on are Fullshard's own.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())  # after sharding

    A parameter whose class has `fsdp_pre_all_gather` and `fsdp_post_all_gather` (a quantised weight) decides itself
    which tensors are gathered, as PyTorch documents; it is split by rows in every layout.

    Args:
        module: the module, or a list of modules that form a single unit.
        mesh: 1-D (shard) or 2-D (replicate, shard); None: 1-D over all ranks of the default process group.
        reshard_after_forward: True frees the unit after forward and gathers it again in backward; False keeps it; an
            int (a divisor of the shard axis' size) keeps 1/int of it, from which backward gathers among that many
            consecutive ranks (the axis' size means True; 1 means False, with a warning); None: True, but False for the
            root.
        shard_placement_fn: may return `Shard(dim)`, to split a parameter evenly on a different dim, or a
            `ShardPlacementResult` with a separate mesh (for experts). A `BlockShard` (of torch 2.16, recognised by
            name) cuts a parameter between rows of its last dim, as `layout=Blocks(shape[-1])` would. A unit whose
            parameters have separate meshes is freed whole after forward, even if `reshard_after_forward` is an int.
        mp_policy: dtypes of gathers, reductions and outputs.
        offload_policy: None or `OffloadPolicy()`: no offloading. `CPUOffloadPolicy()`: sharded parameters, gradients
            and optimizer state live in host memory (on a CPU mesh they do anyway).
        ignored_params: parameters that are neither sharded, moved nor reduced, by this unit or units around it.
        dp_mesh_dims: which dims of `mesh` are data-parallel, if it has others too (`DataParallelMeshDims`); parameters
            may be DTensors on that mesh, replicated on its data-parallel dims.
        layout: "rows" (each parameter split on dim 0 as `torch.chunk`; sharded parameters are `DTensor`s) or "flat"
            (parameters back to back, cut anywhere: no copies, almost no padding; sharded parameters are
            `FlatShard`s). `Blocks(granule)` is flat, but cuts parameters only between granules (rows, quantisation
            blocks); "owner" never cuts a parameter: each is whole on a single rank.
        auto_wrap_policy: make units of submodules first: "auto" finds the blocks that the model repeats and logs
            them; a set of module classes; or a policy of `fullshard.wrap` (PyTorch's are accepted too). A
            `CustomPolicy` may override `layout`, `mp_policy`, `prefetch`, `reshard_after_forward` (bool or None) and
            `shard_placement_fn` for a block. Containers without a forward do not become units. None: `module` only.
        prefetch: how many units are gathered ahead; 0 turns prefetching off. At most `prefetch + 1` units that are
            freed after use are gathered at any time.
        comm: "torch"; "null", which skips communication to time the rest (results are meaningless); or a `Comm`.
        check: when ranks compare what they are about to run; the root's value counts. "first": along the first pass of
            each kind, and whenever a rank departs from an order it has taken before; "step": also at the beginning of
            every pass; "every": before each collective.
        unused: what happens to a unit that only some ranks run in a pass (an expert, a branch for images); the root's
            value counts. "error": a `DivergenceError` names it. "zeros": the other ranks gather and free it in step
            all the same and contribute zeros to its reduction; gradients equal those of a single process. Units have to
            run in the same order, each as often as in the first pass; with check="every" in any order, at the cost of a
            small collective at each unit's beginning and end. Writes through `.data` in a forward are not noticed then.
        sync_module_states: broadcast the parameters and buffers that become units here from the mesh's first rank;
            collective. Pass it to every call, or to a call with `auto_wrap_policy`: units that exist already have cut
            their weights. Without it, different weights cause a warning at the first forward, or an error where
            replicas differ or only some ranks loaded weights.
        reduction: how the ranks' gradients are combined: their "mean"; their "sum"; or "tokens", their sum divided by
            the tokens that all ranks reported to `set_token_count`, for losses that are sums over tokens. The same for
            all units of a model; `docs/gradients.md` has the formulas.

    Returns:
        `module` itself. Its class is now a subclass of its own class and `FSDPModule`.

    Raises:
        ConfigError: neither a mesh nor a process group; a mesh that is not 1-D or 2-D; a container without a forward; a
            module that is a unit already, or lies inside a unit that has all of its parameters; a parameter on a
            foreign device; an argument out of range; a 2-D mesh whose dim names suggest that it would be misread.
            Nothing has changed then.
        LayoutError: a parameter that the layout cannot hold.
    """
    modules: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    offload_policy = OffloadPolicy() if offload_policy is None else offload_policy
    check_arguments(modules, offload_policy, layout, prefetch)
    checked(check, unused)
    check_switch("fully_shard(sync_module_states=)", sync_module_states)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise invalid_argument(
            "fully_shard(shard_placement_fn=)", shard_placement_fn, "a function of a Parameter, or None"
        )
    check_policy(mp_policy)
    spmd = None
    if dp_mesh_dims is None:
        refuse_misread(mesh)
    else:
        mesh, spmd = _data_parallel_part(mesh, dp_mesh_dims)
    axes, kind = resolve_mesh(mesh), make_comm(comm)
    check_reduction(reduction, kind)
    settings = BuildSettings(
        axes,
        kind,
        mp_policy,
        layout,
        shard_placement_fn,
        spmd,
        home=home_of(offload_policy, axes.device),
        reduces_as_computed=reduces_as_computed(),
    )
    keep = _check_reshard(reshard_after_forward, axes)
    below = [runner for unit_module in modules for runner in runners_in(unit_module)]
    own_ignored: list[Any] = checked_ignored(ignored_params)
    ignored = {id(parameter) for parameter in own_ignored} | left_alone(below)
    _refuse_inside(modules, ignored)
    plan = _Plan(modules, settings, keep, ignored, prefetch)
    plans = [plan]
    if auto_wrap_policy is not None:
        if len(modules) != 1:
            raise messages.policy_for_a_list()
        plans = [
            *(
                plan.of_block(block, overrides)
                for _, block, overrides in blocks_of(modules[0], auto_wrap_policy, own_ignored)
            ),
            plan,
        ]
    if len(plans) > 1:  # a single unit checks itself before it changes anything
        _check_plans(plans)
    for unit_module in modules if sync_module_states else ():
        broadcast_states(own_modules(unit_module), axes, kind, ignored)
    for plan in plans:
        _make_unit(plan, check, unused, reduction)
    name_members(modules)
    optimizer_guard.install()
    notice_torch()
    return module


@dataclass(frozen=True)
class _Plan:
    """A unit to be made.

    Attributes:
        modules: its modules.
        settings: the settings with which it is built.
        keep: see `_check_reshard`.
        ignored: ids of the parameters to leave alone.
        prefetch: how many units are gathered ahead.
    """

    modules: Sequence[nn.Module]
    settings: BuildSettings
    keep: tuple[bool | None, Axis | None]
    ignored: set[int]
    prefetch: int

    def of_block(self, block: nn.Module, overrides: dict[str, Any]) -> _Plan:
        """The plan for a block of the model, with a policy's overrides."""
        settings, keep = self.settings, self.keep
        if overrides:
            settings = replace(
                settings,
                policy=overrides.get("mp_policy", settings.policy),
                layout=overrides.get("layout", settings.layout),
                placement=overrides.get("shard_placement_fn", settings.placement),
            )
        if "reshard_after_forward" in overrides:
            keep = _check_reshard(overrides["reshard_after_forward"], settings.axes)
        return _Plan([block], settings, keep, self.ignored, overrides.get("prefetch", self.prefetch))


def _check_plans(plans: Sequence[_Plan]) -> None:
    """Check all planned units, so that an invalid one raises before any is built."""
    rehearsal = Rehearsal(unit_of)
    for plan in plans:
        drafts = rehearsal.add(plan.modules, plan.ignored)
        check_parameters(drafts, plan.settings.axes, plan.settings.layout)
        plan_unit(drafts, plan.settings)


def _refuse_inside(modules: Sequence[nn.Module], ignored: set[int]) -> None:
    """Raise if the units around these modules own all their parameters: a unit of its own would change nothing."""
    if not all(map(is_managed, modules)) or find_parameters(modules, unit_of, ignored):
        return
    for item in find_shared(modules, unit_of, ignored)[:1]:
        raise messages.parameters_taken(plain_class(modules[0]).__name__, item.name)


def _data_parallel_part(mesh: DeviceMesh | None, dims: Any) -> tuple[DeviceMesh, SpmdMesh]:
    """The data-parallel submesh of `mesh`, and the dims of `mesh` that form it."""
    names = [getattr(dims, field, None) for field in ("shard", "replicate")]  # accepts PyTorch's own class too
    if mesh is None or not isinstance(mesh, DeviceMesh) or not hasattr(dims, "shard"):
        raise messages.mesh_dims_without_mesh(mesh, dims)
    mesh_dims = DataParallelMeshDims(*names)
    submesh = data_parallel_mesh(mesh, mesh_dims)
    used = {*mesh_dims.shard_names, *mesh_dims.replicate_names}
    return submesh, SpmdMesh(mesh, tuple(i for i, name in enumerate(mesh.mesh_dim_names or ()) if name in used))


def _check_reshard(reshard: bool | int | None, axes: MeshAxes) -> tuple[bool | None, Axis | None]:
    """`reshard_after_forward` as a pair: bool or None, and the axis from which backward gathers, or None."""
    reshards, ranks = reshard_of(reshard, axes.shard.size)
    if reshard == 1 and not isinstance(reshard, bool):
        warnings.warn(messages.reshard_of_one(), stacklevel=3)
    return reshards, subdivide(axes, ranks) if ranks else None


def _make_unit(plan: _Plan, check: Check, unused: Unused, reduction: str) -> None:
    """Shard the parameters in the plan's modules that no unit has yet, and attach a runner."""
    modules, settings, ignored = plan.modules, plan.settings, plan.ignored
    drafts = find_parameters(modules, unit_of, ignored)
    check_parameters(drafts, settings.axes, settings.layout)
    shared = find_shared(modules, unit_of, ignored)
    unit = build_unit(drafts, settings)
    log_difference(unit, settings.policy)
    show_shared(shared)
    reshard, kept_axis = plan.keep
    unit.keep_among(kept_axis, settings.axes)
    unit_settings = UnitSettings(
        settings.comm,
        settings.policy,
        settings.axes,
        reshard,
        reduce=ReduceSettings(reduction=reduction),
        prefetch=PrefetchSettings(plan.prefetch, plan.prefetch),
        ignored=Ignored.under(modules, ignored),
        check=check,
        unused=unused,
    )
    runner = Runner(unit, modules, unit_settings, find_root)
    for module in modules:
        move_buffers(module.modules(), settings.axes.device)
        mark_managed(own_modules(module), originals=True)
        module.__dict__[RUNNER_KEY] = runner
        object.__setattr__(module, "__class__", _unit_class(type(module)))  # bypasses torch.compile's __setattr__
        module.register_state_dict_post_hook(after_state_dict)
        module.register_load_state_dict_pre_hook(before_load)


def _unit_class(cls: type) -> type:
    unit_class = _classes.get(cls)
    if unit_class is None:
        namespace = {"__module__": cls.__module__, PLAIN: cls, **saving_methods(cls)}
        _classes[cls] = unit_class = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return unit_class


fully_shard.state = state_of  # type: ignore[attr-defined]  # PyTorch's libraries look for it here
