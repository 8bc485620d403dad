"""`summon_full_params`: whole parameters on the modules, outside of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...checkpoint.table import rows_in
from ...checkpoint.whole import Wanted, whole_values
from ...comm import reduce_value
from ...dtypes import as_bits
from ...errors import ConfigError, check_module, check_switch
from ...forms import OWNER_KEY, FlatParameterForm, Member
from ...optim.clip import local_gradients
from ...readers import wait_for_readers
from ...runtime import Runner, runner_of
from ...runtime.outputs import tensors_behind
from ...shard import Bucket
from ...torch_private.local_tensor import local_part
from . import messages

_open: list[nn.Module] = []  # instances inside the context now, in the order in which they entered it


def is_summoned(module: nn.Module) -> bool:
    """Whether `module`, an instance, is inside `summon_full_params` now."""
    runner = runner_of(module)
    return runner is not None and runner.unit.showing.summoned


def may_run_summoned(module: nn.Module) -> bool:
    """Whether a forward of `module`, a summoned instance, has whole parameters on this rank, as generation needs."""
    runner = runner_of(module)
    return runner is not None and runner.unit.showing.whole_here


def without_backward(output: Any) -> Any:
    """Return the output of a summoned instance's forward; a backward through it raises."""
    if torch.is_grad_enabled():
        for tensor in tensors_behind(output)[0]:
            if tensor.grad_fn is not None:
                tensor.register_hook(_refuse_gradient)
    return output


def summoned_around(module: nn.Module) -> Runner | None:
    """The runner of the outermost summoned instance around `module` that has no root yet, or None.

    When `module` runs, that instance or one above it must become the root, although its own forward does not run.
    """
    for instance in _open:
        runner = runner_of(instance)
        if runner is not None and runner.root is None and any(child is module for child in instance.modules()):
            return runner
    return None


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show whole parameters, in their own dtype, on the modules of instances; sharded again when the context ends.

    Collective: every rank enters and leaves; not inside forward or backward. Within the context the module can be
    called, to generate text for example: it computes in the parameters' own dtype, without communication. With
    `recurse=False` call the wrapped module; instances inside it gather their own parameters. A backward through
    either is an error.

    Args:
        module: an instance, or a module that contains instances.
        recurse: True: all instances in `module`; False: only `module` itself.
        writeback: write changes of parameters (and gradients) back; each rank's changes to its own part count. False
            drops them, except under NO_SHARD, where the values are the parameters themselves.
        rank0_only: only rank 0 of each instance's process group shows whole parameters; excludes `writeback`.
        offload_to_cpu: show whole parameters in host memory.
        with_grads: show whole gradients in `.grad`, for parameters that have a gradient on any rank.

    Raises:
        NotSupportedError: `writeback` together with `rank0_only`.
        UsageError: called inside forward or backward, or inside another `summon_full_params` of the same instance;
            a forward of a summoned instance on a rank that shows no whole parameters; a backward through such a
            forward or into other instances of its model; a later backward that reaches summoned parameters.
        ConfigError: an invalid argument; or, on leaving, a parameter that was replaced by one of a different shape.
    """
    check_module("summon_full_params", module)
    switches = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only}
    for name, value in (switches | {"offload_to_cpu": offload_to_cpu, "with_grads": with_grads}).items():
        check_switch(f"summon_full_params({name}=)", value)
    if writeback and rank0_only:
        raise messages.writes_back_from_one_rank()
    instances = [child for child in module.modules() if hasattr(child, "_arguments") and runner_of(child) is not None]
    if not recurse:
        instances = [child for child in instances if child is module]
    for instance in instances:
        _check_idle(instance)
    with ExitStack() as stack:
        for instance in instances:
            stack.enter_context(_summoned(instance, writeback, rank0_only, offload_to_cpu, with_grads))
        yield


def _check_idle(instance: Any) -> None:
    runner = instance._runner()
    root, rank = runner.root, runner.settings.axes.global_rank
    # An instance has no name before its model has run.
    unit = (
        f"the instance around {type(instance.module).__name__}"
        if root is None
        else f"unit {runner.unit.name or '(root)'!r}"
    )
    if is_summoned(instance):
        raise messages.summoned_twice(rank, unit)
    # Asking for the root here would make an inner instance the root.
    if root is not None and runner.is_running:
        raise messages.summoned_within_a_pass(rank, unit, root.pass_top is not None)


@contextmanager
def _summoned(instance: Any, writeback: bool, rank0_only: bool, to_cpu: bool, with_grads: bool) -> Iterator[None]:
    """`summon_full_params` of a single instance."""
    runner: Runner = instance._runner()
    runner.reshard()
    runner.unit.refresh()
    visible = not rank0_only or instance.rank == 0
    wholes = [_Summoned(bucket, to_cpu, with_grads, visible) for bucket in runner.unit.buckets]
    runner.unit.showing.summon(True, visible)
    _open.append(instance)
    try:
        if visible:
            for whole in wholes:
                whole.show()
        yield
    finally:
        runner.unit.showing.summon(False)
        _open.remove(instance)
        with ExitStack() as hiding:  # all of them, whatever one refuses
            for whole in wholes if visible else ():
                hiding.callback(whole.hide, writeback)


def _refuse_gradient(grad: Any) -> None:
    """Hook of whole parameters and of outputs computed from them: their gradients would train nothing."""
    raise messages.backward_through_whole()


def _refuse_existing_graphs(parameter: nn.Parameter) -> None:
    """Make backwards through existing graphs raise when they reach `parameter`, which will get other memory.

    Those graphs share the node that accumulates the parameter's gradient, and nothing else refers to it.
    """
    if parameter.requires_grad:
        with torch.enable_grad():
            node: Any = parameter.view_as(parameter).grad_fn
        node.next_functions[0][0].register_prehook(_refuse_gradient)


def _point(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Give a parameter other memory, and a new node in autograd for graphs that are built from now on.

    Autograd reuses a parameter's node, with the shape that it had, while a graph refers to it; a change of dtype makes
    autograd create a new one.
    """
    other_dtype = torch.float64 if parameter.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty(0, dtype=other_dtype, device=memory.device)
    parameter.data = memory


