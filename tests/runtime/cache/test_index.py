"""Who keeps which block, what goes first, and that the walk sees each way it can be wrong."""

from array import array

import pytest
from k3compile.runtime.cache.free_list import FreeList
from k3compile.runtime.cache.hashes import Chain
from k3compile.runtime.cache.index import PrefixIndex
from k3compile.runtime.cache.orders import Orders, Poison

ME = object()


class Tree:
    """An index with helpers: blocks of one page named by their tokens."""

    def __init__(self, pages: int = 20, states: int = 6) -> None:
        self.pages, self.states = FreeList(pages, "page"), FreeList(10 + states, "checkpoint slot", first=10)
        self.orders = Orders(poison=True)
        self.index = PrefixIndex(self.pages, self.states, self.orders)

    def grow(self, tokens: str, state: bool = False):
        """The node after ``tokens``, one letter a block; what is missing of it is published."""
        chain, node = self.chain(tokens), None
        for n in range(1, len(tokens) + 1):
            known = self.index.get(chain.key(n))
            node = known or self.index.publish(ME, chain.key(n), node, n, self.pages.take(ME, 1))
        if state:
            self.index.keep_state(ME, node, self.states.take(ME, 1)[0])
        return node

    def chain(self, tokens: str) -> Chain:
        return Chain(array("q", map(ord, tokens)), "", 1)

    def has(self, tokens: str) -> bool:
        return self.index.get(self.chain(tokens).key(len(tokens))) is not None


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_the_longest_known_prefix_is_found_and_found_again_after_an_eviction(tree):
    tree.grow("abcdefgh")
    chain = tree.chain("abcdefxy")
    assert tree.index.deepest(chain, 8).tokens == 6
    assert tree.index.deepest(chain, 3).tokens == 3
    assert tree.index.deepest(chain, 8).tokens == 6
    tree.index.evict_pages(5)
    assert tree.index.deepest(chain, 8).tokens == 3
    tree.index.evict_pages(3)
    assert tree.index.deepest(chain, 8) is None
    tree.grow("ab")
    assert tree.index.deepest(chain, 8).tokens == 2
    assert tree.index.deepest(tree.chain("x"), 1) is None


def test_leaves_go_first_and_the_oldest_branch_before_all(tree):
    tree.grow("abc")
    tree.grow("abxy")
    tree.index.evict_pages(1)
    assert not tree.has("abc")
    tree.index.evict_pages(2)
    assert not tree.has("abx")
    assert tree.has("ab")
    assert next(o for o in tree.orders.take() if isinstance(o, Poison)).pages
    tree.index.check([])


def test_a_lock_keeps_a_node_and_its_ancestors_and_no_other(tree):
    tip, other = tree.grow("abc"), tree.grow("abx")
    tree.index.lock(tip)
    assert tree.index.idle_pages == 1
    assert tree.index.idle_pages_of(other) == 1
    assert tree.index.idle_pages_of(tip) == 0
    tree.index.evict_pages(1)
    assert [tree.has(t) for t in ("abc", "abx")] == [True, False]
    with pytest.raises(AssertionError, match="1 pages asked, 0 idle"):
        tree.index.evict_pages(1)
    tree.index.check([tip])
    tree.index.unlock(tip)
    assert tree.index.idle_pages == 3
    tree.index.check([])


def test_two_locks_on_one_branch_are_counted_once_for_their_ancestors(tree):
    short, long = tree.grow("ab"), tree.grow("abcd")
    for node in (short, long, long):
        tree.index.lock(node)
    tree.index.check([short, long, long])
    tree.index.unlock(long)
    tree.index.unlock(long)
    assert tree.index.idle_pages == 2
    tree.index.unlock(short)
    assert tree.index.idle_pages == 4
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        tree.index.unlock(short)


def test_what_was_used_last_goes_last(tree):
    first = tree.grow("a")
    tree.grow("b")
    tree.index.lock(first)
    tree.index.unlock(first)
    tree.index.evict_pages(1)
    assert [tree.has("a"), tree.has("b")] == [True, False]


def test_a_node_that_becomes_a_leaf_is_as_old_as_its_own_last_use(tree):
    node = tree.grow("ab")
    tree.grow("abx")
    tree.grow("d")
    tree.index.lock(node)
    tree.index.unlock(node)
    tree.index.evict_pages(1)
    assert [tree.has("abx"), tree.has("d"), tree.has("ab")] == [False, True, True]
    tree.index.evict_pages(1)
    assert [tree.has("d"), tree.has("ab")] == [False, True]


