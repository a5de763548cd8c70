"""What a rank's list of collectives holds: every call, however it is made."""

import operator

import pytest
import torch
import torch.distributed as dist
from k3compile.runtime.parallel import collectives
from k3compile.runtime.parallel.ranks import world
from k3compile.runtime.parallel.recorder import BITS63, Recorder, hearing, text_of

F32 = torch.float32


@pytest.fixture
def group():
    return world().group


@pytest.fixture
def recorder():
    with hearing(Recorder()) as made:
        yield made


def texts(recorder):
    return [entry.text for entry in recorder.entries()]


def test_collectives_that_are_values_are_heard(group, recorder):
    x = torch.ones(2, 3)
    collectives.all_reduce(x, group)
    collectives.all_gather(x, 1, group)
    collectives.reduce_scatter(x.double(), 1, group)
    collectives.all_to_all(torch.ones(1, 4), 1, group)
    assert texts(recorder) == [
        "allreduce_ [2, 3] float32 over 1",
        "allgather_into_tensor_coalesced_ [2, 3] float32, [2, 3] float32 over 1",
        "reduce_scatter_tensor_coalesced_ [2, 3] float64, [2, 3] float64 over 1",
        "alltoall_base_ [1, 4] float32, [1, 4] float32 over 1",
    ]
    assert recorder.mark().count == 4


def test_collectives_in_place_are_heard(group, recorder):
    plan = torch.zeros(8, dtype=torch.int64)
    dist.broadcast(plan, 0)
    dist.all_reduce(plan)
    dist.barrier()
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(plan, "sum", group))
    assert [text.split()[0] for text in texts(recorder)] == [
        "broadcast_",
        "allreduce_",
        "barrier",
        "allreduce_",
    ]
    assert texts(recorder)[0] == "broadcast_ [8] int64 over 1"


@pytest.mark.inductor
@pytest.mark.slow
def test_collectives_in_code_that_inductor_wrote_are_heard_at_every_call(group, recorder):
    def work(x):
        return collectives.all_reduce(x * 2, group) + 1

    compiled = torch.compile(work, backend="inductor")
    for count in (1, 2, 3):
        compiled(torch.ones(2, 3))
        assert texts(recorder) == ["allreduce_ [2, 3] float32 over 1"] * count


def test_collectives_inside_an_opaque_op_are_heard_when_it_runs_and_not_when_it_is_traced(group, recorder):
    library = torch.library.Library("k3_test_recorder", "DEF")
    library.define("summed(Tensor x) -> Tensor")
    library.impl("summed", lambda x: collectives.all_reduce(x, group), "CPU")
    torch.library.register_fake("k3_test_recorder::summed", torch.empty_like, lib=library)
    compiled = torch.compile(lambda x: torch.ops.k3_test_recorder.summed(x) + 1, backend="aot_eager")
    compiled(torch.ones(5))
    assert texts(recorder) == ["allreduce_ [5] float32 over 1"]


def test_nothing_is_heard_outside(group):
    with hearing(Recorder()) as first:
        pass
    collectives.all_reduce(torch.ones(1), group)
    with hearing(Recorder()) as second:
        collectives.all_reduce(torch.ones(1), group)
    assert (first.mark().count, second.mark().count) == (0, 1)


def made(*calls):
    recorder = Recorder(kept=4)
    for op, shape in calls:
        recorder.add(op, ((shape, F32),), 2)
    return recorder


BASE = [("allreduce_", (4, 8)), ("allreduce_", (2, 8)), ("broadcast_", (9,))]
OTHERS = {
    "an extra call": [*BASE, BASE[0]],
    "a missing call": BASE[:2],
    "another shape": [BASE[0], ("allreduce_", (3, 8)), BASE[2]],
    "another op": [BASE[0], ("reduce_", (2, 8)), BASE[2]],
    "another order": [BASE[1], BASE[0], BASE[2]],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_the_mark_tells_lists_apart(other):
    assert made(*BASE).mark() == made(*BASE).mark()
    assert made(*BASE).mark() != made(*other).mark()
    if len(other) == len(BASE):
        assert made(*BASE).mark().digest != made(*other).mark().digest


def test_dtype_and_group_count_too():
    marks = set()
    for dtype, ranks in ((F32, 2), (torch.float64, 2), (F32, 4)):
        recorder = Recorder()
        recorder.add("allreduce_", (((4,), dtype),), ranks)
        marks.add(recorder.mark())
    assert len(marks) == 3


def test_only_the_last_calls_are_kept_and_all_of_them_count():
    recorder = made(*[("allreduce_", (n,)) for n in range(1, 11)])
    entries = recorder.entries()
    assert [entry.place for entry in entries] == [6, 7, 8, 9]
    assert entries[-1].text == text_of(("allreduce_", (((10,), F32),), 2))
    assert recorder.mark() != made(*[("allreduce_", (n,)) for n in (9, 9, 3, 4, 5, 6, 7, 8, 9, 10)]).mark()


def test_the_digest_fits_a_plan_and_is_the_same_in_every_process():
    recorder = made(*BASE * 50)
    assert 0 <= operator.index(recorder.mark().digest) <= BITS63
    assert torch.tensor(recorder.mark().digest).item() == recorder.mark().digest
    assert made(*BASE).mark().digest == 4531274200157809499
