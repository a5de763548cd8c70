"""Who is silent and who cannot be heard: watches of a store that pauses, in seconds only counted."""

import pytest
from watched_threads import JUMPY, Told


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_store_that_does_not_answer_for_a_while_makes_nobody_silent(order):
    told = Told()
    for _ in range(3):
        assert told.go_on(5.0, order) == [None, None]
        told.paused = True
        assert told.go_on(40.0, order) == [None, None]
        told.paused = False
    assert told.go_on(5.0, order) == [None, None]


def test_a_rank_that_comes_back_to_the_store_later_than_this_one_has_a_fresh_start():
    told = Told()
    told.go_on(5.3)
    told.still = {1}
    assert told.go_on(1.0) == [None, None]
    told.paused = True
    told.go_on(10.0)
    told.paused = False
    assert told.go_on(JUMPY.silence_s - 0.3) == [None, None]
    told.still = set()
    assert told.go_on(5.0) == [None, None]


def test_a_rank_that_stands_still_is_found_although_the_store_paused():
    told = Told()
    told.go_on(5.0)
    told.paused, told.still = True, {1}
    assert told.go_on(10.0) == [None, None]
    told.paused, back = False, told.now
    said, _ = told.go_on(20.0)
    assert said.startswith("rank 1 has given no sign of life for")
    assert JUMPY.silence_s < told.now - back < JUMPY.silence_s + 1.5


def test_a_store_that_never_answers_again_ends_the_job_and_is_what_is_blamed():
    told = Told()
    told.go_on(5.0)
    told.paused, last = True, told.now
    said = "the store has not answered for 60 s: is the launcher stopped?"
    assert told.go_on(100.0) == [said, said]
    assert 59.5 < told.now - last < 62.0
