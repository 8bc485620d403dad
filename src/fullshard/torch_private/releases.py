"""Differences of torch's own `fully_shard` between releases, for programs that adopt Fullshard.

Only the knowledge is private here; the public alternative is to read `torch.__version__` where it matters.
`tests/test_private_api.py` compares with the behaviour of the installed torch.
"""

from __future__ import annotations

import torch

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

REDUCES_AS_COMPUTED = RELEASE < (2, 15)
"""Whether `MixedPrecisionPolicy(reduce_dtype=None)` reduces in `param_dtype`; from 2.15 on in `grad_dtype`."""
