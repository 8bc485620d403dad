"""`owner_of`, `keep_gathered` and `free`, of both front-ends and every layout."""

from __future__ import annotations

import abc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import free, keep_gathered, owner_of, record_events
from fullshard.runtime import runners_in
from fullshard.text import size
from training import assert_same
from ways import (
    LAYOUTS,
    backward_both,
    batch,
    error_of,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    named_error,
    shard,
    some_ways,
    value_problems,
    whole_parameters,
)

two_ways = pytest.mark.parametrize("way", ["rows", "wrapper"])


def sharded(way: str, **settings: Any) -> nn.Module:
    """`layers()` of two blocks that are units, and a root that holds the last layer."""
    return shard(layers(), way, lambda model: list(model)[:2], **settings)


def gathered(model: nn.Module) -> list[bool]:
    """Root first, then the blocks."""
    return [runner.unit.state.value == "gathered" for runner in runners_in(model)]


def gathers_in(action: Any) -> int:
    found: list[Any] = []
    with record_events() as events:
        action()
        found = [event for event in events if event.verb == "gather"]
    return len(found)


# Which unit owns what.


@some_ways
def test_owners_are_named(run_ranks, way: str) -> None:
    assert_same(run_ranks(owners, way))


def owners(way: str) -> list[str]:
    plain = layers()
    originals = dict(plain.named_parameters())
    model = shard(plain, way, lambda model: list(model)[:2])
    problems: list[str] = []

    def check(what: Any, name: str, module: nn.Module, count: int) -> None:
        found = owner_of(model, what)
        if (found.name, found.module) != (name, module) or found.modules != (module,):
            problems.append(f"{type(what).__name__}: {found.name}, {type(found.module).__name__}")
        if sum(len(bucket.parameters) for bucket in found.buckets) != count:
            problems.append(f"{name}: buckets {found.buckets}")

    block, last = inner(model)[0], inner(model)[2]
    linear = inner(block)[0]
    for step in range(2):  # before and after the first forward
        check(block, "0", block, 4)
        check(linear, "0", block, 4)
        check(inner(block)[1], "0", block, 4)  # a module without parameters: the unit whose forward runs it
        check(last, "(root)", model, 2)
        check(model, "(root)", model, 2)
        check(originals["0.0.weight"], "0", block, 4)  # as it was before sharding
        check(linear.weight, "0", block, 4)  # as its module shows it
        for name, parameter in model.named_parameters():
            wanted = name.replace("_fsdp_wrapped_module.", "").partition(".")[0]
            check(
                parameter,
                *(("(root)", model, 2) if wanted in ("2", "_flat_param") else (wanted, inner(model)[int(wanted)], 4)),
            )
        seen: list[Any] = []
        handle = linear.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(module.weight))
        loss_of(model, mine(step)).backward()
        handle.remove()
        check(seen[0], "0", block, 4)  # as it is computed with
    facts = owner_of(model, block).buckets[0]
    table = fullshard.describe(model)
    for fact in (facts.layout, f"{facts.elements:,}", size(facts.gathered_bytes), facts.mesh):
        if fact not in table:
            problems.append(f"{fact!r} is not in the table of describe()")
    return problems


@some_ways
def test_what_a_unit_does_in_a_step_is_what_its_plan_says(run_ranks, way: str) -> None:
    assert_same(run_ranks(plans_told, way))


def plans_told(way: str) -> list[str]:
    model = sharded(way)
    problems = [] if "no plan yet" in fullshard.describe(model, plans=True) else ["told before it was made"]
    loss_of(model, mine(0)).backward()
    if "gathers" in fullshard.describe(model):
        problems.append("told without being asked for")
    told = fullshard.describe(model, plans=True).splitlines()
    for runner in runners_in(model):
        name, unit = runner.unit.name or "(root)", runner.unit
        (line,) = [line for line in told if line.partition(": ")[0].split(", ").count(name) and " gathers " in line]
        with record_events() as events:
            loss_of(model, mine(1)).backward()
        found = {event.verb: event.nbytes for event in events if event.unit == name}
        for what in (f"gathers {size(found['gather'])} in", f"reduces {size(found['reduce'])} of float64"):
            if what not in line:
                problems.append(f"{what!r} is not in {line!r}")
        if f"holds {size(unit.full_bytes)};" not in line:
            problems.append(f"{unit.full_bytes} bytes are held: {line!r}")
    return problems


