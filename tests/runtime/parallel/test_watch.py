"""What a watch notices, and that it cries no wolf. Ranks are threads here, and their ends are recorded."""

import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from k3compile.runtime.parallel import farewell
from k3compile.runtime.parallel import watch as watching
from k3compile.runtime.parallel.divergence import Diverged
from k3compile.runtime.parallel.processes import Identity, identity, start_of
from k3compile.runtime.parallel.watch_config import WatchConfig
from watched_threads import JUMPY, Job, wait_for


@pytest.fixture(autouse=True)
def short_farewells(monkeypatch):
    monkeypatch.setattr(farewell, "LAST_WORDS_S", 0.3)
    monkeypatch.setattr(farewell, "FOLLOWERS_S", 0.6)


@pytest.fixture
def job():
    made = Job()
    yield made
    made.over()


@pytest.fixture
def jumpy():
    made = Job(config=JUMPY)
    yield made
    made.over()


def test_ranks_that_work_are_left_alone_and_leave_in_peace(job):
    leader, follower = job.start()
    for _ in range(20):
        with leader.step("run", 4), follower.step("run", 4):
            time.sleep(0.1)  # longer together than any deadline
    assert job.told == [[], []]
    follower.close()
    assert leader.close()
    assert job.ended == [None, None]


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_does_not_end_ends_every_rank(job, slow):
    watches, leave = job.start(), threading.Event()

    def stuck():
        with watches[slow].step("run", 3):
            leave.wait(20)

    thread = threading.Thread(target=stuck)
    thread.start()
    said = job.ends()
    leave.set()
    thread.join()
    assert re.match(rf"run of 3 rows has taken 1\.\d s on rank {slow}", said)
    assert "--step-deadline-s" in said
    assert job.told[0] == job.told[1]


@pytest.mark.slow
def test_loading_may_take_longer_and_not_for_ever(job):
    leader, _ = job.start()
    with leader.step("load"):
        time.sleep(1.4)
        assert job.told == [[], []]
        assert "load of 0 rows" in job.ends()


def test_an_error_inside_a_step_ends_every_rank(job):
    _, follower = job.start()
    with pytest.raises(ZeroDivisionError), follower.step("run"):
        raise ZeroDivisionError("no rows")
    assert job.ends() == "run failed on rank 1: ZeroDivisionError: no rows"


def test_an_error_while_loading_is_for_others_to_tell(job):
    leader, _ = job.start()
    with pytest.raises(ValueError, match="no such folder"), leader.step("load"):
        raise ValueError("no such folder")
    time.sleep(0.5)
    assert job.told == [[], []]


@pytest.mark.slow
def test_inside_a_step_another_one_does_not_start_the_clock_again(job):
    leader, _ = job.start()
    with leader.step("step"):
        while not any(job.told):
            with leader.step("run", 7):
                time.sleep(0.05)
    assert "step of 7 rows" in job.ends()


def test_a_rank_that_falls_silent_ends_the_others(jumpy):
    leader, _ = jumpy.start()
    start = time.monotonic()
    jumpy.silence(1, "run")
    wait_for(lambda: jumpy.ended[0] is not None)
    assert 1.5 < time.monotonic() - start < 8.0
    assert "rank 1 has given no sign of life for" in leader.trouble


@pytest.mark.slow
def test_a_rank_that_loads_may_be_silent_for_longer(jumpy):
    leader, _ = jumpy.start()
    jumpy.silence(1, "compile")
    time.sleep(3.5)
    assert leader._silences[1].seconds > JUMPY.silence_s
    assert leader.trouble is None


GLOO = "[/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:32396: Connection reset by peer"


def break_off(watch):
    """A pass in which a collective fails; what its clients are told of it."""
    error = RuntimeError(GLOO)
    with pytest.raises(RuntimeError, match="gloo"), watch.step("turn"), watch.step("run"):
        raise error
    return watch.why(error)


def test_a_collective_that_breaks_off_is_explained_by_what_another_rank_says(job):
    leader, follower = job.start()
    threading.Timer(0.4, follower.report, ["run failed on rank 1: ValueError: no rows"]).start()
    assert break_off(leader) == "run failed on rank 1: ValueError: no rows"
    assert job.ends() == "run failed on rank 1: ValueError: no rows"


@pytest.mark.slow
def test_a_collective_that_nobody_explains_is_told_without_addresses_and_logged_in_full(job, caplog):
    leader, _ = job.start()
    said = "a collective broke off on rank 0: another rank, or the way to it, is gone"
    assert break_off(leader) == said
    assert job.ends() == said
    assert [GLOO in one.getMessage() for one in caplog.records].count(True) == 1
    assert f"run failed on rank 0: RuntimeError: {GLOO}" in caplog.text


