"""A c10d key-value store for folded ranks: waiting for a key lets the other ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from .baton import Baton


class _Keys:
    """Waits until all of these keys are set."""

    def __init__(self, keys: Sequence[str], rank: int) -> None:
        self.keys = tuple(keys)
        self.rank = rank
        self.done = False

    def __str__(self) -> str:
        return f"the store's keys {', '.join(self.keys)}"


class FoldedStore(Store):
    """Shared by all ranks of a world."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Keys] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for keys in [k for k in self._waiting if self.check(k.keys)]:
            self._waiting.remove(keys)
            keys.done = True
            self._baton.wake(keys.rank, keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def append(self, key: str, value: str | bytes) -> None:
        more = value.encode() if isinstance(value, str) else bytes(value)
        self.set(key, self._values.get(key, b"") + more)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self.check(keys):
            return
        waiting = _Keys(keys, self._baton.holder())
        self._waiting.append(waiting)
        self._baton.wait_for(waiting)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        present = self._values.get(key)
        if (present is None and expected == "") or present == expected.encode():
            self.set(key, desired)
        return self._values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        """Time-outs mean nothing here: a wait that cannot end is a deadlock, known at once."""
