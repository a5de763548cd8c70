"""Views that show all of a tensor go; every other view stays, and so does what the graph returns."""

import pytest
import torch
from compiled import Compiled, check
from k3compile.passes.canonicalize import CANONICALIZE

X = torch.rand(4, 3)
ALL = {
    "view": lambda x: x.view(4, 3),
    "view with a free size": lambda x: x.view(4, -1),
    "expand": lambda x: x.expand(4, 3),
    "slice": lambda x: torch.ops.aten.slice.Tensor(x, 0, 0, 4),
    "open slice": lambda x: torch.ops.aten.slice.Tensor(x, 1),
    "permute": lambda x: x.permute(0, 1),
    "alias": lambda x: torch.ops.aten.alias.default(x),
}
PART = {
    "view": lambda x: x.view(3, 4),
    "expand": lambda x: x.expand(2, 4, 3),
    "slice": lambda x: x[1:],
    "permute": lambda x: x.permute(1, 0),
    "square": lambda x: x[:3].permute(1, 0),
}


def run(fn, *args, **options):
    compiled = check(fn, args, passes=(CANONICALIZE,), **options)
    return compiled, compiled.remarks(name="canonicalize")


@pytest.mark.parametrize("view", ALL.values(), ids=ALL.keys())
def test_a_view_of_everything_goes(view):
    compiled, remarks = run(lambda x: view(x * 2) + 1, X)
    assert {r.kind for r in remarks} <= {"applied"}
    assert compiled.targets() == ["aten.mul.Tensor", "aten.add.Tensor"]


@pytest.mark.parametrize("view", PART.values(), ids=PART.keys())
def test_a_view_of_less_stays_without_a_word(view):
    compiled, remarks = run(lambda x: view(x * 2) + 1, X)
    assert remarks == []
    assert len(compiled.targets()) >= 3


def test_sizes_that_are_equal_but_do_not_look_it_are_recognised():
    def f(x, spans):
        a, b = spans[0].item(), spans[1].item()
        torch._check(a >= 0)
        torch._check(b >= 0)
        torch._check(a + b == x.shape[0])
        return (x * 2).view(a + b, 3) + 1

    compiled, remarks = run(f, X, torch.tensor([1, 3]), unbacked="L['x']:0")
    assert [r.kind for r in remarks] == ["applied"]
    assert not [t for t in compiled.targets() if "view" in t]


def test_a_view_that_is_returned_stays_beside_what_it_shows():
    def f(x):
        y = x * 2
        return y, y.view(4, 3)

    compiled = Compiled(f, (CANONICALIZE,))
    y, view = compiled(X)
    assert y is not view
    assert y.data_ptr() == view.data_ptr()
    assert [r.reason for r in compiled.remarks(name="canonicalize")] in ([], ["the graph returns the view"])


def test_a_write_through_a_view_of_everything_reaches_the_tensor():
    def f(x):
        x.view(4, 3).mul_(2)
        return x.view(4, 3)[1:].sum()

    run(f, X)
