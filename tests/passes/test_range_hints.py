"""Hints use the user's own spelling, and symbols where the spelling cannot be told."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.contiguous_views import CONTIGUOUS_VIEWS
from k3compile.passes.range_hints import BUILD_IT, origin_hint


def hints(fn, *args):
    compiled = Compiled(fn, (CONTIGUOUS_VIEWS,), unbacked="L['hidden']:0")
    compiled(*args)
    return [r.fix_it for r in compiled.remarks()]


ARGS = torch.rand(6, 2), torch.tensor([1, 3])


def test_the_end_is_compared_with_the_size_of_what_is_read():
    def f(hidden, spans):
        num = spans[0].item()
        torch._check(num >= 0)
        return hidden.relu().index_select(0, torch.arange(num)) + 1

    assert hints(f, *ARGS) == ["add torch._check(num <= hidden.relu().shape[0])"]


def test_the_start_and_the_length_are_named():
    def f(hidden, spans):
        first, last = spans[0].item(), spans[1].item()
        torch._check(last <= hidden.shape[0])
        return torch.index_select(hidden, 0, torch.arange(first, last)) + 1

    assert hints(f, *ARGS) == ["add torch._check(first >= 0)"]


def test_a_run_cut_out_of_another_is_given_in_symbols():
    def f(hidden, spans):
        num = spans[0].item()
        torch._check(num >= 0)
        rows = torch.arange(num + 3)[1:3]
        return torch.index_select(hidden, 0, rows) + 1

    assert hints(f, *ARGS) == ["add torch._check(3 <= hidden.shape[0])"]


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("index comes from a graph input", BUILD_IT),
        ("index comes from aten.nonzero", None),
        (
            "the class changes more than once: ...",
            "order the batch so that the rows of one class are contiguous",
        ),
    ],
)
def test_where_the_index_comes_from_decides_the_advice(reason, hint):
    assert origin_hint(reason) == hint
