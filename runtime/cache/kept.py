"""Which kept state goes first: one that its own text went past, unless somebody came back to it.

    a conversation    P1 ---- E1 ---- P2 ---- E2      its next turn starts at E2
                      passed  passed  passed  fresh

    fresh     the last states of texts, and those that somebody came back to: oldest first
    passed    the others, oldest first; before the fresh ones while they hold more than a quarter of the slots

A turn leaves two or three states, of which the next turn needs one. With plain LRU the others push out the
ends of other conversations: of ten that take turns on 25 slots, none would find anything. The quarter
keeps what the last prompts left, for those that are sent again.
"""

from __future__ import annotations

from .lru import Lru
from .node import Node

PASSED_SHARE = 4  # one slot in so many


class KeptOrder:
    """The nodes whose states may go, of ``slots`` slots in all."""

    def __init__(self, slots: int) -> None:
        self._most_passed = slots // PASSED_SHARE
        self._fresh: Lru[Node] = Lru()
        self._passed: Lru[Node] = Lru()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._passed)

    def __contains__(self, node: Node) -> bool:
        return node in (self._passed if node.passed else self._fresh)

    def add(self, node: Node) -> None:
        """Put a node in, or move it to its place."""
        (self._passed if node.passed else self._fresh).add(node, node.state_used)

    def discard(self, node: Node) -> None:
        """Take a node out, if it is in."""
        (self._passed if node.passed else self._fresh).discard(node)

    def come_back(self, node: Node) -> None:
        """Somebody uses the state: one that was passed by is worth its slot, and stays so."""
        if node.passed:
            self._passed.discard(node)
            node.passed, node.came_back = False, True

    def go_past(self, node: Node) -> None:
        """A text that runs through the node has a later state now. Where texts part, others will come."""
        if node.passed or node.came_back or node.children > 1:
            return
        inside = node in self._fresh
        self._fresh.discard(node)
        node.passed = True
        if inside:
            self.add(node)

    def pop(self) -> Node | None:
        """Take out the node whose state goes next; None when none may."""
        passed, fresh = self._passed.oldest(), self._fresh.oldest()
        if passed is None:
            return self._fresh.pop()
        if fresh is None or len(self._passed) > self._most_passed or passed < fresh:
            return self._passed.pop()
        return self._fresh.pop()
