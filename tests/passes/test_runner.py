"""The runner cleans up, verifies, records, and survives or reports whatever a pass does wrong."""

import copy
import itertools
import operator
from dataclasses import dataclass, replace

import pytest
import torch
from compiled import Compiled, check, copies, run
from k3compile.passes.extra_inputs import add_input
from k3compile.passes.graph import emit
from k3compile.passes.pipeline import ATEN_PASSES
from k3compile.passes.remarks import PassResult
from k3compile.passes.runner import Context, Fuel, PassError, run_passes
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Named:
    """A pass made of a function over (gm, ctx)."""

    run_it: object
    name: str = "named"
    level: str = "aten"
    keeps: str = "exact"

    def run(self, gm, ctx):
        return self.run_it(gm, ctx)


def graph_of(fn=lambda x: (x + 1) * 2, *args):
    """A functional graph that can be run and changed."""
    compiled = Compiled(fn, ())
    compiled(*(args or (torch.rand(4, 3),)))
    return compiled.graphs[0]


def replace_all(gm, old, new, ctx=None, like_args=lambda node: node.args):
    mode = ctx.fake_mode if ctx else None
    for node in gm.graph.find_nodes(op="call_function", target=old):
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(emit(gm.graph, new, like_args(node), like=node, mode=mode))


def test_a_pass_leaves_dead_nodes_to_the_runner():
    def run(gm, ctx):
        replace_all(gm, aten.mul.Tensor, aten.add.Tensor, ctx)
        return PassResult(True)

    gm = graph_of()
    (record,) = run_passes(gm, [Named(run)], Context("aten"))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [aten.add.Tensor] * 2
    assert (record.nodes_before, record.nodes_after, record.changed) == (4, 4, True)
    assert record.seconds > 0
    assert torch.equal(gm(torch.ones(4, 3))[0], torch.full((4, 3), 4.0)), "recompiled"


def test_new_nodes_without_a_value_get_one():
    def run(gm, ctx):
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.call_function(aten.neg.default, node.args[:1]))
        return PassResult(True)

    gm = graph_of()
    run_passes(gm, [Named(run)], Context("aten", verify="static"))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.neg.default)
    assert node.meta["val"].shape == (4, 3)


def wrong_shape(gm, ctx):
    replace_all(gm, aten.mul.Tensor, aten.sum.default, ctx, lambda node: node.args[:1])
    return PassResult(True)


def false_claim(gm, ctx):
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        with gm.graph.inserting_before(node):
            new = emit(
                gm.graph, aten.sum.default, node.args[:1], like=node, mode=None, known=node.meta["val"]
            )
        node.replace_all_uses_with(new)
    return PassResult(True)


def hidden_change(gm, ctx):
    replace_all(gm, aten.mul.Tensor, aten.add.Tensor, ctx)
    return PassResult(False)


def output_is_input(gm, ctx):
    (result,) = gm.graph.output_node().args[0]
    result.replace_all_uses_with(next(iter(gm.graph.nodes)))
    return PassResult(True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (wrong_shape, "the results were"),
        (false_claim, "claims"),
        (hidden_change, "it says it changed nothing"),
        (output_is_input, "shared memory was"),
    ],
)
def test_a_wrong_pass_is_named(wrong, says):
    with pytest.raises(PassError, match=f"pass culprit failed: .*{says}"):
        run_passes(graph_of(), [Named(wrong, "culprit")], Context("aten", verify="static"))


def test_a_lost_write_is_noticed():
    def run(gm, ctx):
        for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
            gm.graph.erase_node(node)
        return PassResult(True)

    gm = graph_of(lambda x: x.mul_(2).sum())
    with pytest.raises(PassError, match=r"written inputs were \['arg0_1'\] and are \[\]"):
        run_passes(gm, [Named(run)], Context("aten", verify="static"))


def test_a_node_read_before_it_exists_is_noticed_without_verification():
    def run(gm, ctx):
        first, *_, last = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        first.append(last.next)
        return PassResult(True)

    with pytest.raises(PassError, match="named"):
        run_passes(graph_of(lambda x: ((x + 1) * 2 + 3) - 4), [Named(run)], Context("aten"))


def crash(gm, ctx):
    replace_all(gm, aten.mul.Tensor, aten.sub.Tensor, ctx)
    raise KeyError("half way")


def test_a_failing_pass_is_undone_and_the_next_one_runs():
    seen = []
    after = Named(lambda gm, ctx: seen.append(str(gm.graph)) or PassResult(False), "after")
    gm = graph_of()
    text = str(gm.graph)
    failed, _ = run_passes(gm, [Named(crash), after], Context("aten", on_error="fallback"))
    assert seen == [text]
    assert failed.remarks[0].reason == "failed and was undone: KeyError: 'half way'"
    assert not failed.changed
    assert torch.equal(gm(torch.ones(4, 3))[0], torch.full((4, 3), 4.0))


def test_a_compile_survives_a_failing_pass():
    compiled = check(
        lambda x: x.index_select(0, torch.arange(2)) * 2,
        [torch.rand(4, 3)],
        passes=(Named(crash), *ATEN_PASSES),
        on_error="fallback",
    )
    assert compiled.applied() == ["aten.index_select"]


