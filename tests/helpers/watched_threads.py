"""Ranks that are watched and are only threads, or not even that; their ends are recorded."""

import threading
import time

import torch.distributed as dist
from k3compile.runtime.parallel import watch as watching
from k3compile.runtime.parallel.processes import Identity
from k3compile.runtime.parallel.recorder import Recorder
from k3compile.runtime.parallel.watch import Watch
from k3compile.runtime.parallel.watch_config import WatchConfig

NOBODY = Identity("", 0, "")
QUICK = WatchConfig(step_deadline_s=1.0, load_deadline_s=2.0, silence_s=20.0)
JUMPY = WatchConfig(step_deadline_s=20.0, load_deadline_s=20.0, silence_s=1.5)


class Job:
    """Watches of ``size`` ranks. ended[r]: the code rank r ended with; told[r]: what its requests heard."""

    def __init__(self, size=2, config=QUICK, who=None):
        store = dist.HashStore()
        self.release = threading.Event()
        self.ended, self.told = [None] * size, [[] for _ in range(size)]
        self.watches = []
        for rank in range(size):
            watch = Watch(
                store,
                rank,
                size,
                config,
                Recorder(),
                who=(who or {}).get(rank, NOBODY),
                end=lambda code, r=rank: self.ended.__setitem__(r, code),
            )
            watch.on_trouble(self.told[rank].append)
            self.watches.append(watch)

    def start(self):
        for watch in self.watches:
            threading.Thread(target=watch.start).start()
        wait_for(lambda: all(all(w._beats.signs) for w in self.watches))
        return self.watches

    def silence(self, rank, doing):
        """Rank's thread stands still from its next word on, which is ``doing``."""
        watch, other = self.watches[rank], self.watches[1 - rank]
        watch._leaving.set()  # so that it does not notice itself
        watch._beats._doing = lambda: doing
        wait_for(lambda: other._beats.signs[rank].doing == doing)
        watch._beats._hurry.wait = lambda _: self.release.wait(30)

    def over(self):
        """Its threads end."""
        self.release.set()
        for watch in self.watches:
            watch._leaving.set()
            if watch._beats._thread.is_alive():
                watch._beats.stop(5)

    def ends(self, seconds=8.0):
        wait_for(lambda: None not in self.ended, seconds)
        assert set(self.ended) == {1}
        assert all(len(told) == 1 for told in self.told)
        return self.told[0][0]


class Told:
    """Two watches without threads, in seconds that are only counted. Each round takes what the store takes:
    while it is ``paused`` no round of anybody ends, and one in ``still`` begins none.
    """

    def __init__(self, config=JUMPY):
        job = Job(config=config)
        self.watches, self.now = job.watches, 100.0
        self.paused, self.still = False, set()
        for watch in self.watches:
            watch._beats._begin()

    def go_on(self, seconds, order=(0, 1)):
        """What each rank finds wrong by then, beating and looking in this order."""
        end = self.now + seconds
        while self.now < end:
            for watch in (self.watches[rank] for rank in order):
                if not self.paused and watch.rank not in self.still and self.now % 0.5 < watching.LOOK_S:
                    watch._beats._round()
                    watch._beats.rounds += 1
            found = [
                watch._look(self.now) if watch.rank not in self.still else None for watch in self.watches
            ]
            if any(found):
                return found
            self.now += watching.LOOK_S
        return [None, None]


def wait_for(condition, seconds=8.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
