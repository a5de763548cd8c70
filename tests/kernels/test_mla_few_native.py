"""Latent attention of few queries in C++: the meaning's numbers, a row that is the same in any batch, and no
other page.
"""

import pytest
import torch
from k3compile.kernels import mla_few_native
from k3compile.kernels.mla import mla_attend
from k3compile.kernels.mla_few_native import attend_few
from k3compile.kernels.native import ISAS, build, written_down
from lanes import thinned
from latent_calls import LENGTHS, SEEN, WIDTHS, call, in_float64, laid_out_otherwise

RANK = list(ISAS)
RUNNABLE = [isa for isa in RANK[RANK.index(build.best_isa()) :] if isa != "portable"]
MIXES = {"few": (LENGTHS, SEEN), "cut": ([17, 1, 50], [600, 3, 0])}


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("mla", request.param):
        pytest.skip(reason)
    return request.param


def run(args, isa, only=None, **more):
    """All rows, or those of one request, after which no row is told of; the others stay 7."""
    q, kv_b, pages, table, seen, cu, scale = args
    value = kv_b.shape[0] // q.shape[1] - (q.shape[2] - pages.shape[2] + kv_b.shape[1])
    out = torch.full((len(q), q.shape[1], value), 7.0)
    tokens = len(q)
    if only is not None:
        part = slice(only, only + 1)
        table, seen, cu, tokens = table[part], seen[part], cu[only : only + 2], int(cu[only + 1])
    attend_few(q[:tokens], kv_b, pages, table, seen, cu, scale, out[:tokens], isa=isa, **more)
    return out


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_it_is_as_close_to_float64_as_the_meaning(isa, widths, mix, kept):
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(4):
        args = call(*MIXES[mix], widths=widths, seed=seed)
        args[1] = args[1].to(kept)
        want = mla_attend.meaning(*in_float64(args))
        for i, found in enumerate((run(args, isa), mla_attend.meaning(*args))):
            assert torch.isfinite(found).all()
            squares[i] += (found.double() - want).square().sum()
    assert squares[0].sqrt() <= 1.1 * squares[1].sqrt(), (squares[0] / squares[1]).sqrt()


