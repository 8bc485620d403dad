"""Plant each fault of `faults.py` into a copy of the source, and see its test fail.

    python tests/mutations/run.py                      all, one after the other
    python tests/mutations/run.py "a gather" parked    those whose names contain one of these
    python tests/mutations/run.py --besides            with the other test of each, where there is one

The examples of the stateful machine are the same in every run. Exits with 1 if a fault was not caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from faults import FAULTS, Fault

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 1200  # seconds for one test
VERDICTS = {0: "MISSED", 1: "caught", 124: "NO END"}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", help="parts of names")
    arguments.add_argument(
        "--besides", action="store_true", help="run `besides` in place of `test`, where there is one"
    )
    arguments.add_argument("--test", help="run this test in place of each fault's own")
    arguments.add_argument("--jobs", type=int, default=1, help="how many at a time")
    given = arguments.parse_args()
    chosen = [
        (fault, given.test or (fault.besides if given.besides else fault.test))
        for fault in FAULTS
        if (not given.names or any(name in fault.name for name in given.names)) and (fault.besides or not given.besides)
    ]
    missed = 0
    print(f"{'verdict':8} {'seconds':>7}  {'test':45} fault", flush=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        for (fault, test), (verdict, seconds, _) in zip(
            chosen, pool.map(lambda one: caught(*one), chosen), strict=True
        ):
            missed += verdict != "caught"
            print(f"{verdict:8} {seconds:7.0f}  {test:45} {fault.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


def caught(fault: Fault, test: str) -> tuple[str, float, str]:
    """The verdict on a fault, the seconds that its test took, and what that printed."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(REPOSITORY / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        plant(fault, source / "fullshard")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *test.split()]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        begin = time.monotonic()
        run = partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        try:
            done = run(command, cwd=REPOSITORY, env=environment, timeout=PATIENCE)
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as expired:
            code, output = 124, str(expired.output)
        seconds = time.monotonic() - begin
    if code == 1 and "\nFAILED " not in output:  # an error of a fixture or a collection is no test that fails
        code = 2
    if code == -signal.SIGSEGV:  # a test read memory that was freed
        code = 1
    return VERDICTS.get(code, f"ERROR {code}"), seconds, output


def plant(fault: Fault, package: Path) -> None:
    """Replace the fault's old text.

    Raises:
        ValueError: it does not occur exactly once.
    """
    file = package / fault.file
    text = file.read_text()
    if (times := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: its old text occurs {times} times in {fault.file}, not once")
    file.write_text(text.replace(fault.old, fault.new))


if __name__ == "__main__":
    sys.exit(main())
