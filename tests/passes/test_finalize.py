"""Which rows are picked by which index, weighed by what, and summed: read off the graph."""

import pytest
import torch
from k3compile.passes.finalize import Finalize, NotFinalize, finalize_at
from latent_tails import WHOLE, WITH_HOLES, ZEROED, index_add, make_args, select, where_after
from traced import traced


def found_in(fn, *args, **options):
    """Everything finalize_at finds in a graph."""
    graph, prover = traced(fn, *args, **options)
    found = [finalize_at(n, prover) for n in graph.nodes if n.op == "call_function"]
    return [f for f in found if f is not None]


def names(found):
    """Which arguments its parts come from."""
    parts = found.rows, found.weights, found.index
    return [next(iter(n.all_input_nodes), n).name if n.op != "placeholder" else n.name for n in parts]


@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic", "static"])
@pytest.mark.parametrize("finalize", [*WHOLE, *WITH_HOLES], ids=lambda f: f.__name__)
def test_the_parts_are_told_apart(finalize, symbolic):
    rows, w, idx, *_ = make_args(torch.float32)
    (found,) = found_in(finalize, rows, w, idx, symbolic=symbolic)
    if symbolic and finalize.__name__.startswith("index_add"):
        assert "top-k is not known" in found.reason, "it is read from how many rows a token has"
        return
    assert isinstance(found, Finalize), found
    assert found.result.meta["val"].shape == (5, 24) or symbolic
    assert found.drops == (finalize in WITH_HOLES)


def test_the_raw_index_is_taken_where_holes_are_dropped_and_the_clamped_one_where_not():
    rows, w, idx, *_ = make_args()
    (found,) = found_in(where_after, rows, w, idx)
    assert found.index.op == "placeholder"
    for zeroed in ZEROED:
        (found,) = found_in(zeroed, rows, w, idx)
        assert "clamp" in found.index.name
        assert not found.drops


def test_only_fancy_indexing_counts_from_the_end():
    rows, w, idx, *_ = make_args()
    (one,) = found_in(select, rows, w, idx)
    (other,) = found_in(lambda rows, w, idx: (rows[idx] * w[..., None]).sum(1), rows, w, idx)
    assert (one.wraps, other.wraps) == (False, True)
    sort = lambda rows, w, x: (rows[x.argsort(1)] * w[..., None]).sum(1)  # noqa: E731
    (sorted_,) = found_in(sort, rows, w, torch.randn(5, 2))
    assert not sorted_.wraps


def test_more_rows_than_tokens_have_choices_are_not_a_finalize():
    rows, w, idx, *_ = make_args()

    def odd(rows, w):
        return torch.zeros(4, 24).index_add(0, torch.zeros(10, dtype=torch.int64), rows[:10] * w.view(-1, 1))

    (found,) = found_in(odd, rows, w, symbolic=False)
    assert isinstance(found, NotFinalize)
    assert "top-k is not known" in found.reason
    assert len(found_in(index_add, rows, w, idx, symbolic=False)) == 1


def test_sums_without_weights_or_picks_are_nobodys_business():
    rows, _, idx, *_ = make_args()
    assert found_in(lambda rows, idx: rows[idx].sum(1), rows, idx) == []
    assert found_in(lambda rows, w: (rows * w).sum(1), rows, rows) == []
    assert found_in(lambda a, b: torch.bmm(a, b), torch.randn(2, 3, 4), torch.randn(2, 4, 5)) == []
