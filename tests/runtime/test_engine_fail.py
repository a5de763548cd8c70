"""An engine that is told to give up: everybody hears it once, whatever its thread is doing."""

import threading
import time

import pytest
from k3compile.runtime.engine import EngineClosed
from k3compile.runtime.request import Request


class Heard(list):
    """Every update, as (tokens, finish, error)."""

    def __call__(self, update):
        self.append((update.tokens, update.finish, update.error))

    @property
    def finishes(self):
        return [(finish, error) for _, finish, error in self if finish is not None]


@pytest.fixture
def stuck(toy):
    """An engine whose first step waits for ``leave``, and a way to end it."""
    engine = toy.engine(max_num_seqs=2)
    entered, leave = threading.Event(), threading.Event()
    plain = engine.executor.forward

    def slow(step):
        entered.set()
        assert leave.wait(20)
        return plain(step)

    engine.use(slow)
    engine.start()
    yield engine, entered, leave
    leave.set()
    engine.stop()


def test_requests_hear_it_while_the_engine_thread_is_stuck_and_only_once_when_it_wakes(toy, stuck):
    engine, entered, leave = stuck
    heard = [Heard() for _ in range(5)]  # two run, three wait
    for i, listener in enumerate(heard):
        engine.submit(Request(f"r{i}", [5, 6, 7], toy.greedy(1)), listener)
        entered.wait(10)
    engine.fail("rank 1 is gone")
    assert [listener.finishes for listener in heard] == [[("error", "rank 1 is gone")]] * 5
    assert engine.stats().last_error == "rank 1 is gone"
    assert not engine.alive
    with pytest.raises(EngineClosed, match="rank 1 is gone"):
        engine.submit(Request("late", [5], toy.greedy(1)), Heard())
    before = [len(listener) for listener in heard]
    leave.set()
    engine._thread.join(10)
    assert not engine._thread.is_alive()
    assert [len(listener) for listener in heard] == before


def test_a_stop_is_told_during_a_step_and_is_no_error_of_the_engine(toy, stuck):
    engine, entered, leave = stuck
    heard = Heard()
    engine.submit(Request("r", [5, 6, 7], toy.greedy(1)), heard)
    assert entered.wait(10)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    engine.fail("the server is stopping", "abort")
    assert heard.finishes == [("abort", "the server is stopping")]
    assert engine.stats().last_error is None
    leave.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert len(heard.finishes) == 1
    engine.cache.check()


def test_a_request_is_told_exactly_once_whatever_moment_the_engine_is_in(toy):
    for turn in range(40):
        engine, heard = toy.engine(max_num_seqs=3), [Heard() for _ in range(6)]
        engine.start()
        for i, listener in enumerate(heard):
            engine.submit(Request(f"r{i}", [5, 6], toy.greedy(2)), listener)
        time.sleep(turn * 0.0004)
        engine.fail("over")
        engine._thread.join(10)
        assert not engine._thread.is_alive()
        for listener in heard:
            assert len(listener.finishes) == 1, turn
            assert listener[-1][1] in ("error", "length")
        engine.stop()


def test_an_idle_engine_ends_too(toy):
    engine = toy.engine()
    engine.start()
    engine.fail("rank 1 is gone")
    engine._thread.join(10)
    assert not engine._thread.is_alive()
    engine.stop()
