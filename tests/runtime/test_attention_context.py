"""Ranks that keep the latents of some tokens each: the hidden states of one rank that keeps them all."""

from itertools import pairwise

import pytest
import torch
from context_ranks import EIGHT, contexts, served, set_interleave, tokens
from k3compile.kernels import mla_gather
from k3compile.kernels.groups import place_in
from k3compile.runtime.attention import Mla
from k3compile.runtime.cache.pools import MlaPools
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import Ranks, world
from lanes import thinned
from rank_parts import Collectives, part
from small_models import Row, make_step, small_model
from threaded_ranks import on_threads

MORE = [(2, 2, 4), (4, 2, 1), (8, 2, 1), (8, 2, 4), (8, 4, 1), (8, 8, 1), (8, 8, 4)]
GROUPS = [  # ranks, those of a context group, the tokens that stay together
    *[(2, 2, 1), (4, 2, 4), (8, 4, 4)],
    *[pytest.param(*more, marks=pytest.mark.slow) for more in MORE],
]
NEWS = [(4, True), (1, False), (3, True), (5, False), (1, False), (2, True), (4, True), (9, False)]


@pytest.fixture(scope="module")
def whole():
    """The model of one rank."""
    with torch.no_grad():
        return small_model(EIGHT)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_equal_on_all_ranks(whole, tp, dcp, page_size, steps, interleave=1, forks=()):
    """Every rank of ``tp`` gives what one rank gives, up to the order of sums."""

    def work(rank: int) -> list[torch.Tensor]:
        model = part(whole, world(dcp))
        set_interleave(model, interleave)
        return served(model, page_size, steps, forks)

    expected = served(whole, page_size, steps, forks)
    for hidden in on_threads(tp, work):
        for got, want in zip(hidden, expected, strict=True):
            assert got.isfinite().all()
            assert (got - want).abs().max() <= 1e-9 * want.abs().max()


@pytest.mark.parametrize(("tp", "dcp", "interleave"), GROUPS)
def test_mixed_steps_give_what_one_rank_gives(whole, tp, dcp, interleave):
    turn = dcp * interleave
    page_size = 2 * turn
    lengths = [0, 1, interleave, turn - 1, turn, turn + 1, page_size, 2 * page_size + 3]
    steps = contexts(lengths, page_size, NEWS.__getitem__)
    assert_equal_on_all_ranks(whole, tp, dcp, page_size, steps, interleave)


@pytest.mark.parametrize("rows", thinned(["verify", "decode", "prefill"], 1))
def test_steps_of_one_class_give_what_one_rank_gives(whole, rows):
    news = {"verify": (4, True), "decode": (1, False), "prefill": (7, False)}[rows]
    assert_equal_on_all_ranks(whole, 4, 4, 8, contexts([0, 5, 19], 8, lambda i: news))


def test_one_token_alone(whole):
    assert_equal_on_all_ranks(whole, 4, 4, 8, [[Row([5], 1, 0, [2])], [Row([6], 1, 1, [2])]])


@pytest.mark.parametrize(
    ("tp", "dcp", "interleave"), [(2, 2, 1), (4, 2, 4), pytest.param(8, 8, 1, marks=pytest.mark.slow)]
)
def test_where_the_context_comes_to_prompts_the_same(whole, tp, dcp, interleave, monkeypatch):
    monkeypatch.setattr(mla_gather, "START", 0)
    monkeypatch.setattr(mla_gather, "STRETCH", 8)
    came, stretches = [], mla_gather.stretches
    monkeypatch.setattr(mla_gather, "stretches", lambda *a: came.append(a[2].seen) or stretches(*a))
    page_size = 2 * dcp * interleave
    news = [(1, False), (4, True), (11, False), (6, False), (20, False)]
    steps = contexts([0, 19, 5, 33, 8], page_size, news.__getitem__)
    assert_equal_on_all_ranks(whole, tp, dcp, page_size, steps, interleave)
    layers = whole.config.num_hidden_layers - len(whole.config.kda_layers)
    of_second_step = [seen for seen in came if seen]
    assert of_second_step
    assert len(of_second_step) % (tp * layers) == 0  # on all ranks alike


def test_requests_that_share_the_pages_of_a_prefix(whole):
    shared, prefix = [5, 2], tokens(16, 7)
    steps = [
        [Row(prefix, 1, 0, shared)],
        [
            Row(tokens(4, 8), 1, 16, [*shared, 1], verify=True),
            Row(tokens(1, 9), 2, 16, [*shared, 3]),
            Row(tokens(11, 10), 3, 16, [*shared, 4, 6]),
        ],
    ]
    assert_equal_on_all_ranks(whole, 4, 4, 8, steps, forks=[(1, 2), (1, 3)])


