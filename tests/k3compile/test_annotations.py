"""A promise about an index is checked when it is made, and ends when the index is written or reshaped."""

import gc

import pytest
import torch

import k3compile
from k3compile.annotations import _promises, annotate_range, forget, in_use, range_promised, was_annotated


@pytest.fixture(autouse=True)
def no_promises():
    forget()
    yield
    forget()


def test_the_promise_is_found_again_by_the_tensor_alone():
    index = torch.arange(3, 7)
    assert not in_use()
    assert k3compile.annotate_range(index, 3, 7) is index
    assert in_use()
    assert range_promised(index) == (3, 7)
    assert range_promised(index.clone()) is None, "an equal tensor is not the tensor"
    assert range_promised(index[:]) is None
    assert range_promised(7) is None


def test_a_later_promise_replaces_an_earlier_one():
    index = annotate_range(torch.arange(3, 7, dtype=torch.int32), 3, 7)
    index += 1
    annotate_range(index, 4, 8)
    assert range_promised(index) == (4, 8)


WRITES = {
    "in place": lambda i: i.add_(1),
    "through a view": lambda i: i[1:].zero_(),
    "through a detached alias": lambda i: i.detach().zero_(),
    "an element": lambda i: i.__setitem__(0, 5),
    "into it": lambda i: torch.add(i, 1, out=i),
    "in inference mode": lambda i: torch.inference_mode()(i.add_)(1),
    "another shape": lambda i: i.resize_(2),
    "other memory": lambda i: i.set_(torch.arange(9)),
    "other data": lambda i: setattr(i, "data", torch.arange(4)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writing_the_index_ends_the_promise(write):
    index = annotate_range(torch.arange(2, 6), 2, 6)
    write(index)
    assert range_promised(index) is None
    assert was_annotated(index)


def test_a_promise_does_not_keep_its_tensor():
    index = annotate_range(torch.arange(2), 0, 2)
    assert was_annotated(index)
    del index
    gc.collect()
    assert len(_promises) == 0
    assert in_use(), "the process still is one that annotates"


REFUSED = {
    "wrong length": (torch.arange(3), 0, 4, r"annotate_range\(0, 4\) of an index with 3 elements"),
    "below zero": (torch.arange(3), -1, 2, r"start must be at least 0"),
    "backwards": (torch.arange(0), 3, 2, r"annotate_range\(3, 2\)"),
    "a table": (torch.zeros(2, 2, dtype=torch.int64), 0, 2, "got a 2-D int64 tensor"),
    "a number": (torch.tensor(3), 3, 4, "got a 0-D int64 tensor"),
    "a mask": (torch.ones(3, dtype=torch.bool), 0, 3, "got a 1-D bool tensor"),
    "floats": (torch.arange(3.0), 0, 3, "got a 1-D float32 tensor"),
    "a list": ([0, 1], 0, 2, "got a list"),
    "a tensor as bound": (torch.arange(3), torch.tensor(0), 3, "wants start as an int"),
    "a bool as bound": (torch.arange(1), 0, True, "wants end as an int"),
}


@pytest.mark.parametrize(("index", "start", "end", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_promised_is_refused_with_what_is_allowed(index, start, end, message):
    with pytest.raises(ValueError, match=message):
        annotate_range(index, start, end)
    assert not in_use()


def test_a_tensor_of_inference_mode_is_refused_since_its_writes_are_not_counted():
    with torch.inference_mode():
        index = torch.arange(3)
        with pytest.raises(ValueError, match="inference mode"):
            annotate_range(index, 0, 3)
        with torch.inference_mode(False):
            assert range_promised(annotate_range(torch.arange(3), 0, 3)) == (0, 3)
