"""An engine whose executor has lost the other ranks: it ends, everybody is told, and nobody twice."""

import logging
import time

import pytest
from k3compile.runtime.engine import EngineClosed
from k3compile.runtime.executor import GroupLost
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.lead import Leader
from k3compile.runtime.parallel.wire import decode
from k3compile.runtime.request import Request


class Channel:
    """Takes so many commands, then the others are gone."""

    def __init__(self, takes, said="connection closed by peer"):
        self.takes, self.said, self.commands = takes, said, []

    def send(self, numbers):
        if len(self.commands) == self.takes:
            raise RuntimeError(self.said)
        self.commands.append(decode(numbers))


def led(toy, takes=1 << 20, **config):
    engine = toy.engine(**config)
    engine.executor = Leader(engine.executor, Channel(takes))
    return engine


def test_an_engine_that_leads_serves_as_one_that_does_not_and_stops_the_others(toy):
    engine = led(toy)
    heard = toy.run(engine, [Request("a", [5, 6, 7], toy.greedy(4))])
    assert heard["a"].tokens == toy.alone([5, 6, 7], 4)
    assert not engine.step()
    engine.stop()
    engine.stop()
    commands = engine.executor.channel.commands
    assert [command.kind for command in commands] == ["run"] * 4 + ["stop"]
    assert [len(command.body.step.tokens) for command in commands[:-1]] == [3, 1, 1, 1]
    assert commands[-1].changes, "what the last commit asked for travels with the stop"


class Knowing(Unwatched):
    """A watch that knows why."""

    def why(self, error):
        return f"rank 1 is gone, for all that {error}"


def test_when_the_ranks_lose_each_other_the_engine_ends_and_says_why(toy, caplog):
    engine, heard = led(toy, takes=2), [toy.Listener(), toy.Listener()]
    for name, listener in zip("ab", heard):
        engine.submit(Request(name, [5, 6], toy.greedy(50)), listener)
    engine.start()
    ends = time.monotonic() + 10
    while engine.alive and time.monotonic() < ends:
        time.sleep(0.01)
    assert not engine.alive
    engine.stop()
    said = "command 3 (run) failed on rank 0: RuntimeError: connection closed by peer"
    assert [(one.finish, one.error) for one in heard] == [("error", said)] * 2
    assert engine.stats().last_error == said
    (logged,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert logged.getMessage() == f"the engine has lost its ranks: {said}"
    assert isinstance(logged.exc_info[1], RuntimeError), "of what nobody explains the way there is shown"
    assert engine.stats().failed_steps == 0, "this is no fault of one step"


def test_what_is_known_to_have_ended_the_ranks_is_logged_and_told_without_the_way_there(toy, caplog):
    engine, listener = led(toy, takes=1), toy.Listener()
    engine.executor.watch = Knowing()
    engine.submit(Request("a", [5, 6], toy.greedy(50)), listener)
    engine.start()
    engine._thread.join(10)
    said = "rank 1 is gone, for all that connection closed by peer"
    assert (listener.error, engine.stats().last_error) == (said, said)
    (logged,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert logged.getMessage() == f"the engine has lost its ranks: {said}"
    assert logged.exc_info is None
    engine.stop()


def test_whoever_is_told_that_the_ranks_are_lost_finds_the_engine_closed(toy):
    engine, open_then = led(toy, takes=1), []
    engine.submit(Request("a", [5, 6], toy.greedy(50)), lambda u: u.finish and open_then.append(engine.alive))
    assert engine.step()
    with pytest.raises(GroupLost):
        engine.step()
    assert open_then == [False]


def test_turned_by_hand_it_raises_and_no_later_step_runs(toy):
    engine = led(toy, takes=1)
    listener = toy.Listener()
    engine.submit(Request("a", [5, 6], toy.greedy(50)), listener)
    assert engine.step()
    with pytest.raises(GroupLost, match="command 2"):
        engine.step()
    assert listener.finish == "error"
    with pytest.raises(EngineClosed, match="command 2"):
        engine.submit(Request("b", [5, 6], toy.greedy(50)), toy.Listener())
    assert not engine.step()
    assert len(engine.executor.channel.commands) == 1
