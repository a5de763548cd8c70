"""The budget by brute force, prefixes of requests, one-step-old confidences, and what trials teach."""

import gc
import itertools
import json

import numpy as np
import pytest
import torch
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.executor import Executor
from k3compile.runtime.request import Request
from k3compile.runtime.speculate.adaptive import Adaptive, Record, make_adaptive
from k3compile.runtime.speculate.costs import CostTable
from k3compile.runtime.speculate.draft import Draft, first
from k3compile.runtime.speculate.ngram import NgramDrafter

FREE = CostTable((1, 2), (1.0, 1.0))  # rows cost nothing
LINEAR = CostTable((1, 101), (1.0, 11.0))  # 0.1 a row on top of 0.9
DEAR = CostTable((1, 2), (1.0, 2.0))  # a row costs as much as a token brings at best


def request(name="a") -> Request:
    return Request(name, [1])


def draft(*confidence: float) -> Draft:
    return Draft(list(range(len(confidence))), None, torch.tensor(confidence, dtype=torch.float64))


def settled(adaptive: Adaptive, requests, drafts, other_rows=0) -> list[int]:
    """The counts once the confidences are one step old."""
    adaptive.allot(requests, drafts, other_rows)
    return adaptive.allot(requests, drafts, other_rows)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_prefixes_brings_more_tokens_a_second(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, size=3)
    drafts = [draft(*rng.uniform(0.2, 1, n)) if n else None for n in lengths]
    step = rng.uniform(0.01, 0.6)
    verify = CostTable((1, 4, 9), (1.0, 1.0 + step, 1.0 + 4 * step))
    passes = CostTable((1, 3), (0.2, 0.3))
    adaptive, requests = Adaptive(verify, passes), [request(n) for n in "abc"]

    def rate(counts) -> float:
        gain = sum(float(np.cumprod(d.confidence.numpy())[:n].sum()) for d, n in zip(drafts, counts) if d)
        return (3 + gain) / (0.3 + verify.at(np.array([3 + 2 + sum(counts)]))[0])

    counts = settled(adaptive, requests, drafts, other_rows=2)
    best = max(itertools.product(*[range(n + 1) for n in lengths]), key=rate)
    assert rate(counts) == pytest.approx(rate(best), rel=1e-12)


def test_free_rows_are_all_taken_and_dear_ones_only_when_sure():
    requests = [request("a"), request("b")]
    drafts = [draft(0.5, 0.5, 0.5), draft(0.1, 0.9)]
    assert settled(Adaptive(FREE), requests, drafts) == [3, 2]
    assert settled(Adaptive(DEAR), requests, drafts) == [0, 0]
    assert settled(Adaptive(LINEAR), requests, drafts) == [2, 0]


def test_a_confident_request_gets_what_an_unsure_one_does_not():
    requests = [request("a"), request("b")]
    counts = settled(Adaptive(LINEAR), requests, [draft(0.3, 0.9, 0.9), draft(0.95, 0.9, 0.9)])
    assert counts == [0, 3]


def test_the_budget_is_one_step_old_and_its_rows_go_to_those_who_are_sure_now():
    adaptive, requests = Adaptive(LINEAR), [request("a"), request("b")]
    sure, unsure = draft(0.99, 0.99), draft(0.01, 0.01)
    assert adaptive.allot(requests, [unsure, unsure]) == [2, 2]  # new requests count as certain
    assert adaptive.allot(requests, [sure, sure]) == [0, 0]
    assert adaptive.allot(requests, [sure, unsure]) == [2, 2]
    assert adaptive.allot(requests, [unsure, sure]) == [0, 2]


def test_a_draft_longer_than_the_last_counts_as_certain_where_nothing_is_known():
    adaptive, owner = Adaptive(FREE), request()
    adaptive.allot([owner], [draft(0.5)])
    assert adaptive.allot([owner], [draft(0.5, 0.5, 0.5)]) == [3]
    assert adaptive.allot([owner], [None]) == [0]
    assert adaptive.allot([owner], [draft(0.5)]) == [1]


def test_what_is_allotted_is_always_a_prefix_also_among_equals():
    requests = [request(str(i)) for i in range(4)]
    adaptive = Adaptive(FREE, vocab_size=(1 << 30) // 4 // 9)  # nine rows of logits fit: five drafts
    counts = adaptive.allot(requests, [draft(1.0, 1.0, 1.0)] * 4)
    assert counts == [2, 1, 1, 1]


def test_the_memory_of_the_logits_bounds_the_rows():
    requests = [request("a"), request("b")]
    for rows, total in ((2, 0), (1, 0), (5, 3), (100, 6)):
        adaptive = Adaptive(FREE, vocab_size=(1 << 28) // rows)
        assert sum(adaptive.allot(requests, [draft(0.9, 0.9, 0.9)] * 2)) == total


def test_prompt_rows_beside_make_a_draft_row_cheaper_in_proportion():
    verify = CostTable((1, 1001), (1.0, 101.0))
    assert settled(Adaptive(verify), [request()], [draft(0.05, 0.05)]) == [0]
    trimmed = Adaptive(CostTable((1, 4, 5), (1.0, 1.3, 3.0)))
    assert settled(trimmed, [request()], [draft(0.9, 0.9, 0.9, 0.9)]) == [3]
    assert settled(trimmed, [request()], [draft(0.9, 0.9, 0.9, 0.9)], other_rows=2) == [1]


def test_nothing_at_all_is_fine():
    assert Adaptive(LINEAR).allot([], []) == []
    assert Adaptive(LINEAR).allot([request()], [None], 7) == [0]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, 7.0])
