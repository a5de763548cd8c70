"""How long is too long."""

from k3compile.runtime.parallel.patience import GAP_S, SLACK, Allowance, Silence, Stopwatch


def test_a_large_step_may_take_what_its_rows_took_before_and_slack():
    allowance = Allowance(8.0)
    assert allowance.of(2048) == 8.0
    allowance.learn(1, 0.05)  # a decode step, which a row of a prompt does not cost
    assert allowance.of(2048) == SLACK * 2048 * 0.05
    allowance.learn(512, 2.56)
    assert allowance.of(2048) == SLACK * 2048 * 0.005
    assert allowance.of(16) == 8.0


def test_the_least_seconds_a_row_count_and_a_step_of_unknown_rows_does_not():
    allowance = Allowance(1.0)
    allowance.learn(100, 10.0)
    allowance.learn(100, 90.0)
    allowance.learn(0, 0.0)
    assert allowance.of(100) == SLACK * 10.0


def test_a_stopwatch_counts_while_nothing_changes():
    watch = Stopwatch()
    assert [watch.look(what, now) for what, now in [(1, 0.0), (1, 0.5), (1, 1.0), (2, 1.5), (2, 2.25)]] == [
        0.0,
        0.5,
        1.0,
        0.0,
        0.75,
    ]


def test_a_process_that_stood_still_itself_does_not_blame_the_others():
    watch = Stopwatch()
    watch.look("seen", 0.0)
    assert watch.look("seen", 3600.0) == GAP_S


def looked(*looks):
    """What a silence gave at each (heard, rounds, now)."""
    silence = Silence()
    return [silence.look(*one) for one in looks]


def test_silence_is_counted_when_a_round_has_ended_and_not_in_between():
    assert looked((7, 1, 0.0), (7, 1, 0.4), (7, 2, 0.5), (7, 2, 0.9), (7, 3, 1.0)) == [
        0.0,
        0.0,
        0.5,
        0.5,
        1.0,
    ]


def test_who_is_heard_is_not_silent():
    assert looked((7, 1, 0.0), (7, 2, 0.5), (8, 3, 1.0), (8, 4, 1.5)) == [0.0, 0.5, 0.0, 0.5]


def test_a_round_that_hung_counts_for_nobody_and_gives_a_fresh_start():
    assert looked((7, 1, 0.0), (7, 2, 0.75), (7, 2, 8.0), (7, 3, 12.75), (7, 4, 13.25)) == [
        0,
        0.75,
        0.75,
        0,
        0.5,
    ]


def test_a_rank_that_stands_still_is_silent_through_a_slow_store_too():
    slow = [(7, n, n * (GAP_S + 1)) for n in range(8)]
    assert looked(*slow) == [0.0, 0.0, *(n * GAP_S for n in range(1, 7))]
    heard = [*slow, (8, 8, 16.0), (8, 9, 18.0), (8, 10, 20.0)]
    assert looked(*heard)[-3:] == [0.0, 0.0, GAP_S], "heard again, it is excused again"
