"""Processes of this machine are found by number and start time, and ended for certain."""

import os
import signal
import subprocess
import sys
import time

import pytest
from k3compile.runtime.parallel.processes import Identity, find, identity, start_of

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no process handles")


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def of(child):
    return Identity(identity().host, child.pid, start_of(child.pid))


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_this_process_is_itself():
    who = identity()
    assert who == identity()
    assert who.pid == os.getpid()
    assert who.start == start_of(os.getpid()) != ""
    found = find(who)
    assert found.alive
    found.close()


def test_one_that_stands_still_lives_and_can_be_ended(child):
    found = find(of(child))
    os.kill(child.pid, signal.SIGSTOP)
    assert found.alive
    assert found.kill()
    until(lambda: not found.alive)  # before anybody has waited for it
    child.wait()
    assert not found.alive
    assert not found.kill()
    found.close()


def test_another_process_with_the_same_number_is_not_it(child):
    assert find(of(child)._replace(start="1")) is None


def test_one_of_another_machine_is_not_looked_for(child):
    assert find(of(child)._replace(host="another")) is None


def test_one_that_has_ended_is_not_found(child):
    who = of(child)
    child.kill()
    child.wait()
    assert find(who) is None


def test_a_name_with_brackets_does_not_hide_the_start_time(tmp_path):
    script = tmp_path / "a) R 1 1"
    script.symlink_to("/bin/sleep")
    process = subprocess.Popen([script, "100"])
    try:
        assert start_of(process.pid).isdigit()
        assert int(start_of(process.pid)) >= int(start_of(os.getpid()))
    finally:
        process.kill()
        process.wait()
