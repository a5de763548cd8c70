"""The engine's drafter and where its pages lie."""

import pytest
import torch
from draft_reference import small_draft
from draft_serving import FIVE, tapped
from k3compile.runtime.cache.sizing import measure
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.speculate.dspark import DSparkDrafter
from k3compile.runtime.speculate.make_drafter import make_drafter, targets_own, with_draft
from k3compile.runtime.speculate.ngram import NgramDrafter


def test_without_drafts_nobody_and_without_a_draft_model_ngrams():
    model = tapped()
    assert make_drafter(model, None, [], EngineConfig()) is None
    assert make_drafter(model, small_draft(FIVE), [], EngineConfig()) is None
    made = make_drafter(model, None, [], EngineConfig(num_drafts=3))
    assert isinstance(made, NgramDrafter)
    assert made.num_drafts == 3


def test_the_drafts_pages_lie_behind_the_targets():
    model, draft = tapped(), small_draft(FIVE)
    pools = with_draft(model, draft)(3, 9, 4, 2, 3)
    own = targets_own(pools, draft)
    assert len(pools) == 7
    assert len(own) == 5
    assert [p.pages.shape for p in pools[5:]] == [(9, 4, 26)] * 2
    made = make_drafter(model, draft, pools, EngineConfig(num_drafts=2, draft_sampling="greedy"))
    assert isinstance(made, DSparkDrafter)
    assert all(a.pages is b.pages for a, b in zip(made.pools, pools[5:], strict=True))
    assert (made.num_drafts, made.sampling) == (2, "greedy")
    assert with_draft(model, None) == model.make_pools
    assert targets_own(own, None) is own


def test_a_page_is_priced_with_the_drafts_part():
    model, draft = tapped(), small_draft(FIVE, torch.float64)
    alone, both = (measure(with_draft(model, d), 4, 2) for d in (None, draft))
    assert both.page - alone.page == 2 * 4 * 26 * 8
    assert both.slot == alone.slot


def test_more_drafts_than_the_checkpoint_proposes_are_refused():
    model, draft = tapped(), small_draft(FIVE, block_size=2)
    with pytest.raises(ValueError, match="proposes 1 to 2 tokens"):
        make_drafter(model, draft, with_draft(model, draft)(3, 9, 4, 3, 3), EngineConfig(num_drafts=3))