def test_a_disabled_pass_is_not_run():
    (record,) = run_passes(graph_of(), [Named(crash)], Context("aten", disabled=frozenset({"named"})))
    assert (record.changed, record.remarks[0].reason) == (False, "disabled by name")


def test_fuel_is_shared_and_a_veto_costs_none():
    fuel = Fuel(2)
    ctx = Context("aten", fuel=fuel, veto=lambda name: name == "guilty")
    answers = [ctx.may_rewrite(name) for name in ("one", "guilty", "two", "three")]
    assert answers == [True, False, True, False]
    assert not replace(ctx, level="dynamo").may_rewrite("four")
    assert all(Fuel().take() for _ in range(5))


def test_who_asks_sees_the_graph_before_and_after():
    seen = []

    def run(gm, ctx):
        replace_all(gm, aten.mul.Tensor, aten.add.Tensor, ctx)
        return PassResult(True)

    ctx = Context("aten", snapshot=lambda gm: str(gm.graph), on_pass=lambda *args: seen.append(args))
    run_passes(graph_of(), [Named(run)], ctx)
    ((name, before, after, seconds),) = seen
    assert name == "named"
    assert "mul" in before
    assert "mul" not in after
    assert seconds > 0


def written(x, y, rows):
    x.index_copy_(0, rows, y)
    x[1:3].index_copy_(0, rows[:1], y[:1] * 2)
    first = x.sum()
    x.index_copy_(0, rows, y * 3)
    x[:2] = y[:2]
    return first


def with_rows(x, rows, y):
    """Arguments in the order in which AOTAutograd gives them to the graph."""
    return written(x, y, rows)


def in_a_row(x, y):
    """Its rows are a slice, and contiguous_views finds that out."""
    return written(x, y, torch.arange(2))


@pytest.fixture(scope="module")
def captured():
    """Functions that write, each with arguments and with its graph as it comes to the passes."""
    x, rows, y = torch.rand(4, 3), torch.tensor([1, 0]), torch.rand(2, 3)
    cases = [(with_rows, (x, rows, y)), (in_a_row, (x, y))]
    return [(fn, args, graph_of(fn, *copies(args))) for fn, args in cases]


@pytest.mark.parametrize("passes", list(itertools.permutations(ATEN_PASSES)))
def test_writes_without_users_survive_the_passes_in_every_order(passes, captured):
    """What the passes leave of a graph does what the function does."""
    for fn, args, graph in captured:
        gm = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        run_passes(gm, passes, Context("aten", verify="static"))
        for (what, got), (_, want) in zip(run(gm, copies(args)), run(fn, copies(args)), strict=True):
            assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want, what


def test_a_dynamo_graph_keeps_its_writes_through_the_clean_up():
    graphs = []

    def backend(gm, inputs):
        run_passes(gm, [Named(lambda gm, ctx: PassResult(True), level="dynamo")], Context("dynamo"))
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    args = [torch.rand(4, 3), torch.rand(2, 3), torch.tensor([1, 0])]
    want = [a.clone() for a in args]
    result, expected = torch.compile(written, backend=backend)(*args), written(*want)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, args, want))
    targets = [n.target for n in graphs[0].graph.nodes]
    assert targets.count("index_copy_") == 3
    assert operator.setitem in targets


def test_one_list_holds_one_level():
    with pytest.raises(AssertionError):
        run_passes(fx.symbolic_trace(lambda x: x), [Named(crash, level="dynamo")], Context("aten"))


class Grows:
    """A Dynamo pass that adds an input, and then fails unless told not to."""

    name, level, keeps = "grows", "dynamo", "exact"

    def __init__(self, error=None):
        self.error = error

    def run(self, gm, ctx):
        add_input(gm, "extra", (self.error and "failed") or "kept", torch.zeros(2), ctx)
        if self.error:
            raise self.error
        return PassResult(True)


def test_an_undone_dynamo_pass_takes_its_extra_inputs_with_it():
    seen = []

    def backend(gm, inputs):
        gm = copy.deepcopy(gm)  # Dynamo reads its own again
        ctx = Context("dynamo", on_error="fallback", on_undone=lambda *undone: seen.append(undone))
        records = run_passes(gm, [Grows(KeyError("half way")), Grows()], ctx)
        seen.append([extra.key for extra in ctx.extra_inputs])
        seen.append([len(gm.graph.find_nodes(op="placeholder")), *(r.changed for r in records)])
        return lambda x: gm(x, torch.zeros(2))

    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)), torch.full((2,), 2.0))
    (name, error), keys, counts = seen
    assert (name, str(error)) == ("grows", "'half way'")
    assert keys == ["kept"]
    assert counts == [2, False, True]


def test_some_errors_are_never_undone():
    ctx = Context("aten", on_error="fallback", never_undone=(KeyError,))
    with pytest.raises(PassError, match="half way"):
        run_passes(graph_of(), [Named(crash)], ctx)


def test_each_pass_has_its_own_level_of_verification():
    run_passes(graph_of(), [Named(hidden_change)], Context("aten", verify={"other": "static"}))
    with pytest.raises(PassError, match="it says it changed nothing"):
        run_passes(graph_of(), [Named(hidden_change)], Context("aten", verify={"named": "static"}))
