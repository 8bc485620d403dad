"""What every recipe begins with: this process's place among the ranks, and the device it computes on."""

import os

import torch
import torch.distributed as dist


def start() -> torch.device:
    """Join the process group that `torchrun` describes, or one of this process alone; the device of this rank."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **alone)
    return device


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Of a loss that is the mean over this rank's rows, where every rank has as many."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
