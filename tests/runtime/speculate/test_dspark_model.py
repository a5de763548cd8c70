"""The draft model: context rows, and the training form against the reference and the pages."""

import pytest
import torch
from draft_reference import Reference, small_draft
from draft_serving import FIVE, Serving, pages_of, row, tapped, taps_of, tokens_of
from k3compile.runtime.speculate.dspark_model import DSparkModel
from small_models import SMALL


def test_context_rows_are_those_of_the_reference_layer_by_layer():
    draft = small_draft(FIVE)
    taps, positions = (
        torch.randn(3, 6, FIVE.hidden_size, dtype=torch.float64),
        torch.tensor([0, 3, 9, 9, 70, 1]),
    )
    rows = draft.context_rows(taps, positions)
    assert rows.shape == (2, 6, 26)
    reference = Reference(draft, None, None)
    for t, position in enumerate(positions.tolist()):
        ctx = reference.norm(reference.w["context_proj.weight"] @ taps[:, t].flatten(), "context_norm.weight")
        for layer in range(2):
            want = torch.cat(reference.row(layer, ctx, position))
            assert (rows[layer, t] - want).abs().max() < 1e-12


def test_all_layers_share_one_product_over_the_context(monkeypatch):
    draft, widths = small_draft(FIVE), []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, *b: widths.append(w.shape[0]) or linear(x, w, *b)
    )
    draft.context_rows(torch.randn(3, 6, FIVE.hidden_size, dtype=torch.float64), torch.arange(6))
    assert widths == [FIVE.hidden_size, 2 * draft.config.row]


def test_pools_have_the_targets_page_numbers():
    pools = small_draft(SMALL).make_pools(7, 4)
    assert [pool.pages.shape for pool in pools] == [(7, 4, 26)] * 2
    assert pools[0].pages.dtype == torch.float64
    assert not pools[0].pages.any()


def test_only_dtypes_a_target_runs_in():
    config = small_draft(SMALL).config
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        DSparkModel(config, torch.float16)
    kept = DSparkModel(config, torch.float32, resident=torch.bfloat16)
    assert kept.context_proj.weight.dtype == torch.bfloat16
    assert kept.confidence_weight.dtype == torch.float32
    assert kept.final_norm.weight.dtype == torch.float32


@pytest.fixture(scope="module")
def target():
    return tapped()


def sequences(target):
    """Two sequences of 18 tokens and their taps [2, 18, n, D]."""
    tokens = [tokens_of(1, 18), tokens_of(2, 18)]
    return torch.tensor(tokens), torch.stack([taps_of(target, one).transpose(0, 1) for one in tokens])


def test_training_logits_are_those_of_the_reference_at_every_anchor(target):
    draft = small_draft(FIVE)
    tokens, taps = sequences(target)
    anchors = torch.tensor([[1, 5, 12], [3, 9, 10]])
    got = draft.training_logits(taps, tokens, anchors, target, block=4)
    assert got.logits.shape == (2, 3, 4, FIVE.vocab_size)
    assert got.confidence.shape == (2, 3, 4)
    reference = Reference(draft, target.embed_tokens, target.lm_head.weight)
    for b in range(2):
        for a, anchor in enumerate(anchors[b].tolist()):
            given = iter(tokens[b, anchor + 1 :].tolist())
            past = taps[b, :anchor].transpose(0, 1)
            _, logits, confidence = reference.draft(
                past, int(tokens[b, anchor]), 4, choose=lambda _, given=given: next(given)
            )
            assert (got.logits[b, a] - logits).abs().max() < 1e-10
            assert (torch.sigmoid(got.confidence[b, a]) - confidence).abs().max() < 1e-10


def test_training_logits_are_what_serving_drafts_from(target):
    draft = small_draft(FIVE)
    serving = Serving(target, draft, 8)
    serving.run(row(1, 0, 13))
    given = tokens_of(1, 14)[13:], [13], [pages_of(1)]  # anchor, seen, page table
    hid, base = serving.drafter.blocks.run(*map(torch.tensor, given))
    tokens, taps = sequences(target)
    # without ``block`` it is the checkpoint's; places past the end only have to be there
    got = draft.training_logits(taps, tokens, torch.tensor([13]), target)
    markov = draft.markov(torch.tensor([[*tokens_of(1, 18)[13:], *[tokens_of(1, 18)[-1]] * 3]]))
    assert torch.equal(base, target.logits(hid))
    want = draft.logits(base, markov)
    assert (got.logits[0, 0] - want[0]).abs().max() < 1e-10


def test_the_token_before_may_be_ones_own(target):
    draft = small_draft(FIVE)
    tokens, taps = sequences(target)
    anchors, other = torch.tensor([4, 8]), torch.randint(0, 90, (2, 2, 5))
    truth = draft.training_logits(taps, tokens, anchors, target, 5)
    given = torch.stack([tokens[:, a : a + 5] for a in (4, 8)], 1)
    same = draft.training_logits(taps, tokens, anchors, target, 5, previous=given)
    assert torch.equal(same.logits, truth.logits)
    changed = draft.training_logits(taps, tokens, anchors, target, 5, previous=other)
    markov = draft.markov(other) - draft.markov(given)
    shift = markov @ draft.markov_w2.T
    assert torch.allclose(changed.logits - truth.logits, shift, rtol=0, atol=1e-10)


def test_every_parameter_gets_a_gradient_and_the_target_none(target):
    draft = small_draft(FIVE)
    draft.requires_grad_(True)
    tokens, taps = sequences(target)
    got = draft.training_logits(taps, tokens, torch.tensor([4, 8]), target, 5)
    (got.logits.logsumexp(-1).sum() + got.confidence.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_a_block_does_not_see_its_anchors_features_nor_later_ones(target):
    draft = small_draft(FIVE)
    tokens, taps = sequences(target)
    blind = taps.clone()
    blind[:, 8:] = torch.nan
    got = draft.training_logits(taps, tokens, torch.tensor([8]), target, 5)
    blind = draft.training_logits(blind.nan_to_num(1e3), tokens, torch.tensor([8]), target, 5)
    assert torch.equal(got.logits, blind.logits)
