"""A rank that made other collectives than rank 0 learns where."""

import re

import pytest
import torch
from k3compile.runtime.parallel.divergence import NOWHERE, Diverged, compare, parting
from k3compile.runtime.parallel.recorder import Recorder

F32 = torch.float32
BASE = [("allreduce_", (n, 8)) for n in range(1, 9)] + [("broadcast_", (9,))]


def made(calls, kept=64):
    recorder = Recorder(kept)
    for op, shape in calls:
        recorder.add(op, ((shape, F32),), 2)
    return recorder


def told(mine, theirs, answers=True):
    with pytest.raises(Diverged) as error:
        compare(3, mine.mark(), theirs.mark(), mine.entries(), theirs.entries() if answers else None)
    return str(error.value)


def test_equal_lists_pass():
    one = made(BASE)
    compare(3, one.mark(), made(BASE).mark(), one.entries(), None)


PART = "the lists part at"
KINDS = {
    "an extra call": ([*BASE[:4], ("barrier", (1,)), *BASE[4:]], 4, "barrier [1]", "allreduce_ [5, 8]", PART),
    "a missing call": ([*BASE[:4], *BASE[5:]], 4, "allreduce_ [6, 8]", "allreduce_ [5, 8]", PART),
    "another shape": ([*BASE[:4], ("allreduce_", (5, 9)), *BASE[5:]], 4, "[5, 9]", "[5, 8]", PART),
    "another order": ([*BASE[:2], BASE[3], BASE[2], *BASE[4:]], 2, "[4, 8]", "[3, 8]", PART),
    "an extra one at the end": (
        [*BASE, ("barrier", (1,))],
        9,
        "barrier [1]",
        "(no more calls)",
        "rank 0 did not come to",
    ),
}


@pytest.mark.parametrize(("calls", "place", "mine", "theirs", "how"), KINDS.values(), ids=KINDS.keys())
def test_the_error_shows_both_lists_where_they_part(calls, place, mine, theirs, how):
    text = told(made(calls), made(BASE))
    assert f"{how} collective {place}:" in text
    first, second = re.findall(rf"> {place} (.*)", text)
    assert theirs in first
    assert mine in second
    assert text.index("rank 0:") < text.index("rank 3:")


def test_the_numbers_of_calls_are_named():
    assert told(made(BASE[:7]), made(BASE)).startswith("rank 3 made 7 collectives where rank 0 made 9")
    assert "9 collectives of rank 3 are not those of rank 0" in told(made(BASE[::-1]), made(BASE))


def test_a_leader_that_does_not_answer_leaves_our_own_list():
    text = told(made(BASE[::-1]), made(BASE), answers=False)
    assert "rank 0 does not answer" in text
    assert "8 allreduce_ [1, 8] float32 over 2" in text


def test_a_difference_before_what_is_still_listed_is_said_to_be_there():
    text = told(made([("barrier", (1,)), *BASE[1:]], kept=4), made(BASE, kept=4))
    assert text.endswith(NOWHERE)


def test_ranks_with_the_same_calls_share_a_list():
    other = made(BASE[:5])
    lists = {rank: made(BASE).entries() for rank in (0, 1, 3)} | {2: other.entries()}
    text = parting(lists)
    assert "rank 0, 1, 3:" in text
    assert "> 5 (no more calls)" in text
    assert parting({0: other.entries(), 1: other.entries()}) is None
    assert parting({0: [], 1: []}) is None
