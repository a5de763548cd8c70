"""The host tier: entries in main memory, no more bytes than allowed."""

from __future__ import annotations

import threading

from .entry import Declined, Entry, Key, nbytes
from .lru import LeafLru


class HostTier:
    """Keeps up to ``capacity`` bytes of tensors. Thread-safe.

    Raises ValueError for a capacity below one byte.
    """

    name = "host"

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a host tier needs at least 1 byte, got {capacity}")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._books = LeafLru()
        self._entries: dict[Key, Entry] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes kept now."""
        return self._books.total

    def put(self, key: Key, entry: Entry, parent: bytes | None) -> None:
        """Keep an entry, which nobody may write to from now on. parent: hash of the block before.

        Raises :class:`Declined`: too_big, or no_room when all the rest is needed by the entry itself.
        """
        size = nbytes(entry)
        if size > self.capacity:
            raise Declined("too_big", f"{size:,} B for {self.capacity:,} B")
        with self._lock:
            if key in self._entries:
                self._books.touch(key)
                return
            self._books.add(key, size, key.above(parent))
            self._entries[key] = entry
            while self._books.total > self.capacity:
                goes = self._books.first_to_go()
                self._books.remove(goes)
                del self._entries[goes]
            if key not in self._entries:
                raise Declined("no_room", "only what the entry hangs below could have made room")

    def get(self, key: Key) -> Entry:
        """An entry, to be read only. Raises :class:`Declined`: not_found."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise Declined("not_found")
            self._books.touch(key)
            return entry
