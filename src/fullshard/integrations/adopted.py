"""What client libraries, and tools of PyTorch's own, need besides names once a program is adopted."""

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

_apply_theirs = checkpoint_wrapper.apply_activation_checkpointing


@functools.wraps(_apply_theirs)
def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper.checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """PyTorch's, which also takes our `CustomPolicy`: PyTorch's would run private code of its own."""
    if not isinstance(auto_wrap_policy, CustomPolicy):
        _apply_theirs(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)
        return
    for path, module in reversed(list(model.named_modules())):  # inner ones first
        chosen = auto_wrap_policy.choose(module)
        if chosen is not None and path:
            model.set_submodule(path, checkpoint_wrapper_fn(module, **chosen))


class FSDPMemTracker:
    """PyTorch's puts methods of its own in the place of private ones, which Fullshard's units do not have.

    Raises:
        PrivateNameError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise messages.memory_tracker()


def _adjust_transformers(modeling: ModuleType, note: Callable[[str], None]) -> None:
    """Gather the weights in `PreTrainedModel.save_pretrained`, which would write this rank's part of each, or raise."""
    modeling.PreTrainedModel.save_pretrained = saving_whole(modeling.PreTrainedModel.save_pretrained)
    note("Transformers: save_pretrained of a sharded model writes whole weights; call it on every rank")


def _adjust_peft_model(peft_model: ModuleType, note: Callable[[str], None]) -> None:
    """The same of `PeftModel.save_pretrained`."""
    peft_model.PeftModel.save_pretrained = saving_whole(peft_model.PeftModel.save_pretrained)
    note("PEFT: save_pretrained of a sharded model writes whole adapters; call it on every rank")


def _adjust_peft_states(save_and_load: ModuleType, note: Callable[[str], None]) -> None:
    """Let `get_peft_model_state_dict` find adapters in blocks that are wrapped one by one.

    It looks for keys of a state dict by the paths of modules, in which the wrapper's own name shows (version 1); it
    would find none, and an empty file would be written.
    """
    original = save_and_load.get_peft_model_state_dict

    @functools.wraps(original)
    def get_peft_model_state_dict(model: nn.Module, state_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        paths: dict[str, str] = {}  # of modules, by what they are without the wrapper's name
        for path, _ in model.named_modules():
            paths.setdefault(clean_path(path), path)  # of a wrapped module, its instance's
        if all(WRAPPED not in path for path in paths.values()):
            return original(model, state_dict, *args, **kwargs)
        shown = {}
        for name, value in (model.state_dict() if state_dict is None else state_dict).items():
            path, dot, own = name.rpartition(".")
            shown[f"{paths.get(path, path)}{dot}{own}"] = value
        return {clean_name(name): value for name, value in original(model, shown, *args, **kwargs).items()}

    vars(save_and_load)["get_peft_model_state_dict"] = get_peft_model_state_dict


ADJUSTED: Mapping[str, Callable[[ModuleType, Callable[[str], None]], None]] = {
    "peft.peft_model": _adjust_peft_model,
    "peft.utils.save_and_load": _adjust_peft_states,
    "transformers.modeling_utils": _adjust_transformers,
}
"""By the module that is changed once it is imported: what changes it, given that and what prints a line."""
