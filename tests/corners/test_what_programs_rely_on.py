"""Names, warnings and profiler ranges of PyTorch's FSDP that programs look for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import LIBRARIES, WRAPPERS, layers, notices, shard, trains_as
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy, StateDictType
from fullshard.wrap import ModuleWrapPolicy
from ways import on_ranks, wrap

both_wrappers = pytest.mark.parametrize("originals", WRAPPERS, ids=["flat parameter", "original parameters"])


# `.params`


@both_wrappers
@on_ranks
def test_params_of_the_wrapper(originals: bool) -> None:
    """The instance's own flat parameter in a list, none where it has no parameters; whatever is used outside."""
    for library in LIBRARIES.values():
        parts = layers()
        parts[2] = wrap(parts[2], library, use_orig_params=originals)
        model = wrap(parts, library, use_orig_params=originals)
        inner, empty = parts[2], wrap(nn.ReLU(), library, use_orig_params=originals)
        for when in ("new", "stepped"):
            assert empty.params == []
            for instance, numel in ((model, 4 * 5 + 5), (inner, 5 * 3 + 3)):
                (flat,) = instance.params
                assert isinstance(flat, nn.Parameter), when
                assert flat.dim() == 1
                held = torch.tensor(flat.numel())
                dist.all_reduce(held)
                assert numel <= held <= numel + 16
                assert originals or any(flat is p for p in instance.parameters())
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()


# Warnings.


class Order(nn.Module):
    """Two wrapped layers that can be run the other way round."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.first, self.second = wrap(nn.Linear(4, 4), **keywords), wrap(nn.Linear(4, 4), **keywords)
        self.swapped = False

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(x)) if self.swapped else self.second(self.first(x))


@pytest.mark.gloo("the debug level is the process's")
@both_wrappers
@on_ranks
def test_a_later_iteration_in_another_order_is_warned_of(originals: bool) -> None:
    """As PyTorch's with the debug level at DETAIL: a UserWarning, once, that names both units and the rank."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        model = Order(use_orig_params=originals)
        root, said = wrap(model, use_orig_params=originals), []
        for swapped in (False, False, True, False, True):
            model.swapped = swapped
            with notices() as now:
                root(torch.ones(2, 4)).sum().backward()
            said.append([line for line in now if "order" in line.lower()])
    finally:
        dist.set_debug_level(level)
    assert not said[0] and not said[1], said
    assert said[2], "the first iteration in another order"
    text = "\n".join(said[2])
    assert text.startswith("UserWarning: Forward order differs from that of the first iteration"), text
    assert f"rank {dist.get_rank()}" in text and "first" in text and "second" in text, text
    assert not said[3] and not said[4], "it is said once"


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[type, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm1d(4), ()),
    "a class of the user's": (lambda: nn.LayerNorm(4), (nn.LayerNorm,)),
}


@pytest.mark.parametrize("norm", NORMS)
@on_ranks
def test_modules_that_mixed_precision_leaves_alone(norm: str) -> None:
    """Wrapped by themselves, with a warning that names their classes; their `.mixed_precision` is the default one."""
    make, ignored = NORMS[norm]
    for library in LIBRARIES.values():
        more: dict[str, Any] = {"_module_classes_to_ignore": ignored} if ignored else {}
        precision = library.MixedPrecision(param_dtype=torch.bfloat16, **more)
        assert precision != library.MixedPrecision()
        module, policy = Normed(make()), ModuleWrapPolicy({nn.Linear})
        with notices() as said:
            model = wrap(module, library, mixed_precision=precision, auto_wrap_policy=policy)
        assert isinstance(module.norm, library.FullyShardedDataParallel)
        assert module.norm.mixed_precision == library.MixedPrecision() == library.MixedPrecision()
        assert module.linear.mixed_precision == model.mixed_precision == precision
        named = [line for line in said if line.startswith("UserWarning") and type(make()).__name__ in line]
        assert named and "mixed precision" in named[0], said
        model(torch.ones(2, 4)).float().sum().backward()  # exempt or not, the types fit


@on_ranks
def test_optim_input_is_deprecated() -> None:
    """A FutureWarning about the argument, when it is given, besides that about the function."""
    for library in LIBRARIES.values():
        deprecated(library)


