"""Differential verification finds what a pass changed, and changes nothing of the user's itself."""

import copy

import pytest
import torch
from compiled import Compiled
from k3compile.passes import pipeline
from k3compile.passes.graph import emit
from k3compile.passes.remarks import PassResult
from k3compile.passes.runner import Context, PassError, run_passes
from latent_tails import EPS, make_args
from pretended_group import pretended_group

from k3compile import report
from k3compile.difference import Compared, Observed, differences
from k3compile.verify import Differential, communicates, copies, in_float64, nudged, observe

aten, ops = torch.ops.aten, torch.ops.k3


class Swap:
    """Replaces one op by a call of another on the same or on other arguments."""

    level = "aten"

    def __init__(self, old, new, arguments=lambda node: node.args, keeps="exact", name="swap"):
        self.old, self.new, self.arguments, self.keeps, self.name = old, new, arguments, keeps, name

    def run(self, gm, ctx):
        nodes = gm.graph.find_nodes(op="call_function", target=self.old)
        for node in nodes:
            with gm.graph.inserting_before(node):
                new = emit(gm.graph, self.new, self.arguments(node), like=node, mode=ctx.fake_mode)
            node.replace_all_uses_with(new)
        return PassResult(bool(nodes))


def verified(fn, one, *args, **context):
    """Run ``one`` over the graph of ``fn``, verified on ``args``; the remarks."""
    compiled = Compiled(fn, ())
    compiled(*copies(args))
    ctx = Context("aten", verify="differential", compare=Differential(args), **context)
    (record,) = run_passes(compiled.graphs[0], [one], ctx)
    return [r.reason for r in record.remarks]


MUL_TO_ADD = Swap(aten.mul.Tensor, aten.add.Tensor)


def test_a_changed_result_is_named_with_its_biggest_difference():
    x = torch.tensor([[1.0, 2.0], [5.0, 2.0]])
    with pytest.raises(PassError, match=r"pass swap failed: .*output 1 was 10.0 and is 7.0 at \[1, 0\]"):
        verified(lambda x: (x + 1, x * 2), MUL_TO_ADD, x)


def test_static_verification_would_not_have_seen_it():
    compiled = Compiled(lambda x: x * 2, ())
    compiled(torch.rand(3))
    run_passes(compiled.graphs[0], [MUL_TO_ADD], Context("aten", verify="static"))


def test_the_level_is_chosen_by_pass():
    compare = Differential([torch.rand(3)])
    compiled = Compiled(lambda x: x * 3, ())
    compiled(torch.rand(3))
    levels = {"swap": "differential"}
    other = Swap(aten.mul.Tensor, aten.sub.Tensor, name="other")
    run_passes(compiled.graphs[0], [other], Context("aten", verify=levels, compare=compare))
    back = Swap(aten.sub.Tensor, aten.mul.Tensor)
    with pytest.raises(PassError, match="pass swap failed"):
        run_passes(compiled.graphs[0], [back], Context("aten", verify=levels, compare=compare))


def test_a_changed_write_to_an_input_is_seen_and_the_users_tensor_is_not_touched():
    pool = torch.tensor([1.0, 5.0])
    with pytest.raises(PassError, match=r"input arg0_1 was 15.0 and is 8.0 at \[1\]"):
        verified(lambda p: p.mul_(3).sum() * 0, MUL_TO_ADD, pool)
    assert pool.tolist() == [1.0, 5.0]


def test_new_and_lost_sharing_is_seen():
    view = Swap(aten.clone.default, aten.alias.default, lambda node: node.args[:1])
    compiled = Compiled(lambda x: x.clone(), ())
    compiled(torch.rand(3))
    gm = compiled.graphs[0]
    ctx = Context("aten", verify={"swap": "off"}, compare=None)
    before = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    run_passes(gm, [view], ctx)
    with pytest.raises(PassError, match="output 0 now share memory"):
        Differential([torch.rand(3)])(view, before, gm, ())
    with pytest.raises(PassError, match="output 0 no longer share memory"):
        Differential([torch.rand(3)])(view, gm, before, ())


def test_an_unchanged_meaning_is_reported():
    twice = Swap(aten.mul.Tensor, aten.add.Tensor, lambda node: (node.args[0], node.args[0]))
    (said,) = verified(lambda x: x * 2, twice, torch.rand(3))
    assert said == (
        "differential verification: computes what the graph before it computed (exact), "
        "on the inputs of this call"
    )


def test_inputs_that_are_not_there_are_made_up():
    compiled = Compiled(lambda x, i: x[i] * 2, ())
    compiled(torch.rand(5, 2), torch.tensor([4, 1]))
    twice = Swap(aten.mul.Tensor, aten.add.Tensor, lambda node: (node.args[0], node.args[0]))
    ctx = Context("aten", verify="differential", compare=Differential([]))
    (record,) = run_passes(compiled.graphs[0], [twice], ctx)
    assert "on 2 made-up inputs of 2" in record.remarks[0].reason


