"""A draft shared by ranks drafts what one rank drafts, and every rank keeps the same context rows."""

import pytest
import torch
from draft_reference import small_draft
from draft_serving import Serving, row, tapped, tokens_of
from k3compile.runtime.parallel.ranks import world
from k3compile.runtime.request import SamplingParams
from rank_parts import Collectives, part
from small_models import dealt
from threaded_ranks import on_threads

NEAR = 1e-9
CONFIG = dealt(8)
PARAMS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)]


@pytest.fixture(scope="module")
def target():
    return tapped(CONFIG)


@pytest.fixture(scope="module")
def draft():
    return small_draft(CONFIG, num_attention_heads=8, num_key_value_heads=8)


def drafted(target, draft):
    """(drafts of two requests, the draft's pages) after a prompt and a mixed step."""
    serving = Serving(target, draft)
    serving.run(row(1, 0, 9), row(2, 0, 21))
    serving.run(row(1, 9, 13), row(2, 21, 22))
    asked = [(slot, tokens_of(slot, count), params) for slot, count, params in zip((1, 2), (14, 23), PARAMS)]
    return serving.propose(*asked), [pool.pages.nan_to_num() for pool in serving.drafter.pools]


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= NEAR * b.abs().max())


@pytest.mark.parametrize("n", [2, 8])
def test_ranks_draft_what_one_drafts(target, draft, n):
    alone, kept = drafted(target, draft)

    def work(rank: int):
        own = part(draft, world())
        assert own.layers[0].self_attn.q_b_proj.weight.shape[0] * n == 8 * draft.config.head_width
        return drafted(part(target, world()), own)

    every = on_threads(n, work)
    for made, pages in every:
        for got, want in zip(made, alone, strict=True):
            assert got.tokens == want.tokens
            assert near(got.confidence, want.confidence)
            assert (got.probs is None) == (want.probs is None)
            assert got.probs is None or near(got.probs, want.probs)
        assert all(near(a, b) for a, b in zip(pages, kept, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(pages, every[0][1]))


def test_a_block_takes_two_sums_a_layer_one_for_the_embedding_and_a_gather(target, draft):
    def work(rank: int):
        serving = Serving(part(target, world()), part(draft, world()))
        serving.run(row(1, 0, 9))
        with Collectives() as seen:
            serving.propose((1, tokens_of(1, 10), PARAMS[0]))
        with Collectives() as observing:
            serving.drafter.draft.context_rows(
                torch.zeros(3, 4, CONFIG.hidden_size).double(), torch.arange(4)
            )
        return seen, observing

    seen, observing = on_threads(2, work)[1]
    assert seen.number == {
        ("all_reduce", CONFIG.hidden_size): 2 * 2 + 1,
        ("all_gather_into_tensor", CONFIG.vocab_size // 2): 1,
    }
    assert seen.bytes["all_reduce"] == 5 * 5 * CONFIG.hidden_size * 8  # five rows of a block, five sums
    assert not observing.number


def test_a_draft_of_one_rank_can_be_trained(target):
    draft = small_draft(CONFIG)
    draft.requires_grad_(True)
    tokens, taps = torch.randint(0, 90, (1, 8)), torch.randn(1, 8, 3, CONFIG.hidden_size).double()
    got = draft.training_logits(taps, tokens, torch.tensor([2, 4]), target, block=3)
    got.logits.square().mean().backward()
    assert draft.layers[0].self_attn.o_proj.weight.grad.abs().max() > 0
    assert draft.layers[1].mlp.down_proj.weight.grad.abs().max() > 0
