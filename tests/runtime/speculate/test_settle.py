"""After a verdict the state is that of a run which only ever saw the kept rows, whoever keeps how many."""

from dataclasses import dataclass, field

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import Draw, row_bounds
from k3compile.runtime.cache.pools import KdaPools, MlaPools
from k3compile.runtime.executor import Executor
from k3compile.runtime.request import Request
from k3compile.runtime.scheduler import Verdict, Work
from k3compile.runtime.speculate.settle import Commit, Rotate, settler, stacked, whole
from lanes import thinned

k3 = torch.ops.k3
LAYERS, HEADS, WIDTH = 2, 2, 8
CHANNELS = 3 * HEADS * WIDTH
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6}


@dataclass
class Held:
    """What settle knows of a Holding."""

    slot: int


@dataclass
class Scene:
    """Requests in the middle of a verify step of ``counts`` rows, with pools of several layers.

    Slot r + 1 is that of request r (with replay off the first of its own), the last four are checkpoints.
    """

    counts: list[int]
    replay: bool
    dtype: torch.dtype = torch.float64
    drafts: int = 0  # K, at least one less than the most rows
    requests: list[Request] = field(init=False)

    def __post_init__(self) -> None:
        draw, number = Draw(self.dtype, seed=1), len(self.counts)
        self.drafts = self.drafts or max(self.counts) - 1
        self.requests = [Request(f"r{r}", [1] * (20 + r)) for r in range(number)]
        for request in self.requests:
            request.seen = len(request.tokens) - 1
        each = 1 if self.replay else self.drafts + 1
        private = 1 + number * each
        self.checkpoints = range(private, private + 4)
        self.own = [list(range(1 + r * each, 1 + (r + 1) * each)) for r in range(number)]
        self.held = {q: Held(own[0]) for q, own in zip(self.requests, self.own)}
        total, rows = private + 4, sum(self.counts)
        tensors = [
            draw.normal_acc(LAYERS, total, HEADS, WIDTH, WIDTH),
            draw.normal(LAYERS, total, 3, CHANNELS),
            *(torch.full((LAYERS, private, self.drafts + 1, HEADS, WIDTH), torch.nan) for _ in range(3)),
            torch.full((LAYERS, private, self.drafts + 1, CHANNELS), torch.nan),
        ]
        tensors = [t.to(self.dtype) for t in tensors]
        if not self.replay:
            tensors[2:] = [t[:, :0].clone() for t in tensors[2:]]
        self.pools = [KdaPools(*parts) for parts in zip(*(t.unbind(0) for t in tensors))]
        self.raw = draw.normal(LAYERS, rows, CHANNELS)
        self.weight = draw.normal_acc(CHANNELS, 4)
        self.g = -5 * draw.fraction(LAYERS, rows, HEADS, WIDTH)
        self.beta = draw.fraction(LAYERS, rows, HEADS)
        self.before = [KdaPools(*(t.clone() for t in pool)) for pool in self.pools]

    def inputs(self, layer: int, tokens: slice, mixed: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = mixed.unflatten(-1, (3, HEADS, WIDTH)).unbind(1)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        return [q, k, v, self.g[layer, tokens], self.beta[layer, tokens]]

    def verify(self) -> None:
        cu, slots = row_bounds(self.counts), torch.tensor([own[0] for own in self.own])
        everything = slice(0, sum(self.counts))
        for layer, pool in enumerate(self.pools):
            given = self.raw[layer], self.weight, pool.window, slots, cu
            if self.replay:
                inputs = self.inputs(layer, everything, k3.short_conv_verify(*given, pool.rec_x))
                k3.kda_verify(*inputs, pool.state, slots, cu, pool.rec_u, pool.rec_k, pool.rec_g)
            else:
                scratch = torch.tensor(self.own)
                inputs = self.inputs(layer, everything, k3.short_conv_verify_states(*given, scratch))
                k3.kda_verify_states(*inputs, pool.state, slots, cu, scratch)

    def alone(self, r: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """State and window of each layer after a run that only ever saw these rows of request r."""
        start, slots, cu = sum(self.counts[:r]), torch.tensor([0]), torch.tensor([0, rows])
        tokens, found = slice(start, start + rows), []
        for layer, pool in enumerate(self.before):
            state, window = (t[self.own[r][0]][None].clone() for t in pool[:2])
            mixed = k3.short_conv(self.raw[layer, tokens], self.weight, window, slots, cu)
            k3.kda_prefill(*self.inputs(layer, tokens, mixed), state, slots, cu)
            found.append((state[0], window[0]))
        return found

    def verdict(self, r: int, rows: int, boundary: int = 0, **more) -> Verdict:
        request, count, own = self.requests[r], self.counts[r], self.own[r]
        work = Work(request, count, count - 1, True, own[0], [], scratch=() if self.replay else own)
        place = {"checkpoint": request.seen + boundary, "checkpoint_slot": self.checkpoints[r]}
        return Verdict(work, [1] * rows, rows, **(place if boundary else {}), **more)

    def settle(self, verdicts: list[Verdict]) -> None:
        settler(Executor(self.pools).write, self.replay, self.held.__getitem__)(None, verdicts)

    def holds(self, slot: int, r: int, rows: int) -> bool:
        """Whether a slot has state and window of request r after so many rows, in all layers."""
        for pool, (state, window) in zip(self.pools, self.alone(r, rows)):
            if not (pool.state[slot] - state).abs().max() <= BOUND[self.dtype] * state.abs().max():
                return False
            if not torch.equal(pool.window[slot], window):
                return False
        return True

    def now(self, r: int) -> int:
        return self.held[self.requests[r]].slot


BOTH = pytest.mark.parametrize("replay", [True, False], ids=["replay", "states"])


@BOTH
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("drafts", thinned(range(1, 17), 5))
def test_a_request_that_keeps_m_rows_goes_on_as_if_it_had_only_seen_those(drafts, dtype, replay):
    for rows in range(1, drafts + 2):
        scene = Scene([drafts + 1], replay, dtype)
        scene.verify()
        scene.settle([scene.verdict(0, rows)])
        assert scene.holds(scene.now(0), 0, rows), rows


@BOTH
@pytest.mark.parametrize("boundary", range(1, 6))
def test_the_state_at_a_block_boundary_goes_to_its_checkpoint_and_the_rest_in_place(boundary, replay):
    for rows in range(boundary, 6):
        scene = Scene([5, 2], replay)
        scene.verify()
        scene.settle([scene.verdict(0, rows, boundary), scene.verdict(1, 2)])
        assert scene.holds(scene.checkpoints[0], 0, boundary)
        assert scene.holds(scene.now(0), 0, rows)
        assert scene.holds(scene.now(1), 1, 2)


@BOTH
@pytest.mark.parametrize("kept", [[4, 1, 3, 2], [1, 4, 2, 3], [2, 2, 2, 1]], ids=str)
def test_every_request_keeps_its_own_count_whatever_the_order_of_rows(kept, replay):
    """H06: counts of rows that changed places would put a wrong state where nothing heals it."""
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        scene = Scene([4, 4, 4, 4], replay)
        scene.verify()
        scene.settle([scene.verdict(r, kept[r]) for r in order])
        assert all(scene.holds(scene.now(r), r, kept[r]) for r in range(4))


@BOTH
def test_rows_shorter_than_the_longest_and_drafts_fewer_than_k(replay):
    scene = Scene([5, 2, 3], replay, drafts=8)
    scene.verify()
    scene.settle([scene.verdict(0, 5), scene.verdict(1, 1), scene.verdict(2, 3, boundary=2)])
    assert all(scene.holds(scene.now(r), r, rows) for r, rows in enumerate((5, 1, 3)))
    assert scene.holds(scene.checkpoints[2], 2, 2)


def test_with_replay_keeping_no_row_leaves_the_state_and_without_it_is_refused():
    scene = Scene([3], replay=True)
    scene.verify()
    scene.settle([scene.verdict(0, 0)])
    assert all(torch.equal(p.state, b.state) for p, b in zip(scene.pools, scene.before))
    scene = Scene([3], replay=False)
    scene.verify()
    with pytest.raises(ValueError, match="without state replay at least the first one has to be kept"):
        scene.settle([scene.verdict(0, 0)])


@BOTH
@pytest.mark.parametrize("rows", [-1, 4])
def test_a_count_of_rows_that_were_not_there_is_refused_and_nothing_moves(rows, replay):
    scene = Scene([3, 5], replay)
    scene.verify()
    before = [KdaPools(*(t.clone() for t in pool)) for pool in scene.pools]
    with pytest.raises(ValueError, match=f"keeps {rows} rows of 3 verified ones"):
        scene.settle([scene.verdict(1, 2, boundary=1), scene.verdict(0, rows)])
    assert all(torch.equal(p.state, b.state) for p, b in zip(scene.pools, before))
    assert [scene.now(r) for r in range(2)] == [own[0] for own in scene.own]


@BOTH
@pytest.mark.parametrize("boundary", [-2, 3])
def test_a_checkpoint_outside_the_kept_rows_is_refused(boundary, replay):
    """H04: a state past what the request keeps would be served under a prefix that it does not belong to."""
    scene = Scene([4], replay)
    scene.verify()
    with pytest.raises(ValueError, match="lies outside its 2 kept rows"):
        scene.settle([scene.verdict(0, 2, boundary)])


@BOTH
def test_a_request_that_ended_moves_on_as_well_and_one_that_failed_or_is_gone_does_not(replay):
    """The cache may keep the last state of a request: it is copied when the request's end is committed."""
    scene = Scene([4, 4, 4], replay)
    scene.verify()
    before = [KdaPools(*(t.clone() for t in pool)) for pool in scene.pools]
    scene.requests[1].finish = "abort"  # while the step ran
    ended = [
        scene.verdict(0, 3, boundary=2, finish="stop"),
        scene.verdict(1, 0),
        scene.verdict(2, 0, finish="error", error="a fault"),
    ]
    scene.settle(ended)
    assert scene.holds(scene.checkpoints[0], 0, 2)
    assert scene.holds(scene.now(0), 0, 3)
    others = [*scene.own[1], *scene.own[2]]
    assert all(torch.equal(p.state[others], b.state[others]) for p, b in zip(scene.pools, before))
    assert [scene.now(r) for r in (1, 2)] == [own[0] for own in scene.own[1:]]


@BOTH
def test_rows_that_were_not_verified_are_left_alone(replay):
    scene = Scene([4], replay)
    scene.verify()
    before = [KdaPools(*(t.clone() for t in pool)) for pool in scene.pools]
    plain = scene.verdict(0, 1)
    scene.settle([plain._replace(work=plain.work._replace(drafts=0))])
    assert all(torch.equal(p.state, b.state) for p, b in zip(scene.pools, before))


def test_who_settles_follows_from_replay():
    assert isinstance(settler([], True, None), Commit)
    assert isinstance(settler([], False, None), Rotate)


def test_layers_are_joined_into_the_tensor_they_were_cut_from():
    scene = Scene([2], replay=True)
    pools = [scene.pools[0], MlaPools(torch.zeros(2, 4, 3)), scene.pools[1]]
    joined = stacked(pools)
    assert joined.state.shape == (LAYERS, *scene.pools[0].state.shape)
    joined.state.fill_(3.0)
    assert all((pool.state == 3.0).all() for pool in scene.pools)
    assert stacked([MlaPools(torch.zeros(2, 4, 3))]) is None
    with pytest.raises(AssertionError, match="pools lie apart"):
        whole([torch.zeros(2), torch.zeros(2)])
    line = torch.zeros(9)
    with pytest.raises(AssertionError, match="not equally spaced"):
        whole([line[i : i + 2] for i in (0, 2, 5)])
