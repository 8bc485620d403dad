"""What of torch is replaced, for the whole process, by importing Fullshard and sharding models."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

import torch, torch.distributed as dist, torch.nn.utils.parametrize, torch.utils.checkpoint
import torch.distributed.checkpoint, torch.distributed.tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                for method, function in vars(value).items():
                    if callable(function) or isinstance(function, (property, staticmethod, classmethod)):
                        found[f"{value.__module__}.{value.__qualname__}.{method}"] = function
            elif callable(value):
                found[f"{name}.{key}"] = value
    return found

before = functions()
import fullshard

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
for shard in (fullshard.fully_shard, fullshard.FullyShardedDataParallel):
    for keywords in ({"layout": "flat"}, {}) if shard is fullshard.fully_shard else ({"use_orig_params": True}, {}):
        model = shard(torch.nn.Linear(4, 4), **keywords)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
ours = fullshard.__file__.rpartition("/")[0]
for name, value in sorted(functions().items()):  # torch replaces some of its own
    code = getattr(getattr(value, "fget", value), "__code__", None)
    if before.get(name) is not value and getattr(code, "co_filename", "").startswith(ours):
        print(name)
"""


def test_only_what_users_ask_of_autograd_by_name_is_replaced():
    """docs/decisions/0012-no-global-patches.md says why these are."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == ["torch.autograd.backward", "torch.autograd.grad"]
