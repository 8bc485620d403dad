"""`fullshard adopt SCRIPT ARGS...`, which works without the packages that other commands need.

The script runs as `__main__` of this process. Processes that it starts with `multiprocessing` ("spawn" or "forkserver")
first import their parent's main module. They import `adopted_main` instead, which adopts FSDP in them too and then runs
the script.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..errors import FullshardError
from .main import own_arguments, refuse

USAGE = """usage: fullshard adopt [--lenient] SCRIPT ARGS...
       fullshard adopt [--lenient] -m MODULE ARGS...

Run a program with Fullshard in place of PyTorch's FSDP: public names of torch.distributed.fsdp become Fullshard's.
Under torchrun: torchrun --nproc-per-node 2 -m fullshard adopt SCRIPT ARGS...
With Accelerate: accelerate launch ... -m fullshard adopt SCRIPT ARGS...

  --lenient   if the program uses private names of torch.distributed.fsdp, warn and give it PyTorch's own

Prints first which libraries it adopted; docs/adopt.md covers each of them.
Exit code: the program's; 2 bad input."""

LENIENT, SCRIPT, PACKAGE = "FULLSHARD_ADOPT_LENIENT", "FULLSHARD_ADOPT_SCRIPT", "FULLSHARD_ADOPT_PACKAGE"
"""Environment variables for the processes that an adopted program starts, which get no arguments from us."""


def run(arguments: list[str]) -> int:
    """Run the command; returns the program's exit code, unless the program exits the interpreter."""
    lenient = arguments[:1] == ["--lenient"]
    words = arguments[1:] if lenient else arguments
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    is_module = words[0] == "-m"
    if is_module and len(words) < 2:
        return refuse("-m needs a module (fullshard adopt --help)")
    if not is_module and words[0].startswith("-"):
        return refuse(f"there is no option {words[0]!r} (fullshard adopt --help)")
    if not is_module and not Path(words[0]).is_file():
        return refuse(f"there is no file {words[0]}")
    from ..integrations.adopt import adopt

    os.environ[LENIENT] = "1" if lenient else ""
    try:
        adopt(lenient)
    except FullshardError as error:
        return refuse(str(error))
    named = words[1:] if is_module else words
    return (_run_module if is_module else _run_script)(named[0], own_arguments(named))


def _run_script(name: str, arguments: list[str]) -> int:
    path = Path(name)
    sys.path[0] = str(path.resolve().parent)  # as `python path` would
    return _run_main(path, arguments, None)


def _run_main(path: Path, arguments: list[str], package: str | None) -> int:
    """Run a file as `__main__`, here and in the processes that it starts; `package`: the parent package of a module."""
    sys.argv = [str(path), *arguments]
    os.environ[SCRIPT], os.environ[PACKAGE] = str(path.resolve()), package or ""
    main = ModuleType("__main__")
    main.__file__, main.__builtins__ = str(path), __builtins__  # type: ignore[attr-defined]
    main.__package__ = package
    main.__spec__ = ModuleSpec(f"{__package__}.adopted_main", None)  # the module that its processes import
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec"), vars(main))
    return 0


def _run_module(name: str, arguments: list[str]) -> int:
    sys.path[0] = os.getcwd()  # as `python -m name` would
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package: run its `__main__`
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return refuse(f"there is no module {name}")
    return _run_main(Path(spec.origin), arguments, spec.parent)
