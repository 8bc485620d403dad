"""Transformers and PEFT without adopting: shard models, load straight into shards, save, and a mixin for `Trainer`.

from fullshard.integrations import hf

model = hf.from_pretrained(LlamaForCausalLM, "/data/llama")  # each rank reads what it owns
hf.save_pretrained(model, "out")

class ShardedTrainer(hf.ShardedTrainerMixin, Trainer): ...
"""

from ..sharding import shard, unit_classes
from .pretrained import from_pretrained
from .saving import save_pretrained
from .trainer import MonitorCallback, ShardedTrainerMixin

__all__ = ["MonitorCallback", "ShardedTrainerMixin", "from_pretrained", "save_pretrained", "shard", "unit_classes"]
