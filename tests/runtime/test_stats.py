"""Histograms count every value once, and a snapshot stays what it was."""

import random
from itertools import pairwise

from k3compile.runtime.stats import Counters, Histogram


def test_a_value_on_a_bound_belongs_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert histogram.snapshot().counts == (2, 2, 1)
    assert histogram.snapshot().sum == 7.5


def test_one_value_can_stand_for_several():
    histogram = Histogram((1.0,))
    histogram.add(0.25, times=4)
    assert (histogram.snapshot().counts, histogram.snapshot().sum) == ((4, 0), 1.0)


def test_counts_equal_a_count_by_hand():
    rng = random.Random(0)
    bounds, values = (0.1, 0.2, 0.7), [rng.random() for _ in range(1000)]
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    edges = [float("-inf"), *bounds, float("inf")]
    by_hand = tuple(sum(low < v <= high for v in values) for low, high in pairwise(edges))
    assert histogram.snapshot().counts == by_hand


def test_a_snapshot_does_not_move():
    histogram = Histogram((1.0,))
    before = histogram.snapshot()
    histogram.add(0.5)
    assert before.counts == (0, 0)


def test_drafts_are_counted_by_their_position():
    counters = Counters()
    for proposed, accepted in ((2, 1), (3, 3), (1, 0), (3, 0)):
        counters.count_drafts(proposed, accepted)
    assert (counters.drafts_proposed, counters.drafts_accepted) == ([4, 3, 2], [2, 1, 1])
