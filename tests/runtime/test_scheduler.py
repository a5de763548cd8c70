"""The scheduler without a model: budgets, order, starvation (H01), preemption, abort, speed."""

import random
import time

import pytest
from k3compile.runtime.budget import DraftCost, Limits
from k3compile.runtime.cache.cache import Cache
from k3compile.runtime.cache.checkpoints import Grid
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.scheduler import PATIENCE, Result, Scheduler, Work
from k3compile.runtime.speculate.draft import Draft

EIGHT_DRAFTS = DraftCost.of(8)
SEVEN_DRAFTS = DraftCost.of(7)


def make(pages=200_000, slots=2000, page_size=64, block=0, unit=0, checkpoints=1000, **limits) -> Scheduler:
    """block: tokens between kept states, 0 without a prefix cache. unit: of hits, the block unless given."""
    limits = {"max_model_len": 1_000_000, **limits}
    grid = Grid(block, unit or block, alignment=min(64, page_size)) if block else None
    cache = Cache(pages, slots, page_size, grid=grid, num_checkpoints=checkpoints if block else 0)
    return Scheduler(Limits(**limits), cache, frozenset([1]))


def add(scheduler: Scheduler, lengths, max_tokens=10, same=False, **more) -> list[Request]:
    """same: prompts begin alike; otherwise nothing is shared."""
    start = len(scheduler.waiting) + len(scheduler.running)
    params = SamplingParams(max_tokens=max_tokens)
    requests = [
        Request(f"r{i}", [2] * n, params, arrival=float(i), cache_salt="" if same else f"r{i}", **more)
        for i, n in enumerate(lengths, start)
    ]
    for request in requests:
        scheduler.add(request)
    return requests


def answer(work: list[Work], token=2) -> list[Result]:
    return [Result(w, [token] if w.samples else []) for w in work]


def turn(scheduler: Scheduler) -> dict[str, int]:
    """One step; the rows each request got."""
    work = scheduler.plan()
    assert len({w.slot for w in work}) == len(work)
    scheduler.commit(scheduler.judge(answer(work)))
    return {w.request.id: w.count for w in work}


def run_out(scheduler: Scheduler, steps: int = 10_000) -> int:
    empty = 0
    for n in range(steps):
        if scheduler.idle:
            scheduler.cache.check()
            return n
        empty = 0 if turn(scheduler) else empty + 1
        assert empty <= (scheduler.grid is not None), "empty steps although something is runnable"
    raise AssertionError("never done")


TABLE = [  # requests, old K=7, new K=7, old K=8, new K=8: k3-runtime.md a.2
    (1, 2048, 8186, 1024, 8185),
    (4, 2048, 8168, 1024, 8164),
    (16, 2048, 8096, 1024, 8080),
    (32, 2048, 8000, 1024, 7968),
    (128, 2048, 7424, 1024, 7296),
    (1024, 2048, 2048, 1024, 1024),
]


@pytest.mark.parametrize(("n", "old7", "new7", "old8", "new8"), TABLE)
def test_the_budget_table(n, old7, new7, old8, new8):
    def shared(draft, adaptive):
        scheduler = make(
            max_num_batched_tokens=8192,
            max_num_seqs=1024,
            draft=draft,
            adaptive_budget=adaptive,
            long_prefill_tokens=1,
        )
        add(scheduler, [9000] * n)
        work = scheduler.plan()
        assert len(work) == n
        return sum(w.count for w in work)

    assert (shared(SEVEN_DRAFTS, False), shared(SEVEN_DRAFTS, True)) == (old7, new7)
    assert (shared(EIGHT_DRAFTS, False), shared(EIGHT_DRAFTS, True)) == (old8, new8)


@pytest.mark.parametrize(("adaptive", "passes"), [(False, 8), (True, 1)])
def test_an_8000_token_prompt_takes_eight_passes_or_one(adaptive, passes):
    scheduler = make(
        max_num_batched_tokens=8192, max_num_seqs=1024, draft=EIGHT_DRAFTS, adaptive_budget=adaptive
    )
    add(scheduler, [8000], max_tokens=1)
    assert run_out(scheduler) == passes


