"""Choices sorted by expert, interpreted: stable, placed as by the meaning, in blocks of one expert each."""

import pytest
import torch
from interpreted import interpreted
from k3compile.kernels.moe import each_expert
from k3compile.kernels.moe_sort_triton import HOLES, UNUSED, most_blocks

EXPERTS = 7
NONE = torch.zeros(0, 3, dtype=torch.int64)
CASES = {
    "nothing": NONE,
    "one token": torch.tensor([[4, 0, 6]]),
    "all to one expert": torch.full((150, 3), 5),
    "none here": torch.full((40, 3), -1),
    "many with holes and an expert without any": torch.randint(0, 7, (200, 3)) - 1,
    "not one of the experts": torch.tensor([[99, 2, -7]]),
}


def sort(ids, block=16):
    return interpreted("k3compile.kernels.moe_sort_triton", "sorted_by_expert", ids, EXPERTS, block)[0]


@pytest.mark.parametrize("ids", CASES.values(), ids=CASES)
def test_places_are_those_of_a_stable_sort(ids):
    order, idx, *_ = sort(ids)
    inside = torch.where((ids < 0) | (ids >= EXPERTS), -1, ids)
    _, want = each_expert(torch.zeros(len(ids), 1), inside, EXPERTS, lambda expert, rows: rows)
    assert torch.equal(idx, want)
    keys = torch.where(inside < 0, EXPERTS, inside).flatten()
    assert torch.equal(order.long(), torch.sort(keys, stable=True).indices)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("ids", CASES.values(), ids=CASES)
def test_blocks_cover_every_place_once_and_have_one_expert(ids, block):
    order, _, expert, first, end = sort(ids, block)
    assert len(expert) == most_blocks(ids.numel(), EXPERTS, block)
    used = expert != UNUSED
    assert ((end - first)[used] > 0).all()
    assert ((end - first)[used] <= block).all()
    places = [place for a, b in zip(first[used].tolist(), end[used].tolist()) for place in range(a, b)]
    assert places == list(range(ids.numel()))
    chosen = ids.flatten()[order.long()]
    for e, a, b in zip(expert[used].tolist(), first[used].tolist(), end[used].tolist()):
        own = chosen[a:b]
        assert ((own < 0) | (own >= EXPERTS)).all() if e == HOLES else (own == e).all()


def test_rows_of_a_wider_tensor_are_sorted_where_they_are():
    wide = torch.full((130, 8), 10**12)
    wide[:, 2:5] = torch.randint(0, EXPERTS, (130, 3))
    ids = wide[:, 2:5]
    for got, want in zip(sort(ids), sort(ids.contiguous()), strict=True):
        assert torch.equal(got, want)


def test_blocks_are_bounded_without_a_look_at_the_choices():
    worst = torch.tensor(
        [[e, e, -1] for e in range(EXPERTS)] * 3
    )  # every expert has a block it does not fill
    expert = sort(worst, 64)[2]
    assert (expert != UNUSED).sum() == EXPERTS + 1 <= most_blocks(worst.numel(), EXPERTS, 64)
    assert most_blocks(5, 896, 128) == 5