def test_an_error_of_this_rank_explains_itself(job):
    assert job.watches[0].why(ValueError("no rows")) is None


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no process handles")
@pytest.mark.parametrize("answers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_collective_that_breaks_off_is_explained_by_a_process_that_is_gone(answers, monkeypatch):
    """Whether or not the store says that it did not leave in peace."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    who = Identity(identity().host, child.pid, start_of(child.pid))
    job = Job(config=WatchConfig(silence_s=60.0), who={1: who})
    leader, follower = job.start()
    wait_for(lambda: leader._processes.get(1) is not None)
    follower._beats._doing = lambda: "run"
    follower._leaving.set()
    wait_for(lambda: leader._beats.signs[1].doing == "run")
    if not answers:
        round_over, at = leader._beats._round, leader._beats.rounds
        monkeypatch.setattr(leader._beats, "_round", lambda: job.release.wait(30) and round_over())
        wait_for(lambda: leader._beats.rounds <= at + 1)
    child.kill()
    child.wait()
    said = f"rank 1 is gone: its process {child.pid} has ended (run)"
    assert break_off(leader) == said
    wait_for(lambda: job.ended[0] is not None)
    assert job.told[0] == [said]
    job.over()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no process handles")
@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_is_gone_is_noticed_before_its_silence(fails):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    who = Identity(identity().host, child.pid, start_of(child.pid))
    job = Job(config=WatchConfig(silence_s=60.0), who={1: who})
    leader, follower = job.start()
    wait_for(lambda: leader._processes.get(1) is not None)
    follower._beats._doing = lambda: "run"  # and not "bye", which it is as its own watch is off
    follower._leaving.set()
    child.kill()
    start = time.monotonic()
    if fails:
        child.wait()
        leader.report("connection reset")
    wait_for(lambda: job.ended[0] is not None)
    assert time.monotonic() - start < 5.0
    said = f"rank 1 is gone: its process {child.pid} has ended"
    assert ("connection reset (the process of rank 1 has ended)" if fails else said) in leader.trouble
    child.wait()
    follower._beats.stop(5)


def test_a_follower_that_nobody_told_to_end_ends_when_rank_0_has_left(jumpy):
    leader, follower = jumpy.start()
    leader.close()
    wait_for(lambda: jumpy.ended[1] is not None)
    assert "rank 0 has ended and this rank was not told to" in follower.trouble


@pytest.mark.slow
def test_a_rank_that_was_never_heard_ends_the_others(monkeypatch):
    monkeypatch.setattr(watching, "MEET_S", 0.2)
    monkeypatch.setattr(watching, "PATIENT", 1.0)
    job = Job(config=JUMPY)
    job.watches[0].start()
    wait_for(lambda: job.ended[0] is not None)
    assert job.watches[0].trouble == "rank 1 has given no sign of life at all"
    job.watches[0]._beats.stop(5)


def test_a_watch_that_has_started_has_heard_every_rank():
    job = Job(size=3)
    late = [threading.Timer(0.3 * rank, watch.start) for rank, watch in enumerate(job.watches[1:], 1)]
    for timer in late:
        timer.start()
    job.watches[0].start()
    assert all(job.watches[0]._beats.signs)
    assert set(job.watches[0]._processes) == {1, 2}
    for timer in late:
        timer.join()
    job.over()


def test_marks_that_differ_raise_with_both_lists_and_end_the_job(job):
    leader, follower = job.start()
    for watch in job.watches:
        watch.recorder.add("allreduce_", (((2, 3), torch.float32),), 2)
    follower.check(follower.mark(), leader.mark())
    follower.recorder.add("barrier", (), 2)
    with pytest.raises(Diverged, match="rank 1 made 2 collectives where rank 0 made 1") as error:
        follower.check(follower.mark(), leader.mark())
    assert "> 1 barrier" in str(error.value)
    assert "> 1 (no more calls)" in str(error.value)
    assert job.ends() == str(error.value).splitlines()[0]


@pytest.mark.slow
def test_ranks_that_never_meet_show_where_their_lists_part(job, caplog, monkeypatch):
    monkeypatch.setattr(farewell, "LAST_WORDS_S", 1.5)
    monkeypatch.setattr(farewell, "FOLLOWERS_S", 1.5)
    leader, follower = job.start()
    leader.recorder.add("broadcast_", (((64,), torch.int64),), 2)
    follower.recorder.add("allreduce_", (((2, 3), torch.float32),), 2)
    with leader.step("run"):
        job.ends()
    text = caplog.text
    assert "the lists part at collective 0" in text
    assert "> 0 broadcast_ [64] int64 over 2" in text
    assert "> 0 allreduce_ [2, 3] float32 over 2" in text


def test_who_leaves_with_something_to_report_reports_it_first(job):
    leader, _ = job.start()
    leader.report("a step failed")
    leader.close()
    assert job.ends() == "a step failed"


def test_the_first_trouble_is_the_one_that_is_told(job):
    leader, follower = job.start()
    follower.report("first")
    wait_for(lambda: leader.trouble is not None)
    leader.report("second")
    assert job.ends() == "first"
