"""Programs of rules that failed once, as the machine printed them; they run first, each in a second."""

from __future__ import annotations

import torch
from machine import Training
from random_blocks import BlockPlan, ModelPlan
from random_ways import Way


def a_count_of_tokens_is_replaced_before_its_use(state: Training) -> None:
    """Its all-reduce was not waited for."""
    state.start(ModelPlan((BlockPlan(),)), Way("rows", reduction="tokens"), 2)
    state.exception(where=6)
    state.keep_gathered()


def a_parameter_is_frozen_between_its_steps_and_a_save(state: Training) -> None:
    """Its momentum had no place where it was loaded."""
    state.start(ModelPlan((BlockPlan(),)), Way("rows"), 2, "momentum")
    state.step(1)
    state.freeze(which=4)
    state.step(1)
    state.move(Way("originals"), 4)


def an_infinite_gradient_and_a_unit_that_stays_gathered(state: Training) -> None:
    state.start(ModelPlan((BlockPlan(), BlockPlan("norm"))), Way("rows"), 2)
    state.scaled_step(infinite=1)
    state.look(0, "stays")
    state.zero(keeps=True)
    state.scaled_step()


def tokens_of_units_that_were_added_later(state: Training) -> None:
    """They are roots of their own, which were not given the count."""
    state.start(ModelPlan((BlockPlan(),)), Way("rows", reduction="tokens"), 2)
    state.micro_batch()
    state.zero()
    state.add_parameters()
    state.micro_batch()


def weights_are_replaced_where_a_rank_holds_none(state: Training) -> None:
    """It did not notice, and was alone with a unit that stayed gathered."""
    state.start(ModelPlan((BlockPlan("odd"),), width=3), Way("originals", units=4095, strategy="keep"), 4)
    state.evaluate(False)
    state.swap_in_average()


def gradients_that_a_rank_has_no_element_of_are_no_ones_own(state: Training) -> None:
    """They have no address, and passed for assigned by the program once the memory beside them came back."""
    state.start(ModelPlan((BlockPlan(),), width=8), Way("rows"), 3, "view")
    state.micro_batch()
    state.zero()
    state.micro_batch()
    state.park()


def what_came_before_an_exception_counts_no_more(state: Training) -> None:
    """The block got gradients in the backward that was broken off, and is skipped in the next one."""
    state.start(ModelPlan((BlockPlan("skips"),)), Way("rows"), 2)
    state.exception(where=0, in_backward=True)


def what_never_gets_a_gradient(state: Training) -> None:
    """Is asked about in each step, and remembered in none."""
    state.start(ModelPlan((BlockPlan("unused"),)), Way("rows"), 2)


def what_stays_gathered_follows_its_shards(state: Training) -> None:
    state.start(ModelPlan((BlockPlan(),)), Way("rows"), 2)
    state.set("after backward", False)
    state.step(1)
    state.step(1)
    state.change("local")
    state.micro_batch()
    state.zero(keeps=True)


def what_is_prefetched_in_vain_does_not_stay(state: Training) -> None:
    """A block that the fourth backward skips, of units that are kept gathered."""
    blocks = BlockPlan("again"), BlockPlan("skips", recompute="reentrant")
    state.start(ModelPlan(blocks), Way("rows", units=420, hybrid=True, prefetch=2), 3)
    for _ in range(4):
        state.keep_gathered()


def what_replicas_keep_apart_is_added_where_a_unit_does_not_run(state: Training) -> None:
    """A unit that micro-batches without the all-reduce used, and the one with it does not."""
    state.start(ModelPlan((BlockPlan("skips"), BlockPlan())), Way("rows", units=8, hybrid=True), 2)
    state.accumulate(batches=3, sync="scatter")


def what_is_kept_for_a_backward_goes_when_weights_change(state: Training) -> None:
    """Of a reshard to two of four ranks, by a forward whose backward nobody calls."""
    state.start(ModelPlan((BlockPlan(), BlockPlan())), Way("rows", strategy="two"), 4)
    state.forward_in_vain()
    state.change("mul_", 1.1)
    state.micro_batch()


def what_is_between_replicas_when_a_backward_breaks(state: Training) -> None:
    state.start(ModelPlan((BlockPlan(),) * 4), Way("rows", hybrid=True), 4)
    state.exception(where=1, in_backward=True)


