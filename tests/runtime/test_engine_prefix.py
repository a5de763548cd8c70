"""The prefix cache under the engine: how many tokens are run, and that each answer is that of a cold run.

Everything freed holds NaN, so an answer that is right was made from nothing that is not the request's.
"""

import random

import pytest
from k3compile.runtime.request import Request

PROMPT = 8000
BOTH = pytest.mark.parametrize("exports", [False, True], ids=["split", "exports"])


def text(toy, length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(toy.VOCAB) for _ in range(length)]


def serve(toy, engine, prompts, max_tokens=6, **more):
    """Together; the listeners by position. Every answer is held against a cold run alone."""
    requests = [Request(f"{i}", p, toy.greedy(max_tokens), **more) for i, p in enumerate(prompts)]
    heard = toy.run(engine, requests)
    for request in requests:
        assert heard[request.id].tokens == toy.alone(request.prompt, max_tokens), request
    return [heard[r.id] for r in requests]


def long_engine(toy, **config):
    model = toy.Model()
    model.config.max_position_embeddings = 1 << 15
    large = {"page_size": 64, "num_pages": 700, "max_num_batched_tokens": 8192, "max_num_seqs": 8}
    engine = toy.engine(model, **{**large, "num_drafts": 8, "prefix_cache": True, **config})
    return model, engine


def cached(listener):
    return listener.updates[-1].cached_tokens


@pytest.mark.parametrize(
    ("exports", "block", "unit", "chunks", "state"),
    [
        (False, 768, 768, [7680, 320], 7680),
        (False, 1536, 1536, [7680, 320], 7680),
        (True, 768, 768, [8000], 7680),
        (True, 1536, 128, [8000], 7936),
    ],
)
def test_a_prompt_of_8000_tokens_is_one_pass_and_leaves_one_state(toy, exports, block, unit, chunks, state):
    """Budget 8192, and the seven rows that eight drafts charge."""
    model, engine = long_engine(toy, exports=exports, block_size=block, prefix_match_unit=unit)
    prompt = text(toy, PROMPT)
    (heard,) = serve(toy, engine, [prompt], max_tokens=1)
    assert model.steps == [[n] for n in chunks]
    assert cached(heard) == 0
    assert [n.tokens for n in engine.cache.index if n.state] == [state]
    assert engine.stats().rows == PROMPT


@BOTH
def test_the_next_turn_of_a_conversation_runs_only_what_is_new(toy, exports):
    _, engine = long_engine(toy, exports=exports, block_size=768, prefix_match_unit=128, num_drafts=0)
    prompt, said = text(toy, 4000), 300
    (first,) = serve(toy, engine, [prompt], max_tokens=said)
    turn = [*prompt, *first.tokens, *text(toy, 200, seed=1)]
    known = (4000 + said - 1) // 128 * 128
    before = engine.stats().rows
    assert before == 4000 + said - 1, "no token is run twice"
    (second,) = serve(toy, engine, [turn], max_tokens=1)
    assert cached(second) == known
    assert engine.stats().rows - before == len(turn) - known
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (4000 + len(turn), known)


BLOCK = 64


@BOTH
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_prompts_around_a_boundary_cold_resent_and_extended(toy, exports, blocks, off):
    engine = toy.engine(
        exports=exports,
        page_size=16,
        num_pages=200,
        max_num_batched_tokens=512,
        prefix_cache=True,
        block_size=BLOCK,
    )
    length = blocks * BLOCK + off
    prompt = text(toy, length)
    longer, shorter = [*prompt, *text(toy, 90, seed=1)], prompt[: length - 30]
    (cold,) = serve(toy, engine, [prompt], max_tokens=1)
    assert cached(cold) == 0
    (resent,) = serve(toy, engine, [prompt])
    assert cached(resent) == (length - 1) // BLOCK * BLOCK
    (extended,) = serve(toy, engine, [longer])
    assert cached(extended) == length // BLOCK * BLOCK
    (again,) = serve(toy, engine, [longer])
    assert cached(again) == (len(longer) - 1) // BLOCK * BLOCK
    (cut,) = serve(toy, engine, [shorter])
    assert cached(cut) <= (len(shorter) - 1) // BLOCK * BLOCK


