"""Where speculation enters a step: drafts reach their requests, and a drafter that fails stops nothing."""

from types import SimpleNamespace

import pytest
import torch
from k3compile.runtime.request import Request
from k3compile.runtime.speculate.draft import Draft
from k3compile.runtime.speculate.speculation import Speculation


class Parrot:
    """Proposes the last token twice, to every second request."""

    lookahead, taps = 2, (1,)

    def __init__(self):
        self.seen, self.forgotten = [], []

    def observe(self, step, taps):
        self.seen.append((step, taps))

    def propose(self, requests, holdings):
        return [Draft([r.tokens[-1]] * 2) if i % 2 == 0 else None for i, r in enumerate(requests)]

    def forget(self, request):
        self.forgotten.append(request)


class Broken(Parrot):
    def propose(self, requests, holdings):
        raise RuntimeError("no idea")


def requests():
    return [Request(name, [5, 6 + i]) for i, name in enumerate("ab")]


def verdict(drafts):
    return SimpleNamespace(work=SimpleNamespace(drafts=drafts))


def test_drafts_reach_their_requests_and_old_ones_go():
    both, drafter = requests(), Parrot()
    both[1].propose(Draft([1]))
    speculation = Speculation(drafter)
    assert (speculation.lookahead, Speculation().lookahead) == (2, 0)
    speculation.propose(both, [None, None])
    assert [r.drafts for r in both] == [[6, 6], []]
    assert [r.proposal for r in both] == [Draft([6, 6]), None]
    speculation.forget(both[0])
    assert drafter.forgotten == both[:1]


def test_proposals_are_trimmed_before_they_are_given():
    both = requests()
    Speculation(Parrot(), trim=lambda running, drafts: [Draft([9]), drafts[1]]).propose(both, [None, None])
    assert [r.drafts for r in both] == [[9], []]


def test_a_drafter_that_fails_is_switched_off_and_its_requests_go_on_without():
    both = requests()
    both[0].propose(Draft([1]))
    speculation = Speculation(Broken())
    speculation.propose(both, [None, None])
    assert [r.drafts for r in both] == [[], []]
    assert (speculation.drafter, speculation.error, speculation.lookahead) == (
        None,
        "RuntimeError: no idea",
        0,
    )
    speculation.observe(None, torch.empty(0))
    speculation.propose(both, [None, None])


def test_only_verified_rows_are_settled():
    calls = []
    speculation = Speculation(settle=lambda batch, verdicts: calls.append(verdicts))
    speculation.settle(None, [verdict(0)])
    assert calls == []
    speculation.settle(None, [verdict(0), verdict(3)])
    assert len(calls) == 1
    with pytest.raises(AssertionError, match="nothing settles their states"):
        Speculation().settle(None, [verdict(1)])
