"""Whatever way a range of rows is read or written, it is rewritten, or the report says by which rule not."""

import re

import pytest
import torch
from compiled import check
from lanes import thinned

X, Y, SPANS = torch.rand(8, 3), torch.rand(8, 3), [[2, 5], [0, 0], [8, 8], [0, 8], [3, 4]]
ALL = slice(None)
UNBACKED = "L['x']:0,L['y']:0"


def ranged(fn):
    """``fn(x, y, rows, s, e)`` as a function of x [T, 3], y [T, 3] and spans, where 0 <= s <= e <= T."""

    def program(x, y, spans):
        s, e = spans[0].item(), spans[1].item()
        torch._check(s >= 0)
        torch._check(s <= e)
        torch._check(e <= x.shape[0])
        torch._check(y.shape[0] == x.shape[0])
        return fn(x, y, torch.arange(s, e), s, e)

    return program


def run(fn, **options):
    calls = [[X, Y, torch.tensor(spans)] for spans in SPANS]
    return check(ranged(fn), *calls, unbacked=UNBACKED, **options)


def table(rows, x):
    return rows[:, None].expand(-1, x.shape[1])


APPLIED = {
    "brackets": lambda x, y, i, s, e: x[i] + 1,
    "brackets with a slice": lambda x, y, i, s, e: x[i, :] + 1,
    "brackets with dots": lambda x, y, i, s, e: x[i, ...] + 1,
    "a negative dimension": lambda x, y, i, s, e: x.index_select(-2, i) + 1,
    "gather": lambda x, y, i, s, e: x.gather(0, table(i, x)) + 1,
    "gather from behind": lambda x, y, i, s, e: x.gather(-2, table(i, x)) + 1,
    "gather by a copied table": lambda x, y, i, s, e: x.gather(0, table(i, x).contiguous()) + 1,
    "gather by a viewed table": lambda x, y, i, s, e: x.gather(0, i.view(-1, 1).expand(-1, 3)) + 1,
    "gather of one dimension": lambda x, y, i, s, e: x.sum(1).gather(0, i) + 1,
    "assignment": lambda x, y, i, s, e: (x.__setitem__(i, y[i] * 2), x * 1)[1],
    "index_put": lambda x, y, i, s, e: torch.index_put(x, (i,), y[i] * 2) + 1,
    "index_copy from behind": lambda x, y, i, s, e: torch.index_copy(x, -2, i, y[i] * 2) + 1,
    "scatter": lambda x, y, i, s, e: x.scatter(0, table(i, x), y[i] * 2) + 1,
    "scatter in place": lambda x, y, i, s, e: x.scatter_(0, table(i, x), y[i] * 2) + 1,
    "columns written": lambda x, y, i, s, e: torch.index_copy(x, 1, torch.arange(1, 3), y[:, :2] * 2) + 1,
    "columns from behind": lambda x, y, i, s, e: torch.index_copy(x, -1, torch.arange(2), y[:, :2] * 2) + 1,
    "a range of a range": lambda x, y, i, s, e: x.index_select(0, i).index_select(0, torch.arange(e - s)) + 1,
    "ranges of both": lambda x, y, i, s, e: x.index_select(0, i).index_select(0, i - s) + 1,
    "a nested range": lambda x, y, i, s, e: x[torch.arange(e)[i]] + 1,
    "a range picked by index_select": lambda x, y, i, s, e: x[torch.arange(e).index_select(0, i)] + 1,
    "a narrowed range": lambda x, y, i, s, e: x[torch.arange(e).narrow(0, s, e - s)] + 1,
    "the rest of a range": lambda x, y, i, s, e: x[torch.arange(e)[s:]] + 1,
    "a piece of a split": lambda x, y, i, s, e: x[torch.arange(e).split([s, e - s])[1]] + 1,
    "joined ranges": lambda x, y, i, s, e: x[torch.cat([torch.arange(s), i])] + 1,
    "a shifted range": lambda x, y, i, s, e: x[torch.arange(e - s) + s] + 1,
    "a range there and back": lambda x, y, i, s, e: x[i[:, None].squeeze(1)] + 1,
    "a flattened range": lambda x, y, i, s, e: x[i.view(1, -1, 1).reshape(-1)] + 1,
}


