"""Every program of docs/adopt.md, as it stands, on two ranks; and the launchers that the page names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from small import BATCH, Block, Net, rows, script
from test_trl import tokenizer
from tiny import Sentences, llama

import fullshard
from ways import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "adopt.md"
SECTIONS = ("Accelerate", "Transformers", "PEFT", "Lightning", "TRL")


def programs() -> dict[str, str]:
    """By section."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        if snippets := re.findall(r"```python\n(.*?)```", body, re.DOTALL):
            found[title] = "\n".join(snippets)
    return found


def test_all_clients_have_a_program():
    assert set(programs()) == set(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
@on_ranks(by="run_adopted")
def test_programs_run(tmp_path, title):
    names: dict[str, Any] = {
        "__name__": "__main__",
        "Block": Block,
        "Model": Net,
        "data": rows(4 * BATCH),
        "folder": tmp_path,
        "language_model": llama,
        "sentences": Sentences(16),
        "tokenizer": tokenizer,
    }
    exec(compile(programs()[title], title, "exec"), names)
    modules = [module for module in names["model"].modules() if isinstance(module, nn_units())]
    assert len(modules) >= 3, modules


def nn_units() -> tuple[type, ...]:
    return (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)


LAUNCHED = """
import sys
import cpu_ranks
import torch
from accelerate import Accelerator
from small import net, rows
import fullshard

accelerator = Accelerator()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows(8), batch_size=4))
for x, y in loader:
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
kind = fullshard.FSDPModule if sys.argv[1] == "2" else fullshard.FullyShardedDataParallel
assert isinstance(model, kind), type(model)
units = sum(hasattr(module, "_fullshard_runner") for module in model.modules())
sys.stdout.write(f"units {units}\\n")  # at once: ranks share the pipe
torch.distributed.destroy_process_group()
"""
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
use_cpu: true
num_machines: 1
num_processes: 2
machine_rank: 0
main_process_port: {port}
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_reshard_after_forward: {reshard}
"""


@pytest.mark.parametrize("version", [1, 2])
def test_accelerates_launcher_and_config_file(tmp_path, version):
    config, path = tmp_path / "fsdp.yaml", tmp_path / "train.py"
    reshard = "FULL_SHARD" if version == 1 else "true"
    config.write_text(CONFIG.format(version=version, port=29530 + version, reshard=reshard))
    path.write_text(LAUNCHED)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    # The launcher does not tell ranks of `use_cpu` where it launches FSDP.
    ranks = {"PYTHONPATH": str(Path(__file__).parent), "ACCELERATE_USE_CPU": "true"}
    told = script(*launcher, "-m", "fullshard", "adopt", str(path), str(version), **ranks)
    assert told.count("units 4") == 2 and told.count("adopts this program") == 1
