"""The ranges body takes first rows for indices; inputs that somebody could see change are left."""

import operator

import pytest
import torch
from dynamo_graph import graph_of
from k3compile.passes.graph import fake_mode_of
from k3compile.passes.multi_version import STARTS, RangeInput, promised_starts, range_inputs, use_ranges
from k3compile.passes.runner import Context


def inputs_of(fn, *more):
    gm = graph_of(fn, torch.rand(8, 3), torch.arange(2, 5), *more)
    return [one.name for one in range_inputs(gm)]


def test_an_index_is_named_as_the_user_does():
    gm = graph_of(lambda x, rows: x[rows] * 2, torch.rand(8, 3), torch.arange(2, 5))
    assert range_inputs(gm) == [RangeInput(1, "rows")]

    def nested(x, step):
        return x[step["rows"]] * 2

    gm = graph_of(nested, torch.rand(8, 3), {"rows": torch.arange(3)})
    (one,) = range_inputs(gm)
    assert one.name == "step['rows']"


LEFT = {
    "a view of it returned": lambda x, i: (x[i] * 2, i.view(3, 1)),
    "written": lambda x, i: (x[i] * 2, i.add_(1).sum()),
    "written through a view": lambda x, i: (x[i] * 2, i[1:].zero_().sum()),
    "written as an out argument": lambda x, i: (x[i] * 2, torch.add(i.sum(), i, out=i).sum()),
    "assigned": lambda x, i: (i.__setitem__(0, 3), x[i] * 2)[1],
}


@pytest.mark.parametrize("fn", LEFT.values(), ids=LEFT.keys())
def test_an_index_that_the_graph_shows_or_writes_is_left(fn):
    assert not inputs_of(fn)
    assert inputs_of(lambda x, i: (x[i] * 2, i)) == ["i"], "Dynamo gives an input back by itself"


def test_an_input_that_may_share_memory_with_the_index_must_not_be_written():
    def f(x, i, j):
        j.add_(1)
        return x[i] * 2

    assert not inputs_of(f, torch.arange(3))
    assert inputs_of(f, torch.rand(3)) == ["i"], "another dtype is other memory"


def test_the_body_takes_rows_from_the_start_it_is_given_and_checks_them():
    gm = graph_of(lambda x, i: (x[i] * 2, i.sum()), torch.rand(8, 3), torch.arange(2, 5))
    ctx = Context("dynamo", fake_mode=fake_mode_of(gm.graph))
    use_ranges(gm, range_inputs(gm), ctx)
    (extra,) = ctx.extra_inputs
    assert (extra.name, extra.example.tolist()) == (STARTS, [0])
    assert gm.graph.find_nodes(op="placeholder")[-1].name == STARTS
    x, junk = torch.rand(8, 3), torch.full((3,), -9)
    rows, total = gm(x, junk, torch.tensor([4]))
    assert torch.equal(rows, x[4:7] * 2)
    assert total == 4 + 5 + 6, "every use of the index is of the range"
    for start in (-1, 6):
        with pytest.raises(RuntimeError, match="i is annotated with rows"):
            gm(x, junk, torch.tensor([start]))


def test_an_int32_index_becomes_an_int32_range():
    gm = graph_of(lambda x, i: x[i] * 2, torch.rand(8, 3), torch.arange(3, dtype=torch.int32))
    use_ranges(gm, range_inputs(gm), Context("dynamo"))
    (made,) = gm.graph.find_nodes(op="call_function", target=torch.arange)
    assert made.kwargs["dtype"] == torch.int32
    with pytest.raises(RuntimeError, match="int32 cannot hold"):
        gm(torch.rand(8, 3), torch.arange(3), torch.tensor([2**31 - 2]))


def test_the_first_rows_are_told_apart_from_other_sizes():
    env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    graph = torch.fx.Graph()
    spans, starts = graph.placeholder("spans"), graph.placeholder(STARTS)
    symbols = []
    for given in (spans, starts):
        row = graph.call_function(torch.ops.aten.select.int, (given, 0, 0))
        item = graph.call_function(torch.ops.aten._local_scalar_dense.default, (row,))
        item.meta["val"] = env.create_unbacked_symint()
        symbols.append(item.meta["val"].node.expr)
    graph.call_function(operator.add, (item, 1))
    assert promised_starts(graph) == {symbols[1]}
