"""The prefix index: a tree of published blocks, who keeps which from eviction, and what goes first.

    root -- 64 -- 128 -- 192 [state] -- 256      locks: a request's tip, a pin, a child with locks
                    \\-- 192' -- 256' [state]     free to go: no locks; first to go: oldest leaf

A node's ancestors are in the tree as long as the node is: only leaves leave. Pages and states are evicted
apart, but a node that goes takes its state along, for the state would serve no prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .free_list import FreeList
from .hashes import Chain
from .kept import KeptOrder
from .lru import Lru
from .node import Node
from .orders import Orders


class PrefixIndex:
    """Nodes over the numbers of ``pages`` and ``states``; what is evicted goes back to those lists."""

    def __init__(self, pages: FreeList, states: FreeList, orders: Orders) -> None:
        self.idle_pages = 0  # of nodes without locks: they can all be had, leaf by leaf
        self.pinned = 0  # transfers under way: what they keep comes back without anybody's doing
        self.record = False  # what is published, for :meth:`take_told`
        self.evicted_pages = 0
        self.evicted_states = 0
        self._nodes: dict[bytes, Node] = {}
        self._pages, self._states, self._orders = pages, states, orders
        self._leaves: Lru[Node] = Lru()  # without locks and children
        self._kept = KeptOrder(states.size - states.first)  # with a state that may go
        self._told: list[Node] = []
        self._clock = 0

    def __len__(self) -> int:
        """How many blocks are published."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The node of a prefix."""
        return self._nodes.get(key)

    def deepest(self, chain: Chain, limit: int) -> Node | None:
        """The node of the longest prefix of at most ``limit`` blocks."""
        nodes, depth = self._nodes, min(chain.depth, limit)
        if depth and chain.key(depth) not in nodes:  # some left since; where one is, all before it are
            there, gone = 0, depth
            while gone - there > 1:
                middle = (there + gone) // 2
                there, gone = (middle, gone) if chain.key(middle) in nodes else (there, middle)
            depth = there
        while depth < limit and chain.key(depth + 1) in nodes:
            depth += 1
        chain.depth = depth
        return nodes[chain.key(depth)] if depth else None

    def publish(self, owner: object, key: bytes, parent: Node | None, tokens: int, pages: list[int]) -> Node:
        """Make ``owner``'s pages a block that others may read. The node has no locks yet."""
        assert key not in self._nodes, f"{self._nodes[key]} is published twice"
        assert parent is None or self._nodes.get(parent.key) is parent, f"{parent} has left the index"
        node = self._nodes[key] = Node(key, parent, tokens, tuple(pages))
        self._pages.move(owner, node, pages)
        if parent is not None:
            parent.children += 1
            self._leaves.discard(parent)
        self.idle_pages += len(node.pages)
        node.used = self._tick()
        self._leaves.add(node, node.used)
        self.tell(node)
        return node

    def tell(self, node: Node) -> None:
        """Note that a node got something that others may want to copy."""
        if self.record:
            self._told.append(node)

    def take_told(self) -> list[Node]:
        """The nodes that were told of since the last call and are still here."""
        nodes, self._told = dict.fromkeys(self._told), []
        return [node for node in nodes if self._nodes.get(node.key) is node]

    def lock(self, node: Node | None) -> None:
        """Keep a node and all its ancestors from eviction; None is the empty prefix."""
        while node is not None:
            node.locks += 1
            if node.locks > 1:
                return
            self.idle_pages -= len(node.pages)
            self._leaves.discard(node)
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Take one :meth:`lock` back; the node counts as used now."""
        now = self._tick()
        while node is not None:
            assert node.locks > 0, f"{node} is unlocked more often than locked"
            node.locks -= 1
            node.used = now
            if node.locks:
                return
            self.idle_pages += len(node.pages)
            if not node.children:
                self._leaves.add(node, now)
            node = node.parent

    def idle_pages_of(self, node: Node | None) -> int:
        """Pages that :meth:`lock` of a node would take from :attr:`idle_pages`."""
        count = 0
        while node is not None and not node.locks:
            count += len(node.pages)
            node = node.parent
        return count

    def pin(self, node: Node) -> None:
        """Keep a node, its ancestors and its state while they are copied elsewhere."""
        self.lock(node)
        node.pins += 1
        self.pinned += 1
        self._kept.discard(node)

    def unpin(self, node: Node) -> None:
        """Take one :meth:`pin` back."""
        assert node.pins > 0, f"{node} is unpinned more often than pinned"
        node.pins -= 1
        self.pinned -= 1
        if node.state and not node.pins:
            self._kept.add(node)
        self.unlock(node)

    def keep_state(self, owner: object, node: Node, slot: int) -> None:
        """Make ``owner``'s checkpoint the state of a node that has none."""
        assert not node.state, f"{node} has a state already"
        self._states.move(owner, node, [slot])
        node.state = slot
        self.touch_state(node)
        above = node.parent
        while above is not None and not above.state:
            above = above.parent
        if above is not None:
            self._kept.go_past(above)

    def lose_state(self, node: Node) -> int:
        """Take a node's state from it; the slot is free."""
        assert node.state, f"{node} has no state"
        assert not node.pins, f"the state of {node} is being copied"
        self._kept.discard(node)
        slot, node.state, node.rolling = node.state, 0, None
        node.passed = node.came_back = False
        self._states.give(node, [slot])
        return slot

    def touch_state(self, node: Node) -> None:
        """The state was used now."""
        node.state_used = self._tick()
        self._kept.come_back(node)
        if not node.pins:
            self._kept.add(node)

    def evict_state(self) -> bool:
        """Free the slot of a state (:class:`KeptOrder` says which); False when none may go."""
        node = self._kept.pop()
        if node is None:
            return False
        self.lose_state(node)
        self.evicted_states += 1
        return True

    def evict_pages(self, count: int) -> None:
        """Free at least ``count`` pages, oldest leaf first; the caller knows that so many are idle."""
        assert count <= self.idle_pages, f"{count} pages asked, {self.idle_pages} idle"
        target = len(self._pages) + count
        while len(self._pages) < target:
            node = self._leaves.pop()
            assert node is not None, "idle pages without a leaf"
            self._evict(node)

    def _evict(self, node: Node) -> None:
        assert not node.locks, f"{node} is in use"
        assert not node.children, f"{node} has children"
        if node.state:
            self._orders.poison(slots=[self.lose_state(node)])
            self.evicted_states += 1
        del self._nodes[node.key]
        self.idle_pages -= len(node.pages)
        self.evicted_pages += len(node.pages)
        self._pages.give(node, reversed(node.pages))
        self._orders.poison(pages=node.pages)
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children and not parent.locks:
                self._leaves.add(parent, max(parent.used, node.used))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def check(self, tips: Iterable[Node | None]) -> None:
        """Walk every node and hold it against the requests' ``tips``; AssertionError names what is wrong."""
        locks, children = dict.fromkeys(self._nodes.values(), 0), dict.fromkeys(self._nodes.values(), 0)
        for node in locks:
            before = node.parent.tokens if node.parent else 0
            assert node.tokens > before, f"{node} is not longer than the {before} tokens before it"
        for tip in tips:
            assert tip is None or tip in locks, f"{tip} is in use and has left the index"
            if tip is not None:
                locks[tip] += 1
        for node in sorted(self._nodes.values(), key=lambda n: -n.tokens):
            locks[node] += node.pins
            assert node.locks == locks[node], f"{node} has {node.locks} locks instead of {locks[node]}"
            assert node.children == children[node], f"{node} counts {node.children} children"
            if node.parent is not None:
                assert node.parent in locks, f"the parent of {node} has left the index"
                children[node.parent] += 1
                locks[node.parent] += node.locks > 0
            leaf = not node.locks and not node.children
            assert (node in self._leaves) == leaf, f"{node} may {'' if leaf else 'not '}be evicted"
            loose = bool(node.state) and not node.pins
            assert (node in self._kept) == loose, f"the state of {node} may {'' if loose else 'not '}go"
        idle = sum(len(n.pages) for n in self._nodes.values() if not n.locks)
        pins = sum(n.pins for n in self._nodes.values())
        assert self.pinned == pins, f"{self.pinned} transfers are said to be under way, {pins} are"
        assert self.idle_pages == idle, f"{self.idle_pages} pages are said to be idle, {idle} are"
        leaves = sum(not n.locks and not n.children for n in self._nodes.values())
        assert len(self._leaves) == leaves, f"{len(self._leaves)} nodes may be evicted instead of {leaves}"
        assert len(self._kept) <= len(self._nodes), "a state may go that serves no prefix"
