"""Work that is planned again as it is: the same plans as when every request is looked at anew."""

import random

import pytest
from k3compile.runtime.budget import DraftCost, Limits
from k3compile.runtime.cache.cache import Cache
from k3compile.runtime.cache.checkpoints import Grid
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.scheduler import Scheduler
from k3compile.runtime.speculate.draft import Draft
from k3compile.runtime.work import Result

EOS, STOP, PLAIN = 1, 3, 2


def make(rng: random.Random, drafts: int) -> Scheduler:
    grid = Grid(16, 8, alignment=4) if rng.random() < 0.6 else None
    cache = Cache(rng.randint(40, 200), 12, 4, grid=grid, num_checkpoints=8 if grid else 0)
    limits = Limits(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=120,
        draft=DraftCost.of(drafts),
        draft_limit=64,
    )
    scheduler = Scheduler(limits, cache, frozenset([EOS]))
    scheduler.lookahead = rng.choice([0, 3])
    return scheduler


def arrival(rng: random.Random, number: int) -> Request:
    params = SamplingParams(
        max_tokens=rng.choice([None, rng.randint(1, 60)]),
        min_tokens=0,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=[STOP] if rng.random() < 0.3 else [],
    )
    salt = rng.choice(["", str(number)])
    return Request(f"r{number}", [PLAIN] * rng.randint(1, 40), params, arrival=float(number), cache_salt=salt)


def history(seed: int, forget: bool) -> tuple[list[object], int]:
    """Every plan and all that came of it, and how many rows were planned again. forget: none may be."""
    rng = random.Random(seed)
    drafts = rng.choice([0, 0, 4])
    scheduler, told, made, again = make(rng, drafts), [], [], 0
    for number in range(300):
        if number < 200 and rng.random() < 0.2:
            made.append(arrival(rng, number))
            scheduler.add(made[-1])
        if rng.random() < 0.03 and made:
            scheduler.abort(rng.choice(made))
        if rng.random() < 0.03 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        for request in scheduler.decoding() if drafts else ():
            request.propose(Draft([PLAIN] * rng.randint(1, 4)) if rng.random() < 0.3 else None)
        if forget:
            for request in made:
                request.again = None
        work = scheduler.plan()
        again += sum(w is w.request.again for w in work)
        told.append([(w.request.id, w[1:5], w.pages.tolist(), w[6:]) for w in work])
        results = []
        for w in work:
            tokens = [
                rng.choices([PLAIN, EOS, STOP], [40, 1, 1])[0] for _ in range(1 + rng.randint(0, w.drafts))
            ]
            failed = "broken" if rng.random() < 0.01 else None
            results.append(Result(w, tokens if w.samples and not failed else [], failed))
        if rng.random() < 0.05 and work:
            scheduler.abort(rng.choice(work).request)  # while the step runs
        verdicts = scheduler.judge(results)
        told.append([(v.work.request.id, v[1:]) for v in verdicts])
        told.append([(p.request.id, p[1:]) for p in scheduler.commit(verdicts)])
        told.append([(r.id, r.seen, r.tokens.tolist(), r.finish) for r in made])
        told.append(scheduler.cache.take_writes())
        scheduler.cache.check()
    return told, again


@pytest.mark.parametrize("seed", range(30))
def test_work_planned_again_is_the_work_of_a_new_look(seed):
    (repeated, some), (anew, none) = history(seed, forget=False), history(seed, forget=True)
    assert none == 0
    assert some > 100, "the traffic never repeats a row, so nothing was compared"
    for step, (one, other) in enumerate(zip(repeated, anew)):
        assert one == other, f"part {step % 5} of step {step // 5}"
    assert len(repeated) == len(anew)


def test_the_last_row_of_a_prompt_is_not_planned_again_before_a_token_came_out():
    """A chunk that leaves one token of the prompt has a decode's shape, but gives no token."""
    scheduler = Scheduler(Limits(max_num_batched_tokens=1, max_num_seqs=1), Cache(10, 3, 4))
    scheduler.add(request := Request("r", [PLAIN] * 3, SamplingParams(max_tokens=9)))
    for samples in [False, False, True, True, True]:
        (work,) = scheduler.plan()
        assert work.samples == samples
        scheduler.commit(scheduler.judge([Result(work, [PLAIN] if samples else [])]))
    assert (request.seen, request.output_tokens) == (5, 3)


def test_drafts_are_planned_although_the_row_could_be_repeated():
    scheduler = Scheduler(Limits(max_num_batched_tokens=16, max_num_seqs=1), Cache(10, 3, 16))
    scheduler.add(request := Request("r", [PLAIN] * 3, SamplingParams(max_tokens=9)))
    for _ in range(3):
        (work,) = scheduler.plan()
        scheduler.commit(scheduler.judge([Result(work, [PLAIN])]))
    assert request.again is not None
    request.propose(Draft([PLAIN, PLAIN]))
    (work,) = scheduler.plan()
    assert (work.count, work.drafts) == (3, 2)
