"""The whole weights of a sharded model, for libraries whose `save_pretrained` writes a single rank's weights."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ..checkpoint.functions import get_model_state_dict
from ..checkpoint.model import in_form
from ..checkpoint.value_forms import StateForm
from ..runtime import runners_in
from ..text import WRAPPED, plain_class
from ..torch_private.store import default_store
from . import messages
from .wrapper.markers import wrapper_of

PATIENCE = 120.0
"""Seconds that ranks wait for each other before a collective that a program may have called on only one rank."""

_meetings: dict[str, int] = {}  # function -> how often this rank has called it


def saving_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `save_pretrained` that gathers a sharded model's weights, which `original` would write in parts, or refuse.

    Every rank calls it; the first rank writes, with the whole model in its host memory. A `state_dict` argument is
    written as it is; ranks that pass an empty dict write nothing.

    Args:
        original: the `save_pretrained` of a model class of Transformers or PEFT.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        sharded = wrapper_of(self) or (self if runners_in(self) else None)
        if sharded is None:
            return original(self, *args, **kwargs)
        state = bound.arguments.get("state_dict", kwargs.get("state_dict"))
        if state is None:
            state = gathered(sharded, "save_pretrained")
        if not state and dist.get_rank():
            return None
        with _without_collectives(self, state):
            if "state_dict" not in signature.parameters:  # PEFT's has it in **kwargs
                return original(self, *args, **{**kwargs, "state_dict": state})
            bound.arguments["state_dict"] = state
            return original(*bound.args, **bound.kwargs)

    return save_pretrained


@contextmanager
def _without_collectives(model: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Context in which PEFT's `save_pretrained` can run on a single rank, with weights from `state`.

    It calls `state_dict` of copied modules (`modules_to_save`) for their names, which instances of the wrapper would
    gather; and it runs the encoders of prompt learning, whose weights are sharded.

    Args:
        model: a model of Transformers or PEFT; only the latter has prompt encoders.
        state: whole weights, under the model's names.
    """
    encoders: Any = getattr(model, "prompt_encoder", None)
    sharded = dict(encoders._modules) if isinstance(encoders, nn.ModuleDict) else {}
    try:
        for name, encoder in sharded.items():
            encoders[name] = plain_copy(encoder, state, f"prompt_encoder.{name}.")
        with in_form(StateForm("names")):
            yield
    finally:
        for name, encoder in sharded.items():
            encoders[name] = encoder


def plain_copy(module: Any, state: Mapping[str, Any], prefix: str) -> Any:
    """An unsharded copy of a sharded module and its submodules, with the tensors of a state dict.

    Args:
        module: the sharded module.
        state: the state dict; the copy shares its tensors.
        prefix: the prefix of the module's names in `state`.
    """
    module = module._modules.get(WRAPPED, module)
    copied: Any = object.__new__(plain_class(module))
    copied.__dict__ = {name: value for name, value in module.__dict__.items() if not name.startswith("_fullshard")}
    for registry in ("_parameters", "_buffers"):
        own = getattr(module, registry)
        copied.__dict__[registry] = {name: state.get(prefix + name, tensor) for name, tensor in own.items()}
    copied.__dict__["_modules"] = {
        name: child if child is None else plain_copy(child, state, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    if isinstance(copied, nn.RNNBase):
        copied._init_flat_weights()
    return copied


def saving_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods to add to a class of sharded modules: a `save_pretrained` of whole weights, if the class has one.

    Only for a `save_pretrained` that accepts a state dict, as those of Transformers and PEFT do.
    """
    original = getattr(cls, "save_pretrained", None)
    if original is None or not (
        "state_dict" in inspect.signature(original).parameters or hasattr(cls, "get_base_model")
    ):
        return {}
    return {"save_pretrained": saving_whole(original)}


def gathered(sharded: nn.Module, what: str) -> dict[str, Any]:
    """The whole weights in host memory on the first rank; an empty dict on others. Collective.

    Args:
        sharded: the sharded model.
        what: the function that the program called, for the error.

    Raises:
        PhaseError: not all ranks called it.
    """
    _meet(what)
    return get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _meet(what: str) -> None:
    """Wait until all ranks have called `what`; without a store, return at once.

    Raises:
        PhaseError: some have not after `PATIENCE` seconds.
    """
    if not dist.is_initialized():
        return
    store, world = default_store(), dist.get_world_size()
    if store is None or world == 1:
        return
    number = _meetings[what] = _meetings.get(what, 0) + 1
    key, deadline = f"fullshard/{what}/{number}", time.monotonic() + PATIENCE
    here = store.add(key, 1)
    while here < world:
        if time.monotonic() > deadline:
            raise messages.ranks_missing(what, dist.get_rank(), world, here, PATIENCE)
        time.sleep(0.01)
        here = store.add(key, 0)
