"""Prompt look-up against a search from scratch, its cost, and what it forgets."""

import gc
import inspect
import random
from array import array

import pytest
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate import ngram
from k3compile.runtime.speculate.draft import Drafter
from k3compile.runtime.speculate.ngram import Index, NgramDrafter


def request(prompt, **params) -> Request:
    return Request("a", prompt, SamplingParams(**params))


def draft(drafter: NgramDrafter, owner: Request):
    return drafter.propose([owner], [])[0]


def searched(tokens: list[int], shortest: int, longest: int) -> int:
    """The definition: longest suffix first, latest earlier place first."""
    end = len(tokens)
    for n in range(min(longest, end), shortest - 1, -1):
        for place in range(end - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[end - n :]:
                return place
    return 0


@pytest.mark.parametrize("bulk", [1, 7, 10**9])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 3), (1, 9)])
def test_the_index_finds_what_a_search_from_scratch_finds(shortest, longest, bulk, monkeypatch):
    monkeypatch.setattr(ngram, "BULK", bulk)
    rng = random.Random(longest)
    for vocabulary in (2, 6, 163_840):
        tokens, index, found = array("q"), Index(shortest, longest), 0
        words = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))] for _ in range(8)]
        while len(tokens) < 300:
            tokens.extend(rng.choice(words)[: rng.randint(1, 6)])
            index.extend(tokens, len(tokens))
            place = index.find(tokens)
            assert place == searched(tokens.tolist(), shortest, longest)
            found += place > 0
        assert found > 10


def test_the_draft_is_what_followed_and_reads_on_into_itself():
    owner = request([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert draft(NgramDrafter(4), owner).tokens == [4, 5, 9, 1]
    assert draft(NgramDrafter(8), request([7, 5, 6, 5, 6])).tokens == [5, 6, 5, 6, 5, 6, 5, 6]
    assert draft(NgramDrafter(3), request([8, 8])).tokens == [8, 8, 8]
    assert draft(NgramDrafter(4), owner)[1:] == (None, None)


def test_the_latest_of_equal_suffixes_is_taken_and_a_longer_one_before_it():
    assert draft(NgramDrafter(1), request([1, 5, 1, 6, 1])).tokens == [6]
    assert draft(NgramDrafter(1), request([2, 1, 5, 3, 1, 6, 2, 1])).tokens == [5]


def test_nothing_is_proposed_where_nothing_occurred_before():
    assert draft(NgramDrafter(4), request([1, 2, 3])) is None
    assert draft(NgramDrafter(4), request([1])) is None
    assert draft(NgramDrafter(4, longest=3, shortest=2), request([3, 1, 4, 1])) is None


@pytest.mark.parametrize(("room", "expected"), [(1, 0), (2, 1), (4, 3), (100, 6)])
def test_no_more_is_proposed_than_the_request_can_take_with_the_token_that_follows(room, expected):
    found = draft(NgramDrafter(6), request([1, 1, 1], max_tokens=room))
    assert (len(found.tokens) if found else 0) == expected


class Counted(array):
    """Tokens that count how many of them were read."""

    read = 0

    def __getitem__(self, place):
        Counted.read += len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1
        return super().__getitem__(place)


def test_a_step_at_100k_tokens_looks_at_no_more_tokens_than_one_at_1k():
    def read(length: int) -> int:
        rng = random.Random(3)
        tokens = Counted("q", [rng.randrange(50) for _ in range(length)])
        index = Index(1, 4)
        index.extend(tokens, length)
        Counted.read = 0
        for _ in range(20):
            tokens.append(rng.randrange(50))
            index.extend(tokens, len(tokens))
            index.find(tokens)
        return Counted.read

    assert read(100_000) <= read(1_000) + 20 * 4 <= 20 * 60


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch):
    monkeypatch.setattr(ngram, "CATCH_UP", 1000)
    drafter, owner = NgramDrafter(4), request([1, 2, 3, 4] * 600)
    found = [draft(drafter, owner) for _ in range(4)]
    assert found[:2] == [None, None]
    assert found[2].tokens == found[3].tokens == [1, 2, 3, 4]


def test_hashes_that_collide_cost_drafts_and_propose_nothing_that_was_not_said(monkeypatch):
    monkeypatch.setattr(ngram, "BASE", 1)  # the hash is the sum: [1, 2] and [2, 1] are one
    rng, index, tokens, found = random.Random(1), Index(2, 2), array("q", [1, 2]), 0
    for _ in range(300):
        tokens.append(rng.randrange(4))
        index.extend(tokens, len(tokens))
        if place := index.find(tokens):
            found += 1
            assert tokens[place - 2 : place] == tokens[-2:]
    assert 0 < found < 300


def test_an_index_goes_with_its_request():
    drafter, owner = NgramDrafter(2), request([1, 1])
    draft(drafter, owner)
    drafter.forget(owner)
    drafter.forget(owner)
    assert len(drafter._indices) == 0
    draft(drafter, owner)
    del owner
    gc.collect()
    assert len(drafter._indices) == 0


def test_requests_do_not_look_into_one_another():
    drafter, first, second = NgramDrafter(2), request([1, 2, 1]), request([1, 3, 1])
    for _ in range(2):
        assert [d.tokens for d in drafter.propose([first, second], [])] == [[2, 1], [3, 1]]


def test_a_request_that_was_thrown_out_and_came_back_drafts_on():
    drafter, owner = NgramDrafter(2), request([1, 2, 1])
    before = draft(drafter, owner)
    drafter.forget(owner)
    assert draft(drafter, owner) == before


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((0, 4, 1), "num_drafts must be at least 1"), ((4, 2, 3), "got 3 and 2"), ((4, 2, 0), "got 0 and 2")],
)
def test_sizes_that_leave_nothing_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        NgramDrafter(*sizes)


def test_it_is_a_drafter():
    for verb in ("observe", "propose", "forget"):
        ours, theirs = (inspect.signature(getattr(c, verb)) for c in (NgramDrafter, Drafter))
        assert list(ours.parameters) == list(theirs.parameters)
    assert (NgramDrafter.lookahead, NgramDrafter.taps) == (0, ())
