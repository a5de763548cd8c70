"""Linear arithmetic never claims what integers refute, and finds what the model's checks imply."""

import itertools
import random

import pytest
import sympy
from k3compile.passes.linear import HUB, Facts, constraints, linear
from torch.utils._sympy.functions import Max, Min

A, B, C = sympy.symbols("a b c", integer=True)
BOX = range(-3, 4)


def facts(*relations):
    return [row for relation in relations for row in constraints(relation)]


def implied(relations, at_most_zero):
    return Facts(facts(*relations)).imply(linear(at_most_zero))


def test_a_part_is_at_most_the_whole():
    known = [A >= 0, B >= 0, C >= 0, sympy.Eq(A + B + C, sympy.Symbol("t", integer=True))]
    t = sympy.Symbol("t", integer=True)
    assert implied(known, A - t)
    assert implied(known, A + B - t)
    assert not implied(known, t - A)
    assert not implied(known[:2], A - t)


def test_strict_relations_of_integers_leave_a_gap_of_one():
    assert implied([A < B], A + 1 - B)
    assert not implied([A < B], A + 2 - B)
    assert not implied([A <= B], A + 1 - B)


def test_a_strict_relation_of_reals_leaves_no_gap():
    x, y = sympy.symbols("x y", real=True)
    assert list(constraints(x < y)) == [linear(x - y)]


def test_conjunctions_are_taken_apart_and_other_facts_ignored():
    assert implied([sympy.And(A >= 2, B >= 3)], 5 - A - B)
    assert facts(sympy.Ne(A, B), sympy.Or(A > 0, B > 0), sympy.true) == []


def test_minima_and_maxima_are_bounded_by_their_arguments():
    assert implied([], Min(A, B) - A)
    assert implied([], B - Max(A, B))
    assert not implied([], A - Min(A, B))
    assert implied([A <= C], Min(A, B) - C)


def test_products_are_opaque_but_consistent():
    assert implied([A * B <= C], A * B - C)
    assert not implied([A <= C], A * B - C)


def test_a_contradiction_implies_everything():
    assert implied([A >= 1, A <= 0], A - 100)


def test_many_layers_that_share_one_size_do_not_get_in_each_others_way():
    t = sympy.Symbol("t", integer=True)
    layers = [sympy.symbols(f"a{i} b{i} c{i}", integer=True) for i in range(3 * HUB)]
    known = [sympy.Eq(sum(parts), t) for parts in layers] + [p >= 0 for parts in layers for p in parts]
    a, b, _ = layers[HUB]
    assert implied(known, a + b - t)
    assert not implied(known, t - a - b)


@pytest.mark.parametrize("seed", range(40))
def test_what_follows_has_no_counterexample_in_a_box(seed):
    rng = random.Random(seed)

    def some_sum():
        return sum(rng.randint(-2, 2) * s for s in (A, B, C)) + rng.randint(-2, 2)

    known = [some_sum() <= 0 for _ in range(rng.randint(1, 4))]
    known = [k for k in known if k not in (sympy.true, sympy.false)]
    goal = some_sum()
    if not implied(known, goal):
        return
    for point in itertools.product(BOX, repeat=3):
        at = dict(zip((A, B, C), point))
        if all(k.subs(at) for k in known):
            assert goal.subs(at) <= 0, (known, goal, at)
