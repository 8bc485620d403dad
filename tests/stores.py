"""A store in this process's memory, for watchers without process groups."""

from __future__ import annotations

import threading


class Store:
    """As `torch_private.store.StoreLine`: one of several lines to the same keys.

    Args:
        line: another one to them.
    """

    def __init__(self, line: Store | None = None) -> None:
        self.keys: dict[str, str] = {} if line is None else line.keys
        self.lock: threading.Lock = threading.Lock() if line is None else line.lock
        self.has_ended = False

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.keys[key] = str(int(self.keys.get(key, "0")) + amount)
            return int(self.keys[key])

    def put(self, key: str, value: str) -> None:
        with self.lock:
            self.keys[key] = value

    def remove(self, key: str) -> None:
        with self.lock:
            self.keys.pop(key, None)

    def has(self, key: str) -> bool:
        with self.lock:
            return key in self.keys

    def get(self, keys: list[str]) -> list[str]:
        with self.lock:
            return [self.keys[key] for key in keys]

    def replace(self, key: str, before: str, after: str) -> bool:
        with self.lock:
            if self.keys.get(key, "") != before:
                return False
            self.keys[key] = after
            return True