@pytest.mark.parametrize("heads", [3, 8], ids=["read as they lie", "turned"])
def test_a_query_sees_itself_and_what_was_before_and_no_more(isa, heads):
    args = call([9], [30], widths=(heads, 16, 8, 16, 32))
    want = run(args, isa)
    for i in range(9):
        changed = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        at = torch.arange(31 + i, 39)
        changed[2][changed[3][0, at // 4], at % 4] = 1e3  # large, not NaN: NaN times no weight is NaN
        assert torch.equal(run(changed, isa)[: i + 1], want[: i + 1])
        changed[2][args[3][0, (30 + i) // 4], (30 + i) % 4] += 1.0  # its own token's row
        assert not torch.equal(run(changed, isa)[i], want[i])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_a_row_does_not_depend_on_company_or_threads(isa, mix, kept):
    args = call(*MIXES[mix], widths=WIDTHS[0])
    args[1] = args[1].to(kept)
    want, bounds = run(args, isa), args[5].tolist()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(args, isa), want)
    finally:
        torch.set_num_threads(before)
    for r in range(len(args[4])):
        alone = run(args, isa, r)
        part = slice(bounds[r], bounds[r + 1])
        assert torch.equal(alone[part], want[part])
        assert (alone[: part.start] == 7.0).all()
        assert (alone[part.stop :] == 7.0).all()


@pytest.mark.parametrize("context", [1, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1025])
@pytest.mark.parametrize("heads", [1, 40])
def test_contexts_that_end_anywhere_in_a_block_or_part_are_right(isa, context, heads):
    args = call([1], [context - 1], widths=(heads, 16, 8, 16, 32))
    torch.testing.assert_close(run(args, isa), mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)


def test_a_long_context_of_many_queries_has_longer_parts_and_the_same_numbers(isa):
    heads, context = 128, 9000  # 16 queries of all heads over more than 16384 / 2048 parts of 512 tokens
    args = call([16], [context], widths=(heads, 2, 2, 2, 16))
    torch.testing.assert_close(run(args, isa), mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)


def test_rows_whose_parts_are_more_than_one_pass_holds_are_all_there(isa):
    heads, rows = 64, 20  # each has 16 queries of all heads over two parts
    args = call([16] * rows, [600] * rows, widths=(heads, 2, 2, 2, 512))
    assert rows * 16 * heads * 2 * 514 > 1 << 24
    torch.testing.assert_close(run(args, isa), mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)


def test_scores_far_apart_stay_finite(isa):
    args = call([1, 2], [600, 40])
    args[0] *= 1e4
    torch.testing.assert_close(run(args, isa), mla_attend.meaning(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_strided_arguments_are_read_where_they_are(isa, kept):
    args = call()
    args[1] = args[1].to(kept)
    want = run(args, isa)
    for other in laid_out_otherwise(args, {"q": 0, "kv_b": 1, "pages": 2, "table": 3}):
        assert torch.equal(run(other, isa), want)


def test_a_long_row_is_computed_in_pieces_each_as_it_is_alone(isa):
    q, kv_b, pages, table, seen, _, scale = args = call([35], [600])
    want = run(args, isa)
    for first, last in ((0, 16), (16, 32), (32, 35)):
        cut = q[first:last], kv_b, pages, table, seen + first, torch.tensor([0, last - first]), scale
        assert torch.equal(run(cut, isa), want[first:last])


def test_token_rows_past_the_last_bound_become_zero_and_are_not_read(isa):
    args = call()
    want = run(args, isa)
    args[0] = torch.cat([args[0], torch.full((3, *args[0].shape[1:]), torch.nan)])
    got = run(args, isa)
    assert torch.equal(got[:-3], want)
    assert (got[-3:] == 0).all()
    assert (run([*args[:5], torch.zeros(7, dtype=torch.int64), args[6]], isa) == 0).all()


def test_it_reads_lengths_and_pages_anew_whenever_its_call_is_made_again(isa):
    args, calls, kept = call(), [], []
    args[4] -= args[4] // 2
    with written_down(calls, kept):
        attend_few(*args, out := torch.empty(29, 3, 16), isa=isa)
    ((function, packed),) = calls
    others = call(seed=1)
    for mine, other in zip(args[:6], others):
        mine.copy_(other)
    assert function(*packed) == 0
    assert torch.equal(out, run(others, isa))


def test_a_request_with_more_tokens_than_its_pages_hold_is_refused_before_anything_is_read(isa):
    args = call([1, 0, 2], [8, 9, 5])
    args[4][1] = 10**6  # a request without a row has no context
    held = args[3].shape[1] * 4
    run(args, isa)
    for own in (None, torch.zeros(3, 24)):
        args[4][2] = held - 2 if own is None else held
        run(args, isa, own=own)
        args[4][2] += 1
        with pytest.raises(ValueError, match=f"request 2 has more tokens than the {held} that its row"):
            run(args, isa, own=own)


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    q, kv_b, pages, *_ = call()

    def said(q=q, kv_b=kv_b, pages=pages, latent=32):
        return mla_few_native.objection((q,), kv_b, pages, latent)

    if reason := said():
        pytest.skip(reason)
    assert said(kv_b=None) is None
    assert said(kv_b=kv_b.bfloat16()) is None
    assert said(pages=pages.to("meta")) == "meta tensors"
    assert said(q=q.double()) == "some arguments are torch.float64, not float32"
    assert said(pages=pages.bfloat16()) == "some arguments are torch.bfloat16, not float32"
    assert said(kv_b=kv_b.half()) == "kv_b is torch.float16, not float32 or bfloat16"
    assert said(latent=24) == "latents of 24 channels, not a multiple of 16"
    apart = "channels of kv_b or of pages are not side by side"
    assert said(pages=pages.mT.contiguous().mT) == apart
    assert said(kv_b=kv_b.T.contiguous().T) == apart
    monkeypatch.setattr(mla_few_native, "best_isa", lambda: "portable")
    assert said() == "vectors of four lanes gain nothing"