def deprecated(library: Any) -> None:
    cls = library.FullyShardedDataParallel
    model = wrap(nn.Linear(4, 4), library)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    whole = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    on_rank_0 = whole if dist.get_rank() == 0 else None
    by_id = library.OptimStateKeyType.PARAM_ID
    calls: dict[str, Callable[..., Any]] = {
        "full": lambda **k: cls.full_optim_state_dict(model, optimizer, **k),
        "shard": lambda **k: cls.shard_full_optim_state_dict(whole, model, **k),
        "scatter": lambda **k: cls.scatter_full_optim_state_dict(on_rank_0, model, **k),
        "rekey": lambda **k: error_or(lambda: cls.rekey_optim_state_dict(whole, by_id, model, **k)),
    }
    for name, call in calls.items():
        with notices() as said:
            call(optim_input=list(model.parameters()))
        assert any("FutureWarning" in line and "`optim_input` argument is deprecated" in line for line in said), said
        if name != "rekey":
            with notices() as said:
                call(**({"optim": optimizer} if name != "full" else {}))
            assert not any("optim_input" in line for line in said), said


def error_or(call: Callable[[], Any]) -> Any:
    """PyTorch's rekeying of a flat parameter's state to ids fails after its warning; that is not at issue."""
    try:
        return call()
    except RuntimeError:
        return None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_module_made_on_the_cpu_is_warned_of(fake_world, library):
    """Sharding it there is slow; the warning says to give `device_id`."""
    fake_world(2)
    with notices() as said:
        LIBRARIES[library].FullyShardedDataParallel(nn.Linear(4, 4))
    assert any(line.startswith("UserWarning") and "CPU" in line and "device_id" in line for line in said), said


# Profiler ranges.


@pytest.mark.gloo("the profiler is the process's")
@pytest.mark.parametrize("front_end", ["rows", True], ids=str)
@on_ranks
def test_ranges_in_a_profile(front_end: Any) -> None:
    """Gathers, reductions and waits are ranges that name the unit, while a profiler records."""
    if isinstance(front_end, bool):
        parts = layers()
        parts[0] = wrap(parts[0], use_orig_params=front_end)
        model = wrap(parts, use_orig_params=front_end)
    else:
        model = shard(layers(), layout=front_end)
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(x).sum().backward()
    names = {event.name for event in recorded.events() if event.name.lower().startswith(("fullshard", "fsdp"))}
    for what in ("gather", "reduce", "wait"):
        found = [name for name in names if what in name]
        assert found, (what, names)
    for unit in ("0", "root"):
        assert any(unit in name for name in names), (unit, names)


@pytest.mark.parametrize("front_end", ["rows", True], ids=str)
def test_no_ranges_without_a_profiler(fake_world, front_end, monkeypatch):
    """They cost nothing then: nobody enters `record_function`."""
    fake_world(2)
    model = wrap(layers()) if front_end is True else shard(layers(), layout=front_end)
    entered: list[str] = []
    real = torch.autograd.profiler.record_function.__enter__

    def enter(self: Any) -> Any:
        entered.append(self.name)
        return real(self)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", enter)
    for _ in range(2):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert [name for name in entered if not name.startswith("Optimizer")] == []


def test_names_of_a_units_class(fake_world):
    """As PyTorch's in `repr` and of the class; `_get_name` is that of the module's own class, for libraries."""

    class Own(nn.Linear):
        def _get_name(self) -> str:
            return "mine"

    fake_world(2)
    shown = {}
    for name, library in LIBRARIES.items():
        model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.ReLU())
        for module in (*model[:2], model):
            library.fully_shard(module)
        shown[name] = repr(model), type(model).__name__, type(model[1]).__name__, model[1]._get_name()
    assert len(set(shown.values())) == 1 and shown["ours"][0].startswith("FSDPSequential(\n  (0): FSDPLinear(")
    ours = fullshard.fully_shard(nn.Linear(2, 2))
    assert ours._get_name() == "Linear"


# Containers


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict], ids=["list", "dict"])
@on_ranks
def test_containers_whose_class_has_a_forward_are_units(kind: type) -> None:
    class Called(kind):
        def forward(self, x: Tensor) -> Tensor:
            for part in self.values() if kind is nn.ModuleDict else self:
                x = part(x)
            return x

    def build() -> nn.Module:
        parts = layers()
        return Called({f"part{i}": part for i, part in enumerate(parts)} if kind is nn.ModuleDict else parts)

    trains_as(fullshard.fully_shard(build()), build())


# What works, beyond PyTorch's or unsaid by it, and is to stay so.


