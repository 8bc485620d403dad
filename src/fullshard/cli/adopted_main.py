"""The main module of processes that an adopted program starts: adopts FSDP, then runs the program's script again.

`multiprocessing` imports it by name, as `__mp_main__`, instead of the script; see `adopt.py`.
"""

import os
from pathlib import Path

from fullshard.cli.adopt import LENIENT, PACKAGE, SCRIPT
from fullshard.integrations.adopt import adopt

adopt(lenient=bool(os.environ.get(LENIENT)))
globals().update(__file__=os.environ[SCRIPT], __package__=os.environ[PACKAGE] or None)
exec(compile(Path(__file__).read_bytes(), __file__, "exec"), globals())