def test_states_leave_without_their_pages_the_oldest_first(tree):
    a, b, c = (tree.grow(t, state=True) for t in ("a", "ab", "c"))
    tree.index.touch_state(a)
    assert tree.index.evict_state()
    assert (bool(a.state), bool(b.state), bool(c.state)) == (True, False, True)
    assert tree.index.evict_state()
    assert (bool(a.state), bool(c.state)) == (True, False)
    assert tree.index.evict_state()
    assert not tree.index.evict_state()
    assert all(tree.has(t) for t in ("ab", "c"))
    assert (tree.index.evicted_states, tree.index.evicted_pages) == (3, 0)
    tree.index.check([])


def test_pages_that_leave_take_their_state_along(tree):
    node = tree.grow("a", state=True)
    slot = node.state
    tree.index.evict_pages(1)
    assert tree.states.used == 0
    assert tree.states.owner(slot) is None
    assert slot in tree.orders.take()[0].slots
    tree.index.check([])


def test_a_pin_keeps_the_state_too_and_gives_it_back_as_old_as_it_was(tree):
    old, new = tree.grow("a", state=True), tree.grow("b", state=True)
    tree.index.pin(old)
    tree.index.check([])
    assert tree.index.evict_state()
    assert (bool(old.state), bool(new.state)) == (True, False)
    assert not tree.index.evict_state()
    with pytest.raises(AssertionError, match="is being copied"):
        tree.index.lose_state(old)
    younger = tree.grow("c", state=True)
    tree.index.unpin(old)
    tree.index.check([])
    assert tree.index.evict_state()
    assert (bool(old.state), bool(younger.state)) == (False, True)
    with pytest.raises(AssertionError, match="unpinned more often"):
        tree.index.unpin(old)


def test_a_state_kept_while_its_node_is_pinned_may_go_after_the_last_pin(tree):
    node = tree.grow("a")
    tree.index.pin(node)
    tree.index.pin(node)
    tree.index.keep_state(ME, node, tree.states.take(ME, 1)[0])
    for _ in range(2):
        assert not tree.index.evict_state()
        tree.index.check([])
        tree.index.unpin(node)
    assert tree.index.evict_state()


def test_publishing_twice_or_under_a_node_that_left_is_our_mistake(tree):
    node = tree.grow("a")
    with pytest.raises(AssertionError, match="published twice"):
        tree.index.publish(ME, node.key, None, 1, tree.pages.take(ME, 1))
    tree.index.evict_pages(1)
    with pytest.raises(AssertionError, match="has left the index"):
        tree.index.publish(ME, b"x", node, 2, tree.pages.take(ME, 1))
    with pytest.raises(AssertionError, match="has a state already"):
        tree.index.keep_state(ME, tree.grow("b", state=True), tree.states.take(ME, 1)[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, n: setattr(n, "locks", n.locks + 1), "locks instead of"),
        (lambda t, n: setattr(n.parent, "children", 2), "counts 2 children"),
        (lambda t, n: t.index._nodes.pop(n.parent.key), "has left the index"),
        (lambda t, n: t.index._leaves.add(n, 0), "may not be evicted"),
        (lambda t, n: t.index._kept.discard(n), "the state of .* may go"),
        (lambda t, n: setattr(t.index, "idle_pages", 2), "2 pages are said to be idle, 1 are"),
        (lambda t, n: t.index._leaves.add(object(), 0), "2 nodes may be evicted instead of 1"),
        (lambda t, n: setattr(n, "tokens", 0), "is not longer than the 2 tokens before it"),
    ],
)
def test_check_sees_each_way_the_tree_can_be_wrong(tree, spoil, message):
    tip = tree.grow("abc", state=True)
    tree.grow("x")
    tree.index.lock(tip)
    tree.index.check([tip])
    spoil(tree, tip)
    with pytest.raises(AssertionError, match=message):
        tree.index.check([tip])


def test_a_tip_that_left_is_noticed(tree):
    tip = tree.grow("a")
    tree.index.evict_pages(1)
    with pytest.raises(AssertionError, match="in use and has left the index"):
        tree.index.check([tip])
