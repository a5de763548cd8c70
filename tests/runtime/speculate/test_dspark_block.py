"""The passes of a draft by themselves; what they must equal is tested in test_dspark.py."""

import torch
from draft_reference import small_draft
from draft_serving import FIVE, Serving, pages_of, row, tapped, tokens_of


def test_a_block_has_a_row_for_each_draft_and_the_heads_scores_of_it():
    serving = Serving(target := tapped(), small_draft(FIVE), 3)
    serving.run(row(1, 0, 9), row(2, 0, 5))
    asked = torch.tensor([tokens_of(1, 10)[9], 7]), torch.tensor([9, 5])
    hid, base = serving.drafter.blocks.run(*asked, torch.tensor([pages_of(1), pages_of(2)]))
    assert hid.shape == (2, 3, FIVE.hidden_size)
    assert base.shape == (2, 3, FIVE.vocab_size)
    assert torch.equal(base, target.logits(hid))
    assert not base.isnan().any()


def test_a_drafter_asks_whoever_it_is_told_to_go_through():
    serving = Serving(tapped(), small_draft(FIVE), 3, "greedy")
    serving.run(row(1, 0, 9))
    asked = []

    class Executor:
        def draft(self, *given):
            asked.append([column.tolist() for column in given])
            return serving.drafter.blocks.run(*given)

    tokens = tokens_of(1, 10)
    alone = serving.propose((1, tokens, None))
    serving.drafter.through(Executor())
    assert serving.propose((1, tokens, None))[0].tokens == alone[0].tokens
    assert asked == [[[tokens[9]], [9], [list(pages_of(1))]]]
