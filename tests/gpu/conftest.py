"""What several files on one GPU share; some use the communication and the models of `benchmarks/`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # after tests, whose models.py is another


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, with real communication."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()
