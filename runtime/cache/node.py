"""A block of tokens in the prefix index: its pages, and perhaps the state after it."""

from __future__ import annotations


class Node:
    """The block that ends after ``tokens`` tokens of a prefix. Compared by identity.

    key: hash of the whole prefix. parent: the block before. pages: ids of the block's pages, immutable now.
    state: slot of the state after exactly ``tokens`` tokens, 0 for none.
    """

    __slots__ = (
        *("key", "parent", "tokens", "pages", "state"),
        *("children", "locks", "pins", "rolling", "used", "state_used", "passed", "came_back"),
    )

    def __init__(self, key: bytes, parent: Node | None, tokens: int, pages: tuple[int, ...]) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.state = 0
        self.children = 0
        self.locks = 0  # requests whose tip it is, pins, and children that have locks
        self.pins = 0  # transfers under way
        self.rolling: object | None = None  # whose passing state it is: nobody else went on from it yet
        self.used = 0
        self.state_used = 0
        self.passed = False  # its state: the text that left it has a later one
        self.came_back = False  # its state: somebody used it after that

    def __repr__(self) -> str:
        name = self.key.hex()[:8]
        return f"Node({name}, {self.tokens} tokens, pages {list(self.pages)}, state {self.state})"
