"""Models under `FullyShardedDataParallel`, ours or PyTorch's: parity recipes for Examples, and what single tests share.

From top to bottom: an Example wrapped and trained into the Records of training.py; a module wrapped by either library,
and what a user sees of it; `Net`, for state dicts, and how dicts differ.
"""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.checkpoint.value_forms import whole_of
from models import EXAMPLES, Example
from training import FP32, OPTIMIZER, Options, Record, compare, mean_over_ranks, reference, take_step

CPU = torch.device("cpu")  # PyTorch's wrapper looks for an accelerator otherwise


@dataclass(frozen=True)
class Wrapping:
    """How a model is wrapped and stepped. Hashable, as Options is."""

    orig: bool = False  # use_orig_params
    strategy: str = "FULL_SHARD"
    groups: str = "default"  # hybrid: "tuple" of groups, "mesh", or "default" (node-local)
    prefetch: str | None = "BACKWARD_PRE"
    limit: bool = True
    forward_prefetch: bool = False
    clip: bool = False
    norm_type: float = 2.0
    max_norm: float = 0.5
    step: Options = field(default_factory=Options)  # scenario, micro-batches, steps, dtype


def hybrid_groups() -> tuple[Any, Any]:
    """(shard, replicate) of this rank: 2 x 2 over 4 ranks."""
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return shards[rank // 2], replicas[rank % 2]


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def arguments(library: types.ModuleType, wrapping: Wrapping) -> dict[str, Any]:
    """The constructor's arguments for every instance."""
    given: dict[str, Any] = {
        "use_orig_params": wrapping.orig,
        "sharding_strategy": library.ShardingStrategy[wrapping.strategy],
        "backward_prefetch": library.BackwardPrefetch[wrapping.prefetch] if wrapping.prefetch else None,
        "limit_all_gathers": wrapping.limit,
        "forward_prefetch": wrapping.forward_prefetch,
    }
    if wrapping.groups == "tuple":
        given["process_group"] = hybrid_groups()
    elif wrapping.groups == "mesh":
        given["device_mesh"] = hybrid_mesh()
    if library is torch_fsdp:
        given["device_id"] = CPU
    return given


def wrap_example(library: types.ModuleType, model: nn.Module, example: Example, wrapping: Wrapping) -> nn.Module:
    """`model` with every unit of the example an instance, and itself one."""
    given = arguments(library, wrapping)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for unit in example.units(model):
            assert isinstance(unit, nn.Module)
            wrapped = library.FullyShardedDataParallel(unit, **given)
            for parent in model.modules():
                for name, child in parent.named_children():
                    if child is unit and parent is not wrapped:
                        parent._modules[name] = wrapped
        return library.FullyShardedDataParallel(model, **given)


def train_wrapped(library: types.ModuleType, example: Example, wrapping: Wrapping) -> Record:
    """Each rank on its own batches. Gradients only of Fullshard: PyTorch's summon fails on them on a CPU."""
    options = wrapping.step
    model = wrap_example(library, example.make(options.dtype), example, wrapping)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    record = Record()
    for step in range(options.steps):
        loss = take_step(model, example, step, [dist.get_rank()], options)
        if wrapping.clip:
            record.norms.append(model.clip_grad_norm_(wrapping.max_norm, wrapping.norm_type).item())
        record.losses.append(mean_over_ranks(loss))
        if step in (0, options.steps - 1) and library is fullshard:
            record.gradients[step] = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    state, plain = model.state_dict(), example.make(options.dtype)
    record.parameters = {name: state[name] for name, _ in plain.named_parameters()}
    record.buffers = {name: state[name] for name, _ in plain.named_buffers()}
    return record


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    with fullshard.FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        # A parameter without elements has no gradient on any rank; a plain one has an empty gradient.
        return {
            name: (None if p.numel() else torch.zeros_like(p)) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }


def wrapped_parity(
    name: str, wrapping: Wrapping, tolerance: float = FP32, check_torch: bool = True, check_buffers: bool = True
) -> list[str]:
    """Trains the named example on this rank and compares with one process and with PyTorch's wrapper."""
    example = EXAMPLES[name]
    got = train_wrapped(fullshard, example, wrapping)
    plain = Options(
        micro_batches=wrapping.step.micro_batches,
        steps=wrapping.step.steps,
        dtype=wrapping.step.dtype,
        scenario=wrapping.step.scenario,
        clip="torch" if wrapping.clip else "none",
        norm_type=wrapping.norm_type,
        max_norm=wrapping.max_norm,
    )
    want = reference(name, plain, dist.get_world_size())
    assert got.gradients, "no step's gradients were recorded"
    buffers = check_buffers and not example.per_rank
    problems = compare(got, want, tolerance, "one process", buffers=buffers)
    if check_torch:
        theirs = train_wrapped(torch_fsdp, example, wrapping)
        without_gradients = replace(got, gradients={})  # theirs cannot be seen; ours were compared with one process'
        problems += compare(without_gradients, theirs, tolerance, "PyTorch's wrapper")
    return problems


# A module wrapped by either library.

LIBRARIES = {"ours": fullshard, "theirs": torch_fsdp}


def wrap(library: types.ModuleType, module: nn.Module, **keywords: Any) -> Any:
    """`module`, wrapped on the CPU by the library's class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.FullyShardedDataParallel(module, device_id=CPU, **keywords)


def whole(library: types.ModuleType, model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by clean name, copied; empty for a model without instances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with library.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            return {name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone() for name, tensor in named}


def batch(step: int, rank: int, width: int = 6, rows: int = 4) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    model: nn.Module,
    steps: int = 3,
    loss: Callable[[Any], Tensor] = lambda out: out.float().square().mean(),
    width: int = 6,
    dtype: torch.dtype = torch.float32,
    ranks: list[int] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """SGD with momentum on this rank's batches (or the concatenation of those of `ranks`); the losses."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        chosen = [dist.get_rank()] if ranks is None else ranks
        value = loss(model(torch.cat([batch(step, rank, width) for rank in chosen]).to(dtype)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def same(mine: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The same names, dtypes and values."""
    assert list(mine) == list(expected)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def mlp(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)))


def trained(model: nn.Module, ranks: list[int] | None = None, **keywords: Any) -> dict[str, Tensor]:
    """The unsharded reference: parameters and buffers after training on all ranks' batches."""
    train(model, ranks=list(range(dist.get_world_size())) if ranks is None else ranks, **keywords)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), Block())


def sharded(originals: bool, model: nn.Sequential | None = None, **keywords: Any) -> Any:
    """The blocks and the model around them, wrapped."""
    model = blocks() if model is None else model
    for i, block in enumerate(model):
        model[i] = wrap(fullshard, block, use_orig_params=originals, **keywords)
    return wrap(fullshard, model, use_orig_params=originals, **keywords)


# State dicts.


class Layer(nn.Module):
    """Odd sizes, a buffer of integers and one of floats, and a parameter beside its submodules."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x * self.gain))) * self.scale


class Net(nn.Module):
    """Embedding, layers, and a head that may share the embedding's weight. [n] tokens to [n, 11]."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(Layer(7, hidden) for hidden in (5, 13, 3))
        self.side = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.shift = nn.Parameter(torch.randn(3, 7))
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.shift[0]
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(self.side(x)))


def make_net(seed: int = 3, **options: bool) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def layers_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Layer)