@BOTH
@pytest.mark.parametrize("budget", [100, 2000])
def test_the_same_prompt_many_times_at_once_is_computed_once(toy, exports, budget):
    engine = toy.engine(
        exports=exports,
        page_size=16,
        num_pages=400,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        prefix_cache=True,
        block_size=BLOCK,
    )
    prompt = text(toy, 1000)
    heard = serve(toy, engine, [prompt] * 6, max_tokens=2)
    assert [cached(h) for h in heard] == [0, *[960] * 5]
    assert engine.stats().rows == 1000 + 5 * 40 + 6
    assert engine.stats().preemptions == 0


def test_while_a_prefix_is_computed_others_get_on(toy):
    model = toy.Model()
    engine = toy.engine(
        model, page_size=16, num_pages=400, max_num_batched_tokens=64, prefix_cache=True, block_size=BLOCK
    )
    prompt, other = text(toy, 640), text(toy, 20, seed=1)
    heard = {name: toy.Listener() for name in "abc"}
    for name, tokens in zip("abc", (prompt, prompt, other)):
        engine.submit(Request(name, tokens, toy.greedy(3)), heard[name])
    while not heard["c"].finish:
        engine.step()
    assert not heard["b"].updates, "the third came before the second, which waits for its prefix"
    while engine.step():
        engine.cache.check()
    assert heard["b"].tokens == heard["a"].tokens == toy.alone(prompt, 3)
    assert cached(heard["b"]) == 576


def test_prompts_that_part_are_joined_again_at_the_junction(toy):
    """The second leaves a state where the two part, so the third starts there."""
    engine = toy.engine(
        exports=True,
        page_size=16,
        num_pages=400,
        max_num_batched_tokens=2000,
        prefix_cache=True,
        block_size=1024,
        prefix_match_unit=64,
    )
    common = text(toy, 500)
    asked = [[*common, *text(toy, 200, seed=n)] for n in range(1, 4)]
    assert [cached(serve(toy, engine, [p])[0]) for p in asked] == [0, 0, 448]


@BOTH
@pytest.mark.parametrize("budget", [256, 2000])
def test_prompts_that_part_where_no_state_is_wait_for_the_one_that_makes_it(toy, exports, budget):
    """Six at once run their common part once more, not six times."""
    engine = toy.engine(
        exports=exports,
        page_size=16,
        num_pages=600,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        prefix_cache=True,
        block_size=1536,
        prefix_match_unit=64,
    )
    common = text(toy, 1000)
    first, *others = [[*common, *text(toy, 200, seed=n)] for n in range(1, 8)]
    serve(toy, engine, [first], max_tokens=2)
    assert [cached(heard) for heard in serve(toy, engine, others, max_tokens=2)] == [0, *[960] * 5]


def test_tenants_do_not_see_each_others_prefixes(toy):
    engine = toy.engine(num_pages=200, page_size=16, prefix_cache=True, block_size=BLOCK)
    prompt = text(toy, 200)
    for salt in ("", "a", "b"):
        assert cached(serve(toy, engine, [prompt], cache_salt=salt)[0]) == 0
        assert cached(serve(toy, engine, [prompt], cache_salt=salt)[0]) == 192


@BOTH
@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9])
def test_a_hit_of_many_state_blocks_reads_the_state_at_its_end(toy, exports, blocks):
    """H03: latents in pages of 16 or 64 tokens, states every 192: nothing is divided by the wrong size."""
    for page in (16, 64):
        engine = toy.engine(
            exports=exports,
            page_size=page,
            num_pages=3000 // page,
            max_num_batched_tokens=512,
            prefix_cache=True,
            block_size=192,
        )
        prompt = text(toy, 192 * blocks + 5)
        serve(toy, engine, [prompt])
        assert cached(serve(toy, engine, [[*prompt, 1, 2, 3]])[0]) == 192 * blocks


