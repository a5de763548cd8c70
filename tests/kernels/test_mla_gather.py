"""Rows to which the context comes: attention over the whole context, and the choice of who travels."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from k3compile.kernels import mla_gather
from k3compile.kernels.mla import paging
from k3compile.kernels.samples import Draw, row_bounds
from kda_oracle import worst
from threaded_ranks import on_threads

k3 = torch.ops.k3
HEADS, NOPE, ROPE, VALUE, LATENT = 3, 8, 4, 6, 16


def problem(lengths, seen, size, dtype=torch.float64):
    """q, kv_b, table, seen, cu, the latents of the rows before and of this step, and their bounds."""
    draw = Draw(dtype)
    table, before, cu = paging(draw, lengths, seen, 99, size)
    old, own = (draw.normal(sum(counts), LATENT + ROPE) for counts in (seen, lengths))
    q = draw.normal(sum(lengths), HEADS, NOPE + ROPE)
    return q, draw.normal(HEADS * (NOPE + VALUE), LATENT) / 4, table, before, cu, old, own


def whole(lengths, seen, size, dtype=torch.float64):
    """What one rank gives that has everything."""
    q, kv_b, table, before, cu, old, own = problem(lengths, seen, size, dtype)
    pages = torch.full((99, size, LATENT + ROPE), torch.nan, dtype=dtype)
    k3.mla_write(old, pages, table, torch.zeros_like(before), row_bounds(seen))
    k3.mla_write(own, pages, table, before, cu)
    return k3.mla_attend(q, kv_b, pages, table, before, cu, (NOPE + ROPE) ** -0.5)


def shared(lengths, seen, size, interleave, first, want):
    """The same by this thread's rank; the rows before ``first`` are given. The own rows are in no page."""
    group = dist.group.WORLD.group_name
    q, kv_b, table, before, cu, old, own = problem(lengths, seen, size)
    place = k3.context_place(group, interleave)
    pages = torch.full((99, size // int(place[1]), LATENT + ROPE), torch.nan, dtype=torch.float64)
    k3.mla_write_shard(old, pages, table, torch.zeros_like(before), row_bounds(seen), place)
    done = want[:first].transpose(0, 1).contiguous()
    return k3.mla_attend_gathered(q, kv_b, done, pages, table, before, cu, own, group, interleave)


MIXES = {
    "fresh": ([40], [0]),
    "chunk": ([40], [61]),
    "mixed": ([1, 5, 0, 17, 1, 16, 150], [50, 3, 6, 20, 0, 33, 12]),
    "around a turn": ([3] * 6, [1, 3, 4, 5, 15, 16]),
}


@pytest.mark.parametrize("stretch", [1, 24, 4096])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("mix", MIXES)
def test_gathered_contexts_give_what_the_whole_gives(mix, ranks, interleave, stretch, monkeypatch):
    monkeypatch.setattr(mla_gather, "STRETCH", stretch)
    monkeypatch.setattr(mla_gather, "QUERY_BLOCK", 7)
    monkeypatch.setattr(mla_gather, "BLOCK_ELEMENTS", 100)
    lengths, seen = MIXES[mix]
    size, first = 2 * ranks * interleave, lengths[0] if mix == "mixed" else 0
    want = whole(lengths, seen, size)
    for got in on_threads(ranks, lambda rank: shared(lengths, seen, size, interleave, first, want)):
        assert worst(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_own_latents_are_rounded_as_a_page_holds_them(dtype):
    lengths, seen = [9], [0]
    q, kv_b, table, before, cu, _, own = problem(lengths, seen, 8, torch.float64)
    pages = torch.zeros(99, 8, LATENT + ROPE, dtype=dtype)
    got = k3.mla_attend_gathered(q, kv_b, q.new_empty(HEADS, 0, VALUE), pages, table, before, cu, own, "", 1)
    k3.mla_write(own, pages, table, before, cu)
    assert worst(got, k3.mla_attend(q, kv_b, pages, table, before, cu, (NOPE + ROPE) ** -0.5)) < 1e-12


def test_rows_that_are_done_are_passed_on_and_rows_of_nobody_are_zero():
    q, kv_b, table, before, cu, _, own = problem([2, 3], [0, 0], 8)
    done = torch.randn(HEADS, 2, VALUE, dtype=torch.float64)
    tail = torch.full((2, HEADS, NOPE + ROPE), torch.nan, dtype=torch.float64)
    beyond = torch.full((2, LATENT + ROPE), torch.nan, dtype=torch.float64)
    pages = torch.full((99, 8, LATENT + ROPE), torch.nan, dtype=torch.float64)
    where = pages, table, before, cu
    rows, own = torch.cat([q, tail]), torch.cat([own, beyond])
    got = k3.mla_attend_gathered(rows, kv_b, done, *where, own, "", 1)
    assert torch.equal(got[:2], done.transpose(0, 1))
    assert got[2:5].isfinite().all()
    assert (got[5:] == 0).all()
    everything = torch.randn(HEADS, 7, VALUE, dtype=torch.float64)
    assert torch.equal(
        k3.mla_attend_gathered(rows, kv_b, everything, *where, own, "", 1), everything.transpose(0, 1)
    )


def test_a_long_context_is_gathered_a_stretch_at_a_time(monkeypatch):
    monkeypatch.setattr(mla_gather, "STRETCH", 24)
    row, table = mla_gather.Row(0, 0, 5, 100), torch.arange(1, 20)[None]
    pages, place = torch.randn(20, 8, 4), torch.tensor([0, 1, 1])
    found = list(mla_gather.stretches(pages, table, row, place, ""))
    assert [len(one) for one in found] == [24, 24, 24, 24, 4]
    assert torch.equal(torch.cat(found), pages[1:].flatten(0, 1)[:100])


rows = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), max_size=6)


@given(rows, st.integers(1, 500))
def test_no_other_boundary_of_rows_sends_fewer_bytes(rows, query):
    lengths, seen = [n for n, _ in rows], [s for _, s in rows]
    cu = row_bounds(lengths)
    chosen = int(k3.exchanged_rows(torch.tensor(seen, dtype=torch.int64), cu, query, 3))

    def bytes_of(row: int) -> int:
        come = [s * 3 + mla_gather.START * -(-s // mla_gather.STRETCH) for s in seen[row:]]
        return query * int(cu[row]) + sum(come)

    least = min(map(bytes_of, range(len(rows) + 1)))
    assert least in [bytes_of(row) for row in range(len(rows) + 1) if cu[row] == chosen]


def test_few_queries_go_to_a_long_context_and_many_let_it_come():
    def chosen(count: int, seen: int) -> int:  # the released model in groups of 8, in bfloat16
        query, token = 96 * (576 * 2 + 513 * 4), 576 * 2
        return int(k3.exchanged_rows(torch.tensor([seen]), torch.tensor([0, count]), query, token))

    assert chosen(1, 1_000_000) == 1
    assert chosen(9, 100_000) == 9
    assert chosen(8192, 1_000_000) == 0
    assert chosen(64, 8_192) == 0
    assert chosen(64, 100_000) == 64
    assert chosen(8192, 0) == 0
