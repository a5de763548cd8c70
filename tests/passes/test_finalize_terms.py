"""Factors, rows and masks of a product are told apart by the places they have."""

import pytest
import torch
from k3compile.passes.finalize_axes import whole
from k3compile.passes.finalize_terms import Terms, Unclear, is_zero, read
from latent_tails import make_args
from traced import inputs, result, traced


def terms_of(fn, *args):
    graph, prover = traced(fn, *args, symbolic=False)
    terms = Terms(prover, "h")
    read(result(graph), whole(result(graph), prover, "tjh"), terms)
    return terms


def test_rows_have_the_width_and_factors_have_not():
    rows, w, idx, *_ = make_args()
    terms = terms_of(lambda rows, w, idx: w.unsqueeze(-1) * rows[idx], rows, w, idx)
    ((picked,), (factor,)) = terms.rows, terms.factors
    given = inputs(picked.node.graph)
    assert [picked.node, factor.node, picked.index] == given
    assert picked.wraps
    assert len(terms.nodes) == 2


def test_masks_say_what_they_keep():
    rows, _, idx, *_ = make_args()

    def keeps(rows, idx):
        return torch.where((idx >= 0)[..., None], rows[idx], 0.0)

    def drops(rows, idx):
        return rows[idx].masked_fill((idx < 0)[..., None], 0)

    def twice(rows, idx):
        return torch.where(~(idx < 0)[..., None], rows[idx], torch.zeros(()))

    assert [terms_of(f, rows, idx).masks[0].keeps for f in (keeps, drops)] == [True, False]
    (mask,) = terms_of(twice, rows, idx).masks
    assert not mask.keeps, "the negation is undone"


def test_two_values_to_choose_from_are_unclear():
    rows, _, idx, *_ = make_args()
    with pytest.raises(Unclear, match="both not zero"):
        terms_of(lambda rows, idx: torch.where((idx >= 0)[..., None], rows[idx], 1.0), rows, idx)


def test_zeros_in_any_spelling():
    def zeros(x):
        return (
            torch.zeros(3),
            x.new_zeros(3),
            torch.zeros_like(x),
            torch.full((3,), 0.0),
            torch.zeros(3, 1).double(),
        )

    graph, _ = traced(zeros, torch.randn(3), symbolic=False)
    (returned,) = graph.output_node().args
    assert all(is_zero(node) for node in returned)
    assert is_zero(0.0)
    graph, _ = traced(lambda x: torch.full_like(x, 0.5), torch.randn(3), symbolic=False)
    assert not is_zero(result(graph))
