"""Attention of a draft block: against plain attention over context and block, without any mask."""

import itertools

import pytest
import torch
from k3compile.kernels import mla, mla_block
from k3compile.kernels.samples import row_bounds
from kda_oracle import worst
from torch.nn import functional as F

k3 = torch.ops.k3
HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 3, 8, 4, 6, 16, 4
SCALE = (NOPE + ROPE) ** -0.5


def plain(q, kv_b, context, own):
    """q [k, H, n+r] of one request, context [seen, L+r], own [k, L+r]: every query sees every row."""
    rows = torch.cat([context, own])
    kv = (rows[:, :LATENT] @ kv_b.T).view(len(rows), HEADS, NOPE + VALUE)
    k = torch.cat([kv[..., :NOPE], rows[:, None, LATENT:].expand(-1, HEADS, -1)], -1)
    parts = (x.transpose(0, 1)[None] for x in (q, k, kv[..., NOPE:]))
    return F.scaled_dot_product_attention(*parts, scale=SCALE)[0].transpose(0, 1)


def paged(lengths, seen, dtype=torch.float64, seed=0):
    """Arguments of mla_attend_block and each context; pages are NaN wherever no token of a context lies."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    contexts = [normal(s, LATENT + ROPE) for s in seen]
    need = [-(-s // PAGE) for s in seen]
    order = torch.randperm(sum(need), generator=source) + 1
    table = torch.zeros(len(lengths), max(need, default=0) + 1, dtype=torch.int64)
    for row, owned in zip(table, order.split(need)):
        row[: len(owned)] = owned
    pages = torch.full((sum(need) + 2, PAGE, LATENT + ROPE), torch.nan, dtype=dtype)
    start, before = torch.zeros(len(seen), dtype=torch.int64), torch.tensor(seen, dtype=torch.int64)
    k3.mla_write(torch.cat(contexts), pages, table, start, row_bounds(seen))
    rows = sum(lengths)
    q, kv_b = normal(rows, HEADS, NOPE + ROPE), normal(HEADS * (NOPE + VALUE), LATENT) / 4
    own = normal(rows, LATENT + ROPE)
    return (q, kv_b, pages, table, before, row_bounds(lengths), own, SCALE), contexts


MIXES = {
    "one": ([7], [130]),
    "no context": ([7], [0]),
    "batch": ([7, 7, 7], [40, 3, 77]),
    "single rows": ([1, 1], [9, 0]),
    "ragged": ([5, 1, 0, 16, 8], [3, 50, 6, 0, 33]),
}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_each_row_sees_its_context_and_all_of_its_block(mix, dtype, bound):
    lengths, seen = MIXES[mix]
    args, contexts = paged(lengths, seen, dtype)
    o = k3.mla_attend_block(*args)
    for r, context in enumerate(contexts):
        row = slice(args[5][r], args[5][r + 1])
        if lengths[r]:
            want = plain(args[0][row].double(), args[1].double(), context.double(), args[6][row].double())
            assert worst(o[row], want) < bound


@pytest.mark.parametrize("elements", [1, 300, 4000])
@pytest.mark.parametrize("mix", MIXES)
def test_blocks_of_any_size_give_the_same(mix, elements, monkeypatch):
    args, _ = paged(*MIXES[mix])
    want = k3.mla_attend_block(*args)
    monkeypatch.setattr(mla, "BLOCK_ELEMENTS", elements)
    assert worst(k3.mla_attend_block(*args), want) < 1e-13


def test_a_context_is_read_once_and_not_once_a_row(monkeypatch):
    fetched, fetch = [], mla.fetch
    monkeypatch.setattr(mla, "fetch", lambda *a: fetched.append(fetch(*a)) or fetched[-1])
    args, _ = paged([7, 7], [200, 90])
    mla_block.mla_attend_block.meaning(*args)
    assert sum(x.shape[0] * x.shape[1] for x in fetched) <= 2 * 200


def test_no_page_is_written():
    args, _ = paged([7, 3], [20, 9])
    before = args[2].clone()
    k3.mla_attend_block(*args)
    assert torch.equal(args[2].nan_to_num(7.0), before.nan_to_num(7.0))


def test_scores_far_apart_do_not_overflow():
    args, contexts = paged([7], [500], torch.float32)
    q = args[0] * 300
    want = plain(q.double(), args[1].double(), contexts[0].double(), args[6].double())
    assert worst(k3.mla_attend_block(q, *args[1:]), want) < 1e-4


def test_rows_past_the_last_bound_are_not_read():
    args, _ = paged([2, 7], [5, 0])
    want = k3.mla_attend_block(*args)
    tail = torch.full((3, HEADS, NOPE + ROPE), torch.nan, dtype=torch.float64)
    beyond = torch.full((3, LATENT + ROPE), torch.nan, dtype=torch.float64)
    got = k3.mla_attend_block(torch.cat([args[0], tail]), *args[1:6], torch.cat([args[6], beyond]), args[7])
    assert torch.equal(got[:9], want)
    assert (got[9:] == 0).all()


def test_the_order_of_requests_changes_nothing():
    lengths, seen = [1, 3, 7], [70, 9, 0]
    args, contexts = paged(lengths, seen)
    q, kv_b, pages, table, before, cu, own, scale = args
    cut = [slice(cu[r], cu[r + 1]) for r in range(3)]
    want = [plain(q[cut[r]], kv_b, contexts[r], own[cut[r]]) for r in range(3)]
    for order in itertools.permutations(range(3)):
        places, bounds = list(order), row_bounds([lengths[r] for r in order])
        rows = torch.cat([q[cut[r]] for r in order])
        mine = torch.cat([own[cut[r]] for r in order])
        o = k3.mla_attend_block(rows, kv_b, pages, table[places], before[places], bounds, mine, scale)
        for place, r in enumerate(order):
            assert worst(o[bounds[place] : bounds[place + 1]], want[r]) < 1e-13
