"""What goes wrong on accelerators alone, seen on a CPU: dtypes of fused kernels, and devices without an index."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from fullshard.comm import objects, values
from fullshard.dtypes import KNOWN
from fullshard.mesh import Axis, axes, device_of

FULL = importlib.import_module("fullshard.forms.full")


class Frozen(nn.Module):
    """Two weights of a dtype that trains nowhere, whose rows do not divide evenly, and one that trains."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        bits = torch.arange(2 * 7 * 3, dtype=torch.uint8)
        for index in range(2):
            octets = bits[: 7 * 3 * dtype.itemsize] + index
            weight = octets.view(dtype).view(7, 3)
            self.register_parameter(f"weight{index}", nn.Parameter(weight, requires_grad=False))
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [weight.view(torch.uint8).clone() for weight in (self.weight0, self.weight1)]
        return x * self.scale


def test_small_dtypes_are_copied_as_bits(run_ranks):
    """On CUDA `_foreach_copy_` has no kernel for 8-bit floats and unsigned integers of more than 8 bits."""
    assert all(run_ranks(copied_as_bits))


def copied_as_bits() -> bool:
    dtypes, copies = set(), FULL.copies

    def planned(to: list[torch.Tensor], come: list[torch.Tensor]) -> Callable[[], object]:
        dtypes.update(tensor.dtype for tensor in [*to, *come])
        return copies(to, come)

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16):
        model, expected = Frozen(dtype), Frozen(dtype)
        fully_shard(model)
        with mock.patch.object(FULL, "copies", planned):
            model(torch.ones(1))
        expected(torch.ones(1))
        for mine, other in zip(model.seen, expected.seen, strict=True):
            assert torch.equal(mine, other), dtype
    assert dtypes and dtypes <= KNOWN | {torch.int16}
    return True


def test_values_go_by_the_device_of_the_units(fake_world):
    fake_world(2)
    group, other, third = dist.new_group(), dist.new_group(), dist.new_group()
    assert device_of(group) == torch.device("cpu")
    device = torch.device("cuda", 3)
    axes._axes(init_device_mesh("cpu", (2,)), device, Axis(group, 2, 0, "nccl"), None)
    bound = mock.Mock(bound_device_id=torch.device("cuda", 2))
    current = mock.Mock(current_device=lambda: 1)
    with (
        mock.patch.object(axes, "device_type_of", lambda group: "cuda"),
        mock.patch.object(axes, "_devices", {group: device, other: torch.device("cpu")}),
        mock.patch.object(torch, "get_device_module", lambda kind: current),
    ):
        assert device_of(group) == device
        assert device_of(other) == device_of(third) == torch.device("cuda", 1)
        assert device_of(bound) == torch.device("cuda", 2)


def test_units_of_another_model_are_not_prefetched(run_ranks):
    assert all(run_ranks(prefetch_of_another))


def prefetch_of_another() -> bool:
    def sharded(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    first, second = sharded(0), sharded(1)
    x = torch.ones(1, 4, requires_grad=True)
    second(x)
    first[1].set_modules_to_forward_prefetch([second[2], first[3]])
    first[2].set_modules_to_backward_prefetch([second[2]])
    with pytest.warns(UserWarning, match="prefetch units of a different model"), fullshard.record_events() as events:
        first(x).sum().backward()
    gathers = [event.unit for event in events if event.verb == "gather"]
    assert sorted(gathers) == sorted([*map(str, range(4)), *map(str, range(4))]), gathers
    assert gathers.index("3") < gathers.index("2"), "chosen, and of this model"
    with warnings.catch_warnings():  # of this rank alone; it is said once
        warnings.simplefilter("error")
        first(x).sum().backward()
    return True


class Sent(Exception):
    """What was about to be sent."""


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_what_is_exchanged_lies_on_the_device_of_the_group(fake_world, collective):
    """Not on the one that is current, which is number 0 on every rank where nobody has chosen (G6)."""
    fake_world(2)
    group, device = dist.new_group(), torch.device("meta")

    def send(*given: object, **named: object) -> None:
        (tensor,) = [one for one in given if isinstance(one, torch.Tensor)]
        raise Sent(tensor.device)

    with (
        mock.patch.object(objects, "device_of", {group: device}.get),
        mock.patch.object(values, "device_of", {group: device}.get),
        mock.patch.object(dist, collective, send),
        pytest.raises(Sent) as raised,
    ):
        if collective == "all_gather":
            objects.objects_of_all("a word", group, "texts")
        else:
            values.reduce_value(torch.ones(1), dist.ReduceOp.SUM, group)
    assert raised.value.args == (device,)
