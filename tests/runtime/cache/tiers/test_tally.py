"""Counts add up from any thread, and only the first of each kind of decline is logged."""

import threading

from k3compile.runtime.cache.tiers.entry import Declined
from k3compile.runtime.cache.tiers.tally import Tally


def test_no_count_is_lost_between_threads():
    tally = Tally()

    def count():
        for _ in range(5000):
            tally.add("stored", "disk", 2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.of("stored") == {"disk": 40_000}
    assert tally.of("loaded") == {}


def test_each_reason_is_logged_once_and_counted_always(caplog):
    tally = Tally()
    for reason in ("torn", "torn", "busy", "torn"):
        tally.decline("load", Declined(reason, "here"))
    tally.decline("store", Declined("torn"))
    assert tally.of("load_declined") == {"torn": 3, "busy": 1}
    assert tally.of("store_declined") == {"torn": 1}
    assert len(caplog.records) == 3