def test_a_numeric_pass_may_round_but_not_worse_than_before():
    x = torch.rand(64, 64).bfloat16()
    through_float = Swap(aten.exp2.default, aten.exp.default, keeps="numeric")
    with pytest.raises(PassError, match=r"\(numeric\): output 0 is .* from float64 .*, where .* was"):
        verified(lambda x: x.exp2(), through_float, x)


class SumOf(Swap):
    """Sums what another op makes of the terms."""

    def __init__(self, op, argument):
        self.op, self.argument = op, argument
        super().__init__(aten.sum.default, aten.sum.default, self.made, keeps="numeric")

    def made(self, node):
        (x,) = node.args
        made = node.graph.call_function(self.op, (x, self.argument))
        made.meta = dict(x.meta)
        return (made,)


def test_rounding_errors_with_one_cause_are_judged_over_several_runs():
    fn = lambda x: x.sum() * torch.ones(256)  # noqa: E731 - one rounded sum decides all 256 results
    alarms = 0
    for seed in range(12):
        x = torch.rand(1001, generator=torch.Generator().manual_seed(seed))
        single = (fn(x), x.flip(0).sum() * torch.ones(256), fn(x.double()))
        alarms += bool(differences([Compared(*(Observed({"sum": t}, frozenset()) for t in single))]))
        assert "numeric" in verified(fn, SumOf(aten.flip.default, [0]), x)[-1], "from the other end, no worse"
    assert alarms > 2, "single runs did not mislead: this test sees nothing"
    with pytest.raises(PassError, match=r"from float64 over 17 runs, where"):
        verified(fn, SumOf(aten.mul.Tensor, 1 + 1e-6), x)


def test_nudged_inputs_share_memory_and_only_rounded_floats_move():
    x, exact, whole = torch.rand(6), torch.rand(3).double(), torch.arange(4)
    first, second, same, number, flag = nudged([x[:4], x[2:], exact, whole, True], seed=1)
    assert first[2:].equal(second[:2])
    assert first.data_ptr() + 8 == second.data_ptr()
    assert same.equal(exact)
    assert number.equal(whole)
    assert flag is True
    assert ((first / x[:4] - 1).abs() < 2.0**-5).all()
    assert not first.equal(x[:4])
    assert not first.equal(nudged([x[:4]], seed=2)[0])


def test_a_graph_runs_in_float64_throughout():
    def fn(x, w):
        return ops.rms_norm(x, w, 1e-5), x.to(torch.float16) * 3, torch.ones(2, dtype=torch.float32) / 3

    compiled = Compiled(fn, ())
    args = torch.rand(4, 8), torch.rand(8)
    compiled(*args)
    seen, why = in_float64(compiled.graphs[0], args)
    assert why == ""
    want = fn(*(a.double() for a in args))[0]
    assert torch.equal(seen.values["output 0"], want)
    assert [seen.values[f"output {i}"].dtype for i in range(3)] == [torch.float64] * 3
    assert seen.values["output 2"][0] == 1 / 3


def test_copies_share_memory_as_the_originals_do():
    pool = torch.rand(6)
    first, second, number = copies([pool[:3], pool[2:], 4])
    first[2] = 7
    assert (second[0], number, pool[2] == 7) == (7, 4, False)


def test_random_numbers_are_the_same_before_and_after_and_the_users_stay_as_they_were():
    compiled = Compiled(lambda x: x + torch.rand(3), ())
    compiled(torch.rand(3))
    state = torch.random.get_rng_state()
    one, other = (observe(compiled.graphs[0], [torch.ones(3)]) for _ in range(2))
    assert torch.equal(one.values["output 0"], other.values["output 0"])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_a_compile_is_verified_on_its_own_inputs(inner, monkeypatch, own_reports):
    def fn(x, n, pool):
        start = n[0].item()
        torch._check(start >= 0)
        torch._check(start <= x.shape[0])
        pool.add_(1)
        return x.index_select(0, torch.arange(start)) * 2

    args = torch.rand(5, 3), torch.tensor([2]), torch.zeros(3)
    torch._dynamo.reset()
    options = {"inner": inner, "verify": {"contiguous_views": "differential", "lower": "differential"}}
    with torch.no_grad():
        result = torch.compile(fn, backend="k3", fullgraph=True, options=options)(*args)
    assert torch.equal(result, args[0][:2] * 2)
    assert args[2].tolist() == [1.0] * 3, "written once, by the call"
    (said,) = (r.reason for r in report.latest().remarks if "differential" in r.reason)
    assert said.endswith("on the inputs of this call")
    monkeypatch.setattr(
        pipeline, "ATEN_PASSES", (Swap(aten.mul.Tensor, aten.add.Tensor, name="canonicalize"),)
    )
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="pass canonicalize failed: it changed what"):
        torch.compile(fn, backend="k3", options={"inner": inner, "verify": "differential"})(*args)
    assert args[2].tolist() == [1.0] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_op_of_ours_that_talks_to_other_ranks_is_not_run_by_one_alone(ranks):
    with pretended_group(ranks) as name:
        made = Compiled(lambda *args: torch.ops.k3.latent_tail(*args, EPS, name), ())
        made(*make_args())
        why = communicates(made.graphs[-1].graph)
    assert why == (None if ranks == 1 else "it communicates with other ranks (k3.latent_tail.default)")
