"""What a drafter promises, held against those there are."""

import inspect

import pytest
import torch
from k3compile.runtime.speculate.draft import Draft, Drafter, sound


def test_a_draft_of_which_only_tokens_are_known_is_one_hot_and_of_unknown_confidence():
    draft = Draft([4, 2])
    assert (draft.probs, draft.confidence) == (None, None)


@pytest.mark.parametrize("verb", ["observe", "propose", "forget"])
def test_every_verb_says_what_it_takes(verb):
    assert next(iter(inspect.signature(getattr(Drafter, verb)).parameters)) == "self"
    assert inspect.getdoc(getattr(Drafter, verb))


def test_a_sound_draft_is_handed_on_as_it_is():
    drawn = Draft([4, 2], torch.full((2, 9), 1 / 9), torch.tensor([0.5, 0.4]))
    assert sound(drawn, 2, 9) is drawn
    assert sound(None, 2, 9) is None
    assert sound(Draft([]), 2, 9) is None


@pytest.mark.parametrize("tokens", [[4, 2, 8, 1], [4, 2, -1, -1], [4, 2, -1, 3]])
def test_a_draft_ends_where_there_is_no_room_or_no_token(tokens):
    drawn = Draft(tokens, torch.rand(4, 9), torch.rand(4))
    cut = sound(drawn, 2, 9)
    assert cut.tokens == [4, 2]
    assert torch.equal(cut.probs, drawn.probs[:2])
    assert torch.equal(cut.confidence, drawn.confidence[:2])
    assert sound(Draft(tokens), 2, 9) == Draft([4, 2])
    assert sound(Draft([-1, 4]), 2, 9) is None


@pytest.mark.parametrize(
    ("draft", "wrong"),
    [
        (Draft([4, 9]), "9"),
        (Draft([4, -2]), "-2"),
        (Draft([4, 2.5]), "2.5"),
        (Draft(torch.tensor([4, 2])), "Tensor"),
        (Draft([4, 2], torch.rand(1, 9)), "probs"),
        (Draft([4, 2], torch.rand(2, 8)), "probs"),
        (Draft([4, 2], None, torch.rand(1)), "confidence"),
    ],
)
def test_what_no_target_could_verify_is_refused(draft, wrong):
    with pytest.raises(ValueError, match=wrong):
        sound(draft, 4, 9)
