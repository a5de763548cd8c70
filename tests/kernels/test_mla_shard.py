"""Attention over shards of a context, merged, against attention over all of it; who writes which row."""

import itertools

import pytest
import torch
from k3compile.kernels import mla_shard
from k3compile.kernels.context_place import local_length
from k3compile.kernels.mla import paging
from k3compile.kernels.samples import Draw, row_bounds
from kda_oracle import worst

k3 = torch.ops.k3
HEADS, NOPE, ROPE, VALUE, LATENT = 3, 8, 4, 6, 16
SCALE = (NOPE + ROPE) ** -0.5


def places(ranks, interleave):
    return [torch.tensor([rank, ranks, interleave]) for rank in range(ranks)]


def sharded(lengths, seen, ranks, interleave, dtype=torch.float64):
    """(arguments of mla_attend over the whole context, every rank's pages), all NaN where nobody wrote."""
    draw, size = Draw(dtype), 2 * ranks * interleave
    most = 3 + sum(-(-(s + n) // size) for s, n in zip(seen, lengths))
    table, before, cu = paging(draw, lengths, seen, most, size)
    whole = torch.full((most, size, LATENT + ROPE), torch.nan, dtype=dtype)
    shards = [torch.full((most, size // ranks, LATENT + ROPE), torch.nan, dtype=dtype) for _ in range(ranks)]
    for start, counts in ((torch.zeros_like(before), seen), (before, lengths)):
        rows, bounds = draw.normal(sum(counts), LATENT + ROPE), row_bounds(counts)
        k3.mla_write(rows, whole, table, start, bounds)
        for pages, place in zip(shards, places(ranks, interleave)):
            k3.mla_write_shard(rows, pages, table, start, bounds, place)
    q = draw.normal(sum(lengths), HEADS, NOPE + ROPE)
    kv_b = draw.normal(HEADS * (NOPE + VALUE), LATENT) / 4
    return (q, kv_b, whole, table, before, cu, SCALE), shards


def merged(args, shards, interleave, attend=k3.mla_attend_shard):
    """The way of a layer, without its exchanges: absorb, attend to every shard, merge, expand."""
    q, kv_b, _, table, seen, cu, scale = args
    absorbed = k3.mla_absorb(q, kv_b, NOPE)
    found = [
        attend(absorbed, pages, table, seen, cu, place, LATENT, scale)
        for pages, place in zip(shards, places(len(shards), interleave))
    ]
    return k3.mla_expand(k3.lse_merge(*map(torch.stack, zip(*found))), kv_b, VALUE).transpose(0, 1)


MIXES = {
    "decode": ([1, 1, 1, 1], [0, 1, 9, 130]),
    "verify": ([9, 2, 5], [40, 0, 7]),
    "prefill": ([40], [0]),
    "chunk": ([40], [61]),
    "mixed": ([5, 1, 0, 17, 1, 16, 150], [3, 50, 6, 20, 0, 33, 12]),
    "around a turn": ([1] * 7, [0, 2, 3, 4, 14, 15, 16]),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (4, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("mix", MIXES)
def test_merged_shards_are_attention_over_the_whole_context(mix, ranks, interleave):
    args, shards = sharded(*MIXES[mix], ranks, interleave)
    want = k3.mla_attend(*args)
    got = merged(args, shards, interleave)
    assert got.shape == want.shape
    assert not want.numel() or worst(got, want) < 1e-12


@pytest.mark.parametrize("sharp", [1, 10])
def test_in_bfloat16_shards_are_as_exact_as_the_whole_context_however_sharp_the_scores(sharp):
    args, shards = sharded([1] * 24 + [4] * 6, [200 + 7 * i for i in range(30)], 2, 1, torch.bfloat16)
    q, *rest = args
    args = (sharp * q, *rest)
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]
    want = k3.mla_attend(*wide)

    def error(got):
        return float((got.double() - want).norm())

    assert error(merged(args, shards, 1)) <= 1.1 * error(k3.mla_attend(*args))


@pytest.mark.parametrize("mix", MIXES)
def test_the_opened_form_merges_to_the_same(mix):
    args, shards = sharded(*MIXES[mix], 4, 1)
    want = k3.mla_attend(*args)
    assert (
        not want.numel() or worst(merged(args, shards, 1, mla_shard.mla_attend_shard.open_form), want) < 1e-12
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)], ids=str)
def test_narrow_dtypes_are_summed_wide(dtype, bound):
    args, shards = sharded(*MIXES["mixed"], 4, 1, dtype)
    exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    assert worst(merged(args, shards, 1), k3.mla_attend(*exact)) < bound


@pytest.mark.parametrize("elements", [1, 300, 4000])
@pytest.mark.parametrize("mix", MIXES)
def test_blocks_of_any_size_give_the_same(mix, elements, monkeypatch):
    args, shards = sharded(*MIXES[mix], 2, 1)
    want = merged(args, shards, 1)
    monkeypatch.setattr(mla_shard, "BLOCK_ELEMENTS", elements)
    assert not want.numel() or worst(merged(args, shards, 1), want) < 1e-12


def test_a_query_without_a_row_here_finds_nothing():
    args, shards = sharded([3, 1], [0, 0], 4, 1)  # tokens 0, 1, 2 of one request and 0 of another
    q = k3.mla_absorb(args[0], args[1], NOPE)
    for rank, (pages, place) in enumerate(zip(shards, places(4, 1))):
        o, lse = k3.mla_attend_shard(q, pages, *args[3:6], place, LATENT, SCALE)
        sees = [rank <= token for token in (0, 1, 2, 0)]
        assert [bool(x.isfinite().all()) for x in lse.T] == sees
        assert [bool((x == 0).all()) for x in o.transpose(0, 1)] == [not s for s in sees]
        assert (lse[:, [not s for s in sees]] == -torch.inf).all()


def test_the_sum_is_a_natural_logarithm():
    args, shards = sharded([1], [6], 2, 1)
    q = k3.mla_absorb(args[0], args[1], NOPE)
    _, lse = k3.mla_attend_shard(q, shards[1], *args[3:6], places(2, 1)[1], LATENT, SCALE)
    known = torch.cat([shards[1][page] for page in args[3][0, :2]])[:3]  # tokens 1, 3 and 5
    torch.testing.assert_close(lse[:, 0], (q[:, 0] @ known.T * SCALE).logsumexp(1))


def test_each_row_of_a_verify_has_its_own_local_length():
    args, shards = sharded([5], [10], 2, 1)
    place = places(2, 1)[0]
    limit = mla_shard.visible(5, *args[4:6], place)
    assert limit.tolist() == [6, 6, 7, 7, 8]
    assert limit.tolist() == local_length(torch.arange(11, 16), place).tolist()
    q = k3.mla_absorb(args[0], args[1], NOPE)
    want, _ = k3.mla_attend_shard(q, shards[0], *args[3:6], place, LATENT, SCALE)
    later = shards[0].clone()
    later[args[3][0, 14 // 4], 1] += 3.0  # token 14, the last: only its own query may see it
    got, _ = k3.mla_attend_shard(q, later, *args[3:6], place, LATENT, SCALE)
    assert torch.equal(got[:, :4], want[:, :4])
    assert not torch.equal(got[:, 4], want[:, 4])


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 4), (8, 1)])
def test_a_rank_writes_its_own_rows_and_no_others(ranks, interleave):
    size, counts, seen = 2 * ranks * interleave, [3, 0, 40], [5, 2, 9]
    draw = Draw(torch.float64)
    table, before, cu = paging(draw, counts, seen, 30, size)
    rows = draw.normal(sum(counts), 4)
    request = [0] * 3 + [2] * 40
    positions = [*range(5, 8), *range(9, 49)]
    for rank, place in enumerate(places(ranks, interleave)):
        pages = torch.full((30, size // ranks, 4), torch.nan, dtype=torch.float64)
        k3.mla_write_shard(rows, pages, table, before, cu, place)
        for row, r, p in zip(rows, request, positions):
            if p // interleave % ranks != rank:
                continue
            offset = p % size
            at = pages[table[r, p // size], offset // (ranks * interleave) * interleave + offset % interleave]
            assert torch.equal(at, row)
            at.fill_(torch.nan)
        assert pages.isnan().all()


def test_writes_are_rounded_to_the_pages():
    pages, rows = torch.zeros(3, 2, 4).bfloat16(), torch.randn(4, 4)
    k3.mla_write_shard(
        rows, pages, torch.tensor([[2]]), torch.tensor([0]), torch.tensor([0, 4]), places(2, 1)[1]
    )
    assert torch.equal(pages[2], rows[1::2].bfloat16())
    assert (pages[:2] == 0).all()


def test_rows_past_the_last_bound_are_not_read():
    args, shards = sharded([2, 20], [5, 0], 2, 1)
    q, place = k3.mla_absorb(args[0], args[1], NOPE), places(2, 1)[1]
    want, sums = k3.mla_attend_shard(q, shards[1], *args[3:6], place, LATENT, SCALE)
    beyond = torch.full((HEADS, 3, LATENT + ROPE), torch.nan, dtype=torch.float64)
    o, lse = k3.mla_attend_shard(torch.cat([q, beyond], 1), shards[1], *args[3:6], place, LATENT, SCALE)
    assert torch.equal(o[:, :22], want)
    assert torch.equal(lse[:, :22], sums)
    assert (o[:, 22:] == 0).all()
    assert (lse[:, 22:] == -torch.inf).all()


def test_a_nan_that_was_written_is_not_hidden():
    args, shards = sharded([1, 1], [9, 9], 2, 1)
    shards[1][args[3][0, 0], 0] = torch.nan  # token 1 of the first request
    got = merged(args, shards, 1)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


def test_the_order_of_requests_changes_nothing():
    lengths, seen = [1, 3, 40], [70, 9, 5]
    args, shards = sharded(lengths, seen, 4, 1)
    q, kv_b, whole, table, before, cu, _ = args
    want = k3.mla_attend(*args)
    for order in itertools.permutations(range(3)):
        at, bounds = list(order), row_bounds([lengths[r] for r in order])
        rows = torch.cat([torch.arange(int(cu[r]), int(cu[r + 1])) for r in order])
        got = merged((q[rows], kv_b, whole, table[at], before[at], bounds, SCALE), shards, 1)
        assert worst(got, want[rows]) < 1e-12


def test_memory_stays_bounded_on_a_long_prefill(monkeypatch):
    args, shards = sharded([600], [1400], 2, 1, torch.float32)
    q = k3.mla_absorb(args[0], args[1], NOPE)
    largest, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a, **k: largest.append(bmm(*a, **k)) or largest[-1])
    monkeypatch.setattr(mla_shard, "BLOCK_ELEMENTS", 1 << 14)
    k3.mla_attend_shard(q, shards[0], *args[3:6], places(2, 1)[0], LATENT, SCALE)
    assert max(x.numel() for x in largest) <= max(1 << 14, 128 * HEADS * LATENT)
