"""Attention of draft blocks in C++: the meaning's numbers, a block that is the same in any batch."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import mla_block_native
from k3compile.kernels.mla_block import mla_attend_block
from k3compile.kernels.native import build
from k3compile.passes.lower import Lower
from latent_calls import WIDTHS, call, in_float64, laid_out_otherwise

LENGTHS, SEEN = [7, 0, 1, 16, 8, 30], [0, 3, 40, 1100, 511, 33]


def block(lengths=LENGTHS, seen=SEEN, widths=WIDTHS[1], seed=0, kept=torch.float32):
    """Arguments of mla_attend_block. What blocks see of themselves lies in no page: those are NaN there."""
    q, kv_b, pages, table, before, cu, scale = call(lengths, seen, widths, seed=seed)
    for pages_of, n, s in zip(table, lengths, seen):
        at = torch.arange(s, s + n)
        pages[pages_of[at // 4], at % 4] = torch.nan
    own = torch.randn(len(q), pages.shape[2], generator=torch.Generator().manual_seed(seed))
    return [q, kv_b.to(kept), pages, table, before, cu, own, scale]


@pytest.fixture(autouse=True)
def there_is_a_kernel():
    if reason := mla_block_native.objection(*block()):
        pytest.skip(reason)


def run(args):
    return mla_block_native.attend_block_native(*args)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_it_is_as_close_to_float64_as_the_meaning(widths, kept):
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(4):
        args = block(widths=widths, seed=seed, kept=kept)
        want = mla_attend_block.meaning(*in_float64(args))
        for i, found in enumerate((run(args), mla_attend_block.meaning(*args))):
            assert torch.isfinite(found).all()
            squares[i] += (found.double() - want).square().sum()
    assert squares[0].sqrt() <= 1.1 * squares[1].sqrt(), (squares[0] / squares[1]).sqrt()


def test_a_block_does_not_depend_on_company_or_threads():
    q, kv_b, pages, table, seen, cu, own, scale = args = block(widths=WIDTHS[0])
    want, before = run(args), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(args), want)
    finally:
        torch.set_num_threads(before)
    for r, count in enumerate(LENGTHS):
        part = slice(cu[r], cu[r + 1])
        places = table[r : r + 1], seen[r : r + 1], torch.tensor([0, count])
        assert torch.equal(run([q[part], kv_b, pages, *places, own[part], scale]), want[part])


def test_every_row_sees_all_of_its_own_block_and_nothing_of_another():
    args = block([7, 5], [30, 9])
    want = run(args)
    for at in (0, 6):
        changed = [*args[:6], args[6].clone(), args[7]]
        changed[6][at] += 1.0
        got = run(changed)
        assert (got[:7] != want[:7]).any(-1).all()
        assert torch.equal(got[7:], want[7:])


def test_no_page_and_no_own_row_is_written():
    args = block()
    before = [a.clone() for a in args[:7]]
    run(args)
    for a, b in zip(args, before):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_rows_past_the_last_bound_are_not_read():
    args = block([2, 7], [5, 0])
    want = run(args)
    for i in (0, 6):
        args[i] = torch.cat([args[i], torch.full((3, *args[i].shape[1:]), torch.nan)])
    got = run(args)
    assert torch.equal(got[:9], want)
    assert (got[9:] == 0).all()
    assert run(block([], [])).shape == (0, 3, 16)


def test_strided_arguments_are_read_where_they_are():
    args = block()
    want = run(args)
    for other in laid_out_otherwise(args, {"q": 0, "kv_b": 1, "pages": 2, "table": 3, "own": 6}):
        assert torch.equal(run(other), want)
    args[6] = args[6].T.contiguous().T
    assert torch.equal(run(args), want)


def test_it_objects_to_what_it_cannot_do():
    args, said = block(), mla_block_native.objection
    assert said(*args) is None
    assert said(*args[:6], args[6].bfloat16(), args[7]) == "some arguments are torch.bfloat16, not float32"
    assert said(*block(widths=(2, 4, 4, 4, 24))) == "latents of 24 channels, not a multiple of 16"


def test_cached_code_runs_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the reference computes it"):
        got = torch.ops.k3.mla_attend_block.native(*block())
    assert torch.equal(got, mla_attend_block.meaning(*block()))


def test_it_is_chosen_and_a_report_says_so():
    args = block()
    compiled = Compiled(lambda *a: mla_attend_block.overload(*a), (Lower(),))
    got = compiled(*args)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"
    torch.testing.assert_close(got, mla_attend_block.meaning(*args), rtol=1e-5, atol=1e-6)
