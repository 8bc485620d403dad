"""What the recipes train on: the source of Python's standard library, which is there already. A token is a byte."""

import ast
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256


def sources() -> list[bytes]:
    """The files of the standard library, but for its packages."""
    return [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]


def batch(text: bytes, step: int, rows: int, length: int) -> Tensor:
    """A global batch [rows, length]: which windows follows from the step alone, so all ranks agree on it."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    return torch.tensor([list(text[start : start + length]) for start in starts])


def questions_and_answers() -> list[tuple[bytes, bytes]]:
    """For each documented function of the first files: its first line, and the first line of its docstring."""
    found = []
    for source in sources()[:40]:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)):
                asked = f"def {node.name}({ast.unparse(node.args)}):"
                found.append((asked.encode(), told.splitlines()[0].encode() + b"\n"))
    return sorted(set(found))
