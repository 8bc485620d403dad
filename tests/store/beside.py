"""Saves in the background whose writers are threads of the rank's own process: no process has to be started."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fullshard.store import background, writer_process

importlib.import_module("fullshard.store.save")  # with the writer of this process, before that is patched


class Thread:
    """What `Writer` asks of a `subprocess.Popen`."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        self.thread = threading.Thread(target=serve, args=args, daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else 0

    def wait(self) -> int:
        self.thread.join()
        return 0


@contextlib.contextmanager
def threads() -> Iterator[background.Writer]:
    """Within, this process's writer is a thread; a save that goes on at the end is waited for."""

    def launch(self: Any) -> None:
        if self._process is None:
            self._channel, theirs = socket.socketpair()
            self._process = Thread(writer_process.serve, theirs)

    writer = background.Writer()
    with (
        mock.patch.object(background.Writer, "_launch", launch),
        mock.patch.object(background, "WRITER", writer),
        mock.patch("fullshard.store.save.WRITER", writer),
    ):
        try:
            yield writer
        finally:
            if writer.part is not None:
                writer.finish()
            if writer._channel is not None:
                writer._channel.close()
