"""Several machines: two network namespaces under `torchrun --nnodes=2`; the program for it; examples for clusters."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[1]
EXAMPLES, BENCHMARKS, CLUSTER = ROOT / "examples", ROOT / "benchmarks", ROOT / "examples" / "cluster"


def module(folder: Path, name: str) -> Any:
    """A program of another folder; both folders have files of names that are not to be found here."""
    sys.path.insert(0, str(folder))
    try:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


@pytest.mark.timeout(600)  # four ranks and two agents import torch
def test_what_crosses_between_two_nodes_is_what_theory_says() -> None:
    if (reason := module(BENCHMARKS, "two_nodes").why_not()) is not None:
        pytest.skip(reason)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        found = module(BENCHMARKS, "multi_node").measure(width=512, layers=4, steps=3, rate="1gbit", timeout=500)
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert found["parameters"] == 4 * 4 * 512 * 513
    for strategy in ("full", "hybrid"):
        got, expected = found[strategy]["bytes"], found["theory"][strategy]
        assert 0.97 * expected < got < 1.06 * expected, f"{strategy}: {got:,} bytes, {expected:,.0f} by theory"
    assert found["full"]["losses"] == pytest.approx(found["hybrid"]["losses"], rel=1e-5)
    assert found["full"]["losses"][-1] < found["full"]["losses"][0]
    seconds = found["hybrid"]["bytes"] * 8 / 1e9
    assert found["hybrid"]["seconds"] > seconds, "faster than the wire: it is not shaped, or not used"


def test_theory_of_larger_clusters() -> None:
    theory = module_of_benchmark().theory
    assert theory(800, nodes=2, ranks=1) == {"full": 2 * 400 + 400, "hybrid": 800}
    assert theory(800, nodes=4, ranks=8)["hybrid"] == 1200
    assert theory(800, nodes=1, ranks=8)["hybrid"] == 0


def module_of_benchmark() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return module(BENCHMARKS, "multi_node")
    finally:
        sys.path.remove(str(BENCHMARKS))


def train(strategy: str, folder: str, steps: int) -> list[float]:
    arguments = ["--strategy", strategy, "--machines", "2", "--width", "16", "--layers", "2", "--steps", str(steps)]
    return module(EXAMPLES, "multi_node").main([*arguments, "--out", folder])


def test_the_program_trains_alike_by_both_strategies_and_goes_on(run_ranks, tmp_path: Path) -> None:
    full = run_ranks(train, "full", str(tmp_path / "full"), 12)
    hybrid = run_ranks(train, "hybrid", str(tmp_path / "hybrid"), 10)
    rest = run_ranks(train, "full", str(tmp_path / "hybrid"), 12)  # the other strategy goes on from its checkpoint
    assert full[0] == full[1] and len(hybrid[0]) == 10 and len(rest[0]) == 2
    assert hybrid[0] + rest[0] == pytest.approx(full[0], rel=1e-5)
    assert full[0][-1] < full[0][0]


# Examples for clusters. They have not been run on one: what is held here is that they parse, and what they call exists.


@pytest.mark.parametrize("folder, name", [(EXAMPLES, "multi_node"), (EXAMPLES / "recipes", "job")])
def test_programs_compute_on_the_host_where_torch_knows_accelerators_that_are_not_there(
    fake_world, monkeypatch, folder: Path, name: str
) -> None:
    """As PyPI's torch, which is built for CUDA, does on a machine without a GPU."""

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    fake_world(2)
    assert module(folder, name).start() == torch.device("cpu")


def known_options(program: str) -> set[str]:
    source = (EXAMPLES / program).read_text()
    return {part.split('"')[0] for part in source.split('add_argument("')[1:]}


def test_the_slurm_script_is_one() -> None:
    script = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", str(script)], check=True, timeout=60)
    lines = script.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert directives and all(lines.index(line) < first_command for line in directives)  # later ones are not read
    assert all("=" in line or line == "#SBATCH --requeue" for line in directives)
    called = " ".join(line for line in lines if not line.startswith("#")).partition(" torchrun ")[2]
    check_torchrun([word for word in called.split() if word.startswith("--")])
    refused = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, timeout=30)
    assert refused.returncode == 2 and "usage" in refused.stderr


def test_the_kubernetes_manifest_is_one() -> None:
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, name = job["spec"], service["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == name and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    arguments = container["args"]
    check_torchrun([word for word in arguments[: arguments.index("examples/multi_node.py")] if word.startswith("--")])
    given = dict(word.lstrip("-").split("=", 1) for word in arguments if word.startswith("--"))
    assert int(given["nnodes"]) == spec["completions"]
    assert given["rdzv-endpoint"].startswith(f"{job['metadata']['name']}-0.{name}:")
    assert int(given["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    own = arguments[arguments.index("examples/multi_node.py") + 1 :]
    assert {word.split("=")[0] for word in own} <= known_options("multi_node.py")
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def check_torchrun(words: list[str]) -> None:
    """Options of torchrun that it knows."""
    parser = importlib.import_module("torch.distributed.run").get_args_parser()
    known = {option.replace("_", "-") for action in parser._actions for option in action.option_strings}
    options = {
        word.split("=")[0] for word in words if not word.startswith(("--kill-on-bad-exit", "--strategy", "--out"))
    }
    assert "--nnodes" in options and options <= known, options - known
