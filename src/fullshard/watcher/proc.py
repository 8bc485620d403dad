"""What the operating system tells of a process: whether it runs, what it has used, how it ended. Linux's `/proc`.

Where there is none (macOS) only whether the process is alive is known; nothing else here fails.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the third on (proc(5)); empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def state(pid: int) -> str:
    """Of a process or thread, a letter of proc(5): R runs, S and D sleep, T is stopped, Z has ended; "?" unknown."""
    fields = stat(pid)
    return fields[0] if fields else "?"


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that the process and the children it waited for have used."""
    fields = stat(pid)
    return sum(map(int, fields[11:15])) / _TICKS if len(fields) > 15 else 0.0


def children_seconds(pid: int) -> float:
    """Seconds of CPU that its children use now (compilers, loaders)."""
    total = 0.0
    for task in _listed(f"/proc/{pid}/task"):
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()
        except OSError:
            continue
        total += sum(cpu_seconds(int(child)) for child in children)
    return total


def wakes(task: int) -> int:
    """How often a thread has gone to sleep of its own accord: to wait for a lock, a peer, a disk, a time."""
    try:
        lines = Path(f"/proc/{task}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:")), 0)


def moved_bytes(pid: int) -> int:
    """Bytes that the process has read and written, whatever by."""
    return _moved(_read(f"/proc/{pid}/io"))


def moved_bytes_of_others() -> int:
    """Bytes that this process has read and written, but for the thread that asks."""
    mine = _read(f"/proc/self/task/{threading.get_native_id()}/io")
    return _moved(_read("/proc/self/io")) - _moved(mine) - len(mine)  # what reading `mine` read


def machine() -> str:
    """What processes have in common that see each other: a machine's boot, and a name space of process numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{_read('/proc/sys/kernel/random/boot_id').strip()} {space}"


def started(pid: int) -> int:
    """When the process was started, in ticks since the machine was: no other has its number and this."""
    fields = stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; without one it would be ended by it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(masks[0] >> (number - 1) & 1)


def ending(pid: int) -> str | None:
    """How a process that nobody has waited for yet ended; None if it lives or cannot be asked any more."""
    fields = stat(pid)
    if not fields or fields[0] not in "ZX" or len(fields) < 50:
        return None
    code = int(fields[49])
    if code & 0x7F:
        return f"killed by signal {code & 0x7F} ({_signal_name(code & 0x7F)})"
    return f"exit code {code >> 8}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _moved(text: str) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("rchar", "wchar")))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
