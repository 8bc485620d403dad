"""Changes to client libraries and PyTorch's own tools that an adopted program needs besides replaced names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

from ..api.whole import saving_whole
from ..api.wrapping import CustomPolicy
from ..names import WRAPPED, clean_name, clean_path
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
    """Let `get_peft_model_state_dict` find adapters in blocks that are wrapped separately (version 1).

    It looks up keys of a state dict by module paths. Those contain the wrapper's own name, which the keys do not: it
    would find none, and write an empty file.
    """
    original = save_and_load.get_peft_model_state_dict

    @functools.wraps(original)
    def get_peft_model_state_dict(model: nn.Module, state_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        paths: dict[str, str] = {}  # module paths by the same paths without the wrapper's name
        for path, _ in model.named_modules():
            paths.setdefault(clean_path(path), path)  # of a wrapped module, the wrapper's
        if all(WRAPPED not in path for path in paths.values()):
            return original(model, state_dict, *args, **kwargs)
        renamed = {}
        for name, value in (model.state_dict() if state_dict is None else state_dict).items():
            path, dot, own = name.rpartition(".")
            renamed[f"{paths.get(path, path)}{dot}{own}"] = value
        return {clean_name(name): value for name, value in original(model, renamed, *args, **kwargs).items()}

    vars(save_and_load)["get_peft_model_state_dict"] = get_peft_model_state_dict


ADJUSTMENTS: Mapping[str, Callable[[ModuleType, Callable[[str], None]], None]] = {
    "peft.peft_model": lambda module, note: _gather_in_save_pretrained(module.PeftModel, note, "PEFT", "adapters"),
    "peft.utils.save_and_load": _find_adapters,
    "transformers.modeling_utils": lambda module, note: _gather_in_save_pretrained(
        module.PreTrainedModel, note, "Transformers", "weights"
    ),
}
"""By module name: a function that changes the module once it is imported, given the module and a printer of notes."""
