"""What a negative index means: which numbers are read, and which tests tell a hole."""

import pytest
import torch
from k3compile.passes.finalize_axes import whole
from k3compile.passes.finalize_holes import index_base, sign_test
from k3compile.passes.finalize_terms import Leaf, Unclear
from traced import traced

IDX = torch.tensor([[0, -1], [2, 1]])


def base_of(fn):
    """The hole of an index that ``fn`` makes, the places, the test it returns beside it, the prover."""
    graph, prover = traced(fn, IDX, symbolic=False)
    index, test = graph.output_node().args[0]
    at = whole(index, prover, "tj")
    return index_base(Leaf(index, (), index, at), prover), at, test, prover


CLAMPS = {
    "clamp": lambda i: i.clamp(min=0),
    "clamp_min": lambda i: i.clamp_min(0),
    "relu": lambda i: i.relu(),
    "where": lambda i: torch.where(i >= 0, i, 0),
    "where the other way": lambda i: torch.where(i < 0, 0, i),
    "and a cast": lambda i: i.int().clamp(min=0).long(),
}


@pytest.mark.parametrize("clamp", CLAMPS.values(), ids=CLAMPS.keys())
def test_clamps_are_seen_through(clamp):
    hole, *_ = base_of(lambda i: (clamp(i), i >= 0))
    assert hole.raw.op == "placeholder"
    assert hole.never_negative


@pytest.mark.parametrize("other", [lambda i: i.clamp(min=1), lambda i: i.clamp(0, 1), lambda i: i.abs()])
def test_other_bounds_are_not(other):
    hole, *_ = base_of(lambda i: (other(i), i >= 0))
    assert hole.raw.op == "call_function"
    assert not hole.never_negative


TESTS = {
    ">= 0": (lambda i: i >= 0, True),
    "> -1": (lambda i: i > -1, True),
    "< 0": (lambda i: i < 0, False),
    "<= -1": (lambda i: i <= -1, False),
    "not < 0": (lambda i: ~(i < 0), True),
    "> 0": (lambda i: i > 0, None),
    "of another": (lambda i: (i + 1) >= 0, None),
    "transposed": (lambda i: (i >= 0).t(), None),
}


@pytest.mark.parametrize(("test", "wanted"), TESTS.values(), ids=TESTS.keys())
def test_a_test_of_the_sign_is_told_from_others(test, wanted):
    hole, at, node, prover = base_of(lambda i: (i.clamp(min=0), test(i)))
    assert sign_test(node, at, hole, prover) is wanted


def test_minus_one_alone_is_a_hole_only_where_there_is_no_other_negative_number():
    hole, at, node, prover = base_of(lambda i: (i.clamp(min=0), i != -1))
    with pytest.raises(Unclear, match="-1 alone"):
        sign_test(node, at, hole, prover)
