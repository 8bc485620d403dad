"""`MonitorCallback` in Lightning's Trainer, with micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from small import STEPS, loader
from test_lightning_by_name import task, trainer_of

from fullshard.events import stream
from ways import on_ranks

pytest.importorskip("lightning", reason="needs the extra lightning: pip install -e '.[lightning]'")


@on_ranks(by="run_clients")
def test_reports_each_optimizer_step_once(tmp_path):
    from fullshard.integrations.lightning_monitor import MonitorCallback

    path = tmp_path / "monitor.jsonl"
    model = task()
    callback = MonitorCallback(every=STEPS // 2, tokens_per_step=10, jsonl=path, line=False)
    trainer_of(tmp_path, callbacks=[callback]).fit(model, loader())
    dist.barrier()
    reports = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [report["step"] for report in reports] == [STEPS // 2, STEPS]
    assert reports[-1]["loss"] == pytest.approx(model.losses[-1], rel=1e-5), "of the last micro-batch"
    assert reports[-1]["exposed_communication"] > 0 and reports[-1]["memory"]["optimizer"] > 0
    assert not stream.listeners
