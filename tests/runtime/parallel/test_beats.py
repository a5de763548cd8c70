"""Ranks hear that the others live, what troubles them, and their lists of collectives."""

import time

import pytest
import torch.distributed as dist
from k3compile.runtime.parallel.beats import BEAT_S, Beats, Sign
from k3compile.runtime.parallel.processes import Identity
from k3compile.runtime.parallel.recorder import Entry

NOBODY = Identity("", 0, "")


class Going:
    """Beats of two ranks in one store; ``doing`` is what each says."""

    def __init__(self, store, size=2):
        self.doing = ["idle"] * size
        self.lists = [[Entry(7, f"barrier {rank}")] for rank in range(size)]
        self.beats = [
            Beats(store, rank, size, NOBODY, lambda r=rank: self.doing[r], lambda r=rank: self.lists[r])
            for rank in range(size)
        ]


@pytest.fixture
def two():
    going = Going(dist.HashStore())
    yield going
    for beats in going.beats:
        if beats._thread.is_alive():
            beats.stop(5)


def test_each_hears_of_the_other_what_it_does(two):
    first, second = two.beats
    first.start()
    assert first.wait(5, lambda: first.rounds >= 1)
    assert first.signs[1] is None
    two.doing[1] = "run"
    second.start()
    assert first.wait(5, lambda: first.signs[1] is not None)
    heard = first.signs[1]  # its first sign, or a later one where this rank was slow
    assert heard == Sign(heard.count, "run", NOBODY)
    assert first.wait(5, lambda: first.signs[1].count >= heard.count + 2)


def test_the_first_trouble_is_heard_by_all_at_once(two):
    first, second = two.beats
    first.start()
    second.start()
    assert second.wait(5, lambda: second.signs[0] is not None)
    second.shout("rank 1 is stuck")
    assert second.wait(5, lambda: second.trouble is not None)
    first.shout("and so is rank 0")
    assert first.wait(5, lambda: first.trouble is not None)
    assert first.trouble == second.trouble == "rank 1 is stuck"


@pytest.mark.slow
def test_lists_are_published_when_one_asks(two):
    first, second = two.beats
    first.start()
    second.start()
    assert first.wait(5, lambda: first.signs[1] is not None)
    assert not first.lists
    second.ask_lists()
    assert second.wait(5, lambda: len(second.lists) == 2)
    assert second.lists == dict(enumerate(two.lists))


def test_the_last_word_is_said_at_once_when_it_stops(two):
    first, second = two.beats
    first.start()
    second.start()
    assert first.wait(5, lambda: first.signs[1] is not None)
    two.doing[1] = "bye"
    start = time.monotonic()
    second.stop(5)
    assert not second._thread.is_alive()
    assert time.monotonic() - start < BEAT_S
    assert first.wait(5, lambda: first.signs[1].doing == "bye")


def test_a_store_that_goes_is_noticed():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    beats = Going(client, 1).beats[0]
    beats.start()
    assert beats.wait(5, lambda: beats.rounds >= 1)
    del server
    assert beats.wait(10, lambda: beats.lost is not None)