def mesh_settings(*shape: int) -> dict[str, Any]:
    """A mesh without names, and the strategy for it."""
    strategy = ShardingStrategy.HYBRID_SHARD if len(shape) == 2 else ShardingStrategy.FULL_SHARD
    return {"device_mesh": init_device_mesh("cpu", shape), "sharding_strategy": strategy}


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("front_end", ["rows", "flat", True], ids=str)
@on_ranks
def test_meshes_without_dim_names(front_end: Any, shape: tuple[int, ...]) -> None:
    """PyTorch's needs names for a hybrid mesh."""
    if isinstance(front_end, bool):
        model = wrap(layers(), use_orig_params=front_end, **mesh_settings(*shape))
    else:
        model = shard(layers(), layout=front_end, mesh=init_device_mesh("cpu", shape))
    trains_as(model, layers())


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks
def test_hybrid_without_a_policy_or_groups(strategy: str) -> None:
    """Node-local groups by themselves; PyTorch's wants a policy, groups or a mesh."""
    parts = layers()
    parts[0] = wrap(parts[0], sharding_strategy=ShardingStrategy[strategy])
    trains_as(wrap(parts, sharding_strategy=ShardingStrategy[strategy]), layers())


@both_wrappers
@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=str)
@on_ranks
def test_local_state_dicts_with_a_mesh(shape: tuple[int, ...], originals: bool) -> None:
    """PyTorch's raises. Saved and loaded, values and training are as before."""
    keywords = {**mesh_settings(*shape), "use_orig_params": originals}
    model, reference, other = wrap(layers(), **keywords), layers(), wrap(layers(seed=1), **keywords)
    assert trains_as(model, reference)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(state)
    trains_as(other, reference)


class Images(nn.Module):
    """Two convolutions that notice how their weights lie. [batch, 4, 8, 8] -> []"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 2)
        self.to(memory_format=torch.channels_last).double()
        self.lay: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 4, 1, 1).expand(-1, 4, 8, 8))
        self.lay.append(self.first.weight.is_contiguous(memory_format=torch.channels_last))
        return self.second(x.relu()).mean((2, 3))


@pytest.mark.parametrize("front_end", ["rows", "flat", *WRAPPERS], ids=str)
@on_ranks
def test_channels_last_parameters(front_end: Any) -> None:
    """They are computed with as they lay before; PyTorch's `fully_shard` refuses them."""
    images = Images()
    if isinstance(front_end, bool):
        model = wrap(images, use_orig_params=front_end)
    else:
        model = images
        for unit in (model.first, model.second, model):
            fullshard.fully_shard(unit, layout=front_end)
        assert model.first.weight.shape == (6, 4, 3, 3)
    assert trains_as(model, Images())
    assert len(images.lay) == 3 and all(images.lay)


@on_ranks
def test_padding_in_the_encoder_of_torch() -> None:
    """Its fast path leaves 0 at padded positions. Freed rows as weights of the first layer keep it from taking it."""
    batch, padded = torch.ones(2, 5, 8), torch.tensor([[False] * 3 + [True] * 2] * 2)
    for layout, units, fast in (("rows", 2, False), ("flat", 2, True), ("rows", 1, True)):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            models.append(nn.TransformerEncoder(layer, 2).eval())
        alone, model = models
        for block in model.layers[2 - units :]:
            fullshard.fully_shard(block, layout=layout)
        fullshard.fully_shard(model, layout=layout)
        with torch.no_grad():
            for unshards in (False, True):
                if unshards:
                    (model.layers[0] if units == 2 else model).unshard()
                there, here = alone(batch, src_key_padding_mask=padded), model(batch, src_key_padding_mask=padded)
                torch.testing.assert_close(here[~padded], there[~padded])
                assert not there[padded].any() and bool(here[padded].any()) != (fast or unshards), (layout, units)


@on_ranks
def test_values_that_hooks_of_inner_modules_put_into_a_state_dict_stay() -> None:
    """A hook of `state_dict` on a module inside a unit, such as a quantiser's: its value is saved, as by PyTorch's."""
    for layout in ("rows", "flat"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def doubled(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[prefix + "weight"] = state[prefix + "weight"] * 2

        model[1].register_state_dict_post_hook(doubled)
        fullshard.fully_shard(model, layout=layout)
        state, weights = model.state_dict(), [layer.weight.to_local().detach() for layer in model]
        for index, factor in enumerate((1, 2)):
            assert torch.equal(state[f"{index}.weight"].to_local(), weights[index] * factor), (layout, index)