def test_the_draft_pass_has_its_own_limit():
    scheduler = make(max_num_batched_tokens=8192, max_num_seqs=1024, draft=EIGHT_DRAFTS, draft_limit=40)
    add(scheduler, [10] * 20)
    assert len(turn(scheduler)) == 5


def test_running_requests_come_before_waiting_ones_and_all_get_a_row():
    scheduler = make(max_num_batched_tokens=10, max_num_seqs=8, long_prefill_tokens=1)
    add(scheduler, [4, 4])
    assert turn(scheduler) == {"r0": 4, "r1": 4}
    add(scheduler, [30, 3])
    assert turn(scheduler) == {"r0": 1, "r1": 1, "r2": 5, "r3": 3}
    assert turn(scheduler)["r3"] == 1


def test_a_long_prompt_in_front_does_not_stop_the_decodes_behind_it():
    scheduler = make(max_num_batched_tokens=16, max_num_seqs=4, long_prefill_tokens=8)
    add(scheduler, [400, 3], max_tokens=50)
    for _ in range(20):
        rows = turn(scheduler)
        assert rows["r1"] >= 1
        assert sum(rows.values()) <= 16


def test_a_prompt_that_fits_a_step_is_not_cut_for_the_others():
    scheduler = make(max_num_batched_tokens=8192, max_num_seqs=16)
    add(scheduler, [8000] * 4)
    assert turn(scheduler) == {"r0": 8000, "r1": 192}


def test_prompts_longer_than_a_step_share_it():
    scheduler = make(max_num_batched_tokens=2048, max_num_seqs=16)
    add(scheduler, [32_000, 32_000, 48])
    assert turn(scheduler) == {"r0": 1000, "r1": 1000, "r2": 48}


def test_a_lone_long_prompt_gets_the_whole_step():
    scheduler = make(max_num_batched_tokens=2048, max_num_seqs=16)
    add(scheduler, [32_000])
    assert turn(scheduler) == {"r0": 2048}


def test_a_waiting_prompt_that_has_no_pages_takes_no_share():
    scheduler = make(pages=600, max_num_batched_tokens=2048, max_num_seqs=16, max_model_len=33_000)
    add(scheduler, [32_000, 32_000])
    assert turn(scheduler) == {"r0": 2048}


BLOCK = 1536


@pytest.mark.parametrize("draft", [DraftCost(), EIGHT_DRAFTS])
@pytest.mark.parametrize("budget", [512, 1024, 1536, 1537, 2048])
@pytest.mark.parametrize("prompts", [[1000], [1536], [5000], [32_000, 32_000], [5000, 1000, 1536]])
def test_every_request_gets_on_in_every_step_whatever_the_block(budget, prompts, draft):
    scheduler = make(
        max_num_batched_tokens=budget, max_num_seqs=4, block=BLOCK, draft=draft, long_prefill_tokens=128
    )
    requests = add(scheduler, prompts, max_tokens=3)
    waited = dict.fromkeys(requests, 0)
    while not scheduler.idle:
        rows = turn(scheduler)
        assert rows
        for request in requests:
            waited[request] = 0 if request.id in rows or request.finish else waited[request] + 1
        if len(prompts) == 2:  # both are longer than a step: neither waits for the other to end
            assert max(waited.values()) == 0
    assert all(r.output_tokens == 3 for r in requests)


def test_a_budget_that_falls_below_the_block_in_mid_prompt_still_moves_it():
    """Each arrival costs seven rows; the long prompt is left with less than a block a step."""
    scheduler = make(max_num_batched_tokens=300, max_num_seqs=32, block=256, draft=EIGHT_DRAFTS)
    (long,) = add(scheduler, [3000], max_tokens=2)
    turn(scheduler)
    assert long.seen == 256
    add(scheduler, [1] * 30, max_tokens=400)
    for _ in range(400):
        before = long.seen
        turn(scheduler)
        if long.finish:
            break
        assert long.seen > before
    assert long.finish == "length"


