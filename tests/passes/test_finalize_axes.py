"""Elements are found behind any chain of views, or it is said that they are not."""

import pytest
import torch
from k3compile.passes.finalize_axes import broadcast, follow, no_cast, whole
from k3compile.passes.graph import tensor
from traced import result, traced

SPELLINGS = {
    "view": lambda x: x.view(3, 5, 7),
    "unflatten": lambda x: x.unflatten(0, (3, 5)),
    "permuted twice": lambda x: x.view(3, 5, 7).permute(2, 0, 1).permute(1, 2, 0),
    "clone": lambda x: x.t().contiguous().view(7, 3, 5).permute(1, 2, 0),
    "ones put in and taken out": lambda x: x.view(3, 1, 5, 7)[:, :, None].squeeze(1).squeeze(1),
    "expanded": lambda x: x.view(3, 5, 7).unsqueeze(0).expand(1, -1, -1, -1).squeeze(0),
    "swapped": lambda x: x.view(3, 5, 7).transpose(0, 2).transpose(-1, 0),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_all_spellings_of_one_view_end_at_the_same_place(spelling):
    graph, prover = traced(spelling, torch.randn(15, 7), symbolic=False)
    at = whole(result(graph), prover, "tjh")
    node, places, _ = follow(result(graph), at, prover)
    assert node.op == "placeholder"
    assert places == (at[0] + at[1], at[2])


def test_it_follows_symbolic_sizes():
    def split(x, w):
        return x.view(w.shape[0], w.shape[1], x.shape[1])

    graph, prover = traced(split, torch.randn(15, 7), torch.randn(3, 5))
    at = whole(result(graph), prover, "tjh")
    node, places, _ = follow(result(graph), at, prover)
    assert (node.op, places) == ("placeholder", (at[0] + at[1], at[2]))


def test_a_view_that_cuts_a_dimension_elsewhere_is_not_followed():
    graph, prover = traced(lambda x: x.view(5, 3, 7), torch.randn(15, 7), symbolic=False)
    view = result(graph)
    graph2, prover2 = traced(lambda x: x.view(3, 35), torch.randn(15, 7), symbolic=False)
    assert follow(view, whole(view, prover, "tjh"), prover)[0].op == "placeholder"
    other = result(graph2)
    assert follow(other, whole(other, prover2, "th"), prover2)[0] is other


def test_order_is_kept_apart():
    graph, prover = traced(lambda x: x.view(3, 5, 7).transpose(0, 1), torch.randn(15, 7), symbolic=False)
    at = whole(result(graph), prover, "tjh")
    _, places, _ = follow(result(graph), at, prover)
    assert places == (at[1] + at[0], at[2])


def test_casts_are_followed_on_request():
    graph, prover = traced(lambda x: x.double().view(3, 5, 7), torch.randn(15, 7), symbolic=False)
    at = whole(result(graph), prover, "tjh")
    assert follow(result(graph), at, prover)[0].op == "placeholder"
    assert follow(result(graph), at, prover, no_cast)[0].op == "call_function"


def test_a_broadcast_operand_has_no_digit_where_it_has_one_element():
    graph, prover = traced(lambda x, w: x * w, torch.randn(3, 5, 7), torch.randn(5, 1), symbolic=False)
    at = whole(result(graph), prover, "tjh")
    assert broadcast(at, tensor(result(graph).args[1]).shape, prover) == (at[1], ())
    assert broadcast(at[:1], (2, 2), prover) is None
