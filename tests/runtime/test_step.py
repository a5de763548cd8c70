"""A plan becomes tensors: rows in order verify, decode, prefill, each with its request's numbers (H08)."""

import itertools
import time
from array import array

import pytest
import torch
from k3compile.runtime.request import Request
from k3compile.runtime.scheduler import Work
from k3compile.runtime.step import build


def piece(name: str, prompt: int, seen: int, count: int, drafts=(), pages=(1,), slot=1) -> Work:
    base = 1000 * (ord(name[0]) - ord("a") + 1)
    request = Request(name, [base + i for i in range(prompt)])
    request.seen = seen
    request.drafts = list(drafts)
    unseen = request.unseen
    return Work(request, count, len(drafts), count >= unseen, slot, array("q", pages))


def mixed() -> list[Work]:
    return [
        piece("a", 71, 70, 1, pages=[4, 5], slot=3),  # the last token of a prompt
        piece("b", 10, 9, 3, drafts=[7, 8], pages=[6], slot=2),  # verify
        piece("c", 40, 39, 1, pages=[1, 2, 9], slot=5),  # plain decode
        piece("d", 100, 0, 70, pages=[8, 3], slot=1),  # a chunk inside a prompt
        piece("e", 12, 4, 8, pages=[7], slot=4),  # the last chunk
    ]


def test_a_mixed_plan_row_by_row():
    step, work, samples, logit_rows = build(mixed(), max_requests=8, max_drafts=4)
    assert [w.request.id for w in work] == ["b", "a", "c", "d", "e"]
    assert step.spans.tolist() == [3, 2, 78]
    assert step.cu_verify.tolist() == [0, 3]
    assert step.cu_other.tolist() == [0, 1, 2, 72, 80]
    assert step.tokens.tolist() == [2009, 7, 8, 1070, 3039, *range(4000, 4070), *range(5004, 5012)]
    assert step.slots.tolist() == [2, 3, 5, 1, 4]
    assert step.seen.tolist() == [9, 70, 39, 0, 4]
    assert step.pages.tolist() == [[6, 0, 0], [4, 5, 0], [1, 2, 9], [8, 3, 0], [7, 0, 0]]
    assert step.scratch.shape == (1, 5)
    assert step.anchor.tolist() == [1]
    assert step.export_offset.tolist() == step.export_slot.tolist() == [0] * 8
    assert [w.request.id for w in samples] == ["b", "a", "c", "e"]
    assert logit_rows.tolist() == [0, 1, 2, 3, 4, 82]


def checkpointed() -> list[Work]:
    """Places for states at the end of a row, inside one, and none."""
    plan = mixed()
    plan[0] = plan[0]._replace(checkpoint=71, checkpoint_slot=21)
    plan[3] = plan[3]._replace(checkpoint=64, checkpoint_slot=22)
    return plan


def test_export_columns_follow_the_rows_after_the_verify_ones():
    step = build(checkpointed(), max_requests=8, max_drafts=4, exports=True).step
    assert step.export_offset.tolist() == [1, 0, 64, 0, 0, 0, 0, 0]
    assert step.export_slot.tolist() == [21, 0, 22, 0, 0, 0, 0, 0]


def test_a_forward_that_does_not_export_is_not_asked_to():
    step = build(checkpointed(), max_requests=8, max_drafts=4).step
    assert step.export_offset.tolist() == step.export_slot.tolist() == [0] * 8


def test_a_verify_row_has_a_slot_for_the_state_after_each_of_its_rows():
    plan = [w._replace(scratch=[2, 7, 8]) if w.drafts else w for w in mixed()]
    step = build(plan, max_requests=8, max_drafts=4).step
    assert step.scratch.tolist() == [[2, 7, 8, 0, 0]]


def test_every_order_of_the_plan_gives_each_request_the_same_rows():
    def by_request(plan):
        step, work, _, _ = build(plan, 8, 4)
        ends = list(itertools.accumulate(w.count for w in work))
        tokens = {w.request.id: step.tokens[e - w.count : e].tolist() for w, e in zip(work, ends)}
        rows = {
            w.request.id: (step.slots[i], step.seen[i], step.pages[i].tolist()) for i, w in enumerate(work)
        }
        return tokens, rows

    plan = mixed()
    expected = by_request(plan)
    for order in itertools.permutations(range(5)):
        assert by_request([plan[i] for i in order]) == expected


def test_dtypes_and_places_are_those_the_model_was_told():
    step = build(mixed(), 8).step
    int32 = {"export_offset", "export_slot"}
    for name, tensor in step._asdict().items():
        assert tensor.dtype == (torch.int32 if name in int32 else torch.int64), name
    assert step.spans.device.type == "cpu"


def test_empty_classes_have_empty_columns():
    step, _, samples, logit_rows = build([piece("a", 10, 0, 5)], 2)
    assert step.spans.tolist() == [0, 0, 5]
    assert step.cu_verify.tolist() == [0]
    assert step.scratch.shape == (0, 1)
    assert (samples, logit_rows.tolist(), logit_rows.dtype) == ([], [], torch.int64)


def test_only_verify_rows_leave_the_other_class_empty():
    step, *_, logit_rows = build([piece("a", 10, 9, 4, drafts=[1, 2, 3])], 2, 3)
    assert (step.spans.tolist(), step.cu_other.tolist()) == ([4, 0, 0], [0])
    assert logit_rows.tolist() == [0, 1, 2, 3]


def test_pages_may_grow_after_the_step_was_built():
    plan = [piece("a", 10, 0, 5)]
    step = build(plan, 2).step
    plan[0].pages.append(9)
    plan[0].request.tokens.append(5)
    assert step.pages.tolist() == [[1]]


@pytest.mark.parametrize(
    "plan",
    [
        [piece("a", 500, 499, 1, pages=range(1, 9), slot=i) for i in range(1, 17)],
        [piece("a", 500, 0, 128, pages=range(1, 9), slot=i) for i in range(1, 17)],
    ],
    ids=["decode", "prefill"],
)
def test_sixteen_requests_are_laid_out_within_a_millisecond(plan):
    times = []
    for _ in range(50):
        start = time.thread_time()
        build(plan, 16)
        times.append(time.thread_time() - start)
    assert sorted(times)[25] < 1e-3
