"""TRL's `SFTTrainer` behind `ShardedTrainerMixin`, without adopting: the numbers of the same program under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_transformers import close, losses
from tiny import llama

import fullshard
from fullshard.integrations import hf
from ways import on_ranks

pytest.importorskip("trl", reason="needs the extra trl: pip install -e '.[trl]'")


@on_ranks(by="run_clients")
def test_fine_tunes_as_ddp(tmp_path):
    from test_trl import sft
    from trl import SFTTrainer

    class ShardedSFTTrainer(hf.ShardedTrainerMixin, SFTTrainer):
        """What users write."""

    plain: Any = sft("ddp", tmp_path)
    plain.train()
    sharded = sft("ddp", tmp_path, ShardedSFTTrainer)
    sharded.train()
    assert isinstance(sharded.model, fullshard.FSDPModule) and sharded.model_wrapped is sharded.model
    close(losses(sharded), losses(plain))
    expected = dict(plain.accelerator.unwrap_model(plain.model_wrapped).state_dict())
    found = {name: value.full_tensor() for name, value in sharded.model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    streamed = dict(fullshard.full_parameters(sharded.model, dtype=torch.bfloat16))
    assert streamed.keys() == dict(llama().named_parameters()).keys()
    torch.testing.assert_close(streamed["lm_head.weight"], expected["lm_head.weight"].bfloat16(), rtol=1e-2, atol=1e-2)
