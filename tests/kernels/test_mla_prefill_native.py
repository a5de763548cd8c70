"""Latent attention of many queries in C++: the meaning's numbers, a row that is the same in any batch, and no
other page.
"""

import pytest
import torch
from k3compile.kernels.mla import absorbed_limit, mla_attend
from k3compile.kernels.mla_few_native import attend_few
from k3compile.kernels.mla_prefill_native import attend_many
from k3compile.kernels.native import ISAS, build, written_down
from lanes import thinned
from latent_calls import WIDTHS, call, in_float64, laid_out_otherwise

RANK = list(ISAS)
RUNNABLE = [isa for isa in RANK[RANK.index(build.best_isa()) :] if isa != "portable"]
LENGTHS, SEEN = [37, 0, 1, 200, 129], [0, 3, 40, 300, 127]
ODD = [*WIDTHS, (2, 7, 3, 20, 24), (2, 0, 9, 33, 20)]  # and latents that fill no vector


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("mla_prefill", request.param):
        pytest.skip(reason)
    return request.param


def run(args, isa, only=None):
    """All rows, or those of one request; the others stay 7."""
    q, kv_b, pages, table, seen, cu, scale = args
    value = kv_b.shape[0] // q.shape[1] - (q.shape[2] - pages.shape[2] + kv_b.shape[1])
    out = torch.full((len(q), q.shape[1], value), 7.0)
    if only is not None:
        table, seen, cu = table[only : only + 1], seen[only : only + 1], cu[only : only + 2]
    attend_many(q, kv_b, pages, table, seen, cu, scale, out, isa=isa)
    return out


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", ODD, ids=str)
def test_it_is_as_close_to_float64_as_the_meaning(isa, widths, kept):
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(3):
        args = call(LENGTHS, SEEN, widths, seed=seed)
        args[1] = args[1].to(kept)
        want = mla_attend.meaning(*in_float64(args))
        for i, found in enumerate((run(args, isa), mla_attend.meaning(*args))):
            assert torch.isfinite(found).all()
            squares[i] += (found.double() - want).square().sum()
    assert squares[0].sqrt() <= 1.1 * squares[1].sqrt(), (squares[0] / squares[1]).sqrt()


@pytest.mark.parametrize("seen", [0, 100])
def test_a_query_sees_itself_and_what_was_before_and_no_more(isa, seen):
    args = call([150], [seen])
    want = run(args, isa)
    for i in (0, 5, 6, 15, 16, 63, 95, 96, 127, 128, 149):
        changed = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        at = torch.arange(seen + i + 1, seen + 150)
        changed[2][changed[3][0, at // 4], at % 4] = 1e3  # large, not NaN: NaN times no weight is NaN
        assert torch.equal(run(changed, isa)[: i + 1], want[: i + 1])
        changed[2][args[3][0, (seen + i) // 4], (seen + i) % 4] += 1.0
        assert not torch.equal(run(changed, isa)[i], want[i])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_company_or_threads(isa, kept):
    args = call(LENGTHS, SEEN)
    args[1] = args[1].to(kept)
    want, bounds = run(args, isa), args[5].tolist()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(args, isa), want)
    finally:
        torch.set_num_threads(before)
    for r in range(len(LENGTHS)):
        alone = run(args, isa, r)
        part = slice(bounds[r], bounds[r + 1])
        assert torch.equal(alone[part], want[part])
        assert (alone[: part.start] == 7.0).all()
        assert (alone[part.stop :] == 7.0).all()


def test_how_far_a_stretch_goes_changes_no_bit(isa):
    """With many heads a stretch of keys and values is shorter: the same head must come out of it."""
    heads, (nope, rope, value, latent) = 160, (8, 4, 6, 16)
    args = call([200], [2300], (heads, nope, rope, value, latent))
    assert heads * 2500 * (nope + rope + value) > 1 << 22
    want = run(args, isa)
    for first in (0, 77, 159):
        part, width = slice(first, first + 1), nope + value
        alone = run([args[0][:, part], args[1][first * width : (first + 1) * width], *args[2:]], isa)
        assert torch.equal(alone, want[:, part])
    torch.testing.assert_close(want, mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 95, 96, 97, 193])
@pytest.mark.parametrize("context", [193, 255, 256, 257])
def test_rows_that_end_anywhere_in_a_block_are_right(isa, count, context):
    args = call([count], [context - count])
    torch.testing.assert_close(run(args, isa), mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)


def test_scores_far_apart_stay_finite(isa):
    args = call([100, 20], [600, 0])
    args[0] *= 1e4
    torch.testing.assert_close(run(args, isa), mla_attend.meaning(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_strided_arguments_are_read_where_they_are(isa, kept):
    args = call(LENGTHS, SEEN)
    args[1] = args[1].to(kept)
    want = run(args, isa)
    for other in laid_out_otherwise(args, {"q": 0, "kv_b": 1, "pages": 2, "table": 3}):
        assert torch.equal(run(other, isa), want)


def computed(attend, isa, count, seen, widths=(1, 16, 0, 16, 32)):
    """Whether a kernel that leaves requests to the other takes one of so many rows; all are zero."""
    _, nope, rope, value, latent = widths
    q = torch.zeros(1, 1, nope + rope).expand(count, -1, -1)
    pages = torch.zeros(1, 1, latent + rope).expand(1, seen + count, -1)
    out = torch.full((1, 1, value), 7.0).expand(count, -1, -1)
    where = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([seen]), torch.tensor([0, count])
    attend(q, torch.zeros(nope + value, latent), pages, *where, 1.0, out, divided=True, isa=isa)
    return (out[0] == 0).all().item()


def test_it_pays_from_the_queries_on_that_make_up_for_the_expansion(isa):
    limit = absorbed_limit(32, 32)  # of a context far longer than the row
    for many, seen in ((500, 0), (11, 0), (limit + 2, 1 << 14), (limit + 2, 1 << 17)):
        assert computed(attend_many, isa, many, seen)
        assert not computed(attend_few, isa, many, seen)
    for few, seen in ((1, 0), (10, 0), (limit - 2, 1 << 14), (limit - 2, 1 << 17)):
        assert computed(attend_few, isa, few, seen)
        assert not computed(attend_many, isa, few, seen)
    narrow = (1, 128, 0, 128, 64)
    assert not computed(attend_many, isa, 10**6, 0, narrow), "there absorbed queries always cost less"


def test_a_request_with_more_tokens_than_its_pages_hold_is_refused_before_anything_is_read(isa):
    args = call([1, 0, 20], [8, 9, 5])
    args[4][1] = 10**6  # a request without a row has no context
    held = args[3].shape[1] * 4
    args[4][2] = held - 20
    run(args, isa)
    args[4][2] += 1
    with pytest.raises(ValueError, match=f"request 2 has more tokens than the {held} that its row"):
        run(args, isa)


def test_it_reads_lengths_and_pages_anew_whenever_its_call_is_made_again(isa):
    args, calls, kept = call(LENGTHS, SEEN), [], []
    args[4] -= args[4] // 2
    with written_down(calls, kept):
        attend_many(*args, out := torch.empty(len(args[0]), 3, 16), isa=isa)
    ((function, packed),) = calls
    others = call(LENGTHS, SEEN, seed=1)
    for mine, other in zip(args[:6], others):
        mine.copy_(other)
    assert function(*packed) == 0
    assert torch.equal(out, run(others, isa))