def test_states_fall_on_the_block_whatever_shares_the_step():
    scheduler = make(max_num_batched_tokens=200, max_num_seqs=4, block=64, long_prefill_tokens=16)
    requests = add(scheduler, [1000, 333, 700], max_tokens=2)
    stops = {r: {0} for r in requests}
    while not scheduler.idle:
        turn(scheduler)
        for r in requests:
            stops[r].add(r.seen)
    for r in requests:
        last = (r.prompt_tokens - 1) // 64 * 64
        assert last in stops[r]


def test_the_newest_yields_its_pages_and_replays_prompt_and_output():
    scheduler = make(pages=9, page_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=32)
    old, new = add(scheduler, [12, 12], max_tokens=20)
    for _ in range(5):
        turn(scheduler)
    assert turn(scheduler) == {"r0": 1}
    assert (new.seen, new.output_tokens, new.preemptions) == (0, 5, 1)
    assert scheduler.waiting == [new]
    scheduler.cache.check()
    while not old.finish:
        assert turn(scheduler)
    assert turn(scheduler) == {"r1": 12 + 5}
    run_out(scheduler)
    assert new.output_tokens == 20
    assert (scheduler.preemptions, scheduler.cache.pages.used) == (1, 0)


def test_nobody_is_admitted_in_a_step_that_threw_somebody_out():
    scheduler = make(pages=9, page_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=32)
    add(scheduler, [12, 12], max_tokens=20)
    for _ in range(5):
        turn(scheduler)
    add(scheduler, [1], priority=-1)
    assert turn(scheduler) == {"r0": 1}
    assert set(turn(scheduler)) == {"r0", "r2"}


def test_a_newcomer_leaves_a_page_for_each_that_runs():
    scheduler = make(pages=6, page_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=20)
    add(scheduler, [11], max_tokens=3)
    turn(scheduler)
    add(scheduler, [8], max_tokens=2)
    assert turn(scheduler) == {"r0": 1}
    run_out(scheduler)
    assert scheduler.preemptions == 0


def test_without_a_free_slot_a_request_stays_in_the_queue():
    scheduler = make(slots=3, max_num_seqs=8)
    requests = add(scheduler, [5, 5, 5, 5], max_tokens=3)
    assert set(turn(scheduler)) == {"r0", "r1"}
    assert scheduler.waiting == requests[2:]
    run_out(scheduler)
    assert all(r.finish == "length" for r in requests)


