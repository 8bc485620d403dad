"""Changes to client libraries and PyTorch's own tools that an adopted program needs besides replaced names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

from ..api.save_pretrained import saving_whole
from ..api.wrapper.configs import StateDictType
from ..api.wrapper.fsdp import FullyShardedDataParallel
from ..api.wrapping import CustomPolicy
from ..text import clean_path
from . import messages

_torch_apply = checkpoint_wrapper.apply_activation_checkpointing


@functools.wraps(_torch_apply)
def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper.checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """PyTorch's, which also accepts Fullshard's `CustomPolicy`: PyTorch's calls private methods of its policies."""
    if not isinstance(auto_wrap_policy, CustomPolicy):
        _torch_apply(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)
        return
    for path, module in reversed(list(model.named_modules())):  # inner modules first
        arguments = auto_wrap_policy.choose(module)
        if arguments is not None and path:
            model.set_submodule(path, checkpoint_wrapper_fn(module, **arguments))


class FSDPMemTracker:
    """Refuses to track memory: PyTorch's patches private methods, which Fullshard's units do not have.

    Raises:
        PrivateNameError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise messages.memory_tracker()


def _gather_in_save_pretrained(cls: Any, note: Callable[[str], None], library: str, contents: str) -> None:
    """Gather the weights in a class's `save_pretrained`, which would write this rank's part of each, or raise."""
    cls.save_pretrained = saving_whole(cls.save_pretrained)
    note(f"{library}: save_pretrained of a sharded model writes whole {contents}; call it on every rank")


def _find_adapters(save_and_load: ModuleType, note: Callable[[str], None]) -> None:
    """Let PEFT save and load adapters in blocks that are wrapped separately (version 1).

    It compares the keys of state dicts with module paths. Those contain the wrapper's own name, which the keys do not:
    it would find no adapters, write an empty file, and load nothing.
    """
    for name in ("get_peft_model_state_dict", "set_peft_model_state_dict"):
        vars(save_and_load)[name] = _with_clean_paths(vars(save_and_load)[name], loads=name.startswith("set"))


def _with_clean_paths(function: Callable[..., Any], loads: bool) -> Callable[..., Any]:
    """PEFT's function of a model, whose `named_modules()` leaves out the wrapper's name meanwhile."""

    @functools.wraps(function)
    def on_clean_paths(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named_modules = model.named_modules
        keys: AbstractContextManager[Any] = nullcontext()
        if isinstance(model, FullyShardedDataParallel):
            model.check_is_root()  # PEFT takes state dicts of parts, which before the first forward would become roots
            if loads:  # which needs the model's keys, and rank0_only leaves them out
                keys = model.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        vars(model)["named_modules"] = lambda *a, **k: [
            (clean_path(path), part) for path, part in named_modules(*a, **k)
        ]
        try:
            with keys:
                return function(model, *args, **kwargs)
        finally:
            vars(model).pop("named_modules", None)  # a call within another one has done so

    return on_clean_paths


ADJUSTMENTS: Mapping[str, Callable[[ModuleType, Callable[[str], None]], None]] = {
    "peft.peft_model": lambda module, note: _gather_in_save_pretrained(module.PeftModel, note, "PEFT", "adapters"),
    "peft.utils.save_and_load": _find_adapters,
    "transformers.modeling_utils": lambda module, note: _gather_in_save_pretrained(
        module.PreTrainedModel, note, "Transformers", "weights"
    ),
}
"""By module name: a function that changes the module once it is imported, given the module and a printer of notes."""
