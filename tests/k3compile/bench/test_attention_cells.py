"""Cells of latent attention: what they count is what their calls hold, and each call is one the op takes."""

import pytest
import torch
from k3compile.kernels import OPS

from k3compile.bench.attention_cells import ATTENTIONS, contexts


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_op_takes_each_call_and_its_context_is_counted_once(name):
    for case, kind, calls, moved, flops in ATTENTIONS[name](1):
        pages, table = calls[0][1 if name in ("mla_attend_shard", "mla_write") else 2 :][:2]
        context = table.numel() * pages[0].numel() * 4
        if name == "mla_write":
            before = pages.clone()
            OPS[name](*calls[-1])
            assert (pages != before).any(2).sum() * pages.shape[2] * 4 == context
            assert (moved, flops) == (2 * len(calls) * context, 0)
            continue
        assert torch.isfinite(OPS[name](*calls[-1])[0]).all(), case
        if kind == "bandwidth":
            assert moved == len(calls) * context
        assert flops > 0
        assert OPS[name].fake_form(*calls[0]) is not None


def test_a_prompt_counts_what_its_queries_see_and_no_more():
    *_, (case, kind, (call,), _, flops) = ATTENTIONS["mla_attend"](1)
    heads, tokens = call[0].shape[1], call[0].shape[0]
    seen = sum(range(1, tokens + 1))
    assert (case, kind) == ("a prompt of 2048", "compute")
    assert flops == 2 * heads * (seen * (128 + 64 + 128) + tokens * 256 * (128 + 128))


def test_contexts_hold_what_is_asked_in_pages_of_their_own():
    pages, tables, one = contexts(10**8, 2048)
    assert len(tables) * one >= 10**8
    assert torch.cat(tables).unique().numel() == len(pages)