@pytest.mark.parametrize("budget", [40, 63, 64, 65, 128])
@pytest.mark.parametrize("prompts", [[50], [64], [300], [1000, 1000]])
@BOTH
def test_a_block_wider_than_the_budget_stops_nobody(toy, exports, budget, prompts):
    """H01 with a cache: chunks of nothing would be planned for ever."""
    engine = toy.engine(
        exports=exports,
        page_size=16,
        num_pages=300,
        max_num_batched_tokens=budget,
        long_prefill_tokens=16,
        prefix_cache=True,
        block_size=64,
    )
    serve(toy, engine, [text(toy, n, seed=i) for i, n in enumerate(prompts)])
    serve(toy, engine, [text(toy, n, seed=i) for i, n in enumerate(prompts)])


def test_a_preempted_request_comes_back_from_what_it_left(toy):
    """H02: its state on resume is a checkpoint of its own tokens, or zero."""
    engine = toy.engine(
        page_size=4, num_pages=60, max_num_seqs=2, max_num_batched_tokens=64, prefix_cache=True, block_size=16
    )
    request, heard = Request("a", text(toy, 50), toy.greedy(60)), toy.Listener()
    engine.submit(request, heard)
    while request.output_tokens < 37:
        engine.step()
    rows, known = engine.stats().rows, (50 + 36) // 16 * 16
    engine.scheduler.preempt(request)
    engine.step()
    assert engine.stats().rows - rows == 50 + 37 - known
    while engine.step():
        pass
    assert heard.tokens == toy.alone(request.prompt, 60)
    assert cached(heard) == 0, "what it had itself is no gift of the cache"


def conversation_traffic(toy, rng, turns):
    """Prompts that grow out of each other, from three beginnings."""
    roots = [text(toy, rng.choice([20, 63, 64, 65]), seed=n) for n in range(3)]
    return [[*rng.choice(roots), *text(toy, rng.randrange(60), seed=rng.randrange(4))] for _ in range(turns)]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
def test_random_traffic_over_few_pages_and_states(toy, seed):
    rng = random.Random(seed)
    engine = toy.engine(
        exports=rng.random() < 0.5,
        page_size=4,
        num_pages=rng.choice([50, 70]),
        max_num_batched_tokens=rng.choice([17, 64]),
        max_num_seqs=rng.choice([2, 5]),
        prefix_cache=True,
        block_size=rng.choice([8, 32]),
        prefix_match_unit=8,
        num_checkpoints=rng.choice([1, 3, 20]),
        retention_interval=rng.choice([None, 0, 64]),
    )
    requests = [
        Request(f"{i}", p, toy.greedy(rng.randint(1, 25)))
        for i, p in enumerate(conversation_traffic(toy, rng, 60))
    ]
    heard, todo = {}, list(requests)
    while todo or not engine.scheduler.idle:
        if todo and rng.random() < 0.4:
            request = todo.pop()
            heard[request.id] = toy.Listener()
            engine.submit(request, heard[request.id])
        if heard and rng.random() < 0.05:
            engine.abort(rng.choice(list(heard)))
        if engine.scheduler.running and rng.random() < 0.05:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        engine.step()
        engine.cache.check()
    toy.assert_nothing_left(engine)
    for request in requests:
        expected = toy.alone(request.prompt, request.params.max_tokens)
        got = heard[request.id]
        assert got.finish in ("length", "abort")
        assert got.tokens == expected[: len(got.tokens)]
        assert got.finish == "abort" or got.tokens == expected
    assert engine.stats().prefix_hit_tokens > 0


def test_a_failed_step_publishes_nothing_and_hurts_no_prefix(toy):
    model = toy.Model()
    engine = toy.engine(
        model, page_size=4, num_pages=100, max_num_batched_tokens=64, prefix_cache=True, block_size=16
    )
    prompt = text(toy, 200)
    for fails_at in range(6):
        known = len(engine.cache.index)
        request, heard = Request("a", prompt, toy.greedy(10)), toy.Listener()
        engine.submit(request, heard)
        for _ in range(fails_at):
            engine.step()
        before = {n.tokens for n in engine.cache.index}, {n.tokens for n in engine.cache.index if n.state}
        model.fail_next = RuntimeError("no such kernel")
        while engine.step():
            pass
        engine.cache.check()
        assert heard.finish == "error"
        after = {n.tokens for n in engine.cache.index}, {n.tokens for n in engine.cache.index if n.state}
        assert before == after
        assert len(engine.cache.index) >= known
    serve(toy, engine, [prompt, prompt[:100], [*prompt, 1]])


