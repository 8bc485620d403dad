"""The program that made `zero3/` and `zero3-values.pt`, on three gloo ranks of DeepSpeed 0.19.8 with PyTorch 2.13.

DS_ACCELERATOR=cpu torchrun --nproc-per-node=3 tests/store/data/zero3.py FOLDER
"""

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 3)
        self.l1 = nn.Linear(3, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("mean", torch.rand(2))

    def forward(self, x):
        return self.head(self.frozen(torch.tanh(self.l1(self.emb(x))))) * self.scale


torch.manual_seed(0)
model = Model()
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 4},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
}
groups = [
    {"params": [model.l1.bias, model.emb.weight], "lr": 0.02},
    {"params": [model.scale, model.l1.weight], "weight_decay": 0.1},
]
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
for step in range(2):
    x = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(step + engine.global_rank))
    engine.backward(engine(x).float().square().sum())
    engine.step()
engine.save_checkpoint(os.path.join(sys.argv[1], "zero3"), client_state={"epoch": 3, "note": "hi"})
values = {}
for name, parameter in model.named_parameters(remove_duplicate=False):
    if parameter.requires_grad:
        states = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        values[name] = [safe_get_full_fp32_param(parameter), *states]
    else:
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = [parameter.detach().clone()]
values |= {name: [buffer] for name, buffer in model.named_buffers()}
if engine.global_rank == 0:
    torch.save(values, os.path.join(sys.argv[1], "zero3-values.pt"))
