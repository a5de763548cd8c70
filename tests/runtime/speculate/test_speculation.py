"""Where speculation enters a step: drafts reach their requests, and a drafter that fails stops nothing."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from k3compile.runtime.executor import GroupLost
from k3compile.runtime.request import Request
from k3compile.runtime.scheduler import Verdict, Work
from k3compile.runtime.speculate.adaptive import Adaptive
from k3compile.runtime.speculate.costs import CostTable
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


def test_only_drafts_that_pay_are_given_and_what_became_of_them_is_learned():
    both = requests()
    adaptive = Adaptive(CostTable((1, 4, 5), (1.0, 1.3, 3.0)))  # up to four rows are cheap
    speculation = Speculation(Parrot(), lambda batch, verdicts: None, adaptive)
    speculation.propose(both, [None, None])
    assert [r.drafts for r in both] == [[6, 6], []]
    batch = SimpleNamespace(step=SimpleNamespace(spans=torch.tensor([3, 1, 2])))
    works = [Work(r, 1 + len(r.drafts), len(r.drafts), True, 1, array("q")) for r in both]
    failed = Verdict(works[0], [], 0, "error", "no")
    speculation.settle(batch, [Verdict(works[0], [6, 9], 2), Verdict(works[1], [4], 1), failed])
    assert (adaptive.tried, adaptive.kept, adaptive.other_rows) == (2, 1, 2)
    speculation.propose(both, [None, None])
    assert [r.drafts for r in both] == [[], []]
    speculation.forget(both[0])
    assert both[0] not in adaptive._records


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


def test_ranks_that_lost_each_other_are_no_fault_of_the_drafter():
    """The others wait in the middle of its pass: going on without it would leave them there."""

    class Alone(Parrot):
        def propose(self, requests, holdings):
            raise GroupLost("command 3 (draft) failed on rank 0")

    speculation = Speculation(Alone())
    with pytest.raises(GroupLost):
        speculation.propose(requests(), [None, None])
    assert speculation.error is None
    assert speculation.observer == speculation.observe
    assert Speculation().observer is None
