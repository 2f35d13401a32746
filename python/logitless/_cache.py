"""Bounded caches, all with one rule."""

from __future__ import annotations

import threading
from typing import Any, Callable


class Cache:
    """Values by key, at most ``most``. One that is used at least once among ``most // 2`` others stays.

    A hit costs one look-up, since uses are not put in order: new values fill one half. When it is full, it becomes the
    older half, whose values are dropped unless they were used and so copied."""

    def __init__(self, most: int):
        self.half, self.new, self.older, self._lock = max(1, most // 2), {}, {}, threading.RLock()

    def find(self, key: Any) -> Any:
        """Returns the value for a key, or None."""
        found = self.new.get(key)
        if found is None:
            found = self.older.get(key)
            if found is not None:
                self.remember(key, found)
        return found

    def __getitem__(self, key: Any) -> Any:
        found = self.new.get(key)
        return self.older[key] if found is None else found

    def __len__(self) -> int:
        return len(self.entries())

    def remember(self, key: Any, value: Any) -> None:
        with self._lock:
            if key not in self.new and len(self.new) >= self.half:
                self.new, self.older = {}, self.new
            self.new[key] = value

    def remembered(self, key: Any, build: Callable[[], Any]) -> Any:
        """Returns the value for a key, or else the result of ``build``, which it caches."""
        found = self.find(key)
        if found is None:
            found = build()
            self.remember(key, found)
        return found

    def forget(self, *keys: Any) -> None:
        """Drops the values of these keys."""
        with self._lock:
            for values in (self.new, self.older):
                for key in keys:
                    values.pop(key, None)

    def entries(self) -> dict[Any, Any]:
        return {**self.older, **self.new}


class ThreadCache(threading.local, Cache):
    """A cache of each thread's own."""
