"""A thread that takes items in order, survives their faults, holds back who gives too much, and ends."""

import threading
import time

from k3compile.runtime.cache.tiers.worker import Worker


def test_items_are_handled_in_order_and_faults_do_not_end_the_thread():
    handled, faults = [], []

    def handle(item):
        handled.append(item)
        if item == 2:
            raise ZeroDivisionError("two")

    worker = Worker("test", handle, faults.append)
    assert all(worker.put(i) for i in range(5))
    assert worker.wait_idle(10)
    assert handled == [0, 1, 2, 3, 4]
    assert [str(f) for f in faults] == ["two"]
    assert worker.close(10) == []
    assert not worker.alive


def test_what_was_not_begun_is_given_back_and_nothing_more_is_taken():
    gate, begun = threading.Event(), threading.Event()

    def handle(item):
        begun.set()
        gate.wait(20)

    worker = Worker("test", handle, print)
    for i in range(3):
        worker.put(i)
    assert begun.wait(10)
    assert not worker.wait_idle(0.05)
    started = time.monotonic()
    assert worker.close(0.1) == [1, 2]
    assert time.monotonic() - started < 5
    assert not worker.put(9)
    gate.set()
    assert worker.wait_idle(10)


def test_who_gives_too_much_waits_until_there_is_less():
    gate, given = threading.Event(), []
    worker = Worker("test", lambda item: gate.wait(20), print, most=10)

    def give():
        for i in range(4):
            worker.put(i, 8)
            given.append(i)

    thread = threading.Thread(target=give)
    thread.start()
    time.sleep(0.2)
    assert len(given) == 3  # one in hand, one that fits, and one above it
    gate.set()
    thread.join(10)
    assert given == [0, 1, 2, 3]
    assert worker.wait_idle(10)
    worker.close(10)


def test_closing_frees_who_waits():
    gate = threading.Event()
    worker = Worker("test", lambda item: gate.wait(20), print, most=0)
    said = []

    def give():
        said.extend(worker.put(i) for i in range(3))

    thread = threading.Thread(target=give)
    thread.start()
    time.sleep(0.1)
    assert worker.close(0.0) == [1]
    thread.join(10)
    gate.set()
    assert said == [True, True, False]