def test_a_confidence_that_is_no_chance_harms_nobody(odd):
    requests = [request("a"), request("b")]
    counts = settled(Adaptive(LINEAR), requests, [draft(odd, 0.9), draft(0.99, 0.99)])
    assert counts[1] == 2


def guessed(k: int) -> Draft:
    return Draft([0] * k)


def test_drafts_of_unknown_confidence_are_judged_by_what_became_of_the_last_ones():
    adaptive, good, bad, given = Adaptive(LINEAR), request("good"), request("bad"), []
    for _ in range(10):
        given.append(adaptive.allot([good, bad], [guessed(4), guessed(4)]))
        for owner, tried in zip((good, bad), given[-1]):
            if tried:
                adaptive.learn(owner, tried, tried if owner is good else 0)
    assert [g for g, _ in given] == [4] * 10
    assert [b for _, b in given][-6:] == [0] * 6


def test_a_request_without_rows_is_tried_again_and_not_at_once():
    dear = CostTable((1, 11), (1.0, 4.0))
    adaptive, owner, tries = Adaptive(dear), request(), []
    for _ in range(200):
        (count,) = adaptive.allot([owner], [guessed(4)])
        tries.append(count)
        if count:
            adaptive.learn(owner, count, 0)
    assert 2 <= sum(map(bool, tries[100:])) <= 40
    assert max(tries[100:]) == 1


def test_the_estimate_counts_kept_drafts_and_the_first_that_was_not():
    adaptive, owner = Adaptive(LINEAR), request()
    adaptive.learn(owner, 4, 2)
    assert adaptive._records[owner] == Record(2, 3)
    adaptive.learn(owner, 4, 4)
    assert adaptive._records[owner] == Record(6, 7)
    assert adaptive._records[owner].estimate == 7 / 8
    with pytest.raises(AssertionError):
        adaptive.learn(owner, 1, 2)


def test_trimming_keeps_tokens_probabilities_and_confidences_together():
    probs = torch.rand(3, 5)
    whole = Draft([4, 1, 2], probs, torch.tensor([0.9, 0.8, 0.7]))
    cut = first(whole, 2)
    assert cut.tokens == [4, 1]
    assert torch.equal(cut.probs, probs[:2])
    assert cut.confidence.tolist() == pytest.approx([0.9, 0.8])
    assert first(whole, 0) is None
    assert first(None, 0) is None
    assert first(guessed(3), 1) == Draft([0])
    assert Adaptive(FREE).trim([request("a"), request("b")], [guessed(2), None]) == [guessed(2), None]


def test_the_rows_expected_beside_are_those_that_were_set():
    adaptive, owner = Adaptive(CostTable((1, 4, 5), (1.0, 1.3, 3.0))), request()
    adaptive.other_rows = 2
    adaptive.trim([owner], [draft(0.9, 0.9, 0.9)])
    assert adaptive.trim([owner], [draft(0.9, 0.9, 0.9)])[0].tokens == [0]


def test_a_request_is_forgotten_when_told_and_when_it_is_gone():
    adaptive, owner = Adaptive(LINEAR), request()
    adaptive.learn(owner, 1, 0)
    adaptive.forget(owner)
    adaptive.forget(owner)
    assert len(adaptive._records) == 0
    adaptive.learn(owner, 1, 0)
    del owner
    gc.collect()
    assert len(adaptive._records) == 0


def test_the_report_is_json_and_counts_what_happened():
    adaptive, owner = Adaptive(LINEAR, FREE), request()
    adaptive.allot([owner], [guessed(3)])
    adaptive.learn(owner, 3, 2)
    told = json.loads(json.dumps(adaptive.report()))
    assert told["verify"] == {"rows": [1, 101], "seconds": [1.0, 11.0]}
    assert told["draft"]["rows"] == [1, 2]
    assert [told[name] for name in ("proposed", "allotted", "tried", "kept")] == [3, 3, 3, 2]


def test_a_thousand_requests_take_one_look_at_the_table(monkeypatch):
    """All budgets at once: what it costs is a sort of the survivals."""
    looks, at = [], CostTable.at
    monkeypatch.setattr(CostTable, "at", lambda table, rows: looks.append(len(rows)) or at(table, rows))
    requests = [request(str(i)) for i in range(1024)]
    assert Adaptive(FREE).allot(requests, [guessed(16)] * 1024) == [16] * 1024
    assert looks == [1024 * 16 + 1]


@pytest.mark.parametrize(("wanted", "drafter"), [(False, NgramDrafter(2)), (True, None)])
def test_nothing_is_measured_where_there_is_nothing_to_decide(wanted, drafter):
    config = EngineConfig(num_drafts=2, adaptive_verification=wanted)
    assert make_adaptive(drafter, None, config, 5) is None


def test_an_engines_costs_are_those_of_its_own_forward_and_drafter():
    config = EngineConfig(max_num_seqs=2, num_drafts=2, adaptive_verification=True, max_model_len=64)
    rows = []

    def forward(step):
        rows.append(len(step.tokens))
        return torch.zeros(len(step.tokens), 3), torch.empty(0)

    adaptive = make_adaptive(NgramDrafter(2), Executor([], forward, lambda hidden: hidden), config, 3)
    assert adaptive.verify.rows == (1, 2, 4, 6)
    assert set(rows) == {1, 2, 4, 6}
    assert adaptive.draft.rows == (1, 2)
    assert adaptive.most_rows == (1 << 28) // 3
