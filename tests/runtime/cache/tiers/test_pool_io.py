"""Pages and states come back bit for bit, into other pages and slots, and nothing else is written."""

import random

import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools, MlaPools
from k3compile.runtime.cache.tiers.entry import Declined, nbytes
from k3compile.runtime.cache.tiers.pool_io import PoolIO, join_blocks
from tier_entries import bits, same


def kda(slots: int = 6, dtype: torch.dtype = torch.float32, channels: int = 9) -> KdaPools:
    shapes = [(2, 3, 5), (3, channels), (4, 2, 3), (4, 2, 5), (4, 2, 5), (4, channels)]
    return KdaPools(*(torch.randn(slots, *shape).to(dtype) for shape in shapes))


def mla(pages: int = 9, page_size: int = 4, row: int = 7) -> MlaPools:
    return MlaPools(torch.randn(pages, page_size, row).to(torch.bfloat16))


def pools() -> list:
    torch.manual_seed(0)
    return [kda(), mla(), kda(), kda(), mla()]


def test_pages_of_all_layers_and_of_the_draft_come_back_into_other_pages():
    model, draft = pools(), [mla(row=3), mla(row=3)]
    io = PoolIO(model, 8, draft)
    assert io.pages_per_block == 2
    blocks = [io.read_pages([3, 8]), io.read_pages([1, 4])]
    before = [layer.pages.clone() for layer in [model[1], model[4], *draft]]
    assert nbytes(blocks[0]) == io.nbytes("pages") == 2 * 2 * 4 * (7 + 3) * 2
    io.write_pages([7, 2, 6, 5], join_blocks(blocks))
    for layer, old in zip([model[1], model[4], *draft], before):
        assert bits(layer.pages[[7, 2, 6, 5]]) == bits(old[[3, 8, 1, 4]])
        assert bits(layer.pages[[0, 1, 3, 4, 8]]) == bits(old[[0, 1, 3, 4, 8]])


def test_the_state_of_a_slot_comes_back_into_another_slot_and_records_stay():
    model = pools()
    io = PoolIO(model, 4)
    entry = io.read_state(2)
    assert nbytes(entry) == io.nbytes("state")
    before = [[t.clone() for t in layer] for layer in model]
    io.write_state(5, entry)
    for layer, old in zip(model, before):
        for i, (tensor, was) in enumerate(zip(layer, old)):
            moved = isinstance(layer, KdaPools) and i < 2
            assert bits(tensor[:5]) == bits(was[:5])
            assert bits(tensor[5:]) == bits(was[[2]] if moved else was[5:])


def test_what_was_read_is_a_copy():
    model = pools()
    io = PoolIO(model, 4)
    pages, state = io.read_pages([2]), io.read_state(3)
    kept = {n: t.clone() for n, t in (pages | state).items()}
    for layer in model:
        for tensor in layer:
            tensor.fill_(torch.nan)
    assert same(pages | state, kept)


def test_nan_and_infinity_come_back_as_they_are():
    model = pools()
    model[0].state[1].view(torch.int32).random_()
    model[1].pages[2].view(torch.int16).random_()
    io = PoolIO(model, 4)
    io.write_state(2, io.read_state(1))
    io.write_pages([3], io.read_pages([2]))
    assert bits(model[0].state[1]) == bits(model[0].state[2])
    assert bits(model[1].pages[2]) == bits(model[1].pages[3])


def test_views_of_one_big_tensor_are_read_and_written_through():
    big = torch.randn(2, 5, 4, 3)  # layers, pages, tokens, row
    io = PoolIO([kda(), *(MlaPools(big[i]) for i in range(2))], 4)
    was = big.clone()
    io.write_pages([1], io.read_pages([4]))
    assert bits(big[:, 1]) == bits(was[:, 4])
    assert bits(big[:, 2:]) == bits(was[:, 2:])


def test_a_shape_or_dtype_of_other_pools_is_foreign():
    io = PoolIO(pools(), 4)
    io.check("pages", io.read_pages([1]))
    io.check("state", io.read_state(1))
    state = io.read_state(1)
    for wrong in (
        {"state": state["state"]},
        state | {"more": torch.zeros(1)},
        state | {"window": state["window"].double()},
        state | {"window": state["window"][:, :2]},
        io.read_pages([1]),
    ):
        with pytest.raises(Declined, match="foreign"):
            io.check("state", wrong)


def test_the_geometry_tells_pools_apart():
    base = pools()
    others = [
        PoolIO(base, 4),
        PoolIO(base, 8),
        PoolIO(base, 4, [mla()]),
        PoolIO([*base, mla()], 4),
        PoolIO([base[1], base[0]], 4),
        PoolIO([base[0], mla(page_size=2)], 4),
        PoolIO([kda(dtype=torch.float64), base[1]], 4),
    ]
    assert len({io.geometry for io in others}) == len(others)
    assert PoolIO(pools(), 4).geometry == PoolIO(base, 4).geometry


@pytest.mark.parametrize(
    ("layers", "unit", "draft", "says"),
    [
        ([kda()], 4, [], "both latent pages and recurrent states"),
        ([mla()], 4, [], "both latent pages and recurrent states"),
        ([kda(), kda(channels=4), mla()], 4, [], "window of all layers to be alike"),
        ([kda(), mla(), mla(row=3)], 4, [], "latents of all layers to be alike"),
        ([kda(), mla()], 6, [], "6 tokens is no whole number of pages of 4"),
        ([kda(), mla()], 0, [], "0 tokens is no whole number of pages"),
        ([kda(), mla()], 4, [mla(), mla(row=3)], "draft of all layers to be alike"),
    ],
)
def test_what_cannot_be_stored_is_refused(layers, unit, draft, says):
    with pytest.raises(ValueError, match=says):
        PoolIO(layers, unit, draft)


def test_random_round_trips():
    rng, model = random.Random(0), pools()
    io = PoolIO(model, 8)
    for _ in range(20):
        a, b, c, d = rng.sample(range(1, 9), 4)
        wanted = model[4].pages[[a, b]].clone()
        io.write_pages([c, d], io.read_pages([a, b]))
        assert bits(model[4].pages[[c, d]]) == bits(wanted)