def _shown_values(wanted: Iterable[Wanted], to_cpu: bool, visible: bool) -> list[torch.Tensor]:
    """Whole values in the memory in which they are shown; none if this rank shows none. Collective."""
    values: list[torch.Tensor] = []
    for _, whole in whole_values(wanted):
        if visible:
            values.append(whole.cpu() if to_cpu else whole)
        del whole  # before the next batch
    return values


class _Summoned:
    """The parameters of a bucket while they are shown whole. Lives as long as the context.

    Attributes:
        values: whole values, by member; views of the shard if it is not split and stays on its device.
        grads: whole gradients, by member; None without `with_grads`, or where no rank has one.
        parameters, saved: the whole parameters, and what was in their `.grad`, of the members shown so far.
        complete: whether all are shown: `show` did not raise.
    """

    def __init__(self, bucket: Bucket, to_cpu: bool, with_grads: bool, visible: bool) -> None:
        self.bucket = bucket
        rows = rows_in(bucket)
        self.is_copy = bucket.layout.world > 1 or to_cpu
        if self.is_copy:
            self.values = _shown_values((Wanted(row.name, row) for row in rows), to_cpu, visible)
        else:
            shard, slots = bucket.shard, [member.slot for member in bucket.members]
            self.values = [shard.as_strided(s.shape, s.stride, shard.storage_offset() + s.offset) for s in slots]
        self.grads: list[torch.Tensor | None] = [None] * len(rows)
        if with_grads:
            local, here = torch.zeros_like(bucket.shard), set[int]()  # local: [shard_numel]
            with torch.no_grad():  # after create_graph a gradient may have a grad_fn
                for member, grad in local_gradients(bucket):
                    bucket.part(local, member).copy_(grad)
                    here.add(id(member))
            flags = [id(member) in here for member in bucket.members]
            has_grad = torch.tensor(flags, dtype=torch.int32, device=bucket.axes.device)  # on any rank
            if bucket.layout.world > 1:
                reduce_value(has_grad, torch.distributed.ReduceOp.MAX, bucket.axes.shard.group)
            indices = [index for index, flag in enumerate(has_grad.tolist()) if flag]
            wanted = (Wanted(rows[i].name, rows[i], local=bucket.part(local, bucket.members[i])) for i in indices)
            for index, whole in zip(indices, _shown_values(wanted, to_cpu, visible), strict=visible):
                self.grads[index] = whole
        self.version = self._shard_version()
        self.parameters: list[nn.Parameter] = []
        self.saved: list[torch.Tensor | None] = []
        self.complete = False

    def _shard_version(self) -> int:
        """A number that differs after the bucket's `FlatParameter` was changed; 0 for buckets without one."""
        flat = self.bucket.flat_parameter
        return 0 if flat is None else int(self.bucket.shard._version + flat._version)

    def show(self) -> None:
        """Register the whole parameters, under their names before wrapping."""
        bucket = self.bucket
        if isinstance(bucket.form, FlatParameterForm):
            bucket.form.unregister()
        for member, value, grad in zip(bucket.members, self.values, self.grads, strict=True):
            split = member.split
            if bucket.form.keeps_originals and split is None:
                parameter = member.sharded
                self.saved.append(parameter.grad)
                self.parameters.append(parameter)
                parameter.grad = None
                _point(parameter, value)
            else:  # a tensor-parallel parameter is shown as a DTensor
                shown = value if split is None else split.unsharded(value)
                parameter = nn.Parameter(shown, requires_grad=member.sharded.requires_grad)
                parameter.__dict__[OWNER_KEY] = member.sharded.__dict__.get(OWNER_KEY)
                self.saved.append(None)
                self.parameters.append(parameter)
            if grad is not None:
                parameter.grad = grad if split is None else split.unsharded(grad)
            for place in member.places:
                place.register(parameter)
        self.complete = True

    def hide(self, writeback: bool) -> None:
        """Show the sharded parameters again, and write changes back with `writeback`; after a `show` that raised too.

        Raises:
            ConfigError: a parameter was replaced by one of a different shape; all others are restored.
            UsageError: the `FlatParameter` was changed too: changes of the whole values are dropped.
        """
        bucket, writeback = self.bucket, writeback and self.complete
        stepped = self.is_copy and self._shard_version() != self.version
        error: ConfigError | None = None
        for i, (member, parameter) in enumerate(zip(bucket.members, self.parameters, strict=self.complete)):
            try:
                if self.complete:
                    self._collect(i, parameter, writeback)
            except ConfigError as different_shape:
                error = different_shape
            if bucket.form.keeps_originals and member.split is None:
                grad, parameter.grad = self.saved[i], None
                _refuse_existing_graphs(parameter)
                _point(parameter, member.local)
                member.sharded = parameter
                parameter.grad = grad
            elif parameter.requires_grad:
                parameter.register_hook(_refuse_gradient)  # graphs may outlive the context
            for place in member.places:
                if place.outside:
                    place.withdraw()
                place.show(member.shown)
        if isinstance(bucket.form, FlatParameterForm):
            bucket.form.register_again()
        if writeback:
            self._write_back(stepped)
        if error is not None:
            raise error
        if writeback and stepped:
            raise messages.flat_parameter_changed(member.name for member in bucket.members)

    @torch.no_grad()
    def _collect(self, index: int, parameter: nn.Parameter, writeback: bool) -> None:
        """Copy a replaced parameter, or one with replaced memory, into `values` and `grads`."""
        member, whole = self.bucket.members[index], self.values[index]
        registered = member.places[0].registered()
        value = registered if isinstance(registered, torch.Tensor) else parameter
        value_grad = None if value.grad is None else local_part(value.grad)
        value = local_part(value)
        if value.shape != whole.shape:
            raise messages.replaced_by_another_shape(member.name, member.slot.shape, tuple(value.shape))
        for target, source in ((whole, value), (self.grads[index], value_grad)) if writeback else ():
            if target is not None and source is not None and source.data_ptr() != target.data_ptr():
                target.copy_(source)

    @torch.no_grad()
    def _write_back(self, stepped: bool) -> None:
        """Write this rank's parts of changed gradients into the sharded ones; of values too, unless `stepped`."""
        bucket = self.bucket
        for member, value in zip(bucket.members, self.values, strict=True) if self.is_copy and not stepped else ():
            part = bucket.part(bucket.shard, member)
            own = self._own_part(member, value).to(part.device)
            if not torch.equal(as_bits(own), as_bits(part)):  # a needless write would invalidate a graph
                wait_for_readers()
                part.copy_(own)
        grads = {id(member): grad for member, grad in zip(bucket.members, self.grads, strict=True)}
        for member, grad in local_gradients(bucket):
            if (whole := grads[id(member)]) is not None:
                grad.copy_(self._own_part(member, whole))

    def _own_part(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value; shares its memory."""
        shape, stride, offset = self.bucket.layout.view_in_whole(member.slot, member.part)
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)
