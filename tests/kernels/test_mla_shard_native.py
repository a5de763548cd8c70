"""Attention to one rank's rows of a context in C++: the meaning's numbers and sums, row by row the same."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import mla_shard_native
from k3compile.kernels.context_place import local_length
from k3compile.kernels.mla import paging
from k3compile.kernels.mla_shard import mla_attend_shard
from k3compile.kernels.native import build
from k3compile.kernels.samples import Draw
from k3compile.passes.lower import Lower
from latent_calls import in_float64, laid_out_otherwise

LENGTHS, SEEN = [1, 0, 9, 1, 2, 40], [0, 3, 40, 3100, 0, 505]
PLACES = [(0, 1, 1), (1, 2, 1), (3, 4, 1), (2, 4, 4)]
WIDTHS = [(3, 32, 8), (16, 256, 64), (1, 16, 0)]  # heads of all ranks, L, r


def shard(lengths=LENGTHS, seen=SEEN, place=PLACES[1], widths=WIDTHS[0], seed=0):
    """Arguments of mla_attend_shard; pages are NaN wherever no row of a context lies."""
    (heads, latent, rope), (_, ranks, _), rows = widths, place, 8
    draw, size = Draw(torch.float32, seed), rows * ranks
    count = 3 + sum(-(-(s + n) // size) for s, n in zip(seen, lengths))
    table, before, cu = paging(draw, lengths, seen, count, size)
    pages, place = torch.full((count, rows, latent + rope), torch.nan), torch.tensor(place)
    for pages_of, here in zip(table, local_length(before + cu.diff(), place).tolist()):
        at = torch.arange(here)
        pages[pages_of[at // rows], at % rows] = draw.normal(here, latent + rope)
    q = draw.normal(heads, sum(lengths), latent + rope)
    return [q, pages, table, before, cu, place, latent, (latent + rope) ** -0.5]


@pytest.fixture(autouse=True)
def there_is_a_kernel():
    if reason := mla_shard_native.objection(*shard()):
        pytest.skip(reason)


def run(args):
    return mla_shard_native.attend_shard_native(*args)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_it_is_as_close_to_float64_as_the_meaning(widths, place):
    squares = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(40 if widths[1] < 64 else 4):  # few values a draw: chance would decide the ratio
        args = shard(place=place, widths=widths, seed=seed)
        want = mla_attend_shard.meaning(*in_float64(args))
        for i, found in enumerate((run(args), mla_attend_shard.meaning(*args))):
            for j, (a, b) in enumerate(zip(found, want)):
                nowhere = b == -torch.inf
                assert torch.equal(a == -torch.inf, nowhere)
                squares[i, j] += (a.double() - b)[~nowhere].square().sum()
    assert (squares[0].sqrt() <= 1.1 * squares[1].sqrt()).all(), (squares[0] / squares[1]).sqrt()


def test_a_query_without_a_row_here_finds_nothing():
    args = shard([3, 1], [0, 0], (1, 4, 1))  # tokens 0, 1, 2 of one request and 0 of another
    o, lse = run(args)
    assert (lse == -torch.inf).tolist() == [[True, False, False, True]] * 3
    assert (o == 0).all(-1).tolist() == [[True, False, False, True]] * 3


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_row_does_not_depend_on_company_or_threads(widths):
    q, pages, table, seen, cu, *rest = args = shard(widths=widths)
    want, before = run(args), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, run(args), want))
    finally:
        torch.set_num_threads(before)
    for r, count in enumerate(LENGTHS):
        part = slice(cu[r], cu[r + 1])
        bounds = torch.tensor([0, count])
        o, lse = run([q[:, part], pages, table[r : r + 1], seen[r : r + 1], bounds, *rest])
        assert torch.equal(o, want[0][:, part])
        assert torch.equal(lse, want[1][:, part])


def test_each_row_of_a_verify_has_its_own_local_length():
    args = shard([5], [10], (0, 2, 1))
    want, _ = run(args)
    later = args[1].clone()
    later[args[2][0, 0], 7] += 3.0  # token 14, the last: only its own query may see it
    got, _ = run([args[0], later, *args[2:]])
    assert torch.equal(got[:, :4], want[:, :4])
    assert not torch.equal(got[:, 4], want[:, 4])


def test_rows_past_the_last_bound_are_not_read_and_requests_past_the_rows_wait():
    args = shard()
    want, sums = run(args)
    beyond = torch.full((3, 3, args[0].shape[2]), torch.nan)
    o, lse = run([torch.cat([args[0], beyond], 1), *args[1:]])
    assert torch.equal(o[:, :-3], want)
    assert torch.equal(lse[:, :-3], sums)
    assert (o[:, -3:] == 0).all()
    assert (lse[:, -3:] == -torch.inf).all()
    first = int(args[4][4])
    o, lse = run([args[0][:, :first], *args[1:]])
    assert torch.equal(o, want[:, :first])
    assert torch.equal(lse, sums[:, :first])
    o, lse = run([args[0][:, :0], *args[1:]])
    assert (o.shape, lse.shape) == ((3, 0, 32), (3, 0))


def test_a_nan_that_was_written_is_not_hidden():
    args = shard([1, 1], [9, 9])
    args[1][args[2][0, 0]] = torch.nan
    o, lse = run(args)
    assert o[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert o[:, 1].isfinite().all()


def test_strided_arguments_are_read_where_they_are():
    args = shard()
    want = run(args)
    for other in laid_out_otherwise(args, {"q": 0, "pages": 1, "table": 2}):
        assert all(map(torch.equal, run(other), want))


def test_it_objects_to_what_it_cannot_do():
    args, said = shard(), mla_shard_native.objection
    assert said(*args) is None
    assert said(args[0].double(), *args[1:]) == "some arguments are torch.float64, not float32"
    assert said(*args[:6], 24, args[7]) == "latents of 24 channels, not a multiple of 16"


def test_cached_code_runs_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the reference computes it"):
        got = torch.ops.k3.mla_attend_shard.native(*shard())
    assert all(map(torch.equal, got, mla_attend_shard.meaning(*shard())))


def test_it_is_chosen_and_a_report_says_so():
    args = shard()
    compiled = Compiled(lambda *a: mla_attend_shard.overload(*a), (Lower(),))
    compiled(*args)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"
