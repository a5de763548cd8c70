"""The view a functionalised call writes is read from its description, and lowering shows it as it lies."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import OPS
from k3compile.kernels.conv import short_conv
from k3compile.kernels.op import op
from k3compile.passes.graph import tensor
from k3compile.passes.in_place import functional_writes
from k3compile.passes.lower import Lower
from k3compile.passes.written_view import SLICE, STRIDED, written_value, written_view

from k3compile.report import Report

DENSE, APART = "applied: computed by dense", "note: computed by its meaning"
VIEWS = {  # of a pool [4, 6] -> how it is described, its strides and offset, what computes a write into it
    "turned": (lambda p: p.mT, STRIDED, (1, 6), 0, APART),
    "a slice with gaps": (lambda p: p[:, 1:3], SLICE, (6, 1), 1, APART),
    "a slice of whole rows": (lambda p: p[1:3], SLICE, (6, 1), 6, DENSE),
    "a row": (lambda p: p[2], STRIDED, (1,), 12, DENSE),
    "a column": (lambda p: p[:, 2], STRIDED, (6,), 2, APART),
    "the same again": (lambda p: p.view(4, 6), None, (6, 1), 0, DENSE),
    "the pool": (lambda p: p, None, (6, 1), 0, DENSE),
}


@pytest.fixture(scope="module")
def adding():
    """An op that writes, with an implementation for dense memory."""

    def k3test_add(by: float, to: torch.Tensor) -> None:
        to.add_(by)

    made = op(writes=("to",))(k3test_add)
    made.fake(lambda by, to: None)

    @made.impl("dense", objection=lambda by, to: None if to.is_contiguous() else "rows lie apart")
    def dense(by, to):
        to.view(-1).add_(by)

    yield made
    del OPS["k3test_add"]


def pool():
    return torch.arange(24.0).view(4, 6)


def said(compiled: Compiled) -> list[str]:
    return [f"{r.kind}: {r.reason}" for r in compiled.remarks(name="lower")]


@pytest.mark.parametrize("kind", VIEWS)
def test_a_description_is_read(adding, kind):
    view, target, strides, offset, _ = VIEWS[kind]
    compiled = Compiled(lambda p: adding.overload(1.0, view(p)), ())
    compiled(pool())
    (node,) = functional_writes(compiled.graphs[0].graph)
    found = written_view(node, "to")
    assert found.view is target
    assert found.base is node.kwargs["_all_bases"][0]
    value = written_value(node, "to")
    assert (value.stride(), value.storage_offset()) == (strides, offset)
    assert value.shape == view(pool()).shape
    assert tensor(found.base).shape == (4, 6), "the base itself stays what it is"


def test_nothing_is_written_where_no_tensor_was_given(adding):
    compiled = Compiled(lambda p: adding.overload(1.0, p), ())
    compiled(pool())
    (node,) = functional_writes(compiled.graphs[0].graph)
    node.kwargs = node.kwargs | {"_to_base_index": None}
    assert written_view(node, "to") is None
    assert written_value(node, "to") is None


@pytest.mark.parametrize("kind", VIEWS)
def test_an_implementation_is_asked_about_the_view_and_not_its_base(adding, kind):
    view, _, _, _, expected = VIEWS[kind]
    compiled = Compiled(lambda p: adding.overload(1.0, view(p)), (Lower(),))
    compiled(given := pool())
    assert said(compiled) == [expected]
    (remark,) = compiled.remarks(name="lower")
    assert remark.detail == ("dense: rows lie apart" if expected == APART else "")
    view(want := pool()).add_(1.0)
    assert torch.equal(given, want)


def test_a_dense_view_of_a_pool_that_is_not_dense_is_taken(adding):
    compiled = Compiled(lambda p: adding.overload(1.0, p.mT), (Lower(),))
    compiled(pool().mT)
    assert said(compiled) == [DENSE]


@pytest.mark.parametrize("where", ["backed", "unbacked"])
def test_sizes_that_are_known_at_run_time_make_no_trouble(adding, where):
    """Rows by a size of a changing input, and by a number that was read from a tensor."""

    def fn(p, rows, start):
        if where == "backed":
            return adding.overload(1.0, p[: rows.shape[0]])
        s = start.item()
        torch._check(s >= 0)
        torch._check(s <= 2)
        return adding.overload(1.0, p.narrow(0, s, 2).unsqueeze(0))

    compiled = Compiled(fn, (Lower(),), dynamic=True)
    compiled(given := pool(), torch.ones(3), torch.tensor(1))
    assert said(compiled) == [DENSE]
    rows = slice(0, 3) if where == "backed" else slice(1, 3)
    want = pool()
    want[rows] += 1.0
    assert torch.equal(given, want)


WINDOWS = {  # of a pool -> the windows [slots, 3, 16] that a convolution moves, and why C++ does not
    "turned": ((4, 16, 3), lambda p: p.mT, "native: channels, or taps, are not side by side"),
    "with a gap": ((4, 3, 40), lambda p: p[..., 8:24], ""),
    "dense": ((6, 3, 16), lambda p: p[1:5], ""),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_report_says_what_computes_a_convolution_on_views_of_its_pool(kind):
    shape, view, why = WINDOWS[kind]
    generator = torch.Generator().manual_seed(0)
    x, weight, before = (torch.randn(s, generator=generator) for s in ((5, 16), (16, 4), shape))
    rows = torch.tensor([1, 3]), torch.tensor([0, 3, 5])
    objection = short_conv.implementations["native"].objection
    if reason := objection(x, weight, torch.zeros(4, 3, 16), *rows):
        pytest.skip(reason)
    want = before.clone()
    expected = short_conv.meaning(x, weight, view(want), *rows)

    compiled = Compiled(lambda p: short_conv(x, weight, view(p), *rows), (Lower(),))
    got = compiled(given := before.clone())
    text = Report("key", "compiled", "eager", {}, tuple(compiled.records)).text()
    line = next(line for line in text.splitlines() if "k3.short_conv" in line)
    assert ("computed by its meaning" if why else "computed by native") in line
    assert why in line
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(given, want)
    assert torch.equal(given == before, want == before), "nothing in the gaps is written"
