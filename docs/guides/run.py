"""Run a page of the documentation: its Python blocks, in order, as one program on two ranks.

    python docs/guides/run.py docs/guides/memory.md
    python docs/guides/run.py docs/guides/memory.md --ranks 4

A comment on the line before a block marks special blocks:

    <!-- file: train.py -->     the block is a file for the page's commands, not part of the page's program
    <!-- slow -->               it takes long: `make test-slow` runs it
    <!-- not run: why -->       it is never run

A ```text block right after a Python block is the output of the first rank; "..." in it stands for anything.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?(?P<fence>```+)(?P<language>[\w{}-]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        section: the innermost heading above it, without its marks.
        line: the line of the fence, counted from 1.
        mark: the comment on the line before it, or "".
        output: the ```text block right after a Python block, or None.
    """

    section: str
    line: int
    language: str
    text: str
    mark: str
    output: str | None = None

    def file(self) -> str | None:
        """The name of the file that the block contains, or None."""
        return self.mark.removeprefix("file:").strip() if self.mark.startswith("file:") else None

    def runs(self) -> bool:
        """Whether the block belongs to the page's program."""
        return self.language == "python" and self.file() is None and not self.mark.startswith("not run:")


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page's text."""
    page_blocks: list[Block] = []
    matches = list(FENCE.finditer(page))
    spans = [match.span() for match in matches]
    headings = [
        (heading.start(), heading[1])
        for heading in re.finditer(r"^#+ (.*)$", page, re.M)
        if not any(start <= heading.start() < stop for start, stop in spans)
    ]
    for index, match in enumerate(matches):
        following = matches[index + 1] if index + 1 < len(matches) else None
        output = None
        if match["language"] == "python" and following is not None and following["language"] == "text":
            output = following["text"] if not page[match.end() : following.start()].strip() else None
        page_blocks.append(
            Block(
                section=next((title for place, title in reversed(headings) if place < match.start()), ""),
                line=page.count("\n", 0, match.start("fence")) + 1,
                language=match["language"],
                text=match["text"],
                mark=match["mark"] or "",
                output=output,
            )
        )
    return page_blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    program = "".join(block.text + "\n" for block in blocks(options.page.read_text()) if block.runs())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, options.page.stem.replace("-", "_") + ".py")
        path.write_text(program)
        Path(folder, "docs").symlink_to(Path(__file__).resolve().parents[1])  # pages open their programs there
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        return subprocess.run([*launcher, str(path)], cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
