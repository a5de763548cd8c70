"""What a graph promises: what it writes, what shares memory, how every node looks."""

import torch
from compiled import Compiled, check
from k3compile.passes.graph import fake_mode_of
from k3compile.passes.prover import Prover
from k3compile.passes.remarks import Proof, Remark
from k3compile.passes.static_check import Signature, alike, differences, unfounded

aten = torch.ops.aten


def graph_of(fn, *args, **options):
    compiled = Compiled(fn, (), **options)
    compiled(*args)
    return compiled.graphs[0].graph


def of(graph):
    mode = fake_mode_of(graph)
    return mode, Prover(mode.shape_env)


def test_written_inputs_are_those_a_node_writes_in_place():
    def f(x, y):
        x[1:].mul_(2)
        return y + 1

    signature = Signature.of(graph_of(f, torch.rand(3, 2), torch.rand(2)))
    assert signature.written == {"arg0_1"}


def test_inputs_and_outputs_that_share_memory_are_grouped():
    graph = graph_of(lambda x: (x + 1, x * 2), torch.rand(3, 2))
    assert Signature.of(graph).aliases == frozenset()
    (first, second) = graph.output_node().args[0]
    graph.output_node().args = ((first, first),)
    assert Signature.of(graph).aliases == {frozenset({"output 0", "output 1"})}
    assert second.name in Signature.of(graph).looks


def test_an_untouched_graph_keeps_its_promises():
    graph = graph_of(lambda x: (x + 1, x[1:] * 2), torch.rand(3, 2), dynamic=True)
    before = Signature.of(graph)
    assert differences(before, graph, *of(graph)) == []
    assert not before.touched(graph)


def test_a_node_that_reads_something_else_is_computed_again():
    graph = graph_of(lambda x, y: (x + 1) * y, torch.rand(3, 2), torch.rand(3, 2))
    before = Signature.of(graph)
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (mul,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    mul.args = (add, add)
    assert before.touched(graph)
    assert differences(before, graph, *of(graph)) == []
    add.meta["val"] = add.meta["val"].sum()
    assert any("add was" in problem for problem in differences(before, graph, *of(graph)))


def test_a_functionalised_call_gives_back_what_it_was_given(rev_into):
    def f(x, y):
        rev_into(y, x)
        return y + 1

    graph = graph_of(f, torch.rand(3, 2), torch.rand(3, 2))
    (call,) = (n for n in graph.nodes if "auto_functionalized" in str(n.target))
    before = Signature(**{**vars(Signature.of(graph)), "reads": {}})
    assert differences(before, graph, *of(graph)) == []
    call.meta["val"] = (None, call.meta["val"][1].sum())
    assert any(p.startswith(f"{call.name} claims") for p in differences(before, graph, *of(graph)))


def test_values_look_alike_up_to_the_names_of_their_sizes():
    prover = Prover(None)
    assert alike(torch.rand(3, 2), torch.rand(3, 2), prover)
    assert not alike(torch.rand(3, 2), torch.rand(2, 3).t(), prover), "strides"
    assert not alike(torch.rand(3), torch.rand(3).double(), prover)
    assert not alike(torch.rand(3), torch.rand(4), prover)
    assert not alike((torch.rand(3),), torch.rand(3), prover)
    assert alike([torch.rand(3), 4], (torch.rand(3), 4), prover)
    assert not alike(4, 5, prover)
    assert not alike(None, torch.rand(1), prover)


def test_a_claim_that_does_not_hold_is_unfounded():
    def remark(*claims):
        proofs = tuple(Proof("", "static", claim) for claim in claims)
        return Remark("p", "applied", "n", "op", "", proofs=proofs)

    assert unfounded([remark("0 <= 3", "aten.arange = [0, 3)")], Prover(None)) == []
    assert unfounded([remark("4 <= 3")], Prover(None)) == ["the proof 4 <= 3 does not hold"]


def test_a_view_of_a_replaced_node_still_shares_its_memory():
    def written_and_viewed(a, b):
        new = torch.index_copy(b, 0, torch.arange(2, 5), a[:3] * 1)
        return new.t().narrow(1, 1, 3).t(), new

    check(written_and_viewed, [torch.rand(8, 3), torch.rand(8, 3)], verify="static")
