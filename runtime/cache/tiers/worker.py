"""A thread that handles one item after the other, and can be waited for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Worker:
    """Calls ``handle`` with each item on a daemon thread of that ``name``.

    sorry: called with what ``handle`` raised; the thread goes on. most: how much may wait, in the units of
    :meth:`put`, before ``put`` waits as well (None: anything).
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[Any], None],
        sorry: Callable[[Exception], None],
        most: int | None = None,
    ) -> None:
        self._handle, self._sorry, self._most = handle, sorry, most
        self._changed = threading.Condition()
        self._items: deque[tuple[Any, int]] = deque()
        self._size = 0  # of the items that wait
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"k3-offload-{name}", daemon=True)
        self._thread.start()

    def put(self, item: object, size: int = 1) -> bool:
        """Leave an item to the thread; waits while there is more than ``most``. False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._most is None or self._size <= self._most)
            if self._closed:
                return False
            self._items.append((item, size))
            self._size += size
            self._changed.notify_all()
            return True

    def wait_idle(self, wait_s: float) -> bool:
        """Wait until nothing is left to do; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._busy, max(wait_s, 0.0))

    def close(self, wait_s: float) -> list:
        """End the thread after the item it has in hand, which may take ``wait_s`` -> the items it never
        touched.
        """
        with self._changed:
            left = [item for item, _ in self._items]
            self._items.clear()
            self._closed = True
            self._changed.notify_all()
        if wait_s > 0:
            self._thread.join(wait_s)
        return left

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                if not self._items:
                    return
                item, size = self._items.popleft()
                self._size -= size
                self._busy = True
                self._changed.notify_all()
            try:
                self._handle(item)
            except Exception as error:  # the service goes on without this item
                log.exception("%s failed", self._thread.name)
                self._sorry(error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