@BOTH
def test_a_request_that_dies_while_its_step_runs_publishes_nothing_of_it(toy, exports):
    model = toy.Model()
    engine = toy.engine(
        model,
        exports=exports,
        page_size=4,
        num_pages=100,
        max_num_batched_tokens=64,
        prefix_cache=True,
        block_size=16,
    )
    prompt, doomed = text(toy, 200), toy.Listener()
    engine.submit(Request("a", prompt, toy.greedy(10)), doomed)
    engine.step()
    before = len(engine.cache.index)
    plain = model.forward

    def hang_up(step, pools, exports=False):
        out = plain(step, pools, exports)
        engine.scheduler.abort(engine.scheduler.running[0])
        return out

    model.forward = hang_up
    engine.step()
    model.forward = plain
    assert len(engine.cache.index) == before
    engine.cache.check()
    engine._live.clear(), engine._known.clear()
    serve(toy, engine, [prompt])


def test_the_forward_decides_between_steps_how_prompts_are_cut(toy):
    """Uncompiled at first, then compiled: the second prompt needs one pass, and finds what the first left."""
    model = toy.Model()
    engine = toy.engine(
        model, page_size=16, num_pages=400, max_num_batched_tokens=2000, prefix_cache=True, block_size=BLOCK
    )
    first, second = text(toy, 300), text(toy, 300, seed=1)
    serve(toy, engine, [first], max_tokens=1)

    def compiled(step):
        return model.forward(step, engine.pools, exports=True)

    compiled.exports = True
    engine.use(compiled)
    serve(toy, engine, [second], max_tokens=1)
    assert model.steps == [[256], [44], [300]]
    assert [cached(h) for h in serve(toy, engine, [first, second])] == [256, 256]


@BOTH
def test_conversations_that_take_turns_find_each_others_ends_and_not_only_their_own_past(toy, exports):
    """Ten on the sixteen slots of the default, which hold all their ends and few of their other states."""
    turns, new, said, unit = 3, 100, 50, 64
    engine = toy.engine(
        exports=exports,
        page_size=16,
        num_pages=10 * 32 + 1,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        prefix_cache=True,
        block_size=768,
        prefix_match_unit=unit,
    )
    assert engine.cache.total_slots - engine.cache.slots.size == 16
    chats = [text(toy, new, seed=n) for n in range(10)]
    for turn in range(turns):
        for n, chat in enumerate(chats):
            (heard,) = serve(toy, engine, [chat], max_tokens=said)
            assert cached(heard) == max(len(chat) - new - 1, 0) // unit * unit
            chats[n] = [*chat, *heard.tokens, *text(toy, new, seed=100 * turn + n)]


@BOTH
def test_a_prompt_is_found_again_however_often_it_was_answered(toy, exports):
    """The state at its end is passed by each answer, and come back to."""
    engine = toy.engine(
        exports=exports,
        page_size=16,
        num_pages=400,
        max_num_batched_tokens=512,
        prefix_cache=True,
        block_size=768,
        prefix_match_unit=64,
        num_checkpoints=4,
    )
    prompt = text(toy, 200)
    found = []
    for n in range(4):
        found.append(cached(serve(toy, engine, [prompt], max_tokens=80)[0]))
        serve(toy, engine, [text(toy, 130, seed=n)], max_tokens=2)
    assert found == [0, 192, 192, 192]


def test_what_the_cache_cannot_keep_is_counted_by_reason(toy):
    engine = toy.engine(
        page_size=4,
        num_pages=200,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        prefix_cache=True,
        block_size=16,
        num_checkpoints=1,
    )
    for seed in range(4):
        serve(toy, engine, [text(toy, 100, seed=seed)] * 2)
    stats = engine.stats()
    assert stats.evicted_states > 0
    assert stats.prefix_declines["deferred"] > 0
