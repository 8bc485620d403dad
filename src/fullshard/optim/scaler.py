"""Gradient scaling for fp16 training with sharded gradients.

If any rank has an inf or NaN gradient, all ranks must skip the step and change their scale together.

Private API: `torch.amp.GradScaler._unscale_grads_`, the one place where the base class looks at gradients, is
overridden, and `torch._amp_foreach_non_finite_check_and_unscale_` is the kernel it uses. Public alternative: divide
each gradient by `get_scale()`, call `isfinite().all()` on it, and step and `update(new_scale)` by hand: several
kernels and a host synchronisation per gradient. tests/test_private_api.py tests both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..comm import reduce_value
from ..optimizers import parameters_of
from ..torch_private.local_tensor import inside
from .clip import distinct_gradients, refuse_stepped


class ShardedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose ranks agree on whether any gradient is inf or NaN.

    Works with sharded parameters (rows, flat), `optimizer_view`s and plain parameters, on CPU and accelerators. Like
    PyTorch's class of this name, it unscales fp16 gradients, and a scaled loss keeps its dtype. One all-reduce per
    optimizer and step, in `unscale_` or, without it, in `step`.

    Every rank must call `unscale_` or `step` for the same optimizers in the same order, even if an optimizer has no
    gradients on some ranks.

    Args:
        device: where the scale lives.
        init_scale: the first scale.
        backoff_factor: multiplies the scale after a skipped step.
        growth_factor: multiplies the scale after `growth_interval` consecutive steps without a skip.
        growth_interval: in steps.
        enabled: False: `scale` and `unscale_` do nothing, `step` steps.
        process_group: the ranks that share the gradients; None: all ranks, if torch.distributed is initialized.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """A loss, or a list, tuple or iterable of them, times the scale, each in its own dtype.

        Raises:
            ValueError: something in it is neither a tensor nor an iterable.
        """
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        return super().scale(outputs)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply gradients by `inv_scale`; by device, 1.0 where any rank has an inf or NaN, else 0.0.

        `allow_fp16`, from the base class, has no effect: sharded gradients may be in fp16.
        """
        parameters = parameters_of([optimizer])
        remedy = "train in bfloat16, which needs no scaling; or step after the backward"
        refuse_stepped(parameters, "A gradient scaler", remedy)
        flags: dict[torch.device, torch.Tensor] = {found_inf.device: found_inf}
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with torch.no_grad():
            for grad in _plain_gradients(parameters):
                by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
            for (device, _), grads in by_kind.items():
                if device not in flags:
                    flags[device] = torch.zeros_like(found_inf, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], inv_scale.to(device))
            self._agree(flags, found_inf.device)
        return flags

    def _agree(self, flags: dict[torch.device, torch.Tensor], home: torch.device) -> None:
        """Set all flags to their maximum over devices and ranks, with one all-reduce on the scale's device.

        Ranks may have gradients on different devices, so each makes exactly one collective.
        """
        flag = torch.stack([local.to(home) for local in flags.values()]).amax()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
            reduce_value(flag, dist.ReduceOp.MAX, self.process_group)
        for local in flags.values():
            local.copy_(flag)


def _plain_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The nonempty local tensors of gradients, each once."""
    grads: dict[int, torch.Tensor] = {}
    for parameter, gradient, _ in distinct_gradients(parameters):
        grad = inside(gradient)
        if grad.is_sparse:
            if not grad.is_coalesced():
                grad = parameter.grad = grad.coalesce()  # sums duplicates, which may overflow in fp16
            grad = grad._values()
        if grad.numel():
            grads[id(gradient)] = grad
    return [*grads.values()]
