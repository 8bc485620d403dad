"""Random models on real ranks, and in one process that sees every rank's batches; in fp64, so that equal means equal
but for rounding.

A seed chooses units, settings and events (random_events.py): accumulation, clipping, errors and a lack of memory in the
middle of a forward or backward, evaluation, unshard, loading what was saved, a copy, weights changed by hand, gradients
kept or given up. A failure prints the command that repeats it; by hand, of many seeds:

    python tests/random_runs.py --seed 5000 --count 200 --front rows --more
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy
from random_events import Held, Plan, accumulate, batch, between_steps, change, give_up
from random_models import Model, say_who
from random_wide import FRONTS, check_wide
from ranks import RankPools

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def shard(plan: Plan, model: nn.Module, front: Any) -> nn.Module:
    """`model` with its units made, innermost first."""
    draw = plan.draw
    if front not in ("wrapper orig", "wrapper flat"):
        options = {"layout": front, "prefetch": draw.choice([0, 1, 2])}
        for name in plan.units:
            kept = draw.choice([True, False, None])
            fullshard.fully_shard(model.get_submodule(name), reshard_after_forward=kept, **options)
        fullshard.fully_shard(model, **options)
        model.set_reshard_after_backward("keep" not in plan.chosen)
        return model
    options = {"use_orig_params": front == "wrapper orig", "sharding_strategy": draw.choice(STRATEGIES)}
    for name in plan.units:
        parent, _, leaf = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, leaf, FullyShardedDataParallel(holder.get_submodule(leaf), **options))
    return FullyShardedDataParallel(model, **options)


def clipped(plan: Plan, model: nn.Module) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(0.1)
    if "view" in plan.chosen:
        return fullshard.clip_grad_norm_(model.parameters(), 0.1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def check(seed: int, front: Any, more: bool = False) -> None:
    """Three steps of the seed's model, sharded by `front`, against one process that sees every rank's batches."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(draw, more).double()
    if draw.random() < 0.3 and front != "wrapper flat":  # which wants all of an instance's parameters to train
        for p in model.body.parameters():
            p.requires_grad_(draw.random() < 0.6)
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    units = sorted((name for name in names if draw.random() < 0.45), key=lambda name: -name.count("."))
    plan = Plan(draw, units, front == "wrapper flat", more)
    reference = copy.deepcopy(model)
    model = shard(plan, model, front)
    optimizer = plan.optimizer(fullshard.optimizer_view(model) if "view" in plan.chosen else list(model.parameters()))
    optimizer_there = plan.optimizer(list(reference.parameters()))

    held = Held()
    for step in range(3):
        give_up(plan, model, seed, step)
        losses = accumulate(plan, model, step, partial(backward, plan, model, seed, step))
        for rank in range(dist.get_world_size()):
            for number in range(plan.micro_batches):
                say_who(reference, step + number, rank)
                x, first = batch(seed, step, number, rank), rank == number == 0 and not step
                loss = plan.backward(reference, x, 1 / dist.get_world_size(), first)
                if rank == dist.get_rank():
                    torch.testing.assert_close(losses[number], loss, rtol=1e-9, atol=1e-12)
        if "clip" in plan.chosen:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            got = clipped(plan, model)  # float32 on a rank of the wrapper that holds no gradient
            rtol = 1e-8 if got.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(got.double(), norm, rtol=rtol, atol=1e-12)
        held.check()
        to_none = not plan.leaves_zeros() or plan.draw.random() < 0.5
        if "hold" in plan.chosen and to_none:
            held.hold(model, plan.draw.choice(["itself", "local", "view"]))
        for each in (optimizer, optimizer_there):
            each.step()
            each.zero_grad(set_to_none=to_none)
        between_steps(plan, model, seed, step)
        change(plan, model, reference)
        plan.toggle(model, reference)
    held.check()

    got, want = model.state_dict(), reference.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        whole = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
        torch.testing.assert_close(whole, value, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def backward(plan: Plan, model: nn.Module, seed: int, step: int, number: int) -> Tensor:
    """Of this rank's micro-batch of that number; the loss."""
    x = batch(seed, step, number, dist.get_rank())
    return plan.backward(model, x, 1.0, first=number == 0 and not step)


def command(seed: int, front: Any, more: bool) -> str:
    """The shell command that repeats a seed."""
    return f'python tests/random_runs.py --seed {seed} --front "{front_name(front)}"' + " --more" * more


def front_name(front: Any) -> str:
    return front if isinstance(front, str) else f"blocks {front.granule}"


def check_all(seeds: range, front: Any, more: bool = False) -> None:
    for seed in seeds:
        repeat = command(seed, front, more)
        print(repeat, flush=True)  # the last line of a rank that dies
        try:
            check(seed, front, more)
        except BaseException as error:
            error.add_note(f"repeat with: {repeat}")
            raise


def wide_command(seed: int, world: int) -> str:
    """The shell command that repeats a wide seed."""
    return f"python tests/random_runs.py --wide --seed {seed} --world {world}"


def check_each(seeds: range, more: bool) -> None:
    """Each seed in one front-end only, in turn."""
    for seed in seeds:
        check_all(range(seed, seed + 1), FRONTS[seed % len(FRONTS)], more)


def check_all_wide(seeds: range) -> None:
    for seed in seeds:
        repeat = wide_command(seed, dist.get_world_size())
        print(repeat, flush=True)
        try:
            check_wide(seed)
        except BaseException as error:
            error.add_note(f"repeat with: {repeat}")
            raise


def run_wide(pools: RankPools, seeds: range, world: int, chunk: int) -> list[str]:
    """Wide seeds, several to a task; of a task that fails each seed alone. The commands that repeat what failed."""
    failed = []
    for start in range(seeds.start, seeds.stop, chunk):
        some = range(start, min(start + chunk, seeds.stop))
        try:
            pools.run(check_all_wide, some, world=world, timeout=10 * len(some) + 20)
        except Exception as error:
            if len(some) > 1:
                failed += run_wide(pools, some, world, max(1, chunk // 5))
                continue
            failed.append(wide_command(start, world))
            notes = "\n".join(getattr(error, "__notes__", []))[-3000:]
            print(f"{failed[-1]}\n  {type(error).__name__}: {str(error)[:400]}\n{notes}", flush=True)
    return failed


def main() -> None:
    from random_runs import check_all, run_wide  # by the name under which the ranks find it

    parser = argparse.ArgumentParser(description="Random models on real ranks against one process.")
    names = {front_name(front): front for front in FRONTS}
    parser.add_argument("--seed", type=int, required=True, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds from there on")
    parser.add_argument("--front", choices=names, default=None, help="one layout or wrapper; all if left out")
    parser.add_argument("--more", action="store_true", help="with the models and events of MORE")
    parser.add_argument("--wide", action="store_true", help="random_wide.py; a seed stands for its front-end")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    given = parser.parse_args()
    pools = RankPools(Path(tempfile.mkdtemp(prefix="ranks-")))
    failed = []
    try:
        if given.wide:
            failed = run_wide(pools, range(given.seed, given.seed + given.count), given.world, chunk=25)
        for front in () if given.wide else [names[given.front]] if given.front else FRONTS:
            for seed in range(given.seed, given.seed + given.count):
                try:
                    pools.run(check_all, range(seed, seed + 1), front, given.more, world=given.world)
                except Exception as error:
                    failed.append(command(seed, front, given.more))
                    notes = getattr(error, "__notes__", []) if given.count == 1 else []
                    print(
                        "\n".join([f"{failed[-1]}\n  {type(error).__name__}: {str(error)[:300]}", *notes]), flush=True
                    )
    finally:
        pools.close()
    print(f"{len(failed)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
