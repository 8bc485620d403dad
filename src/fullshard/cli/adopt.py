"""`fullshard adopt SCRIPT ARGS...`, which needs none of the packages that other commands do.

The script runs as `__main__` of this process. Processes that it starts by `multiprocessing` (with "spawn" or
"forkserver") import their parent's main module before anything else; they find `adopted_main` in its place, which
adopts them, too, before it runs the script.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..errors import FullshardError
from .main import refuse

USAGE = """usage: fullshard adopt [--lenient] SCRIPT ARGS...
       fullshard adopt [--lenient] -m MODULE ARGS...

Run a program with Fullshard in the place of PyTorch's FSDP: public names of torch.distributed.fsdp are Fullshard's.
Under torchrun: torchrun --nproc-per-node 2 -m fullshard adopt SCRIPT ARGS...
With Accelerate: accelerate launch ... -m fullshard adopt SCRIPT ARGS...

  --lenient   warn of private names of torch.distributed.fsdp that the program uses, and hand out PyTorch's own

What it took over is printed first; docs/adopt.md tells about each client library.
Exit code: the program's; 2 bad input."""

LENIENT, SCRIPT, PACKAGE = "FULLSHARD_ADOPT_LENIENT", "FULLSHARD_ADOPT_SCRIPT", "FULLSHARD_ADOPT_PACKAGE"
"""Set in the environment of processes that an adopted program starts, which cannot be given arguments."""


def run(arguments: list[str]) -> int:
    """The command; the program's exit code, unless that exits by itself."""
    rest = list(arguments)
    lenient = bool(rest) and rest[0] == "--lenient"
    if lenient:
        rest = rest[1:]
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if rest else 2
    if rest[0] == "-m":
        if len(rest) < 2:
            return refuse("-m needs a module (fullshard adopt --help)")
        return _module(rest[1], rest[2:], lenient)
    if rest[0].startswith("-"):
        return refuse(f"there is no option {rest[0]!r} (fullshard adopt --help)")
    return _script(Path(rest[0]), rest[1:], lenient)


def _script(path: Path, arguments: list[str], lenient: bool) -> int:
    if not path.is_file():
        return refuse(f"there is no file {path}")
    if (code := _adopt(lenient)) is not None:
        return code
    sys.path[0] = str(path.resolve().parent)  # as `python path` would
    return _run(path, arguments, None)


def _run(path: Path, arguments: list[str], package: str | None) -> int:
    """Run a file as `__main__`, in this process and in those that it starts; `package`: of a module."""
    sys.argv = [str(path), *arguments]
    os.environ[SCRIPT], os.environ[PACKAGE] = str(path.resolve()), package or ""
    main = ModuleType("__main__")
    main.__file__, main.__builtins__ = str(path), __builtins__  # type: ignore[attr-defined]
    main.__package__ = package
    main.__spec__ = ModuleSpec(f"{__package__}.adopted_main", None)  # for processes that it starts
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec"), vars(main))
    return 0


def _module(name: str, arguments: list[str], lenient: bool) -> int:
    if (code := _adopt(lenient)) is not None:
        return code
    sys.path[0] = os.getcwd()  # as `python -m name` would
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # of a package, its `__main__`
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return refuse(f"there is no module {name}")
    return _run(Path(spec.origin), arguments, spec.parent)


def _adopt(lenient: bool) -> int | None:
    from ..integrations.adopt import adopt

    os.environ[LENIENT] = "1" if lenient else ""
    try:
        adopt(lenient)
    except FullshardError as error:
        return refuse(str(error))
    return None