@some_ways
def test_what_nobody_owns_is_told_with_the_reason(run_ranks, way: str) -> None:
    assert_same(run_ranks(unowned, way))


def unowned(way: str) -> list[str]:
    plain = layers()
    left = plain[1][2].bias
    ignored = {"ignored_params": {left}} if way in LAYOUTS else {"ignored_states": [left]}
    model = shard(plain, way, lambda model: list(model)[:2], **ignored)
    inner(model)[2].extra = nn.Parameter(torch.zeros(2))
    other, outside = sharded(way), nn.Sequential(model, nn.Linear(2, 2))
    cases: list[tuple[nn.Module, Any, tuple[str, ...]]] = [
        (model, left, ("it is ignored", "1.2.bias")),
        (model, next(other.parameters()), ("another model",)),
        (model, nn.Parameter(torch.zeros(2)), ("not a parameter of the model",)),
        (model, nn.Tanh(), ("not a module of the model",)),
        (model, inner(model)[2].extra, ("added later", "2.extra")),
        (layers(), left, ("no units",)),
        (model, "0.0", ("get_submodule",)),
        (outside, outside[1], ("No unit runs",)),
        (outside, outside[1].weight, ("No unit owns", "1.weight")),
    ]
    return [
        problem
        for within, what, words in cases
        for problem in named_error(error_of(lambda w=within, x=what: owner_of(w, x)), *words, where=words[0])
    ]


# Units that stay.


@two_ways
def test_units_stay_for_the_block_and_train_as_ever(run_ranks, way: str) -> None:
    assert_same(run_ranks(kept, way))


