"""A rewrite fires, refuses with its reason, keeps the result, and tells the closest match otherwise."""

import pytest
import torch
from compiled import check
from k3compile.passes.rewrite import Group, Rewrite
from k3compile.passes.runner import Fuel

aten = torch.ops.aten
X = torch.rand(3, 4)


def pattern(x, y):
    return aten.neg.default(aten.sub.Tensor(x, y))


def replacement(x, y):
    return aten.sub.Tensor(y, x)


def tensors_only(site):
    return None if isinstance(site.argument("y"), torch.fx.Node) else "y is a number"


SWAP = Rewrite("swap", pattern, replacement, tensors_only)


def run(fn, *args, passes=(SWAP,), **options):
    compiled = check(fn, args, passes=passes, **options)
    return compiled, compiled.remarks(name=passes[0].name)


def test_it_fires_and_the_result_is_equal():
    compiled, (remark,) = run(lambda x, y: (-(x - y)) * 2, X, X + 1)
    assert (remark.kind, remark.op, remark.reason) == ("applied", "aten.neg", "swap")
    assert compiled.targets() == ["aten.sub.Tensor", "aten.mul.Tensor"]
    assert remark.source.startswith(__file__)


def test_it_fires_at_every_place():
    compiled, remarks = run(lambda x, y: -(-(x - y) - y), X, X + 1)
    assert [r.kind for r in remarks] == ["applied", "applied"]
    assert compiled.targets() == ["aten.sub.Tensor"] * 2


def test_an_objection_is_the_reason():
    _, (remark,) = run(lambda x: -(x - 3), X)
    assert (remark.kind, remark.reason) == ("missed", "y is a number")


def test_an_intermediate_somebody_else_reads_is_kept():
    def f(x, y):
        d = x - y
        return -d, d * 2

    compiled, (remark,) = run(f, X, X + 1)
    assert remark.reason == "aten.sub sub has another user: mul"
    assert "aten.neg.default" in compiled.targets()


def test_what_is_no_candidate_makes_no_remark():
    only_wide = Rewrite("swap", pattern, replacement, where=lambda site: site.value("x").shape[1] > 9)
    _, remarks = run(lambda x, y: -(x - y), X, X + 1, passes=(only_wide,))
    assert remarks == []


def test_the_closest_match_is_told_when_nothing_was_applied():
    _, (remark,) = run(lambda x, y: -(x + y) + (-(torch.sub(x, y, alpha=2))), X, X)
    assert remark.kind == "note"
    assert remark.reason == "closest match has 2 of 2 calls: expected 1, found 2"


def test_a_replacement_that_looks_different_is_not_used():
    shorter = Rewrite("swap", pattern, lambda x, y: aten.sum.default(aten.sub.Tensor(y, x)))
    compiled, (remark,) = run(lambda x, y: -(x - y), X, X + 1, passes=(shorter,))
    assert remark.reason == "the replacement's results look different"
    assert compiled.targets() == ["aten.sub.Tensor", "aten.neg.default"]


def test_fuel_is_spent_by_rewrite():
    _, remarks = run(lambda x, y: -(-(x - y) - y), X, X + 1, fuel=Fuel(1))
    assert [r.reason for r in remarks] == ["swap", "stopped by fuel or by the bisector"]


def test_several_results_are_replaced_together():
    def both(x, y):
        s = aten.add.Tensor(x, y)
        return s, aten.neg.default(s)

    def swapped(x, y):
        s = aten.add.Tensor(y, x)
        return s, aten.neg.default(s)

    def f(x, y):
        s = x + y
        return -s, s * 2

    compiled, (remark,) = run(f, X, X + 1, passes=(Rewrite("both", both, swapped),))
    assert remark.kind == "applied"
    assert [n.name for n in compiled.graphs[0].graph.nodes if n.op == "placeholder"] == ["arg0_1", "arg1_1"]


def test_a_result_read_before_the_pattern_ends_is_left():
    def both(x, y):
        s = aten.add.Tensor(x, y)
        return s, aten.neg.default(s)

    def f(x, y):
        s = x + y
        early = s * 2
        return -s + early

    _, (remark,) = run(f, X, X, passes=(Rewrite("both", both, both),))
    assert remark.reason == "add is read before the pattern is complete"


def test_a_group_reports_under_its_own_name():
    group = Group(
        "tidy", (SWAP, Rewrite("abs", lambda x: aten.abs.default(x), lambda x: aten.abs.default(x)))
    )
    _, remarks = run(lambda x, y: (-(x - y)).abs(), X, X + 1, passes=(group,))
    assert [(r.pass_name, r.reason) for r in remarks] == [("tidy", "swap"), ("tidy", "abs")]


def test_parameters_can_be_asked_about():
    seen = []

    def look(site):
        seen.append((site.dtype("x"), site.value("y").shape, site.anchor.target))

    run(lambda x, y: -(x - y), X, X, passes=(Rewrite("look", pattern, replacement, look),))
    assert seen == [(torch.float32, (3, 4), aten.neg.default)]


def test_a_pattern_is_checked_when_it_is_first_used():
    with pytest.raises(ValueError, match="must lead"):
        _ = Rewrite("bad", lambda x: (aten.neg.default(x), aten.abs.default(x)), lambda x: x).traced
