"""Commands come out as they went in, and numbers that are no command are refused whatever is wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3compile.runtime.cache.orders import Clear, Copy, Fold, Poison, PoisonAll
from k3compile.runtime.parallel.recorder import Mark
from k3compile.runtime.parallel.wire import (
    HEAD,
    MAGIC,
    Ask,
    Command,
    Malformed,
    Run,
    Stop,
    decode,
    encode,
    length_of,
)
from k3compile.runtime.step import Step

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
LISTS = st.lists(INT64, max_size=5)


@st.composite
def ints(draw, *shape, numbers=INT64, dtype=torch.int64):
    count = torch.Size(shape).numel()
    flat = draw(st.lists(numbers, min_size=count, max_size=count))
    return torch.tensor(flat, dtype=dtype).view(shape)


@st.composite
def runs(draw):
    size = st.integers(0, 5)
    t, rv, ro, p, k, e = (draw(size) for _ in range(6))
    step = Step(
        draw(ints(t)),
        draw(ints(3)),
        draw(ints(rv + 1)),
        draw(ints(ro + 1)),
        draw(ints(rv + ro)),
        draw(ints(rv + ro)),
        draw(ints(rv + ro, p)),
        draw(ints(rv, k)),
        draw(ints(rv)),
        draw(ints(e, numbers=INT32, dtype=torch.int32)),
        draw(ints(e, numbers=INT32, dtype=torch.int32)),
    )
    copies = draw(st.integers(0, 4))
    pair = [draw(st.lists(INT64, min_size=copies, max_size=copies)) for _ in range(2)]
    rows = draw(ints(draw(size)))
    return Run(step, rows, Copy(*pair), draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 9)))


@st.composite
def asks(draw):
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return Ask(draw(ints(rows)), draw(ints(rows)), draw(ints(rows, columns)))


CHANGES = st.one_of(
    st.builds(Copy, LISTS, LISTS),
    st.builds(Clear, LISTS),
    st.builds(Poison, LISTS, LISTS),
    st.builds(Fold, st.lists(st.tuples(INT64, INT64, INT64), max_size=4)),
    st.just(PoisonAll()),
)
COMMANDS = st.builds(
    Command,
    st.integers(1, 1 << 62),
    st.builds(Mark, st.integers(0, 1 << 62), INT64),
    st.lists(CHANGES, max_size=6),
    st.one_of(runs(), asks(), st.just(Stop())),
)


def plain(thing):
    """Tensors as (dtype, shape, numbers), so that ``==`` says what it should."""
    if isinstance(thing, torch.Tensor):
        return thing.dtype, tuple(thing.shape), thing.tolist()
    if isinstance(thing, tuple | list):
        return type(thing).__name__, [plain(part) for part in thing]
    return thing


@settings(deadline=None, max_examples=100)
@given(COMMANDS)
def test_what_comes_out_is_what_went_in(command):
    numbers = encode(command)
    assert (numbers.dtype, numbers.dim()) == (torch.int64, 1)
    assert length_of(numbers) == len(numbers)
    got = decode(numbers)
    assert plain(got) == plain(command)
    assert got.kind == {Run: "run", Ask: "draft", Stop: "stop"}[type(command.body)]


@settings(deadline=None, max_examples=100)
@given(COMMANDS, st.data())
def test_cut_or_longer_numbers_are_refused(command, data):
    numbers = encode(command)
    cut = numbers[: data.draw(st.integers(2, len(numbers) - 1))]
    for wrong in (cut, torch.cat([numbers, numbers[:1]])):
        with pytest.raises(Malformed):
            decode(wrong)
        told = wrong.clone()
        told[1] = len(told)
        with pytest.raises(Malformed):
            decode(told)


@settings(deadline=None, max_examples=100)
@given(COMMANDS, st.data())
def test_a_number_that_changed_on_the_way_is_refused_or_another_command(command, data):
    """Nothing but Malformed is raised: not an index error, not a tensor of a billion elements."""
    numbers = encode(command)
    place = data.draw(st.integers(0, len(numbers) - 1))
    numbers[place] = data.draw(INT64)
    try:
        got = decode(numbers)
    except Malformed:
        return
    assert torch.equal(encode(got), numbers) or place < HEAD  # what the head of a kind does not use


@settings(deadline=None)
@given(st.lists(INT64, min_size=2, max_size=60).filter(lambda numbers: numbers[0] != MAGIC))
def test_foreign_numbers_are_refused(numbers):
    with pytest.raises(Malformed, match="no command, or one of another version"):
        decode(torch.tensor(numbers))


@settings(deadline=None)
@given(st.lists(INT64, min_size=1, max_size=HEAD - 2))
def test_our_mark_before_foreign_numbers_is_not_enough(numbers):
    with pytest.raises(Malformed, match=r"a command of -?[0-9]+ numbers"):
        decode(torch.tensor([MAGIC, *numbers]))


def test_every_piece_is_a_tensor_of_its_own():
    """A compiled layer must not see, by its address or its storage, where in a command a column lay."""
    column = torch.arange(3)
    step = Step(*(column.clone() for _ in range(6)), column.view(3, 1), column.view(3, 1)[:2], *[column] * 3)
    step = step._replace(cu_other=column[:2], export_offset=column.int(), export_slot=column.int())
    step = step._replace(anchor=column[:2])
    got = decode(encode(Command(1, Mark(0, 0), [], Run(step, column, Copy([], []))))).body.step
    assert plain(got) == plain(step)
    assert all(t.storage_offset() == 0 and t.untyped_storage().nbytes() <= 24 for t in got)


def test_a_command_that_is_too_long_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr("k3compile.runtime.parallel.wire.MOST", 100)
    body = Ask(torch.zeros(9).long(), torch.zeros(9).long(), torch.zeros(9, 9).long())
    with pytest.raises(ValueError, match="at most 100 can be sent"):
        encode(Command(1, Mark(0, 0), [], body))