def kept(way: str) -> list[str]:
    model, plain = sharded(way), layers()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    problems: list[str] = []
    block = inner(model)[0]

    def step(number: int) -> None:
        backward_both(model, plain, number)
        problems.extend(gradient_problems(f"step {number}", model, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step(0)
    for number, module in ((1, block), (2, model)):
        with keep_gathered(module):
            for part in range(2):
                backward_both(model, plain, 10 * number + part)
            held = gathered(model)
            if held != ([False, True, False] if module is block else [True] * 3):
                problems.append(f"{number}: gathered in the block: {held}")
            count = gathers_in(lambda: loss_of(model, mine(3)).detach())
            if count != (2 if module is block else 0):
                problems.append(f"{number}: {count} gathers in a forward")
        left = gathered(model)
        if any(left[1:] if module is block else left):
            problems.append(f"{number}: gathered after it: {left}")
        problems += gradient_problems(f"kept {number}", model, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
        free(model)
    step(4)
    return problems + value_problems("after it", model, plain)


@two_ways
def test_weights_changed_inside_count(run_ranks, way: str) -> None:
    assert_same(run_ranks(changed_inside, way))


def changed_inside(way: str) -> list[str]:
    model, plain = sharded(way), layers()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1, eps=1e-3) for one in (model, plain)]
    with keep_gathered(model):  # before the first forward
        for step in range(3):
            backward_both(model, plain, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for one in (model, plain):
                for parameter in one.parameters():
                    parameter.mul_(0.5)
        backward_both(model, plain, 4)
        problems = [] if all(gathered(model)) else ["not all stay gathered"]
        problems += gradient_problems("after a change by hand", model, plain)
    return problems + value_problems("weights", model, plain)


@two_ways
def test_a_chunked_loss_gathers_its_unit_once(run_ranks, way: str) -> None:
    assert_same(run_ranks(chunked, way))


class Chunked(nn.Module):
    """A body, and a head that is run on one part of the batch after the other, backwards within the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def chunked(way: str) -> list[str]:
    model = shard(Chunked(), way, lambda model: [model.body, model.head])
    plain = Chunked()
    problems: list[str] = []

    def run(one: Any, x: Tensor) -> None:
        hidden = one(x)
        cut = hidden.detach().requires_grad_()
        for part in cut.chunk(3):
            inner(one).head(part).square().sum(1).mean().backward()
        hidden.backward(cut.grad)

    inner(model).head(model(mine(9)))  # all units have run: the head within no pass of the root's is one of its own
    for step in range(2):
        model.zero_grad(), plain.zero_grad()
        with keep_gathered(inner(model).head):
            count = gathers_in(lambda step=step: run(model, mine(step)))
        for rank in range(dist.get_world_size()):  # the reference cuts each rank's batch as that rank does
            run(plain, batch(step, rank))
        for parameter in plain.parameters():
            parameter.grad /= dist.get_world_size()
        if count > 4:  # body and head; twice where a root's own gathers count
            problems.append(f"step {step}: {count} gathers")
        problems += gradient_problems(f"step {step}", model, plain)
    return problems


@two_ways
def test_an_exception_inside_leaves_a_model_that_trains(run_ranks, way: str) -> None:
    assert_same(run_ranks(raised_inside, way))


class Failure(Exception):
    """What the user's own code raises here."""


def raised_inside(way: str) -> list[str]:
    model, plain = sharded(way), layers()
    loss_of(model, mine(0)).detach()
    problems: list[str] = []
    for where in ("between", "forward", "backward"):
        fails = raise_at(inner(model)[1], where)
        with pytest.raises(Failure), keep_gathered(model):
            loss_of(model, mine(1).requires_grad_()).backward()
            raise Failure if where == "between" else AssertionError
        fails.remove()
        problems += [f"{where}: something stays gathered"] if any(gathered(model)) else []
        model.zero_grad(), plain.zero_grad()
        backward_both(model, plain, 2)
        problems += gradient_problems(where, model, plain)
        model.zero_grad()
    return problems


def raise_at(module: nn.Module, where: str) -> Any:
    def raises(*given: Any) -> None:
        raise Failure

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if where == "forward":
            raise Failure
        if where == "backward":
            output.register_hook(raises)

    return module.register_forward_hook(hook)


def test_wrong_times_and_modules_are_named(run_ranks) -> None:
    assert_same(run_ranks(wrong_uses))


def wrong_uses() -> list[str]:
    model = sharded("flat")
    problems = named_error(error_of(lambda: enter(model[0][0])), "no unit", "owner_of", where="part")
    problems += named_error(error_of(lambda: free(model[0][0])), "no unit", where="free a part")
    found: list[Any] = []
    handle = model[0].register_forward_hook(lambda *_: found.append(error_of(lambda: enter(model[0]))))
    other = model[1].register_forward_hook(lambda *_: found.append(error_of(lambda: free(model))))
    model(mine(0))
    handle.remove(), other.remove()
    problems += named_error(found[0], "runs", "FORWARD", where="own forward")
    problems += named_error(found[1], "between steps", where="free in a forward")
    with keep_gathered(model):
        loss_of(model, mine(0)).backward()
        model[0].unshard()
        with torch.no_grad():
            model[0][0].weight.add_(1)
        error = error_of(lambda: free(model))  # leaves what is kept
        problems += [f"free: {error!r}"] if error is not None or not all(gathered(model)) else []
        error = error_of(lambda: loss_of(model, mine(1)))
    return problems + named_error(error, "was written to", where="a gathered weight")


def test_a_context_is_entered_any_number_of_times(run_ranks) -> None:
    assert_same(run_ranks(entered_again))


def entered_again() -> list[str]:
    """Within itself, and after its end; what is inside stays gathered until the outermost end."""
    model = sharded("flat")
    kept = keep_gathered(model)
    problems: list[str] = []
    for _ in range(2):
        with kept:
            with kept:
                loss_of(model, mine(0)).backward()
            problems += [] if all(gathered(model)) else ["freed at an inner end"]
        problems += ["gathered after the end"] if any(gathered(model)) else []
    try:
        with kept:
            raise KeyError("a program's own")
    except KeyError:
        loss_of(model, mine(0)).backward()
    return problems + (["gathered after an exception"] if any(gathered(model)) else [])


def enter(module: nn.Module) -> None:
    with keep_gathered(module):
        pass


def test_ranks_that_keep_other_units_are_told(run_ranks) -> None:
    """In a step that is known, and from the first forward on."""
    for known, first in run_ranks(kept_apart):
        assert "keep_gathered of 1 units from unit '0' on" in known and "'1'" in known, known
        assert "in keep_gathered" in first, first


def kept_apart() -> list[str]:
    told = []
    for trained in (True, False):
        model = sharded("rows")
        if trained:
            loss_of(model, mine(0)).backward()

        def keep(model: Any = model) -> None:
            with keep_gathered(model[dist.get_rank()]):
                model(mine(0))

        error = error_of(keep)
        assert isinstance(error, fullshard.DivergenceError), error
        told.append(str(error))
    return told


# Freeing the root.


@two_ways
def test_the_root_is_freed_after_a_forward_alone(run_ranks, way: str) -> None:
    assert_same(run_ranks(freed, way))


def freed(way: str) -> list[str]:
    model, plain = sharded(way, keep=way not in LAYOUTS), layers()
    loss = loss_of(model, mine(0))
    problems = [] if gathered(model)[0] else ["the root was not kept for its backward"]
    free(model)
    free(model)  # nothing is left to do
    problems += ["something is gathered"] if fullshard.memory_use(model).gathered else []
    loss.backward()  # after all: it is gathered again
    loss_of(plain, batch(0)).backward()
    return problems + gradient_problems("a backward after it", model, plain)


# Modules whose metaclass is not `type`.


class Meta(abc.ABCMeta):
    """As of libraries that register their models."""


class Abstract(nn.Module, metaclass=Meta):
    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Block(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class AbstractModel(Abstract):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.linear = nn.ModuleList([Block(), Block()]), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.linear(x)


@two_ways
def test_modules_whose_metaclass_is_abcmeta(run_ranks, way: str) -> None:
    assert_same(run_ranks(abstract, way))


def abstract(way: str) -> list[str]:
    model = shard(AbstractModel().double(), way, lambda model: list(model.blocks))
    plain = AbstractModel().double()
    problems = [] if isinstance(inner(inner(model).blocks[0]), Abstract) else ["a block is no instance of its class"]
    plain.load_state_dict(whole_parameters(model))
    for step in range(2):
        model.zero_grad(), plain.zero_grad()
        backward_both(model, plain, step)
        problems += gradient_problems(f"step {step}", model, plain)
    return problems


# Masters in more digits than the model was loaded in.


@two_ways
def test_masters_in_fp32_of_a_model_in_bf16(run_ranks, way: str) -> None:
    assert_same(run_ranks(masters, way))


def masters(way: str) -> list[str]:
    """As a model in fp32 of the same weights, to the bit, and as much memory between steps."""
    wrapped = fullshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = {"mp_policy": policy} if way in LAYOUTS else {"mixed_precision": wrapped}
    found = []
    for cast_after in (True, False):
        model = layers().to(torch.bfloat16)
        model = model if cast_after else model.float()
        model = shard(model, way, lambda model: list(model)[:2], **mixed)
        if cast_after:
            model.float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(mine(step).float()).float().square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        computed = {bucket.compute_dtype for runner in runners_in(model) for bucket in runner.unit.buckets}
        found.append((whole_parameters(model), computed, fullshard.memory_use(model).parameters))
    (after, dtypes, held), (before, wanted, held_before) = found
    problems = [name for name, value in before.items() if not torch.equal(after[name], value)]
    problems += [] if dtypes == wanted == {torch.bfloat16} else [f"computed in {dtypes}"]
    problems += [] if {value.dtype for value in after.values()} == {torch.float32} else ["not in fp32"]
    return problems + ([] if held == held_before else [f"{held} bytes, and {held_before}"])
