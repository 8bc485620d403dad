"""The main module of processes that an adopted program starts: adopts, then runs the program's script again.

`multiprocessing` imports it by name, as `__mp_main__`, where it would have imported the script; see `adopt.py`.
"""

import os
import sys
from pathlib import Path

from fullshard.cli.adopt import LENIENT
from fullshard.integrations.adopt import adopt

adopt(lenient=bool(os.environ.get(LENIENT)))
__file__ = sys.argv[0]  # the parent's
exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())
