"""All benchmarks that need no GPU, one after another, and one side-by-side table of them: what `make bench`
runs.

    python benchmarks/run.py                    everything, about five minutes on an idle machine of two cores
    python benchmarks/run.py --quick            a check that everything runs
    python benchmarks/run.py --only traffic     one benchmark (may be repeated)
    python benchmarks/run.py --save             also write benchmarks/results/<date>-<name>.json and .md

Within a benchmark the peers are interleaved in one process; each benchmark is a process of its own, so that
none inherits another's process group, threads or heap.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Quantity, dump, faults, hardware, load, markdown, print_table, print_verdicts

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("host_cost", "throughput", "optimizer_step", "traffic", "live_memory", "meta_build")
LIMIT = 420.0  # seconds for one benchmark; far more than any takes


def run(name: str, quick: bool) -> list[Quantity] | None:
    """One benchmark in its own process group; None, said aloud, if it failed or outlasted the limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.json")
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(path), *["--quick"] * quick]
        environment = {
            "OMP_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "99",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **os.environ,
        }
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = process.wait(LIMIT)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            os.killpg(process.pid, signal.SIGKILL)  # the benchmark and the ranks it started
            process.wait()
            if isinstance(reason, KeyboardInterrupt):
                raise
            status = -1
        print(f"{name}: {time.perf_counter() - start:.0f} s{'' if status == 0 else ', FAILED'}", flush=True)
        return load(json.loads(path.read_text())) if status == 0 else None


def save(quantities: list[Quantity], name: str) -> Path:
    """Write samples (JSON) and table (Markdown), both with date and hardware; return the Markdown's path."""
    date, facts = datetime.date.today().isoformat(), hardware()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    base = results / f"{date}-{name}"
    whole = {"date": date, "hardware": facts, "quantities": dump(quantities)}
    base.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(quantities, facts, date) + "\n")
    return base.with_suffix(".md")


def show(quantities: list[Quantity], name: str | None) -> None:
    """Print tables, verdicts and hardware; save them under that name."""
    print_table(quantities)
    print_verdicts(quantities)
    print("\n" + ", ".join(f"{key} {value}" for key, value in hardware().items()))
    if name is not None:
        print(f"written: {save(quantities, name)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fullshard beside plain PyTorch, DDP, FSDP2 and FSDP1.")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="run this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="few repetitions: a check that it runs, no measurement")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-<name>.json and .md")
    arguments = parser.parse_args()
    chosen = arguments.only or BENCHMARKS
    print(
        "Measuring " + ", ".join(chosen) + "; ratios mean little while other programs use the machine.",
        flush=True,
    )
    results = {name: run(name, arguments.quick) for name in chosen}
    quantities = [quantity for found in results.values() if found for quantity in found]
    name = "all" if chosen == BENCHMARKS else "-".join(chosen)
    show(quantities, name if arguments.save else None)
    failed = [name for name, found in results.items() if found is None]
    if failed:
        print(f"failed: {', '.join(failed)}")
    wrong = faults(quantities)
    print("\n".join(wrong))
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
