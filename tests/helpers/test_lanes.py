"""Thinning loses no parameter: what leaves the fast lane is slow."""

import pytest
from lanes import thinned


def split(params):
    """(values of both lanes, values of the slow lane)."""
    late = [p for p in params if hasattr(p, "marks")]
    assert all([m.name for m in p.marks] == ["slow"] for p in late)
    return [p for p in params if not hasattr(p, "marks")], [p.values for p in late]


@pytest.mark.parametrize(("count", "fast"), [(1, 1), (2, 1), (5, 2), (22, 6), (30, 8), (3, 3)])
def test_the_fast_ones_are_spread_and_the_others_are_slow(count, fast):
    kept, late = split(thinned(range(count), fast))
    assert len(kept) == fast
    assert kept[0] == 0
    assert fast == 1 or kept[-1] == count - 1
    assert sorted([*kept, *(value for (value,) in late)]) == list(range(count))


def test_values_of_several_arguments_stay_apart():
    kept, late = split(thinned([(1, "a"), (2, "b")], 1, several=True))
    assert (kept, late) == ([(1, "a")], [(2, "b")])