def wrap_net(module: nn.Module, library: types.ModuleType = fullshard, mesh: bool = False, **options: Any) -> Any:
    """`module` wrapped by `library`, layer by layer unless said otherwise; HYBRID over a 2-D mesh."""
    strategy = options.pop("strategy", "FULL_SHARD")
    options.setdefault("auto_wrap_policy", layers_policy)
    world = dist.get_world_size()
    if "HYBRID" in strategy:
        options["device_mesh"] = mesh_of((2, world // 2))
    elif mesh:
        options["device_mesh"] = mesh_of((world,))
    if library is not fullshard:
        options["device_id"] = CPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.FullyShardedDataParallel(module, sharding_strategy=library.ShardingStrategy[strategy], **options)


def net_case(case: str, orig: bool, seed: int = 3) -> tuple[nn.Module, nn.Module]:
    """A wrapped `Net` of that case ("tied", "nested-NO_SHARD", ...), and the same one not wrapped."""
    kind, _, strategy = case.partition("-")
    keywords: dict[str, Any] = {"use_orig_params": orig, "strategy": strategy or "FULL_SHARD"}
    flags = {"tied": kind.startswith("tied"), "frozen": kind == "frozen"}
    model, plain = make_net(seed, **flags), make_net(seed, **flags)
    if kind == "single":
        keywords["auto_wrap_policy"] = None
    elif kind == "tied_across":
        keywords["auto_wrap_policy"] = {Layer, nn.Embedding}
    elif kind == "tied_two":
        model.head = wrap_net(model.head, **keywords)
        keywords["auto_wrap_policy"] = None
    elif kind == "ignored":
        keywords["ignored_states"] = [model.side, model.layers[1].up]
    elif kind == "ignored_parameter":
        keywords["ignored_states"] = [model.tokens.weight, model.layers[1].gain]
    elif kind == "checkpoint_inside":
        model.layers = nn.ModuleList(
            wrap_net(checkpoint_wrapper(x), **(keywords | {"auto_wrap_policy": None})) for x in model.layers
        )
        keywords["auto_wrap_policy"] = None
    elif kind == "checkpoint_outside":
        model.layers = nn.ModuleList(
            checkpoint_wrapper(wrap_net(x, **(keywords | {"auto_wrap_policy": None}))) for x in model.layers
        )
        keywords["auto_wrap_policy"] = None
    elif kind == "inside_plain":
        model.layers = nn.ModuleList(wrap_net(x, **(keywords | {"auto_wrap_policy": None})) for x in model.layers)
        return model, plain
    return wrap_net(model, **keywords), plain


def whole_values(state: Any) -> dict[str, Any]:
    """Values whole and detached, on every rank."""
    return OrderedDict(
        (key, whole_of(value, CPU).clone() if hasattr(value, "detach") or hasattr(value, "local_shards") else value)
        for key, value in state.items()
    )


def typed(kind: str, model: nn.Module, config: Any = None, optim: Any = None, library: Any = fullshard) -> Any:
    return library.FullyShardedDataParallel.state_dict_type(
        model, library.StateDictType[f"{kind}_STATE_DICT"], config, optim
    )


def differences(where: str, got: Any, want: Any, tolerance: float = 0.0) -> list[str]:
    """Lines that say how two dicts of tensors differ, in names, order, dtypes, shapes or values."""
    if list(got) != list(want):
        return [f"{where}: names {list(got)} where {list(want)} are wanted"]
    found = []
    for key, value in want.items():
        mine = got[key]
        if not isinstance(value, Tensor):
            if mine != value:
                found.append(f"{where} {key}: {mine!r} where {value!r} is wanted")
        elif mine.shape != value.shape or mine.dtype != value.dtype:
            found.append(f"{where} {key}: {tuple(mine.shape)} {mine.dtype} where {tuple(value.shape)} {value.dtype}")
        elif not torch.allclose(mine.double(), value.double(), rtol=tolerance, atol=tolerance):
            found.append(f"{where} {key}: off by {(mine.double() - value.double()).abs().max():.2e}")
    return found


def net_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (6,), generator=generator), torch.randint(11, (6,), generator=generator)


def train_net(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: list[int] | None = None
) -> list[float]:
    """Steps on every rank's own batch (or, of one process, on those of `ranks`); the mean losses."""
    losses = []
    for step in steps:
        mine = [dist.get_rank()] if ranks is None else ranks
        inputs, targets = (torch.cat(parts) for parts in zip(*[net_batch(step, r) for r in mine], strict=True))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        if ranks is None:
            mean = mean / dist.get_world_size()
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
