"""Outputs of a forward that look at memory which is about to be given back."""

from __future__ import annotations

from typing import Any

import torch

from ..containers import map_tensors
from ..shard import Unit


def detached_from_unit(output: Any, unit: Unit) -> Any:
    """`output` with views of the unit's gathered memory replaced by copies (a forward that returns its own weight)."""
    addresses = unit.full_addresses()
    if not addresses:
        return output

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if (
            tensor.is_meta
            or tensor.layout is not torch.strided
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        ):
            return tensor
        return tensor.clone() if tensor.untyped_storage().data_ptr() in addresses else tensor

    return copy(output) if type(output) is torch.Tensor else map_tensors(copy, output)
