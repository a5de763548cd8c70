"""Paged latent attention: absorbed and expanded rows against plain attention over the whole context."""

import itertools

import pytest
import torch
from k3compile.kernels import mla
from k3compile.kernels.samples import row_bounds
from kda_oracle import worst
from torch.nn import functional as F

k3 = torch.ops.k3
HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 3, 8, 4, 6, 16, 4
SCALE = (NOPE + ROPE) ** -0.5


def plain(q, kv_b, context, seen):
    """Expand everything, then torch's attention with a mask: q [T, H, n+r], context [seen+T, L+r]."""
    kv = (context[:, :LATENT] @ kv_b.T).view(len(context), HEADS, NOPE + VALUE)
    pe = context[:, None, LATENT:].expand(-1, HEADS, -1)
    k, v = torch.cat([kv[..., :NOPE], pe], -1), kv[..., NOPE:]
    mask = torch.arange(len(context)) <= (seen + torch.arange(len(q)))[:, None]
    o = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=SCALE
    )
    return o[0].transpose(0, 1)


def paged(lengths, seen, dtype=torch.float64, seed=0):
    """Arguments of mla_attend and each row's context; pages are NaN wherever no token of a request lies."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)

    contexts = [normal(s + n, LATENT + ROPE) for s, n in zip(seen, lengths)]
    need = [-(-len(c) // PAGE) for c in contexts]
    order = torch.randperm(sum(need), generator=source) + 1
    table = torch.zeros(len(lengths), max(need, default=0) + 2, dtype=torch.int64)
    for row, owned in zip(table, order.split(need)):
        row[: len(owned)] = owned
    pages = torch.full((sum(need) + 3, PAGE, LATENT + ROPE), torch.nan, dtype=dtype)
    seen = torch.tensor(seen, dtype=torch.int64)
    old = [c[:s] for c, s in zip(contexts, seen)]
    k3.mla_write(torch.cat(old), pages, table, torch.zeros_like(seen), row_bounds([len(c) for c in old]))
    new, cu = torch.cat([c[s:] for c, s in zip(contexts, seen)]), row_bounds(lengths)
    k3.mla_write(new, pages, table, seen, cu)
    q, kv_b = normal(sum(lengths), HEADS, NOPE + ROPE), normal(HEADS * (NOPE + VALUE), LATENT) / 4
    return (q, kv_b, pages, table, seen, cu, SCALE), contexts


MIXES = {
    "decode": ([1, 1, 1], [0, 9, 130]),
    "verify": ([9, 2, 5], [40, 0, 7]),
    "prefill": ([40], [0]),
    "chunk": ([40], [61]),
    "mixed": ([5, 1, 0, 17, 1, 16, 70], [3, 50, 6, 20, 0, 33, 12]),
}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_each_row_is_plain_attention_over_its_own_context(mix, dtype, bound):
    lengths, seen = MIXES[mix]
    args, contexts = paged(lengths, seen, dtype)
    o = k3.mla_attend(*args)
    for r, context in enumerate(contexts):
        row = slice(args[5][r], args[5][r + 1])
        if lengths[r]:
            want = plain(args[0][row].double(), args[1].double(), context.double(), seen[r])
            assert worst(o[row], want) < bound


@pytest.mark.parametrize("elements", [1, 300, 4000])
@pytest.mark.parametrize("mix", MIXES)
def test_blocks_of_any_size_give_the_same(mix, elements, monkeypatch):
    args, _ = paged(*MIXES[mix])
    want = k3.mla_attend(*args)
    monkeypatch.setattr(mla, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(mla, "QUERY_BLOCK", 7)
    assert worst(k3.mla_attend(*args), want) < 1e-13


@pytest.mark.parametrize("mix", MIXES)
def test_absorbed_equals_expanded(mix, monkeypatch):
    args, _ = paged(*MIXES[mix])
    results = []
    for most in (0, 100):
        monkeypatch.setattr(mla, "absorbed_limit", lambda *widths, most=most: most)
        results.append(k3.mla_attend(*args))
    assert worst(results[1], results[0]) < 1e-13


def test_scores_far_apart_do_not_overflow():
    args, contexts = paged([3, 30], [500, 100], torch.float32)
    q = args[0] * 300
    o = k3.mla_attend(q, *args[1:])
    for r, seen in enumerate((500, 100)):
        row = slice(args[5][r], args[5][r + 1])
        want = plain(q[row].double(), args[1].double(), contexts[r].double(), seen)
        assert worst(o[row], want) < 1e-4


def test_memory_stays_bounded_on_a_long_prefill(monkeypatch):
    largest = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a, **k: largest.append(bmm(*a, **k)) or largest[-1])
    args, _ = paged([600], [1400], torch.float32)
    monkeypatch.setattr(mla, "BLOCK_ELEMENTS", 1 << 14)
    monkeypatch.setattr(mla, "QUERY_BLOCK", 16)
    k3.mla_attend(*args)
    assert max(x.numel() for x in largest) <= 16 * 2000


def test_pages_of_the_whole_pool_or_of_a_slice_of_it():
    args, _ = paged([1, 5, 20], [30, 2, 9])
    want = k3.mla_attend(*args)
    wide = torch.full((*args[2].shape[:2], 2, args[2].shape[2]), torch.nan, dtype=torch.float64)
    wide[:, :, 0] = args[2]
    gaps = torch.full((args[2].shape[0], 2, *args[2].shape[1:]), torch.nan, dtype=torch.float64)
    gaps[:, 0] = args[2]
    for pages in (wide[:, :, 0], gaps[:, 0]):
        assert torch.equal(k3.mla_attend(*args[:2], pages, *args[3:]), want)


def test_write_rounds_to_the_pages_and_touches_nothing_else():
    pages = torch.full((6, PAGE, 8), 7.0).bfloat16()
    latent, table = torch.randn(6, 8), torch.tensor([[4, 2], [5, 0]])
    k3.mla_write(latent, pages, table, torch.tensor([3, 0]), torch.tensor([0, 4, 6]))
    assert torch.equal(pages[4, 3], latent[0].bfloat16())
    assert torch.equal(pages[2, :3], latent[1:4].bfloat16())
    assert torch.equal(pages[5, :2], latent[4:].bfloat16())
    rest = pages.clone()
    rest[4, 3], rest[2, :3], rest[5, :2] = 7.0, 7.0, 7.0
    assert (rest == 7.0).all()


def test_rows_past_the_last_bound_are_not_read():
    args, _ = paged([2, 20], [5, 0])
    want = k3.mla_attend(*args)
    tail = torch.full((3, HEADS, NOPE + ROPE), torch.nan, dtype=torch.float64)
    got = k3.mla_attend(torch.cat([args[0], tail]), *args[1:])
    assert torch.equal(got[:22], want)
    assert (got[22:] == 0).all()


def test_the_order_of_rows_changes_nothing():
    lengths, seen = [1, 3, 1, 40], [70, 9, 0, 5]
    args, contexts = paged(lengths, seen)
    q, table, cu = args[0], args[3], args[5]
    want = [plain(q[cu[r] : cu[r + 1]], args[1], contexts[r], seen[r]) for r in range(4)]
    for order in itertools.permutations(range(4)):
        bounds = row_bounds([lengths[r] for r in order])
        rows = torch.cat([q[cu[r] : cu[r + 1]] for r in order])
        places = list(order)
        o = k3.mla_attend(rows, args[1], args[2], table[places], args[4][places], bounds, SCALE)
        for place, r in enumerate(order):
            assert worst(o[bounds[place] : bounds[place + 1]], want[r]) < 1e-13


def test_rows_are_absorbed_while_that_is_fewer_products():
    for latent, expanded_width in ((512, 256), (256, 256), (32, 32), (16, 14)):
        limit = mla.absorbed_limit(latent, expanded_width)
        for queries in (limit, limit + 1):
            apart = queries * 2 * latent  # products a key and head, absorbed
            together = latent * expanded_width + queries * expanded_width
            assert (apart <= together) == (queries == limit)
