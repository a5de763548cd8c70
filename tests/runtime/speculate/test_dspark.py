"""The DSpark drafter against a reference that knows neither pages nor batches nor pools."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from draft_reference import Reference, small_draft
from draft_serving import FIVE, PAGE, Serving, pages_of, row, tapped, taps_of, tokens_of
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate.dspark import DSparkDrafter
from k3compile.runtime.speculate.dspark_model import DSparkModel
from small_models import Row, make_step

EXACT = 1e-10
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target():
    return tapped()


@pytest.fixture(scope="module")
def draft():
    return small_draft(FIVE)


def expected(target, draft, tokens, size, choose=None):
    reference = Reference(draft, target.embed_tokens, target.lm_head.weight)
    arguments = (taps_of(target, tokens[:-1]), tokens[-1], size)
    return reference.draft(*arguments, **({"choose": choose} if choose else {}))


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_drafts_and_confidences_are_those_of_the_reference(target, draft, size):
    serving = Serving(target, draft, size)
    serving.run(row(1, 0, 13))
    (made,) = serving.propose((1, tokens_of(1, 14), GREEDY))
    tokens, _, confidence = expected(target, draft, tokens_of(1, 14), size)
    assert made.tokens == tokens
    assert made.probs is None
    assert (made.confidence - confidence).abs().max() < EXACT
    assert len(set(tokens)) > 1 or size == 1


def test_logits_are_those_of_the_reference(target, draft):
    serving = Serving(target, draft, 7)
    serving.run(row(1, 0, 13))
    params = SamplingParams(temperature=1.0, seed=3)
    (made,) = serving.propose((1, tokens_of(1, 14), params))
    drawn = iter(made.tokens)
    _, logits, confidence = expected(target, draft, tokens_of(1, 14), 7, choose=lambda _: next(drawn))
    assert (made.probs - logits.softmax(-1)).abs().max() < EXACT
    assert (made.confidence - confidence).abs().max() < EXACT


def test_a_short_context_is_drafted_from_too(target, draft):
    serving = Serving(target, draft, 4)
    serving.run(row(1, 0, 1))
    (made,) = serving.propose((1, tokens_of(1, 2), GREEDY))
    assert made.tokens == expected(target, draft, tokens_of(1, 2), 4)[0]


def same(a, b):
    return a.tokens == b.tokens and bool((a.confidence - b.confidence).abs().max() < EXACT)


def test_company_chunks_and_mixed_steps_change_nothing(target, draft):
    lengths = {1: 20, 2: 13, 3: 9, 4: 30}
    alone = {}
    for slot, count in lengths.items():
        serving = Serving(target, draft)
        serving.run(row(slot, 0, count))
        (alone[slot],) = serving.propose((slot, tokens_of(slot, count + 1), GREEDY))
    serving = Serving(target, draft)
    serving.run(row(4, 0, 7), row(1, 0, 19))
    serving.run(row(3, 0, 8), row(4, 7, 8))
    accepted = tokens_of(3, 9)[8:]
    # a verify of two right drafts and a wrong one beside a decode, a prefill and the rest of a prompt
    serving.run(row(3, 8, 0, [*accepted, 5, 6], verify=True), row(1, 19, 20), row(2, 0, 13), row(4, 8, 30))
    asked = [(slot, tokens_of(slot, count + 1), GREEDY) for slot, count in lengths.items()]
    for order in (asked, asked[::-1], asked[2:] + asked[:2]):
        for (slot, _, _), made in zip(order, serving.propose(*order)):
            assert same(made, alone[slot]), slot


def test_a_rejected_row_is_overwritten_by_the_row_that_takes_its_place(target, draft):
    clean, serving = Serving(target, draft), Serving(target, draft)
    clean.run(row(1, 0, 12))
    serving.run(row(1, 0, 6))
    snapshot = [tuple(t[1].clone() for t in pool if t.shape[0] == 6) for pool in serving.pools]
    wrong = [*tokens_of(1, 7)[6:], 80, 81, 82]
    serving.run(row(1, 6, 0, wrong, verify=True))
    for pool, kept in zip(serving.pools, snapshot):  # what a commit of one row would leave, replayed
        for tensor, values in zip((t for t in pool if t.shape[0] == 6), kept):
            tensor[1] = values
    serving.run(row(1, 6, 12))
    asked = (1, tokens_of(1, 13), GREEDY)
    assert same(serving.propose(asked)[0], clean.propose(asked)[0])


def test_pages_that_came_from_another_request_serve_a_prefix_hit(target, draft):
    serving = Serving(target, draft)
    serving.run(row(1, 0, 20))
    (want,) = serving.propose((1, tokens_of(1, 21), GREEDY))
    request = Request("hit", tokens_of(1, 21), GREEDY)
    request.seen = 20
    table = array("q", [*pages_of(1)[:4], 61])  # 16 tokens shared, the rest run again on a page of its own
    for pool in serving.drafter.pools:
        pool.pages[61] = torch.nan
    step = make_step([Row(tokens_of(1, 20)[16:], 2, 16, table)])
    serving.drafter.observe(step, taps_of(target, tokens_of(1, 20))[:, 16:])
    (made,) = serving.drafter.propose([request], [SimpleNamespace(pages=table, slot=2)])
    assert same(made, want)


def test_drafting_writes_no_page(target, draft):
    serving = Serving(target, draft)
    serving.run(row(1, 0, 12))
    before = [pool.pages.nan_to_num(9.0) for pool in serving.drafter.pools]
    serving.propose((1, tokens_of(1, 13), GREEDY))
    assert all(torch.equal(p.pages.nan_to_num(9.0), b) for p, b in zip(serving.drafter.pools, before))
    assert serving.drafter.lookahead == 0


def test_a_request_in_the_middle_of_its_prompt_gets_no_draft(target, draft):
    serving = Serving(target, draft)
    serving.run(row(1, 0, 8), row(2, 0, 8))
    half = Request("1", tokens_of(1, 20), GREEDY)
    half.seen = 8
    done = Request("2", tokens_of(2, 9), GREEDY)
    done.seen = 8
    held = [SimpleNamespace(pages=pages_of(slot), slot=slot) for slot in (1, 2)]
    none, made = serving.drafter.propose([half, done], held)
    assert none is None
    assert len(made.tokens) == 5
    assert serving.drafter.propose([], []) == []


def test_probs_are_what_the_tokens_were_drawn_from(target, draft):
    serving = Serving(target, draft, 3)
    serving.run(row(1, 0, 12))
    counts = torch.zeros(FIVE.vocab_size, dtype=torch.float64)
    asked = [
        (1, tokens_of(1, 13), SamplingParams(temperature=2.0, seed=seed, top_p=0.9)) for seed in range(2000)
    ]
    made = serving.propose(*asked)
    first = made[0].probs[0]
    for one in made:
        assert torch.allclose(one.probs[0], first, rtol=0, atol=1e-12)
        assert (one.probs.sum(-1) - 1).abs().max() < 1e-12
        counts[one.tokens[0]] += 1
    expected_counts = 2000 * first
    often = expected_counts > 5
    chi = ((counts - expected_counts)[often] ** 2 / expected_counts[often]).sum()
    assert chi < often.sum() + 4 * (2 * often.sum()) ** 0.5


def test_temperature_and_greedy_sampling_shape_the_draft(target, draft):
    serving, best = Serving(target, draft), Serving(target, draft, sampling="greedy")
    for one in (serving, best):
        one.run(row(1, 0, 12))
    greedy, cold, warm = serving.propose(
        *((1, tokens_of(1, 13), SamplingParams(temperature=t, seed=1)) for t in (0.0, 1e-6, 1.5))
    )
    assert cold.tokens == greedy.tokens
    assert cold.probs[range(5), cold.tokens].min() > 0.999
    assert warm.probs.max() < 0.999
    (always,) = best.propose((1, tokens_of(1, 13), SamplingParams(temperature=1.5, seed=1)))
    assert always.tokens == greedy.tokens
    assert always.probs is None


def test_the_same_seed_drafts_the_same_in_any_company_and_not_what_the_verifier_draws(target, draft):
    serving = Serving(target, draft)
    serving.run(row(1, 0, 12), row(2, 0, 12))
    warm = SamplingParams(temperature=3.0, seed=5)
    (alone,) = serving.propose((1, tokens_of(1, 13), warm))
    other, together = serving.propose((2, tokens_of(2, 13), warm), (1, tokens_of(1, 13), warm))
    assert together.tokens == alone.tokens
    assert other.tokens != alone.tokens
    again, second = (Request("1", tokens_of(1, 13), warm) for _ in range(2))
    assert serving.drafter.uniforms(again) == serving.drafter.uniforms(second)
    again.seen = 1
    assert not set(serving.drafter.uniforms(again)) & set(serving.drafter.uniforms(second))
    verifier = torch.Generator().manual_seed(5)
    drawn = {float(torch.rand((), generator=verifier, dtype=torch.float64)) for _ in range(50)}
    assert not drawn & set(serving.drafter.uniforms(second))
    free = [Request("1", tokens_of(1, 13), SamplingParams()) for _ in range(2)]
    assert serving.drafter.uniforms(free[0]) != serving.drafter.uniforms(free[1])
    serving.drafter.forget(free[0])
    serving.drafter.forget(free[0])


def test_a_draft_that_is_not_finite_is_none(target, draft):
    serving = Serving(target, draft)
    serving.run(row(1, 0, 12))
    for pool in serving.drafter.pools:
        pool.pages[pages_of(1)[0]] = torch.nan
    serving.run(row(2, 0, 12))
    warm = SamplingParams(temperature=1.0, seed=5)
    broken, greedy, fine = serving.propose(
        (1, tokens_of(1, 13), warm), (1, tokens_of(1, 13), GREEDY), (2, tokens_of(2, 13), warm)
    )
    assert broken is None
    assert greedy is None
    assert len(fine.tokens) == 5
    assert serving.drafter.broken == 2


def test_what_does_not_fit_is_refused(target, draft):
    pools = draft.make_pools(4, PAGE)
    for count in (0, 9):
        with pytest.raises(ValueError, match="proposes 1 to 8 tokens"):
            DSparkDrafter(draft, target, pools, count)
    with pytest.raises(ValueError, match="sampling is 'hot'"):
        DSparkDrafter(draft, target, pools, 3, "hot")
    with pytest.raises(ValueError, match=r"the target taps \(0, 1\), the draft reads \(0, 2, 3\)"):
        DSparkDrafter(draft, tapped(taps=(0, 1)), pools, 3)


def test_a_tap_is_the_raw_sum_that_the_next_layer_banks():
    model, banked = tapped(taps=(1, 3)), {}

    def layer(block, p, blocks, pools, step):
        if block.snapshot:
            banked[len(banked)] = blocks[-1].clone()
        return type(block).forward(block, p, blocks, pools, step)

    with torch.no_grad():
        pools = model.make_pools(2, 20, 8)
        _, taps = model(make_step([Row(tokens_of(1, 20), 1, 0, range(1, 20))]), pools, layer=layer)
    assert torch.equal(taps[0], banked[1])  # layers 0, 2 and 4 bank their input
    assert torch.equal(taps[1], banked[2])


@pytest.mark.parametrize(
    ("dtype", "resident", "bound"),
    [(torch.float32, None, 2e-5), (torch.float32, torch.bfloat16, 0.05), (torch.bfloat16, None, 0.1)],
    ids=str,
)
def test_other_dtypes_draft_about_the_same(target, draft, dtype, resident, bound):
    warm = (1, tokens_of(1, 13), SamplingParams(temperature=1.0, seed=5))
    exact = Serving(target, draft, 1)
    exact.run(row(1, 0, 12))
    other = DSparkModel(draft.config, dtype, resident=resident)
    other.load_state_dict(draft.state_dict())
    rounded = Serving(target, other, 1)
    rounded.run(row(1, 0, 12))
    (a,), (b,) = exact.propose(warm), rounded.propose(warm)
    assert rounded.drafter.pools[0].pages.dtype == dtype
    assert b.probs.dtype == torch.float32
    assert b.confidence.dtype == torch.float32
    assert (a.probs - b.probs).abs().max() < bound
    assert (a.confidence - b.confidence).abs().max() < bound
