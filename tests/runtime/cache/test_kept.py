"""States that their own text went past go first, as long as they hold more than their share."""

import pytest
from k3compile.runtime.cache.kept import KeptOrder
from k3compile.runtime.cache.node import Node


def node(stamp: int, children: int = 1) -> Node:
    made = Node(bytes([stamp]), None, 64 * stamp, (stamp,))
    made.state_used, made.children = stamp, children
    return made


@pytest.fixture
def five():
    """An order of eight slots, two of them for what was passed, and five nodes in it."""
    order, nodes = KeptOrder(8), [node(stamp) for stamp in range(1, 6)]
    for each in nodes:
        order.add(each)
    return order, nodes


def drained(order):
    out = []
    while (gone := order.pop()) is not None:
        out.append(gone.state_used)
    return out


def test_without_any_passed_the_oldest_goes_first(five):
    order, _ = five
    assert (len(order), drained(order), len(order)) == (5, [1, 2, 3, 4, 5], 0)


def test_the_passed_go_before_older_ones_down_to_their_share(five):
    order, nodes = five
    for each in nodes[1:]:
        order.go_past(each)
    assert all(each in order for each in nodes)
    assert drained(order) == [2, 3, 1, 4, 5]


def test_who_is_come_back_to_is_never_passed_again(five):
    order, nodes = five
    order.go_past(nodes[4])
    order.come_back(nodes[4])
    order.add(nodes[4])
    for each in nodes:
        order.go_past(each)
    assert [each.passed for each in nodes] == [True, True, True, True, False]
    assert drained(order) == [1, 2, 3, 4, 5]


def test_the_state_where_texts_part_is_not_passed():
    order, fork = KeptOrder(1), node(1, children=2)
    order.add(fork)
    order.go_past(fork)
    assert not fork.passed


def test_one_that_may_not_go_is_remembered_as_passed():
    order, away, other = KeptOrder(1), node(2), node(1)
    order.go_past(away)  # it is being copied
    assert away not in order
    order.add(other)
    order.add(away)
    assert drained(order) == [2, 1]


def test_what_is_taken_out_is_out(five):
    order, nodes = five
    order.go_past(nodes[0])
    order.discard(nodes[0])
    order.discard(nodes[2])
    assert drained(order) == [2, 4, 5]
