"""Patterns match what they say: constants compared, parameters bound once, partial matches told."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.match import Match, NearMiss, Pattern, match_at

aten = torch.ops.aten


def graph_of(fn, *args):
    compiled = Compiled(fn, ())
    compiled(*args)
    return compiled.graphs[0].graph


def found(pattern, fn, *args):
    traced = Pattern.trace(pattern)
    graph = graph_of(fn, *args)
    (node,) = graph.find_nodes(op="call_function", target=traced.calls[-1].target)
    return match_at(traced, node)


X = torch.rand(3, 4)


def row_sums(x, y):
    return aten.sum.dim_IntList(aten.add.Tensor(x, y), [1])


def test_parameters_bind_to_nodes_and_constants():
    match = found(row_sums, lambda x, y: (x + y).sum(1), X, X + 1)
    bound = {p.name: match.bound[p] for p in match.pattern.inputs}
    assert [n.name for n in bound.values()] == ["arg0_1", "arg1_1"]
    match = found(row_sums, lambda x: (x + 7).sum(1), X)
    assert match.bound[match.pattern.inputs[1]] == 7
    assert [n.target for n in match.outputs] == [aten.sum.dim_IntList]


@pytest.mark.parametrize(
    ("fn", "matched", "reason"),
    [
        (lambda x: (x + 7).sum(0), 2, "expected 1, found 0"),
        (lambda x: (x + 7).sum(1, keepdim=True), 2, "expected False, found True"),
        (lambda x: (x * 7).sum(1), 1, "expected aten.add, found aten.mul"),
        (lambda x: torch.add(x, 7, alpha=2).sum(1), 2, "expected 1, found 2"),
        (lambda x: x.sum(1), 1, "expected aten.add, found placeholder"),
    ],
)
def test_constants_are_not_wildcards(fn, matched, reason):
    miss = found(row_sums, fn, X)
    assert isinstance(miss, NearMiss)
    assert (miss.matched, miss.reason) == (matched, reason)


def test_a_parameter_is_one_thing_wherever_it_recurs():
    def twice(x):
        return aten.mul.Tensor(aten.neg.default(x), x)

    assert isinstance(found(twice, lambda x: (-x) * x, X), Match)
    assert isinstance(found(twice, lambda x, y: (-x) * y, X, X + 1), NearMiss)


def test_lists_bind_whole_and_compare_element_by_element():
    def any_view(x, size):
        return aten.view.default(x, size)

    match = found(any_view, lambda x: x.view(4, 3), X)
    assert list(match.bound[match.pattern.inputs[1]]) == [4, 3]

    def flat(x):
        return aten.view.default(x, [12])

    assert isinstance(found(flat, lambda x: x.view(12), X), Match)
    assert isinstance(found(flat, lambda x: x.view(12, 1), X), NearMiss)


def test_booleans_are_not_numbers():
    def kept(x):
        return aten.sum.dim_IntList(x, [1], 1)

    assert isinstance(found(kept, lambda x: x.sum(1, keepdim=True), X), NearMiss)


def test_an_intermediate_with_another_user_is_told():
    def f(x):
        y = x + 7
        return y.sum(1), y * 2

    node, user = found(row_sums, f, X).outside_user()
    assert (node.target, user.target) == (aten.add.Tensor, aten.mul.Tensor)
    assert found(row_sums, lambda x: (x + 7).sum(1), X).outside_user() is None


def test_a_call_that_does_not_lead_to_the_last_one_is_refused():
    def two(x):
        return aten.neg.default(x), aten.abs.default(x)

    with pytest.raises(ValueError, match="two: every call must lead to the last one"):
        Pattern.trace(two)