def test_a_smaller_priority_number_is_served_first_and_yields_last():
    scheduler = make(pages=9, page_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=32)
    add(scheduler, [12], max_tokens=20)
    turn(scheduler)
    (urgent,) = add(scheduler, [12], max_tokens=20, priority=-1)
    for _ in range(6):
        turn(scheduler)
    assert scheduler.running == [urgent]
    assert [r.id for r in scheduler.waiting] == ["r0"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_gives_everything_back_wherever_the_request_is(steps):
    scheduler = make(max_num_batched_tokens=20, max_num_seqs=2)
    first, second, third = add(scheduler, [30, 4, 4], max_tokens=50)
    for _ in range(steps):
        turn(scheduler)
    for request in (first, second, third):
        assert scheduler.abort(request)
        assert not scheduler.abort(request)
        scheduler.cache.check()
    assert scheduler.idle
    assert (scheduler.cache.pages.used, scheduler.cache.slots.used) == (0, 0)


def test_a_request_aborted_while_its_step_runs_gets_nothing():
    scheduler = make()
    first, second = add(scheduler, [4, 4])
    work = scheduler.plan()
    scheduler.abort(first)
    assert [p.request for p in scheduler.commit(scheduler.judge(answer(work)))] == [second]
    assert (first.finish, first.output) == ("abort", [])


def test_a_failed_piece_of_work_ends_its_request_alone():
    scheduler = make()
    first, second = add(scheduler, [4, 4])
    work = scheduler.plan()
    results = [Result(work[0], error="broken"), Result(work[1], [5])]
    progress = scheduler.commit(scheduler.judge(results))
    assert [(p.request, p.finish, p.error) for p in progress] == [
        (first, "error", "broken"),
        (second, None, None),
    ]
    assert scheduler.running == [second]
    scheduler.cache.check()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (100, 1, "prompt has 100 tokens, and with one to generate that is more than max_model_len=100"),
        (41, 1, "may grow to 42 tokens but all pages together hold 40"),
        (30, None, "may grow to 100 tokens but all pages together hold 40"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt, max_tokens, message):
    scheduler = make(pages=11, page_size=4, max_model_len=100)
    with pytest.raises(ValueError, match=message):
        add(scheduler, [prompt], max_tokens)
    assert scheduler.idle


def test_a_request_as_large_as_everything_runs_to_its_end():
    scheduler = make(pages=11, slots=2, page_size=4, max_model_len=100, max_num_batched_tokens=7)
    (request,) = add(scheduler, [30], max_tokens=10)
    run_out(scheduler)
    assert request.output_tokens == 10


def test_drafts_are_rows_to_verify_and_only_accepted_ones_count():
    scheduler = make(draft=EIGHT_DRAFTS)
    (request,) = add(scheduler, [4], max_tokens=50)
    turn(scheduler)
    request.drafts = [3, 4, 5]
    (work,) = scheduler.plan()
    assert (work.count, work.drafts, work.samples) == (4, 3, True)
    scheduler.commit(scheduler.judge([Result(work, [3, 9])]))  # one of three accepted, and the next token
    assert (request.seen, request.output, request.unseen, request.drafts) == (6, [2, 3, 9], 1, [])


def test_drafts_are_cut_to_the_room_and_to_the_context():
    scheduler = make(draft=EIGHT_DRAFTS, max_model_len=8)
    (request,) = add(scheduler, [4], max_tokens=50)
    turn(scheduler)
    request.drafts = [3] * 8
    (work,) = scheduler.plan()
    assert (work.count, work.drafts) == (3, 2)  # three tokens may still come
    narrow = make(max_num_batched_tokens=10, draft=DraftCost(extra_rows=2, lookahead=3))
    for request in add(narrow, [1, 1], max_tokens=50):
        request.arrival = 0.0
    turn(narrow)
    for request in narrow.running:
        request.drafts = [3] * 5
    assert [w.count for w in narrow.plan()] == [5, 1]  # 10 - 2 - (1 + 2) for the other, then 10 - 7 - 2


def test_a_drafter_gets_pages_for_what_it_writes_after_a_last_token():
    scheduler = make(pages=8, page_size=4, max_num_batched_tokens=8, max_model_len=20, draft=DraftCost.of(2))
    scheduler.lookahead = 3
    (request,) = add(scheduler, [14], max_tokens=6)
    pages = []
    while not request.finish:
        work = scheduler.plan()
        pages.append(len(work[0].pages))
        scheduler.commit(scheduler.judge(answer(work)))
    assert pages == [2, 5, 5, 5, 5, 5, 5, 5][: len(pages)], "a chunk inside the prompt needs none"


def test_who_can_use_a_draft():
    scheduler = make(max_model_len=100, max_num_batched_tokens=30)
    last, two, long = add(scheduler, [3, 3, 50], max_tokens=2)
    last.params = SamplingParams(max_tokens=1)
    full = Request("full", [2] * 98, SamplingParams(max_tokens=50), arrival=9.0)
    turn(scheduler)
    assert scheduler.decoding() == []  # each of them stops with its next token, or has a prompt to run
    two.params = SamplingParams(max_tokens=3)
    assert scheduler.decoding() == [two]
    scheduler.abort(long)
    scheduler.add(full)
    while full.output_tokens < 1:
        turn(scheduler)
    assert full.unseen == 1
    assert full not in scheduler.decoding(), "one token more and its context is full"


def test_a_request_that_nothing_helps_gets_an_error_instead_of_a_spin(monkeypatch):
    scheduler = make()
    first, second = add(scheduler, [4, 4])
    monkeypatch.setattr(scheduler.cache, "admit", lambda *args, **more: False)
    assert scheduler.plan() == []
    assert scheduler.commit([]) == []
    assert scheduler.plan() == []
    (progress,) = scheduler.commit([])
    assert (progress.request, progress.finish) == (first, "error")
    assert "the request of 4 tokens cannot get on: with nothing else running, 199999 of 199999 pages" in (
        progress.error
    )
    monkeypatch.undo()
    assert turn(scheduler) == {"r1": 4}
    assert (first.finish, second.finish, scheduler.take_gone()) == ("error", None, [first])


def test_a_request_aborted_or_failed_in_its_step_publishes_nothing_of_it():
    for reason in ("abort", "error"):
        scheduler = make(page_size=4, block=16, max_num_batched_tokens=32)
        (request,) = add(scheduler, [100])
        turn(scheduler)
        known = len(scheduler.cache.index)
        (work,) = scheduler.plan()
        assert (work.checkpoint, work.checkpoint_slot > 2000) == (64, True)
        if reason == "abort":
            scheduler.abort(request)
            results = answer([work])
        else:
            results = [Result(work, error="broken")]
        scheduler.commit(scheduler.judge(results))
        assert len(scheduler.cache.index) == known == 2
        scheduler.cache.check()
        assert scheduler.cache.checkpoints.used == 1


def test_a_judgement_can_be_asked_again():
    """As when the states cannot be settled: the slot for a state inside verified rows is given back."""
    scheduler = make(page_size=4, block=8, draft=EIGHT_DRAFTS)
    (request,) = add(scheduler, [6], max_tokens=50)
    turn(scheduler)
    request.propose(Draft([2] * 5))
    (work,) = scheduler.plan()
    (verdict,) = scheduler.judge([Result(work, [2] * 6)])
    assert (verdict.rows, verdict.checkpoint, verdict.tokens) == (6, 8, [2] * 6)
    assert verdict.checkpoint_slot > 0
    (again,) = scheduler.judge([Result(work, [2] * 6)])
    assert again == verdict
    (failed,) = scheduler.judge([Result(work, error="no such kernel")])
    assert (failed.rows, failed.checkpoint, failed.tokens) == (0, 0, [])
    assert request.output_tokens == 1
    scheduler.commit([failed])
    scheduler.cache.check()
    assert scheduler.cache.checkpoints.used == 0


def test_a_wait_that_brings_nothing_ends(monkeypatch):
    scheduler = make(block=64, max_num_batched_tokens=100)
    add(scheduler, [20_000, 20_000], same=True)
    monkeypatch.setattr(scheduler.cache, "checkpoint", lambda request, tokens: 0)
    waits = [turn(scheduler) for _ in range(PATIENCE - 1)]
    assert all(rows == {"r0": 64} for rows in waits)
    assert set(turn(scheduler)) == {"r0", "r1"}


def test_planning_twice_without_commit_is_our_mistake():
    scheduler = make()
    scheduler.plan()
    with pytest.raises(AssertionError, match="twice"):
        scheduler.plan()


def random_scheduler(rng: random.Random) -> Scheduler:
    page = rng.choice([1, 4, 16])
    unit = page * rng.choice([1, 2])
    scheduler = make(
        pages=rng.choice([8, 12, 40]),
        slots=rng.choice([2, 3, 9]),
        page_size=page,
        block=rng.choice([0, unit, 2 * unit, 3 * unit]),
        unit=unit,
        checkpoints=rng.choice([1, 3, 30]),
        max_num_batched_tokens=rng.choice([9, 17, 64]),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_model_len=200,
        long_prefill_tokens=rng.choice([1, 8]),
        draft=rng.choice([DraftCost(), EIGHT_DRAFTS]),
    )
    scheduler.exports = rng.random() < 0.5
    return scheduler


def random_turn(scheduler: Scheduler, rng: random.Random) -> dict[str, int]:
    """A step whose drafts are accepted by chance."""
    if scheduler.limits.draft.lookahead:
        for request in scheduler.decoding():
            request.propose(Draft([2] * rng.randint(1, 8)) if rng.random() < 0.7 else None)
    work = scheduler.plan()
    results = [Result(w, [2] * (1 + rng.randint(0, w.drafts)) if w.samples else []) for w in work]
    scheduler.commit(scheduler.judge(results))
    return {w.request.id: w.count for w in work}


@pytest.mark.parametrize("seed", range(24))
def test_random_traffic_leaks_nothing_starves_nobody_and_never_idles(seed):
    """Arrivals, aborts, drafts, lengths, blocks and tiny pools at random; the books are walked throughout."""
    rng = random.Random(seed)
    scheduler = random_scheduler(rng)
    made, oldest_wait, empty = [], 0, 0
    for turn_number in range(600):
        if rng.random() < 0.3 and turn_number < 500:
            tokens = rng.randint(1, min(190, scheduler.cache.capacity - 1))
            params = SamplingParams(max_tokens=rng.randint(1, min(scheduler.cache.capacity, 200) - tokens))
            salt = rng.choice(["", "a", f"{turn_number}"])
            request = Request(
                f"r{turn_number}", [2] * tokens, params, arrival=float(turn_number), cache_salt=salt
            )
            scheduler.add(request)
            made.append(request)
        if rng.random() < 0.05 and made:
            scheduler.abort(rng.choice(made))
        if scheduler.idle:
            continue
        oldest = min((*scheduler.running, *scheduler.waiting), key=lambda r: r.rank)
        rows = random_turn(scheduler, rng)
        empty = 0 if rows else empty + 1
        assert empty <= (scheduler.grid is not None), "the last to run may throw itself out, once"
        assert sum(rows.values()) <= scheduler.limits.step_budget
        oldest_wait = 0 if oldest.id in rows else oldest_wait + 1
        shares = scheduler.grid is not None and not oldest.cache_salt.isdigit()
        assert oldest_wait <= 60 * shares, (
            "the oldest gets on in every step, or waits for what others compute"
        )
        if turn_number % 10 == 0:
            scheduler.cache.check()
    run_out(scheduler, 60_000)
    assert all(r.finish for r in made)
    assert all(r.output_tokens == r.params.max_tokens for r in made if r.finish == "length")
    assert scheduler.cache.slots.used == 0
    scheduler.cache.drop()
    scheduler.cache.check()
    assert (scheduler.cache.pages.used, scheduler.cache.checkpoints.used) == (0, 0)


def milliseconds_a_step(requests: int, rounds: int = 30, block: int = 0) -> float:
    """Median CPU time of plan, judge and commit together with everybody decoding."""
    scheduler = make(max_num_batched_tokens=8192, max_num_seqs=1024, draft=EIGHT_DRAFTS, block=block)
    add(scheduler, [5] * requests, max_tokens=10_000)
    while scheduler.waiting or any(r.unseen > 1 for r in scheduler.running):
        turn(scheduler)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        work = scheduler.plan()
        planned = time.thread_time() - start
        results = answer(work)
        start = time.thread_time()
        scheduler.commit(scheduler.judge(results))
        times.append(planned + time.thread_time() - start)
        assert len(work) == requests
    return sorted(times)[rounds // 2] * 1e3


@pytest.mark.parametrize("block", [0, 64], ids=["plain", "cached"])
@pytest.mark.parametrize(("requests", "allowed_ms"), [(64, 0.5), (1024, 5.0)])
def test_a_step_is_planned_and_committed_in_time(requests, allowed_ms, block):
    assert min(milliseconds_a_step(requests, block=block) for _ in range(3)) < allowed_ms


def test_a_full_queue_of_one_prompt_costs_no_more_than_other_steps():
    """A thousand wait for the prefix that one runs; each is looked up in every step."""
    scheduler = make(max_num_batched_tokens=1024, max_num_seqs=1024, block=64)
    add(scheduler, [20_000] * 1000, same=True)
    times = []
    for _ in range(12):
        start = time.thread_time()
        work = scheduler.plan()
        times.append(time.thread_time() - start)
        assert [w.request.id for w in work] == ["r0"]
        scheduler.commit(scheduler.judge(answer(work)))
    assert sorted(times)[6] < 20e-3


def test_time_grows_linearly_with_the_requests():
    few, many = milliseconds_a_step(128), milliseconds_a_step(1024)
    assert many / few < 3 * 1024 / 128
