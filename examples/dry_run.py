"""A program for `fullshard dry-run`: builds a GPT on the meta device, shards it, and trains on random bytes."""

import torch
from model import GPT, VOCABULARY, GPTConfig
from torch import distributed as dist

from fullshard import fully_shard

dist.init_process_group("gloo")
with torch.device("meta"):
    model = GPT(GPTConfig(layers=4, width=256, heads=4, context=64))
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.to_empty(device="cpu")
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    tokens = torch.randint(0, VOCABULARY, (4, 64))
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
