"""The tuples of a step: those made in a hurry, past their constructors, are whole."""

from k3compile.runtime.budget import Limits
from k3compile.runtime.cache.cache import Cache
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.scheduler import Scheduler
from k3compile.runtime.work import Progress, Result, Verdict


def test_what_is_made_for_a_repeated_row_equals_what_its_constructor_makes():
    scheduler = Scheduler(Limits(), Cache(10, 3, 16))
    scheduler.add(request := Request("r", [2, 2], SamplingParams(max_tokens=9)))
    for _ in range(3):
        (work,) = scheduler.plan()
        (verdict,) = scheduler.judge([Result(work, [5])])
        (progress,) = scheduler.commit([verdict])
    assert work is request.again
    assert verdict == Verdict(work, [5], 1)
    assert progress == Progress(request, [5], None)
    assert (verdict.checkpoint, verdict.checkpoint_slot, progress.error) == (0, 0, None)


def test_work_says_by_default_that_it_leaves_no_state_behind():
    scheduler = Scheduler(Limits(), Cache(10, 3, 16))
    scheduler.add(Request("r", [2, 2], SamplingParams(max_tokens=9)))
    (work,) = scheduler.plan()
    assert (work.count, work.drafts, work.samples, work.checkpoint, work.scratch) == (2, 0, True, 0, ())
