"""Planned steps are compared with the engine and with what the allocator reports (benchmarks/allocations.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # after tests, whose models.py is another
