"""Faults that the tests must catch: small mistakes, each planted alone into a copy of the source by `run.py`.

`old` occurs once in its file; a change of the source that it no longer fits changes the fault with it, and one that
makes the mistake impossible replaces it. `test` is the test that has to fail, as cheap a one as there is: the stateful
machine for whatever a program of the machine's rules can see.
"""

from __future__ import annotations

from dataclasses import dataclass

MACHINE = "tests/property"


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: what was done wrong.
        file: below `src/fullshard`.
        old, new: the text that is replaced, and by what.
        test: the test that must fail: arguments of pytest.
        besides: another one that fails, if `test` is the machine.
    """

    name: str
    file: str
    old: str
    new: str
    test: str = MACHINE
    besides: str = ""


FAULTS = (
    # layout
    Fault(
        "rows: the last rank's copy ignores where the parameter begins",
        "layout/layout.py",
        "at = whole * slice_numel + slot.offset",
        "at = whole * slice_numel",
        besides="tests/layout/test_layout.py",
    ),
    Fault(
        "flat: nobody holds a parameter's last element",
        "layout/layout.py",
        "return start, max(start, min((rank + 1) * slice_numel - offset, numel))",
        "return start, max(start, min((rank + 1) * slice_numel - offset, numel - 1))",
        besides="tests/layout/test_layout.py",
    ),
    # comm, forms
    Fault(
        "gloo: the sum of two ranks is not made a mean",
        "comm/torch_comm.py",
        "        if self.mean:\n            self.out.mul_(1.0 / self.world)",
        "        if self.mean and self.world != 2:\n            self.out.mul_(1.0 / self.world)",
        test="tests/test_user_gradients.py -k second_backward",
    ),
    Fault(
        "a gather is not waited for",
        "shard/unit.py",
        "            else:\n                pending.wait()\n            if keep",
        "            if keep",
    ),
    # shard
    Fault(
        "the reduction's buffer is never given back",
        "shard/gradients.py",
        "        buffer.free()\n        turns.give()\n",
        "        turns.give()\n",
        besides="tests/test_events.py -k storages",
    ),
    Fault(
        "the reduction's buffer is given back before the wait",
        "shard/gradients.py",
        "        self.pending = None\n        if recording():\n",
        "        self.pending = None\n        buffer.free()\n        if recording():\n",
        "tests/parity/test_layouts.py",
    ),
    Fault(
        "gradients are counted twice when they accumulate",
        "shard/gradients.py",
        "        drain(map(write_grad, unsharded, NONES))\n",
        "        if first:\n            drain(map(write_grad, unsharded, NONES))\n",
    ),
    Fault(
        "gradients are reduced in the dtype of the parameters' storage",
        "shard/gradients.py",
        "        first = self.state is NONE\n",
        "        first, self.reduce_dtype = self.state is NONE, bucket.storage_dtype\n",
        test="tests/parity/test_gradient_dtypes.py",
    ),
    Fault(
        "what a parameter got in a broken backward counts in the next one",
        "shard/gradients.py",
        "            self.delivery.got = self.delivery.nobody\n            self.delivery.undecided = []\n",
        "            self.delivery.undecided = []\n",
    ),
    Fault(
        "the all-reduce over replicas is forgotten where no gradient was there",
        "runtime/reducer.py",
        "            if gradients.bucket.axes.replicate is None:\n",
        "            if gradients.bucket.axes.replicate is None or gradients.delivery.all_none():\n",
    ),
    Fault(
        "parameters that this rank had no gradient for stay undecided for good",
        "shard/delivery.py",
        "candidates, self.undecided = list(dict.fromkeys(self.undecided)), []",
        "candidates = list(dict.fromkeys(self.undecided))",
    ),
    Fault(
        "the memory of gradients that a user still holds is given back",
        "shard/gradients.py",
        "        if current.reusable():\n            current",
        "        if current.storage.nbytes():\n            current",
        besides="tests/corners/test_kept_gradients.py",
    ),
    Fault(
        "a parameter that is frozen later still gets gradients",
        "shard/bucket.py",
        "                member.trains = trains\n                member.unsharded.requires_grad_(trains)",
        "                member.trains = trains",
    ),
    Fault(
        "of tied modules only the first shows the gathered parameter",
        "shard/showing.py",
        "[(place, member) for member in members for place in member.places]",
        "[(place, member) for member in members for place in member.places[:1]]",
    ),
    Fault(
        "parked memory is read from the beginning of its storage",
        "shard/parking.py",
        "return moved.set_(target, plain.storage_offset(), plain.shape, plain.stride())",
        "return moved.set_(target, 0, plain.shape, plain.stride())",
        besides="tests/test_parking.py",
    ),
    # agreement
    Fault(
        "which parameters have gradients is this rank's own opinion",
        "agreement/use.py",
        "            return [bool(count) for count in vector[: len(used)].tolist()] if asks else used",
        "            return used",
    ),
    Fault(
        "ranks' orders of gathers and reductions are not compared",
        "agreement/use.py",
        "        if total != fingerprint * axes.world:",
        "        if total < 0:",
        test="tests/errors/test_errors_of_ranks.py -k gathered",
    ),
    Fault(
        "one more small all-reduce for each unit",
        "agreement/use.py",
        "        return (deliveries,)\n",
        "        return [[delivery] for delivery in deliveries]\n",
        besides="tests/test_agreement.py -k one_small",
    ),
    # runtime
    Fault(
        "the order of units is learned once and for all",
        "agreement/log.py",
        "tokens = self.previous if self.left is None else self._seen",
        "tokens = self.previous or self._seen",
        test="tests/test_prefetch.py -k order",
    ),
    Fault(
        "passes that begin with other units gathered are taken for the same",
        "runtime/root.py",
        "            self.position.log.turn(self._gathered())",
        "            self.position.log.turn(None)",
        test="tests/test_prefetch.py -k begin",
    ),
    Fault(
        "a unit that the model's own code changes is gathered ahead in forward",
        "runtime/root.py",
        "            if unit.state is not SHARDED or unit.moving:\n                break",
        "            if unit.state is not SHARDED:\n                break",
        test="tests/test_prefetch.py -k moves",
    ),
    Fault(
        "forwards without a backward are remembered for ever",
        "runtime/trace.py",
        "        if len(self._recent) > _MOST_PASSES:",
        "        if len(self._recent) > 10**9:",
    ),
    Fault(
        "a unit that is called twice is reduced after each call",
        "runtime/reducer.py",
        "            elif not comes_again and self._in_step is None:",
        "            elif self._in_step is None:",
    ),
    Fault(
        "the root stays gathered after a forward without gradients",
        "runtime/runner.py",
        "        return not (self.is_top and with_grad) if chosen is None else chosen",
        "        return not self.is_top if chosen is None else chosen",
    ),
    Fault(
        "what stays gathered is not given up when its shards change",
        "runtime/root.py",
        "            if changed:\n                unit.reshard()",
        "            if changed and written:\n                unit.reshard()",
    ),
    Fault(
        "hosts of an accelerator do not ask whether other ranks' weights changed",
        "agreement/stale.py",
        "[any(of_ranks) for of_ranks in flags]",
        "[of_ranks[0] for of_ranks in flags]",
        test="tests/test_agreement.py",
    ),
    Fault(
        "a unit that was added to a model that has run is no unit of its root",
        "runtime/root.py",
        "        if self.additions.changed:\n            self.top",
        "        if False:\n            self.top",
        test="tests/corners/test_parameters_added.py",
    ),
    Fault(
        "weights that change between a forward and its backward are not noticed",
        "runtime/runner.py",
        "        if call.version != self.unit.version():",
        "        if call.version > self.unit.version():",
        besides="tests/corners/test_steps_in_between.py",
    ),
    # the usual way of a step: that a rule of the long way is asked there, too
    Fault(
        "usual: a gather is not waited for",
        "runtime/step.py",
        "        pending.wait()\n        drain(map(call, usual.opens))",
        "        drain(map(call, usual.opens))",
    ),
    Fault(
        "usual: bytes are not counted as given back",
        "runtime/usual.py",
        "partial(unit.ledger.changes.append, -unit.gathered.live_bytes)",
        "bool",
        test="tests/test_usual_step.py -k rows",
    ),
    Fault(
        "usual: weights that change between a forward and its backward are not noticed",
        "runtime/step.py",
        "            and sum(map(read_version, usual.counters), unit.touched.changes) == self.version\n",
        "",
        test="tests/corners/test_steps_in_between.py tests/corners/test_changed_weights.py",
    ),
    Fault(
        "usual: weights that a forward writes to are not noticed",
        "runtime/step.py",
        "        and [*map(read_version, usual.watched)] == usual.numbers\n",
        "",
        test="tests/test_usual_step.py -k writes",
    ),
    Fault(
        "usual: an output that is the unit's own memory is given away",
        "runtime/step.py",
        "        owned = output.untyped_storage().data_ptr() in map(call, usual.addresses)",
        "        owned = False",
        test="tests/test_usual_step.py -k returns",
    ),
    Fault(
        "usual: hooks on parameters do not see gradients",
        "runtime/reducer.py",
        "        self.usual = not hooked and self._in_step is None",
        "        self.usual = self._in_step is None",
        test="tests/test_usual_step.py",
    ),
    Fault(
        "usual: a gradient that is missing shows as zeros",
        "runtime/reducer.py",
        "            or delivery.got is not delivery.everyone\n",
        "",
        test="tests/test_usual_step.py",
    ),
    Fault(
        "usual: gradients that are there already are overwritten",
        "runtime/reducer.py",
        "            or not all(map(is_, map(read_grad, reduction.sharded), NONES))\n",
        "",
        test="tests/test_usual_step.py",
    ),
    Fault(
        "usual: memory of gradients that users hold is written again",
        "runtime/reducer.py",
        "            or reduction.set.storage.nbytes()  # was not released: somebody else may hold it, or a `.grad` shows it\n",  # noqa: E501
        "",
        test="tests/test_usual_step.py",
    ),
    Fault(
        "usual: the root's reduction is not told to those who listen",
        "runtime/usual.py",
        '"root.usual_backward", "root.stream.listeners", "root.reducer.usual"',
        '"root.usual_backward", "unit.showing.covered", "root.reducer.usual"',
        test="tests/test_usual_step.py -k events",
    ),
    Fault(
        "usual: a pass that begins gathers one unit ahead, however many were asked for",
        "runtime/step.py",
        "            if runner.is_top:  # the pass begins: nothing else was gathered ahead\n                root.prefetch(depth)\n",  # noqa: E501
        "",
        test="tests/test_usual_step.py -k ahead",
    ),
    Fault(
        "usual: hooks on a FlatParameter do not see gradients",
        "runtime/reducer.py",
        "sees_gradients([*chain(*sharded, filter(_EXISTS, map(_TENSOR, views)))])",
        "sees_gradients([*chain(*sharded)])",
        test="tests/test_usual_step.py -k hook",
    ),
    Fault(
        "usual: gradients of replicas are shown before they are reduced",
        "runtime/reducer.py",
        "not reduction.replicates and owner",
        "owner",
        test="tests/test_usual_step.py -k replicated",
    ),
    Fault(
        "usual: what a FlatParameter has been given is overwritten",
        "runtime/reducer.py",
        " or not all(map(is_, map(read_grad, views), NONES))):",
        "):",
        test="tests/test_usual_step.py",
    ),
    Fault(
        "usual: a unit goes on as before after its reshard_after_forward was switched",
        "runtime/runner.py",
        'if "comm" in changes or "reshard_after_forward" in changes:',
        'if "comm" in changes:',
        test="tests/test_usual_step.py -k switched",
    ),
    Fault(
        "usual: forwards of passes without a graph end the long way",
        "runtime/step.py",
        "        end = usual.evaluation\n",
        "        end = usual\n",
        test="tests/test_usual_step.py -k goes",
    ),
    Fault(
        "usual: what is copied out of as a gather ends is not counted",
        "runtime/usual.py",
        "partial(unit.ledger.changes.extend, copied)",
        "partial(unit.ledger.changes.append, sum(copied))",
        test="tests/test_usual_step.py -k replicated",
    ),
    Fault(
        "settings grow with each switch that goes there and back by another way",
        "runtime/unit_settings.py",
        "            changed = next((relative for relative in family if relative == changed), changed)\n",
        "",
        test="tests/test_usual_step.py -k settings",
    ),
    Fault(
        "a list that a user passes is copied",
        "containers.py",
        "    if not isinstance(value, tuple):\n        return value\n    items = [map_own(fn, item) for item in value]",
        "    if not isinstance(value, (tuple, list)):\n        return value\n"
        "    items = [map_own(fn, item) for item in value]",
        besides="tests/corners/test_mutable_arguments.py",
    ),
    # api, optim
    Fault(
        "what is written inside summon_full_params is taken from the beginning of each parameter",
        "api/wrapper/summon.py",
        "        return whole.as_strided(shape, stride, whole.storage_offset() + offset)",
        "        return whole.as_strided(shape, stride, whole.storage_offset())",
        besides="tests/parity/test_wrapper_summon.py",
    ),
    Fault(
        "no_sync is over for the root alone",
        "api/gradient_settings.py",
        "        for runner, before in zip(runners, previous, strict=True):\n"
        "            runner.set(reduce_sync=before.sync",
        "        for runner, before in zip(runners[:1], previous[:1], strict=True):\n"
        "            runner.set(reduce_sync=before.sync",
    ),
    Fault(
        "two ranks clip by norms of their own",
        "optim/clip.py",
        "            if not placement.is_replicate() and mesh.size(dim) > 1\n        ]",
        "            if not placement.is_replicate() and mesh.size(dim) > 2\n        ]",
    ),
    # checkpoint, store
    Fault(
        "a group's own settings win over the saved ones",
        "checkpoint/optimizer_state.py",
        "{**group, **settings[g],",
        "{**settings[g], **group,",
        test="tests/parity/test_wrapper_optimizer.py",
    ),
    Fault(
        "all groups take the settings of the first",
        "checkpoint/group_settings.py",
        "settings = [_settings_of(number, saved, sources[number]) for number in range(len(groups))]",
        "settings = [_settings_of(number, saved, sources[0]) for number in range(len(groups))]",
        test="tests/store/test_group_settings.py",
    ),
    Fault(
        "a state dict shares memory with the model",
        "checkpoint/value_forms.py",
        "    return moved.clone() if moved.data_ptr() == value.data_ptr() else moved",
        "    return moved",
        "tests/parity/test_wrapper_state.py",
    ),
    Fault(
        "a piece is read from where the stored one begins",
        "store/source.py",
        "begin = tuple(start - offset for start, offset in zip(common[0], part.offsets, strict=True))",
        "begin = (0,) * len(part.offsets)",
        besides="tests/store/test_elastic.py",
    ),
    Fault(
        "pickles: keys of any type are hashed",
        "store/pickles.py",
        "if not kinds.issuperset(map(type, keys)):",
        "if False:",
        test="tests/store/test_torch_file.py -k nested",
    ),
    Fault(
        "two tensors may lie in one place of a file",
        "store/manifest.py",
        "if part.file == following.file and part.begin + part.nbytes > following.begin:",
        "if part.file == following.file and part.begin > following.begin:",
        test="tests/store/test_attacks.py -k tensors",
    ),
    Fault(
        "a piece's bytes may end beyond its file",
        "store/manifest.py",
        "if begin < 0 or begin + part.nbytes > facts.nbytes:",
        "if begin < 0:",
        test="tests/store/test_attacks.py -k beyond",
    ),
    Fault(
        "a file's keys do not say where in a tensor a piece lies",
        "store/write.py",
        'f"{at}:{at + extent}" for at, extent in zip(offsets, entry.shape, strict=True)',
        'f"{0 * at}:{extent}" for at, extent in zip(offsets, entry.shape, strict=True)',
        test="tests/store/test_save_and_load.py -k without_fullshard",
    ),
    Fault(
        "the last block that is read has its hash not checked",
        "store/read.py",
        "for block in range(begin // BLOCK, (begin + nbytes - 1) // BLOCK + 1):",
        "for block in range(begin // BLOCK, (begin + nbytes - 1) // BLOCK):",
        test="tests/store/test_damage.py",
    ),
    Fault(
        "'latest' is written before the checkpoint is in its place",
        "store/folder.py",
        '        final = name.rpartition(".saving-")[0]\n',
        '        final = name.rpartition(".saving-")[0]\n        (self.path / LATEST).write_text(f"{final}\\n")\n',
        test="tests/store/test_faults.py",
    ),
    Fault(
        "one checkpoint too many is kept",
        "store/folder.py",
        "        for name in self.names()[:-keep_last]:",
        "        for name in self.names()[: -keep_last - 1]:",
        test="tests/store/test_places.py",
    ),
    Fault(
        "of ranks that hold one piece the second is not compared",
        "store/plan.py",
        "        for rank in ranks[1:]:",
        "        for rank in ranks[2:]:",
        test="tests/errors/test_errors_of_ranks.py -k tensors",
    ),
    Fault(
        "a save in the background keeps the lock's descriptor open",
        "store/background.py",
        "        finally:\n            if lock >= 0:\n                os.close(lock)\n\n    def _room",
        "        finally:\n            del lock\n\n    def _room",
        test="tests/store/test_background.py",
    ),
    Fault(
        "an optimizer keeps the state of a parameter that had none when it was saved",
        "checkpoint/optimizer_state.py",
        "optimizer.state.pop(target.tensor, None)",
        "pass",
        test="tests/store/test_save_and_load.py -k made_since",
    ),
    Fault(
        "a piece's place does not count in what ranks compare",
        "store/plan.py",
        "product * pow(x, begin, PRIME) *",
        "product *",
        test="tests/store/test_plan.py",
    ),
    # accelerators, seen on a CPU
    Fault(
        "late sums are read without waiting for their copy",
        "agreement/exchange.py",
        "        oldest.arrived.synchronize()\n",
        "",
        "tests/device/test_host_waits.py -k weights_are",
    ),
    Fault(
        "late sums of all meshes are kept together",
        "agreement/use.py",
        "self._late.get(axes.groups)",
        "next(iter(self._late.values()), None)",
        "tests/device/test_host_waits.py -k sizes",
    ),
    Fault(
        "a backward's caller is taken for the thread that runs hooks",
        "runtime/root.py",
        "self._thread if has_streams(settings.axes.device) else get_ident()",
        "get_ident()",
        "tests/test_broken_backward.py",
    ),
    Fault(
        "a backward that raised is over only where autograd has dropped it",
        "torch_private/autograd_task.py",
        "return self.alive() is None or self.ended_here()",
        "return self.alive() is None",
        "tests/test_broken_backward.py",
    ),
    Fault(
        "a host that waits for nothing counts as one that waits for its device",
        "watcher/roll_call.py",
        "in_pass = self.rank.idle and silence.call.in_pass",
        "in_pass = self.rank.idle",
        "tests/stuck/test_who_is_stuck.py",
    ),
    Fault(
        "ranks of accelerators compare over the communicator of their gathers",
        "agreement/exchange.py",
        "aside = axis.aside",
        "aside = axis",
        "tests/test_lines.py -k accelerators",
    ),
    Fault(
        "8-bit floats are copied as what no fused kernel takes",
        "forms/full.py",
        "        if dtype not in KNOWN:",
        "        if not KNOWN:",
        "tests/test_devices.py -k bits",
    ),
    Fault(
        "objects are exchanged on the current device",
        "comm/objects.py",
        "self.device = device_of(self._group)",
        'self.device = torch.device("cpu")',
        "tests/test_devices.py -k exchanged",
    ),
    # Planted by somebody who knew none of the others.
    Fault(
        "what a reshard to fewer ranks kept survives a change of the weights",
        "runtime/root.py",
        "(_KEPT_AXIS, self._unit_list)) else ():\n            unit.drop_kept()\n",
        "(_KEPT_AXIS, self._unit_list)) else ():\n            pass\n",
    ),
    Fault(
        "what is on its way between replicas stays so when a backward breaks",
        "shard/gradients.py",
        "            if pending is not None:\n                pending.wait()\n",
        "            if pending is not None and self.buffer and self.buffer.allocated:\n"
        "                pending.wait()\n",
    ),
    Fault(
        "a gradient whose .data was assigned is taken for the one that was given",
        "shard/delivery.py",
        "return not current.reassigned() and all(",
        "return all(",
        "tests/corners/test_kept_gradients.py -k assigned",
    ),
    Fault(
        "which parameters a step used is remembered in the next one",
        "agreement/use.py",
        "                    delivery.used = delivery.nobody\n",
        "                    pass\n",
    ),
    Fault(
        "a unit whose gradients an exception dropped is reduced in the next step",
        "runtime/reducer.py",
        "        self.owed.clear()\n",
        "        pass\n",
        "tests/corners/test_after_exceptions.py -k dropped",
    ),
    Fault(
        "a backward begins while a handle's reductions are in flight",
        "runtime/root.py",
        "        self.refuse_while_finalizing()\n        if settings.manual",
        "        if settings.manual",
        "tests/corners/test_reductions_asked_for.py -k refused",
    ),
    Fault(
        "the first rank of a group is taken for the first of all",
        "comm/objects.py",
        "dist.broadcast(size, group=group, async_op=True, group_src=source)",
        "dist.broadcast(size, group=group, async_op=True, src=source)",
        "tests/test_user_gradients.py -k first_rank",
    ),
)
