"""The rules beside aliasing: layout, overlap, alignment, liveness."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.passes.aliasing import Aliases
from k3compile.passes.index_sites import site_of
from k3compile.passes.legality import (
    alignment_objection,
    layout_objection,
    liveness_objection,
    may_overlap,
    obligations,
    ruled,
    scatter_objection,
)
from k3compile.passes.prover import Prover
from k3compile.passes.ranges import Range
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten
KNOWN = Prover(None)


@pytest.mark.parametrize(
    ("t", "overlaps"),
    [
        (torch.rand(4, 3), False),
        (torch.rand(4, 3).t(), False),
        (torch.rand(4, 6)[:, 1:4], False),
        (torch.rand(4, 3)[1:3], False),
        (torch.rand(1, 3).expand(4, 3), True),
        (torch.rand(9).as_strided((4, 3), (2, 1)), True),
        (torch.rand(9).as_strided((4, 2), (2, 1)), False),
        (torch.rand(3, 1).expand(3, 1), False),
        (torch.rand(4)[:1].expand(1, 1), False),
    ],
)
def test_overlap_is_read_from_the_strides(t, overlaps):
    assert may_overlap(t, KNOWN) is overlaps


def test_a_layout_is_compared_in_every_part():
    t = torch.rand(4, 3)
    assert layout_objection(t, torch.rand(4, 3), KNOWN) is None
    assert layout_objection(t, torch.rand(4, 3).double(), KNOWN) == "the result would be torch.float64 on cpu"
    assert layout_objection(t, torch.rand(3, 4).t(), KNOWN) == "the result would have other strides"
    assert "other sizes" in layout_objection(t, torch.rand(5, 3), KNOWN)


def gather(base, consumer, rows=None):
    """A gather of ``base`` that ``consumer`` reads, as nodes with values."""
    graph = torch.fx.Graph()
    x, i = graph.placeholder("x"), graph.placeholder("i")
    x.meta["val"], i.meta["val"] = base, torch.arange(2)
    made = graph.call_function(aten.mul.Tensor, (x, 2))
    made.meta["val"] = base
    node = graph.call_function(aten.index_select.default, (made, 0, i))
    node.meta["val"] = base[:2]
    used = graph.call_function(consumer, (node, 1.0))
    used.meta["val"] = base[:2]
    graph.output((used,))
    return site_of(node), Aliases(graph)


def aligned(width, consumer=torch.ops.k3.l2_norm.default, device="meta"):
    env = ShapeEnv()
    start = env.create_unbacked_symint()
    torch._check(start >= 0)
    with FakeTensorMode(shape_env=env):
        site, aliases = gather(torch.empty(8, width, dtype=torch.bfloat16, device=device), consumer)
    return alignment_objection(site, Range(start, 2, ()), aliases, Prover(env))


def test_kernels_of_other_devices_keep_their_alignment():
    assert aligned(8) is None, "16 bytes a row"
    assert aligned(12) == "the view may not be aligned to 16 bytes"
    assert aligned(12, consumer=aten.add.Tensor) is None, "ATen assumes nothing"
    assert aligned(12, device="cpu") is None


def test_a_view_that_outlives_its_base_is_weighed():
    site, aliases = gather(torch.rand(64, 3), aten.add.Tensor)
    kept = liveness_objection(site, Range(0, 2, ()), aliases, KNOWN)
    assert kept == "the view would keep a tensor at least 16 times larger alive"
    assert liveness_objection(site, Range(0, 5, ()), aliases, KNOWN) is None
    site.node.graph.output_node().args = ((site.base,),)
    assert liveness_objection(site, Range(0, 2, ()), Aliases(site.node.graph), KNOWN) is None, "kept anyway"


def test_a_slice_must_start_and_end_inside():
    site, _ = gather(torch.rand(64, 3), aten.add.Tensor)
    assert obligations(site, Range(2, 3, ())) == [
        ("0 <= start", 0, 2),
        ("0 <= length", 0, 3),
        ("end <= size", 5, 64),
    ]


@pytest.mark.parametrize(
    ("target", "source", "objection"),
    [
        (torch.rand(4, 3), torch.rand(2, 3), None),
        (
            torch.rand(4, 3),
            torch.rand(2, 3).double(),
            "the target is torch.float32, the source torch.float64",
        ),
        (torch.rand(4, 3), torch.rand(1, 3), "the source is broadcast over the rows"),
        (torch.rand(4, 3), torch.rand(3), "the source is broadcast over the rows"),
        (torch.rand(1, 3).expand(4, 3), torch.rand(2, 3), "the target may overlap itself"),
    ],
)
def test_a_scatter_must_fit_its_target(target, source, objection):
    graph = torch.fx.Graph()
    x, i, y = (graph.placeholder(n) for n in "xiy")
    x.meta["val"], i.meta["val"], y.meta["val"] = target, torch.arange(2), source
    node = graph.call_function(aten.index_put.default, (x, [i], y))
    node.meta["val"] = target
    graph.output((node,))
    assert scatter_objection(site_of(node), Range(0, 2, ()), Aliases(graph), KNOWN) == objection


REFUSALS = {
    "R1": [
        "index comes from a graph input",
        "the index has 2 dimensions",
        "the index is a mask",
        "the index leaves out columns",
        "2 dimensions are indexed at once",
        "the tensor has no dimensions",
        "step is -1",
        "arange of floating point numbers",
        "passes through torch.int8",
        "the class changes more than once: its rows are [0, 2) and [4, 6)",
        "it accumulates",
    ],
    "R2": ["unproven: 0 <= start", "unproven: 0 <= length", "unproven: end <= size"],
    "R3": [
        "the result would be torch.float64 on cpu",
        "the result would have other sizes: (3) strides (1)",
        "the result would have other strides",
        "the target is torch.float32, the source torch.float64",
        "the source is broadcast over the rows",
        "the target may overlap itself",
    ],
    "R4": ["the view would reach an output of the graph"],
    "R5": [
        "the base is written before the view is last read",
        "the target is written elsewhere too",
        "it writes in place: the graph is not functional",
    ],
    "R6": [
        "a consumer of unknown kind would take the view",
        "a consumer would write through the view",
        "a consumer that takes the view writes the same storage",
        "the source is memory of the target",
    ],
    "R7": ["the view may not be aligned to 16 bytes"],
    "R8": ["the view would keep a tensor at least 16 times larger alive"],
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_a_refusal_names_its_rule(rule):
    assert [ruled(reason) for reason in REFUSALS[rule]] == [f"{reason} ({rule})" for reason in REFUSALS[rule]]


def test_what_no_rule_forbids_names_none():
    for reason in ("stopped by fuel or by the bisector", "no node computes the bounds of [u0, u1)"):
        assert ruled(reason) == reason
