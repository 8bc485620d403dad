"""`hf.MonitorCallback` in Transformers' Trainer: sharded by the mixin, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from test_hf_trainer import sharded_trainer
from test_transformers import STEPS, losses

from fullshard.integrations import hf
from ways import on_ranks


@on_ranks(by="run_clients")
def test_reports_steps_losses_and_tokens(tmp_path):
    path = tmp_path / "monitor.jsonl"
    callback = hf.MonitorCallback(every=2, tokens_per_step=48, jsonl=path, line=False)
    trainer = sharded_trainer(tmp_path, save_strategy="steps", save_steps=STEPS // 2)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.monitor is not None
    again = hf.MonitorCallback(every=2, jsonl=path, line=False)
    resumed = sharded_trainer(tmp_path)
    resumed.add_callback(again)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{STEPS // 2}")
    dist.barrier()
    reports = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [report["step"] for report in reports] == [2, 4, 4], "of four, and of the two after the checkpoint"
    assert reports[1]["loss"] == losses(trainer)[2], "what was logged last is the third step's"
    assert reports[1]["grad_norm"] > 0 and reports[0]["exposed_communication"] > 0
    seconds = reports[1]["steps"] * reports[1]["seconds_per_step"]
    assert abs(reports[1]["tokens_per_second"] * seconds - 2 * 2 * 48) < 1e-6
    assert reports[1]["memory"]["optimizer"] > 0 and reports[2]["tokens_per_second"] is None
