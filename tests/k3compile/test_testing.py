"""The helpers for users' tests: they pass, they fail with reasons, and goldens are kept as text."""

from pathlib import Path

import pytest
import torch

from k3compile.testing import assert_rewrites, assert_same_graph

GOLDENS = Path(__file__).parent / "goldens"


def slices(x, w):
    return torch.index_select(x, 0, torch.arange(2, 5)) @ w


def table(x, i):
    return torch.index_select(x, 0, i).relu()


X, W, I = torch.ones(8, 4), torch.ones(4, 4), torch.tensor([1, 3])


def test_counts_that_hold_return_the_timelines():
    (found,) = assert_rewrites(slices, (X, W), contiguous_views=1)
    assert found.stages[-1].name == "lower"


def test_too_few_rewrites_fail_with_the_reasons():
    with pytest.raises(AssertionError, match=r"applied.contiguous_views is 0, allowed: = 1\n.*index_select"):
        assert_rewrites(table, (X, I), contiguous_views=1)


def test_a_mistyped_pass_gets_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean 'contiguous_views'"):
        assert_rewrites(slices, (X, W), contiguous_view=1)


@pytest.mark.parametrize(("name", "fn", "args"), [("slices", slices, (X, W)), ("table", table, (X, I))])
def test_toy_programs_compile_to_their_goldens(name, fn, args, update_golden):
    assert_same_graph(fn, args, GOLDENS / f"{name}.k3graph", update=update_golden)


def test_another_graph_fails_with_the_diff(tmp_path):
    golden = tmp_path / "g.k3graph"
    with pytest.raises(AssertionError, match="does not exist; call with update=True"):
        assert_same_graph(slices, (X, W), golden)
    assert_same_graph(slices, (X, W), golden, update=True)
    assert "aten.slice.Tensor" in golden.read_text()
    assert_same_graph(slices, (X, W), golden)
    with pytest.raises(AssertionError, match=r"(?s)not the graph of .*added: aten.relu.default.*update=True"):
        assert_same_graph(lambda x, w: slices(x, w).relu(), (X, W), golden)
    with pytest.raises(AssertionError, match="shape"):
        assert_same_graph(slices, (X, torch.ones(4, 5)), golden)
