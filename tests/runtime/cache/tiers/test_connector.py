"""What the index publishes is stored before it may go, and what a request lacks is brought back to it."""

import pytest
import torch
from k3compile.runtime.cache import writes
from k3compile.runtime.cache.cache import NO_HIT, Cache
from k3compile.runtime.cache.checkpoints import Grid
from k3compile.runtime.cache.pools import KdaPools, MlaPools
from k3compile.runtime.cache.tiers.connector import Connector
from k3compile.runtime.cache.tiers.disk import DiskTier
from k3compile.runtime.cache.tiers.host import HostTier
from k3compile.runtime.cache.tiers.offload import Offload
from k3compile.runtime.cache.tiers.pool_io import PoolIO
from k3compile.runtime.request import Request
from tier_entries import FINGERPRINT

UNIT, PAGE = 4, 2


class Served:
    """A cache over real pools, whose contents are functions of the tokens: latents are the running sum of
    tokens, and so is the state.
    """

    def __init__(self, folder=None, host: int = 1 << 20, num_pages: int = 16, **settings) -> None:
        self.cache = Cache(
            num_pages, 4, PAGE, poison=True, grid=Grid(UNIT, UNIT, alignment=UNIT), num_checkpoints=4
        )
        slots = self.cache.total_slots
        kda = KdaPools(
            *(torch.zeros(slots, *shape) for shape in [(1, 1, 1), (3, 1)]), *[torch.zeros(4, 1, 1, 1)] * 4
        )
        self.pools = [kda, MlaPools(torch.zeros(num_pages, PAGE, 1))]
        writes.poison_all(self.pools)
        io = PoolIO(self.pools, UNIT)
        disk = DiskTier(folder, 1 << 20, FINGERPRINT, 1000) if folder else None
        self.offload = Offload(io, UNIT, HostTier(host) if host else None, disk, **settings)
        self.connector = Connector(self.cache, self.offload)

    def write(self) -> None:
        writes.apply(self.pools, self.cache.take_writes())

    def admit(self, request: Request, tokens: int = 0) -> None:
        """Admit with the hit and room for ``tokens`` in all."""
        hit = self.cache.match(request)
        request.seen = hit.tokens
        assert self.cache.admit(request, hit, (tokens or len(request.tokens)) - hit.tokens)

    def run(self, request: Request, publish: bool = True) -> None:
        """Run all that is unseen but the last token, as a forward and a commit would."""
        kda, mla = self.pools
        while request.unseen > 1:
            self.write()
            holding = self.cache.holding(request)
            end = min((request.seen // UNIT + 1) * UNIT, len(request.tokens) - 1)
            assert self.cache.grow(request, end - request.seen)
            slot = self.cache.checkpoint(request, end) if end % UNIT == 0 else 0
            self.write()
            for at in range(request.seen, end):
                kda.state[holding.slot] += request.tokens[at]
                mla.pages[holding.pages[at // PAGE], at % PAGE] = kda.state[holding.slot].item()
            kda.window[holding.slot] = float(request.tokens[end - 1])
            if slot:
                writes.copy(self.pools, [holding.slot], [slot])
            request.seen = end
            self.cache.advance(request)
            self.write()
            if publish:
                self.connector.publish()
        self.cache.check()

    def right(self, request: Request) -> bool:
        """Whether pages and state are those of the tokens seen."""
        kda, mla = self.pools
        holding, total = self.cache.holding(request), 0
        for at in range(request.seen):
            total += request.tokens[at]
            if mla.pages[holding.pages[at // PAGE], at % PAGE].item() != total:
                return False
        window = request.tokens[request.seen - 1]
        return kda.state[holding.slot].item() == total and bool((kda.window[holding.slot] == window).all())

    def settle(self) -> None:
        assert self.offload.drain(20)

    def serve(self, *requests: Request) -> None:
        for request in requests:
            self.admit(request)
            self.run(request)
            assert self.right(request)
            self.cache.release(request)
        self.settle()

    def load(self, request: Request):
        """Bring a request up as the scheduler and the engine do -> its Load."""
        hit = self.cache.match(request)
        end = self.connector.reach(request, hit)
        assert end > hit.tokens, "the tiers have nothing"
        request.seen = hit.tokens
        assert self.cache.admit(request, hit, end - hit.tokens)
        assert self.connector.start(request, hit.tokens, end)
        for _ in range(100):
            if finished := self.connector.finished(0.2):
                break
        ((owner, load),) = finished
        assert owner is request
        self.write()
        if load.failed is None:
            self.connector.write(request, load)
            request.seen = load.end
            self.cache.advance(request, loaded=True)
            self.write()
            self.connector.publish()
        return load

    def forget(self) -> None:
        """The device forgets everything; its pages become NaN."""
        self.settle()
        self.cache.drop()
        self.write()
        self.cache.check()
        assert not len(self.cache.index)


def prompt(length: int, id: str = "r", first: int = 1) -> Request:
    return Request(id, [first, *range(2, length + 1)])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_the_device_forgets_comes_back_and_is_published_again(tmp_path, tier):
    served = Served(tmp_path if tier == "disk" else None, host=0 if tier == "disk" else 1 << 20)
    served.serve(prompt(14))
    served.forget()
    request = prompt(18, "again")
    assert served.load(request).failed is None
    assert request.seen == 12
    assert served.right(request)
    assert served.cache.match(prompt(18)).tokens == 12  # on the device again, the state too
    served.run(request)
    assert served.right(request)
    served.cache.release(request)
    served.cache.check()
    served.connector.close()


def test_a_restart_finds_the_prefix(tmp_path):
    first = Served(tmp_path)
    first.serve(prompt(14))
    first.connector.close(5)
    second = Served(tmp_path)
    request = prompt(14)
    second.load(request)
    assert (request.seen, second.right(request)) == (12, True)
    second.connector.close()


def test_only_what_the_device_lacks_is_loaded():
    served = Served(num_pages=12)
    served.serve(prompt(20))
    assert served.cache.match(prompt(20)).tokens == 16
    other = Request("other", [50] * 12)
    served.admit(other)  # drives out the end of the prefix, with its state
    served.write()
    hit = served.cache.match(prompt(20))
    assert 0 < hit.tokens < 16
    served.cache.release(other)
    request = prompt(20)
    load = served.load(request)
    assert (load.start, load.end) == (hit.tokens, 16)
    assert served.right(request)
    served.connector.close()


def test_a_load_never_covers_the_last_token():
    served = Served()
    served.serve(prompt(14))
    served.forget()
    request = prompt(12)
    assert served.load(request).end == 8
    served.connector.close()


def test_a_request_of_another_tenant_finds_nothing():
    served = Served()
    served.serve(prompt(14))
    served.forget()
    mine, theirs = prompt(14), Request("x", prompt(14).tokens, cache_salt="somebody else")
    assert served.connector.reach(theirs, served.cache.match(theirs)) == 0
    assert served.connector.reach(mine, served.cache.match(mine)) == 12
    served.connector.close()


def test_a_failed_load_leaves_the_request_at_its_hit_and_it_computes_the_rest():
    served = Served()
    served.serve(prompt(14))
    served.forget()
    request = prompt(14)
    assert served.connector.reach(request, served.cache.match(request)) == 12
    served.offload.host._entries.clear()
    request.seen = 0
    assert served.load(request).failed == "not_found"
    assert request.seen == 0
    served.run(request)
    assert served.right(request)
    served.connector.close()


def test_a_request_that_gives_up_cancels_its_load_and_asks_again_next_time():
    served = Served()
    served.serve(prompt(14))
    served.forget()
    request = prompt(14)
    served.cache.admit(request, served.cache.match(request), 12)
    assert served.connector.start(request, 0, 12)
    served.connector.forget(request)
    served.cache.release(request)
    assert served.connector.finished(0.1) == []
    assert served.offload.stats().loads == {"cancelled": 1}
    assert served.load(request).failed is None
    served.connector.close()


def test_the_tiers_are_asked_once_for_a_request_and_a_hit():
    served = Served()
    request, calls = prompt(14), []
    served.offload.longest = lambda keys, start: calls.append(len(keys)) or start
    for _ in range(3):
        served.connector.reach(request, served.cache.match(request))
    assert calls == [3]
    served.connector.forget(request)
    served.connector.reach(request, served.cache.match(request))
    assert calls == [3, 3]
    served.connector.close()


def test_a_node_cannot_go_before_it_is_copied():
    served = Served()
    served.offload.flush = lambda: None  # the threads get nothing
    request = prompt(14)
    served.admit(request)
    served.run(request)
    served.cache.release(request)
    served.cache.drop()
    assert len(served.cache.index) == 3
    served.cache.check()
    del served.offload.flush
    served.offload.flush()
    served.forget()
    served.connector.close()


def test_what_has_no_place_in_the_queue_waits_unpinned_and_no_block_is_left_out():
    served = Served(queue=1)
    served.offload.flush = lambda: None
    request = prompt(14)
    served.admit(request)
    served.run(request)
    assert served.connector.busy
    assert sum(node.pins for node in served.cache.index) == 1
    served.cache.release(request)
    del served.offload.flush
    assert served.connector.drain(20)
    assert not served.connector.busy
    assert served.connector.reach(prompt(14), NO_HIT) == 12
    assert served.offload.stats().store_declined == {}
    served.connector.close()
    served.cache.drop()
    served.cache.check()


def test_what_the_device_forgets_while_it_waits_is_counted():
    served = Served(queue=1)
    served.offload.flush = lambda: None
    request = prompt(14)
    served.admit(request)
    served.run(request)
    served.cache.release(request)
    served.cache.drop()  # all but the pinned first block
    assert len(served.cache.index) == 1
    del served.offload.flush
    assert served.connector.drain(20)
    assert served.offload.stats().store_declined == {"evicted": 2}
    served.connector.close()


def test_closing_unpins_everything():
    served = Served()
    served.offload.flush = lambda: None
    request = prompt(14)
    served.admit(request)
    served.run(request)
    served.cache.release(request)
    del served.offload.flush
    served.connector.close(5)
    served.cache.drop()
    assert not len(served.cache.index)
    served.cache.check()
