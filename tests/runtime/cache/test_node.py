"""A node is itself and says in messages what it is."""

from k3compile.runtime.cache.node import Node


def test_nodes_are_compared_by_identity():
    a, b = Node(b"k" * 32, None, 64, (1,)), Node(b"k" * 32, None, 64, (1,))
    assert a != b
    assert len({a, b}) == 2


def test_a_node_shows_its_prefix_pages_and_state():
    node = Node(b"\x01" * 32, None, 128, (3, 4))
    node.state = 9
    assert repr(node) == "Node(01010101, 128 tokens, pages [3, 4], state 9)"
