"""Orders keep their order; neighbours are joined only where that means the same."""

from k3compile.runtime.cache.orders import Clear, Copy, Orders, Poison


def test_neighbours_of_one_kind_become_one_order():
    orders = Orders(poison=True)
    orders.clear(1)
    orders.clear(2)
    orders.copy(7, 3)
    orders.copy(7, 4)
    orders.poison(slots=[5])
    orders.poison(pages=[6, 8])
    assert orders.take() == [Clear([1, 2]), Copy([7, 7], [3, 4]), Poison([5], [6, 8])]
    assert orders.take() == []


def test_kinds_are_not_sorted():
    orders = Orders(poison=True)
    orders.copy(7, 3)
    orders.poison(slots=[7])
    orders.clear(1)
    orders.copy(3, 7)
    assert [type(o) for o in orders.take()] == [Copy, Poison, Clear, Copy]


def test_a_copy_that_needs_another_or_disturbs_it_comes_after_it():
    for second in [(3, 5), (8, 3), (9, 7)]:  # reads its target, writes it again, overwrites its source
        orders = Orders()
        orders.copy(7, 3)
        orders.copy(*second)
        assert orders.take() == [Copy([7], [3]), Copy([second[0]], [second[1]])]


def test_poison_is_ordered_under_test_alone():
    orders = Orders()
    orders.poison(slots=[1], pages=[2])
    assert orders.take() == []
    debugging = Orders(poison=True)
    debugging.poison()
    assert debugging.take() == []