def what_two_steps_used_and_the_next_does_not(state: Training) -> None:
    state.start(ModelPlan((BlockPlan("skips"),)), Way("rows", units="root"), 2)
    for _ in range(5):
        state.step(1)


def what_is_kept_for_a_backward_goes_on_ranks_that_do_not_run_the_block(state: Training) -> None:
    """Ranks that took part in its gather in passing kept theirs, and gathered it among other ranks the second time."""
    state.start(ModelPlan((BlockPlan("somewhere"),)), Way("rows", units="nested", strategy="two"), 4)
    state.micro_batch(shape="two backwards")


def a_pass_that_could_not_begin_has_not_begun(state: Training) -> None:
    """There was no memory to compare what begins; the pass after it was broken off on one rank, which lost both."""
    state.start(ModelPlan((BlockPlan(),)), Way("wrapper", prefetch=0), 2)
    state.forward_in_vain()
    state.out_of_memory(nth=1)
    state.exception_on_one_rank(who=0)
    state.micro_batch()


def what_was_added_later_beside_a_block_that_some_ranks_leave_out(state: Training) -> None:
    """It was a root of its own, which ranks that leave the block out came to while others compared in the block."""
    state.start(ModelPlan((BlockPlan("somewhere"),)), Way("rows", units=283), 3)
    state.micro_batch()
    state.zero()
    state.add_parameters()
    for _ in range(3):
        state.evaluate(False)
        state.micro_batch()
        state.zero()


def units_of_several_layouts_are_changed_by_one_call_of_foreach(state: Training) -> None:
    """DTensors, and others: torch refuses lists of both."""
    state.start(ModelPlan((BlockPlan(), BlockPlan(), BlockPlan())), Way("blocks", units=12, reduce=torch.bfloat16), 3)
    state.change("foreach", 0.9)
    state.step(2)


def what_waits_for_a_reduction_is_set_to_zero(state: Training) -> None:
    """It is given up, and in rows `.grad` stays None, as in PyTorch's; the wrapper showed zeros."""
    state.start(ModelPlan((BlockPlan(), BlockPlan("either"))), Way("rows"), 2, "adamw")
    for sync in ("yes", "no"):
        state.micro_batch(sync=sync)
    state.zero(to_none=False)
    state.micro_batch()
    state.step(1)


def as_many_steps_as_once_before(state: Training) -> None:
    """After which something else came then: ranks compare once more, until they have seen what comes now."""
    state.start(ModelPlan((BlockPlan(),)), Way("rows", units=1432, hybrid=True, prefetch=0), 4)
    state.scaled_step(batches=2, infinite=None)
    state.out_of_memory(nth=14)
    for batches in (2, 1):
        state.scaled_step(batches=batches, infinite=None)
    state.choose_optimizer("sgd")
    state.out_of_memory(nth=17)
    state.scaled_step(batches=1, infinite=None)
    state.choose_optimizer("sgd")
    state.scaled_step(batches=2, infinite=None)
    state.out_of_memory(nth=1)
    state.choose_optimizer("sgd")


CASES = [
    as_many_steps_as_once_before,
    what_waits_for_a_reduction_is_set_to_zero,
    units_of_several_layouts_are_changed_by_one_call_of_foreach,
    what_was_added_later_beside_a_block_that_some_ranks_leave_out,
    a_pass_that_could_not_begin_has_not_begun,
    what_is_kept_for_a_backward_goes_on_ranks_that_do_not_run_the_block,
    what_is_kept_for_a_backward_goes_when_weights_change,
    what_is_between_replicas_when_a_backward_breaks,
    what_two_steps_used_and_the_next_does_not,
    what_replicas_keep_apart_is_added_where_a_unit_does_not_run,
    what_is_prefetched_in_vain_does_not_stay,
    what_never_gets_a_gradient,
    what_stays_gathered_follows_its_shards,
    what_came_before_an_exception_counts_no_more,
    gradients_that_a_rank_has_no_element_of_are_no_ones_own,
    weights_are_replaced_where_a_rank_holds_none,
    tokens_of_units_that_were_added_later,
    a_count_of_tokens_is_replaced_before_its_use,
    a_parameter_is_frozen_between_its_steps_and_a_save,
    an_infinite_gradient_and_a_unit_that_stays_gathered,
]
