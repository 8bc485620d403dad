"""Two machines in one: network namespaces with a wire between them, and a program that torchrun starts in both.

    namespace a, 10.77.N.1  ---- veth pair, shaped to a rate in each direction ----  namespace b, 10.77.N.2

What crosses is counted by the kernel, at the wire's end in each namespace. Needs root, `ip` and `tc` (iproute2), and a
kernel that makes namespaces, veth pairs and token buckets (tbf); `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NODES = ("a", "b")


@dataclass(frozen=True)
class Wire:
    """Two namespaces and what is between them.

    Attributes:
        names: of the namespaces.
        addresses: of each end.
        device: the interface's name, in both.
    """

    names: tuple[str, str]
    addresses: tuple[str, str]
    device: str

    def command(self, node: int, *words: str) -> list[str]:
        """A command that runs in one of the namespaces."""
        return ["ip", "netns", "exec", self.names[node], *words]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def wire(rate: str = "1gbit") -> Iterator[Wire]:
    """Two namespaces, connected at `rate` in each direction; gone when the context ends.

    Raises:
        OSError: they cannot be made here; says which command failed, and why.
    """
    tag = os.getpid() % 65536
    names = tuple(f"fs{tag:04x}{node}" for node in NODES)
    device = f"fs{tag:04x}"
    addresses = (f"10.77.{tag % 256}.1", f"10.77.{tag % 256}.2")
    made = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run(
            *("ip", "link", "add", device, "netns", names[0], "type", "veth"),
            *("peer", "name", device, "netns", names[1]),
        )
        found = Wire((names[0], names[1]), addresses, device)
        for node, address in enumerate(addresses):
            _run(*found.command(node, "ip", "address", "add", f"{address}/24", "dev", device))
            _run(*found.command(node, "ip", "link", "set", device, "up"))
            _run(*found.command(node, "ip", "link", "set", "lo", "up"))
            bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
            _run(*found.command(node, "tc", "qdisc", "add", "dev", device, "root", *bucket))
        yield found
    finally:
        for name in made:
            with suppress(OSError):
                _run("ip", "netns", "delete", name)


def why_not() -> str | None:
    """Why two namespaces cannot be made here; None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool}: install iproute2"
    try:
        with wire():
            return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces cannot be made here: {error}"


def launch(connected: Wire, ranks: int, program: Path, *arguments: str, timeout: float = 300) -> str:
    """Run a program under torchrun in both namespaces at once.

    Args:
        connected: the two.
        ranks: in each.
        program: with its arguments; GLOO_SOCKET_IFNAME and NODE_DEVICE tell it the interface.
        timeout: seconds, for both.

    Returns:
        What the first node printed.

    Raises:
        RuntimeError: a node failed; what both said.
    """
    environment = {
        **os.environ,
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NODE_DEVICE"), connected.device),
        "OMP_NUM_THREADS": "1",
    }
    meeting = f"--master-addr={connected.addresses[0]}"
    nodes = []
    for node in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        torchrun += [f"--nproc-per-node={ranks}", meeting, "--master-port=29577"]
        command = connected.command(node, *torchrun, str(program), *arguments)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        nodes.append(subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes))
    said = ["", ""]
    try:
        for node in (0, 1):
            said[node] = nodes[node].communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"two nodes did not end within {timeout:g} s") from error
    finally:
        for process in nodes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.communicate()
    if any(process.returncode for process in nodes):
        raise RuntimeError("\n".join(f"--- node {node}\n{text[-4000:]}" for node, text in enumerate(said)))
    return said[0]