@pytest.mark.parametrize("fn", thinned(APPLIED.values(), 10), ids=APPLIED.keys())
@pytest.mark.parametrize(
    "decompose",
    [pytest.param(False, id="plain ATen"), pytest.param(True, id="decomposed", marks=pytest.mark.slow)],
)
def test_a_range_is_rewritten_in_every_spelling(fn, decompose):
    compiled = run(fn, decompose=decompose)
    assert compiled.applied()
    assert not compiled.missed()
    assert not [t for t in compiled.targets() if re.search(r"index|gather|\.scatter\.", t)]


def int32(rows, e):
    torch._check(e <= 2**31)
    return rows.to(torch.int32)


def test_an_int32_range_needs_to_fit():
    assert run(lambda x, y, i, s, e: x.index_select(0, int32(i, e)) + 1).applied()
    (remark,) = run(lambda x, y, i, s, e: x.index_select(0, i.int()) + 1).remarks("missed")
    assert remark.reason == "passes through torch.int32, which may be too narrow (R1)"
    assert remark.fix_it == "keep the index in int64, or add torch._check(end <= 2**31)"


MISSED = {
    "part of the columns": (
        lambda x, y, i, s, e: x.gather(0, i[:, None].expand(-1, 2)) + 1,
        r"the result would have other sizes: .* \(R3\)",
    ),
    "part of the columns written": (
        lambda x, y, i, s, e: x.scatter(0, i[:, None].expand(-1, 2), y[s:e] * 2) + 1,
        r"the index leaves out columns \(R1\)",
    ),
    "columns read": (
        lambda x, y, i, s, e: x.index_select(1, torch.arange(1, 3)) + 1,
        r"the result would have other strides \(R3\)",
    ),
    "columns gathered": (
        lambda x, y, i, s, e: x.gather(-1, torch.arange(1, 3).expand(x.shape[0], -1)) + 1,
        r"the result would have other strides \(R3\)",
    ),
    "a nested range that may not fit": (
        lambda x, y, i, s, e: x[i[torch.arange(s)[:2]]] + 1,
        r"index comes from .*\(R1\)",
    ),
    "a value for all rows": (
        lambda x, y, i, s, e: (x.__setitem__(i, 5.0), x * 1)[1],
        r"the source is broadcast over the rows \(R3\)",
    ),
    "columns assigned": (
        lambda x, y, i, s, e: (x.__setitem__((ALL, torch.arange(2)), y[:, :2] * 2), x * 1)[1],
        r"the target is written elsewhere too \(R5\)",
    ),
    "two ranges at once": (
        lambda x, y, i, s, e: x[i[:, None], torch.arange(2)] + 1,
        r"2 dimensions are indexed at once \(R1\)",
    ),
}


@pytest.mark.parametrize(("fn", "reason"), MISSED.values(), ids=MISSED.keys())
def test_what_means_something_else_names_its_rule(fn, reason):
    missed = check(ranged(fn), [X, Y, torch.tensor([2, 5])], unbacked=UNBACKED).missed()
    assert missed
    assert re.fullmatch(reason, missed[-1])


def test_a_gather_by_data_is_no_site():
    def f(x, i):
        return x.gather(0, i) + 1, x.scatter(1, i, x[:3] * 2)

    assert not check(f, [X, torch.tensor([[0, 2, 1]] * 3)]).remarks()


def test_take_along_dim_and_a_table_of_known_size():
    def f(x):
        rows = torch.arange(2, 5)
        return torch.take_along_dim(x, rows[:, None], 0) + 1, torch.take_along_dim(
            x, rows.view(3, 1), dim=-2
        ) * 2

    compiled = check(f, [X])
    assert compiled.applied() == ["aten.gather"] * 2
