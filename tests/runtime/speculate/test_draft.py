"""What a drafter promises, held against those there are."""

import inspect

import pytest
from k3compile.runtime.speculate.draft import Draft, Drafter


def test_a_draft_of_which_only_tokens_are_known_is_one_hot_and_of_unknown_confidence():
    draft = Draft([4, 2])
    assert (draft.probs, draft.confidence) == (None, None)


@pytest.mark.parametrize("verb", ["observe", "propose", "forget"])
def test_every_verb_says_what_it_takes(verb):
    assert next(iter(inspect.signature(getattr(Drafter, verb)).parameters)) == "self"
    assert inspect.getdoc(getattr(Drafter, verb))
