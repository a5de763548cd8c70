"""The end of a rank: requests are told first, nobody is left behind, and it is never waited for long."""

import os
import signal
import subprocess
import sys
import time

import pytest
from k3compile.runtime.parallel import farewell
from k3compile.runtime.parallel.beats import Sign
from k3compile.runtime.parallel.farewell import Farewell
from k3compile.runtime.parallel.patience import Silence
from k3compile.runtime.parallel.processes import Identity, find, identity, start_of

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no process handles")


class Quiet:
    """What was heard of three ranks: ``doing`` of each; those in ``still`` beat no more. answers: the store
    does.
    """

    def __init__(self, *doing):
        self.doing, self.still, self.said = doing, set(), []
        self.lists, self.answers = {}, True

    @property
    def rounds(self):
        return int(time.monotonic() * 10) if self.answers else 7

    @property
    def signs(self):
        now = int(time.monotonic() * 10)
        return [
            Sign(0 if r in self.still else now, doing, Identity("", 0, ""))
            for r, doing in enumerate(self.doing)
        ]

    def shout(self, trouble):
        self.said.append(trouble)

    def ask_lists(self): ...

    def hurry(self): ...


@pytest.fixture
def others():
    made = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) for _ in range(3)]
    yield made
    for child in made:
        child.kill()
        child.wait()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(farewell, "LAST_WORDS_S", 0.4)
    monkeypatch.setattr(farewell, "FOLLOWERS_S", 1.0)
    monkeypatch.setattr(farewell, "STANDS_STILL_S", 0.3)


def handles(others, *ranks):
    host = identity().host
    return {r: find(Identity(host, others[r].pid, start_of(others[r].pid))) for r in ranks}


def dead(child, seconds=2.0):
    end = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    return child.poll() == -signal.SIGKILL


def test_rank_0_tells_its_requests_at_once_and_ends_those_that_do_not_end(others):
    beats, order = Quiet("run", "run", "ending"), []
    os.kill(others[1].pid, signal.SIGSTOP)
    end = Farewell(0, beats, handles(others, 1, 2), [Silence() for _ in range(3)], lambda c: order.append(c))
    start = time.monotonic()
    end.in_trouble("rank 1 is silent", [lambda said: order.append((said, time.monotonic() - start < 0.1))])
    assert order == [("rank 1 is silent", True), 1]
    assert beats.said == ["rank 1 is silent"]
    assert dead(others[1])
    assert others[2].poll() is None  # it ends by itself
    assert time.monotonic() - start >= 0.4


def test_details_are_logged_once_after_the_trouble_and_told_nobody(caplog):
    told = []
    end = Farewell(0, beats := Quiet("run"), {}, [Silence()], lambda c: None)
    end.in_trouble("rank 1 is gone", [told.append], ["pair.cc:537 read error"])
    assert [one.getMessage() for one in caplog.records][1:] == ["as this rank saw it: pair.cc:537 read error"]
    assert caplog.records[0].getMessage().startswith("rank 1 is gone. All ranks end")
    assert (told, beats.said) == (["rank 1 is gone"], ["rank 1 is gone"])


def test_an_interrupted_rank_ends_the_others_as_interrupted_and_not_as_failed(caplog):
    ended = []
    Farewell(0, Quiet("run"), {}, [Silence()], ended.append).in_trouble("rank 1 was interrupted", [])
    assert ended == [130]
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "rank 1 was interrupted. All ranks end")
    ]


def test_one_that_was_about_to_end_and_stands_still_is_ended_too(others):
    beats = Quiet("run", "ending", "ending")
    beats.still = {2}
    silences = [Silence() for _ in range(3)]
    Farewell(0, beats, handles(others, 1, 2), silences, lambda code: None).in_trouble("x", [])
    assert dead(others[2])
    assert others[1].poll() is None


def test_a_follower_waits_for_rank_0_and_leaves_it_and_others_alone_while_they_live(others):
    beats, ended = Quiet("run", "run", "run"), []
    end = Farewell(1, beats, handles(others, 0, 2), [Silence() for _ in range(3)], ended.append)
    start = time.monotonic()
    end.in_trouble("x", [])
    assert time.monotonic() - start >= 1.0
    assert ended == [1]
    assert [child.poll() for child in others] == [None] * 3


def test_a_follower_does_not_wait_for_a_rank_0_that_is_gone(others):
    known = handles(others, 0)
    others[0].kill()
    start = time.monotonic()
    Farewell(1, Quiet("run", "run", "run"), known, [Silence() for _ in range(3)], lambda c: None).in_trouble(
        "x", []
    )
    assert time.monotonic() - start < 0.5


def test_a_follower_ends_a_rank_0_that_stands_still(others):
    beats = Quiet("run", "run", "run")
    beats.still = {0}
    os.kill(others[0].pid, signal.SIGSTOP)
    Farewell(1, beats, handles(others, 0), [Silence() for _ in range(3)], lambda c: None).in_trouble("x", [])
    assert dead(others[0])


@pytest.mark.slow
def test_a_follower_leaves_rank_0_alone_that_it_cannot_hear_as_the_store_does_not_answer(others):
    beats = Quiet("run", "run", "run")
    beats.still, beats.answers = {0}, False
    start = time.monotonic()
    Farewell(1, beats, handles(others, 0), [Silence() for _ in range(3)], lambda c: None).in_trouble("x", [])
    assert time.monotonic() - start >= 1.0
    assert others[0].poll() is None


@pytest.mark.slow
def test_whoever_hangs_while_he_is_told_does_not_hold_the_process(monkeypatch, others):
    monkeypatch.setattr(farewell, "HARD_S", 0.3)
    ended = []
    end = Farewell(0, Quiet("run"), {}, [Silence()], ended.append)
    end.in_trouble("x", [lambda said: time.sleep(1.0)])
    assert ended[0] == 1


def test_in_peace_all_are_waited_for_and_the_rest_is_ended(others):
    known = handles(others, 1, 2)
    end = Farewell(0, Quiet("bye", "bye", "bye"), known, [], lambda code: None)
    others[1].kill()
    start = time.monotonic()
    assert not end.in_peace(0.5)
    assert time.monotonic() - start < 2.0
    assert dead(others[2])
    assert end.in_peace(5.0)
