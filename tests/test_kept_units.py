"""Units that stay gathered on an accelerator: no micro-batch reads anything to the host, and no change is passed over.

The device is emulated: what is copied to the host arrives when the host waits for it, and every read is counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, PhaseError, ShardingStrategy, fully_shard, keep_gathered
from fullshard.agreement import kept
from ways import whole_parameters

WIDTH, MICRO_BATCHES = 5, 4
READS = Counter[str]()


class Copy:
    """Of a tensor on the device, under way to the host."""

    def __init__(self, values: Tensor, out: Tensor) -> None:
        self.values, self.out = values, out
        self.asked_in = READS["forwards"]

    def synchronize(self) -> None:
        waited = READS["waited in"] == READS["forwards"]  # for a later answer already
        READS["too early"] += not waited and READS["forwards"] - self.asked_in < kept._LATE
        self.out.copy_(self.values)


@contextlib.contextmanager
def accelerator() -> Iterator[None]:
    flags_of = kept.flags_of

    def compared(*given: object) -> Tensor:
        READS["forwards"] += 1
        return flags_of(*given)

    def read(*given: object) -> object:
        READS["at once"] += 1
        READS["forwards"] += 1
        READS["waited in"] = READS["forwards"]
        return differing(*given)

    differing = kept.differing
    READS.clear()
    with (
        mock.patch.object(kept, "has_streams", lambda device: True),
        mock.patch.object(kept, "host_buffer", lambda numel: torch.full((numel,), 7, dtype=torch.int64)),
        mock.patch.object(kept, "begin_copy_to_host", Copy),
        mock.patch.object(kept, "flags_of", compared),
        mock.patch.object(kept, "differing", read),
    ):
        yield


def three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def functional(model: nn.Module) -> nn.Module:
    fully_shard(model, auto_wrap_policy={nn.Linear})
    model.set_reshard_after_backward(False)
    return model


def wrapper(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
    )


def micro_batch(model: nn.Module, seed: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    (model(x).square().mean() / MICRO_BATCHES).backward()


def reads_of_steps() -> tuple[list[list[int]], bool]:
    """How often each micro-batch of each step read an answer at once; and whether training is right."""
    plain, model = three(), functional(three())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (plain, model)]
    reads: list[list[int]] = []
    with accelerator():
        for _ in range(4):
            reads.append([])
            for index in range(MICRO_BATCHES):
                before = READS["at once"]
                micro_batch(plain, index)
                micro_batch(model, index)
                reads[-1].append(READS["at once"] - before)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert READS["too early"] == 0 and READS["forwards"] > 2 * kept._LATE
    ours = whole_parameters(model)
    return reads, all(ours[name].allclose(parameter, atol=1e-6) for name, parameter in plain.named_parameters())


def test_a_steady_micro_batch_reads_nothing(run_ranks):
    """The shards were compared with what was gathered, and the answer read, in every one."""
    for reads, right in run_ranks(reads_of_steps):
        assert right
        assert [step[1:] for step in reads[1:]] == [[0] * (MICRO_BATCHES - 1)] * 3, reads
        assert all(step[0] == 1 for step in reads[1:]), "an optimizer has stepped"


def changed(change: str) -> tuple[str, bool]:
    """What the forwards after a change say, and whether those that follow are right."""
    plain, model = three(), functional(three())
    with accelerator():
        for seed in range(3):
            micro_batch(model, seed)
        for one in (plain, model):
            for parameter in one.parameters():
                held = parameter.to_local() if one is model else parameter
                if change == "told":
                    with torch.no_grad():
                        parameter.mul_(0.5)
                elif one is plain or dist.get_rank() == 0 or change == "nowhere":
                    array = held.detach().numpy()
                    array *= 0.5
        said = ""
        if change == "nowhere":
            with pytest.raises(PhaseError) as error:
                for seed in range(1 + kept._LATE):
                    micro_batch(model, seed)
            said = str(error.value)
        x = torch.ones(2, WIDTH)
        return said, torch.allclose(model(x), plain(x), atol=1e-6)


def test_no_change_is_passed_over(run_ranks):
    for said, right in run_ranks(changed, "told"):
        assert right and said == ""
    for said, right in run_ranks(changed, "nowhere"):
        assert right and "P415" in said and "0.weight" in said


def swapped() -> bool:
    """Weights that are put in place by `.data` around an evaluation, which no version counter tells of."""
    plain, model = three(), wrapper(three())
    x = torch.ones(2, WIDTH)
    with accelerator():
        for _ in range(2):
            micro_batch(model, 0)
            model.zero_grad()
            with torch.no_grad():
                model(x)
            for one in (plain, model):
                for parameter in one.parameters():
                    parameter.data.mul_(0.5)
            if not torch.allclose(model(x), plain(x), atol=1e-6):
                return False
        with keep_gathered(model), torch.no_grad():
            model(x)
            before = READS["at once"]
            for _ in range(3):
                model(x)
            assert READS["at once"] == before, "tokens of a generation"
    return True


def test_weights_that_are_swapped_around_an_evaluation_count(run_ranks):
    assert all(run_ranks(swapped))
