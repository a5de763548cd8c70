"""The pieces of the chunked form: how rows are cut, and what one chunk knows."""

import pytest
import torch
from k3compile.kernels import kda_chunk
from k3compile.kernels.kda_chunk import (
    Inputs,
    blocks,
    borrow,
    diagonal,
    diagonal_steep,
    give_back,
    local,
    sweep,
)
from kda_oracle import case, recurrence, worst

POOL = torch.zeros(1)


def test_the_grid_starts_where_the_row_starts():
    (block,) = blocks([7, 200], [130, 64], 64, 1, POOL)
    assert block.steps == [2, 1, 1]
    assert block.tokens[:, 0].tolist() == [7, 200, 71, 135]
    assert block.invalid.sum(1).tolist() == [0, 0, 0, 62]
    assert block.tokens[3].tolist() == [135, 136, *[135] * 62]


def test_whole_chunks_carry_no_mask():
    (block,) = blocks([0], [128], 64, 1, POOL)
    assert block.invalid is None


def test_blocks_bound_what_is_held_at_a_time(monkeypatch):
    monkeypatch.setattr(kda_chunk, "BLOCK_ELEMENTS", 4 * 64)
    cut = list(blocks([0, 1000], [640, 320], 64, 1, POOL))
    assert [b.steps for b in cut] == [[2, 2], [2, 2], [2, 1, 1], [1, 1, 1]]
    assert max(len(b.tokens) for b in cut) == 4


def test_blocks_and_one_piece_agree(monkeypatch):
    row = case(300)

    def run():
        state = row.state.clone()
        parts = [
            sweep(local(Inputs(*row[:5]), block, torch.float64), block.steps, 2, [state])
            for block in blocks([0], [300], 64, 48, row.state)
        ]
        return torch.cat(parts), state

    once = run()
    monkeypatch.setattr(kda_chunk, "BLOCK_ELEMENTS", 1)
    again = run()
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])
    assert worst(once[1], recurrence(row)[1]) < 1e-13


def test_both_ways_to_the_diagonal_agree():
    row = case(32, heads=3, keys=8)
    g = row.g.transpose(0, 1).reshape(3, 2, 16, 8)
    both = torch.stack([x.transpose(0, 1).reshape(3, 2, 16, 8) for x in (row.q, row.k)], 2)
    middle = (g.cumsum(2) - g.cumsum(2)[:, :, 7:8]).exp()
    assert worst(diagonal(both, middle), diagonal_steep(both, g)) < 1e-13


def test_one_channel_too_steep_is_enough_for_the_exact_form(monkeypatch):
    calls = []
    monkeypatch.setattr(kda_chunk, "diagonal_steep", lambda *a: calls.append(1) or diagonal_steep(*a))
    row = case(32)
    steep = row.g.clone()
    steep[3:7, 1, 5] = -20.5
    for g, used in ((row.g * 0 - 5.0, 0), (steep, 1)):
        (block,) = blocks([0], [32], 32, 1, row.state)
        local(Inputs(*row[:3], g, row.beta), block, torch.float64)
        assert len(calls) == used


def test_the_steep_bound_is_what_float32_can_hold():
    edge = torch.tensor(kda_chunk.MAX_EXPONENT)
    assert torch.isfinite(edge.exp() * 128)
    assert kda_chunk.SUB * 5.0 <= kda_chunk.MAX_EXPONENT
    for dtype, floor in kda_chunk.FLOOR.items():
        assert torch.tensor(floor, dtype=dtype).exp() == 0.0


@pytest.mark.parametrize("elements", [1, 1 << 30])
def test_states_come_back_however_they_were_borrowed(monkeypatch, elements):
    monkeypatch.setattr(kda_chunk, "IN_PLACE_ELEMENTS", elements)
    pool = torch.zeros(5, 2, 3, 4)
    states = borrow(pool, [4, 2])
    for s in states:
        s += 1
    give_back(pool, [4, 2], states)
    assert pool.sum((1, 2, 3)).tolist() == [0, 0, 24, 0, 24]