@pytest.mark.slow
def test_a_prompt_in_chunks_that_end_anywhere(whole):
    prompt, pages = tokens(41, 3), [3, 1, 4, 2, 6, 5]
    ends = [0, 1, 7, 8, 20, 33, 41]
    steps = [[Row(prompt[a:b], 1, a, pages)] for a, b in pairwise(ends)]
    assert_equal_on_all_ranks(whole, 4, 4, 8, steps)


def test_the_draft_rows_that_were_refused_are_written_over(whole):
    pages = [3, 1, 4]
    steps = [
        [Row(tokens(9, 1), 1, 0, pages)],
        [Row(tokens(4, 2), 1, 9, pages, verify=True)],
        [Row(tokens(4, 3), 1, 9, pages, verify=True)],  # nothing of the last step was kept
    ]
    assert_equal_on_all_ranks(whole, 4, 2, 8, steps)


def test_a_token_lies_on_one_rank_of_its_group_and_in_its_own_row(whole):
    steps = contexts([19], 8)

    def work(rank: int) -> torch.Tensor:
        ranks = world(4)
        model = part(whole, ranks)
        pools = model.make_pools(2, 1 + max(steps[0][0].pages), 8)
        kept = next(pool for pool in pools if isinstance(pool, MlaPools)).pages
        assert kept.shape[1] == 2
        kept.fill_(torch.nan)
        layer = next(layer.self_attn for layer in model.layers if isinstance(layer.self_attn, Mla))
        x = torch.randn(19, EIGHT.hidden_size, generator=torch.Generator().manual_seed(0)).double()
        layer(x, MlaPools(kept), make_step([steps[0][0]]))
        written = ~kept.isnan().any(2)  # [N, 2]
        owned, place = steps[0][0].pages, place_in(ranks.context_group)[0]
        for page, held in enumerate(written.tolist()):
            first = 8 * owned.index(page) if page in owned else 1000
            assert held == [first + row * 4 + place < 19 for row in range(2)]
        return kept[written]

    rows = on_threads(8, work)
    assert [len(r) for r in rows] == [5, 5, 5, 4] * 2
    assert all(torch.equal(a, b) for a, b in zip(rows[:4], rows[4:]))  # each context group has all tokens


def test_a_page_costs_each_rank_its_share():
    def bytes_of(context: int) -> int:
        model = Model(EIGHT, device="meta", ranks=Ranks(0, 8, "", context))
        return sum(p.pages[0].nbytes for p in model.make_pools(2, 3, 32) if isinstance(p, MlaPools))

    assert [bytes_of(1) // bytes_of(n) for n in (1, 2, 4, 8)] == [1, 2, 4, 8]


@pytest.mark.parametrize("rows", [1, 9])
def test_a_layer_sends_its_queries_what_they_found_and_its_sum(whole, rows):
    heads, latent, wide = EIGHT.num_attention_heads, EIGHT.kv_lora_rank, 8

    def work(rank: int) -> None:
        model = part(whole, world(4))
        layers = zip(model.layers, model.make_pools(2, 4, 16))
        layer, pools = next((one.self_attn, own) for one, own in layers if isinstance(own, MlaPools))
        step = make_step([Row(list(range(rows)), 1, 3, [2])])
        with Collectives() as sent:
            layer(torch.ones(rows, EIGHT.hidden_size, dtype=torch.float64), pools, step)
        assert sent.number == {
            ("all_gather_into_tensor", latent + EIGHT.qk_rope_head_dim): 1,
            ("all_to_all_single", latent + 1): 1,
            ("all_reduce", EIGHT.hidden_size): 1,
        }
        own = heads // 8  # of this rank; four ranks' go through it
        assert sent.bytes["all_gather_into_tensor"] == wide * rows * own * (latent + EIGHT.qk_rope_head_dim)
        assert sent.bytes["all_to_all_single"] == wide * rows * own * 4 * (latent + 1)

    on_threads(8, work)


@pytest.mark.parametrize(("page_size", "interleave"), [(6, 1), (2, 1), (8, 4)])
def test_pages_that_ranks_cannot_share_are_refused(page_size, interleave, monkeypatch):
    monkeypatch.setattr(Mla, "interleave", interleave)
    model = Model(EIGHT, device="meta", ranks=Ranks(0, 8, "", 4))
    with pytest.raises(ValueError, match=f"page_size={page_size} .* multiple of {4 * interleave}"):
        model.make_pools(2, 3, page_size)
