"""An engine whose ranks follow one leader: the tokens of one rank, and each rank its part of the pools."""

from functools import cache
from types import SimpleNamespace

import pytest
from features_traffic import Oracle, request_of, traffic
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.request import Request, SamplingParams
from led_ranks import Parts, assert_alike, assert_together, led

SIZES = {
    "max_num_batched_tokens": 160,
    "max_num_seqs": 4,
    "page_size": 16,
    "num_pages": 120,
    "max_model_len": 320,
    "poison": True,
}
PREFIXES = {"prefix_cache": True, "prefix_match_unit": 32, "block_size": 64, "num_checkpoints": 8}
FEW = {"num_pages": 18, "max_model_len": 256}
THROWN = 6  # the step after which all running requests are thrown out
ORACLE = {"num_drafts": 3}
SETTINGS = {
    "chunks": {},
    "prefixes": PREFIXES,
    "n-grams": {"num_drafts": 3},
    "drafts and prefixes": PREFIXES | ORACLE,
    "drafts without replay": PREFIXES | ORACLE | {"state_replay": False},
    "a draft model": PREFIXES | {"num_drafts": 5},
    "a draft model without replay": FEW | {"num_drafts": 5, "state_replay": False},
}
FAST = {("chunks", 2), ("a draft model", 2)}


@cache
def parts(state_replay=True, draft=False):
    return Parts(state_replay, draft)


class Served:
    """Serves the twelve requests; called with an engine it returns what each request got, and why it ended.

    abort: request by step. params: of all requests instead of greedy ones. drafter_error: what has to happen.
    """

    def __init__(self, abort=(), params=None, drafter_error=None):
        self.abort, self.params, self.engine = dict(abort), params, None
        self.drafter_error = drafter_error

    def __call__(self, engine):
        self.engine = engine
        asks, answers, finish, ended = traffic(), [[] for _ in traffic()], {}, {}
        waiting, step = set(range(len(asks))), 0

        def listen(update):
            assert update.error is None, update.error
            index = int(update.request_id)
            answers[index] += update.tokens
            if update.finish is not None:
                finish[index] = update.finish

        while waiting or len(finish) < len(asks):
            assert step < 400
            for index in sorted(waiting):
                ask = asks[index]
                since = max((ended.get(other, 1 << 30) for other in ask.after), default=0)
                if step < since + ask.arrival:
                    continue
                waiting.discard(index)
                before = [] if ask.turn_of is None else asks[ask.turn_of].tokens + answers[ask.turn_of]
                request = request_of(index, before + ask.tokens, ask)
                if self.params is not None:
                    request.params = self.params
                engine.submit(request, listen)
            if step in self.abort:
                engine.abort(str(self.abort[step]))
            engine.step()
            engine.cache.check()
            for request in list(engine.scheduler.running) if step == THROWN else ():
                engine.scheduler.preempt(request)
            step += 1
            for index in finish:
                ended.setdefault(index, step)
        assert engine.speculation.error == self.drafter_error
        return answers, finish


@cache
def answers():
    """What an oracle knows."""
    return led(1, parts(), EngineConfig(**SIZES), Served()).answers[0]


def run(ranks, name, served, context=1):
    config = EngineConfig(**{**SIZES, **SETTINGS[name]})
    own, drafter = parts(config.state_replay, "model" in name), None
    if name.startswith("drafts"):
        known = [SimpleNamespace(answer=answer) for answer in answers()]  # not asked for inside the ranks

        def drafter():
            return Oracle(known)

    return led(ranks, own, config, served, drafter, context)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, n, marks=[] if (name, n) in FAST else pytest.mark.slow)
        for name in SETTINGS
        for n in (2, 4)
    ],
)
def test_tokens_and_pools_are_those_of_one_rank(name, ranks):
    several, alone = (run(n, name, served := Served()) for n in (ranks, 1))
    assert_alike(several, alone)
    assert several.answers[0] == answers()
    stats = served.engine.stats()  # of the last run; the books of all runs are alike
    assert stats.preemptions > 0
    assert (stats.prefix_hit_tokens > 0) == served.engine.config.prefix_cache
    assert (sum(stats.drafts_proposed) > 0) == (served.engine.config.num_drafts > 0)
    assert ("draft" in dict(map(reversed, several.commands[0]))) == ("model" in name)


@pytest.mark.parametrize(
    ("name", "ranks", "context"),
    [
        ("drafts and prefixes", 2, 2),
        pytest.param("drafts and prefixes", 4, 2, marks=pytest.mark.slow),
        pytest.param("drafts without replay", 4, 4, marks=pytest.mark.slow),
        pytest.param("a draft model", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_the_tokens_of_a_page_give_those_of_one_rank(name, ranks, context):
    several, alone = run(ranks, name, served := Served(), context), run(1, name, Served())
    assert_alike(several, alone, context)
    assert several.answers[0] == answers()
    stats = served.engine.stats()
    assert stats.preemptions > 0
    assert (stats.prefix_hit_tokens > 0) == served.engine.config.prefix_cache
    assert sum(stats.drafts_proposed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafts and prefixes", "a draft model"])
def test_aborts_between_steps_leave_all_ranks_alike(name):
    """H22: what a client does reaches the ranks as what the leader makes of it."""
    aborts = {3: 0, 5: 3, 6: 5, 9: 1, 14: 11}
    several, alone = (run(n, name, Served(aborts)) for n in (2, 1))
    assert_alike(several, alone)
    assert list(several.answers[1].values()).count("abort") >= 3


@pytest.mark.slow
def test_seeds_give_the_tokens_of_one_rank():
    params = SamplingParams(temperature=1.1, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)
    several, alone = (run(n, "a draft model", Served(params=params)) for n in (2, 1))
    assert_alike(several, alone)


def test_requests_at_the_length_limit_and_steps_without_work_are_the_same_commands_everywhere():
    """H22: near the limit there is no room for drafts, and an engine without work asks nothing."""

    def work(engine):
        got = {}
        for _ in range(3):
            assert not engine.step()
        for length in (60, 61, 62, 63):
            tokens = got[length] = []
            params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
            prompt = [(length + i * i) % 90 for i in range(length)]
            engine.submit(Request(str(length), prompt, params), lambda u, t=tokens: t.extend(u.tokens))
        while engine.step():
            pass
        assert not engine.step()
        return got

    config = EngineConfig(**SIZES | {"max_model_len": 64, "num_drafts": 5})
    several, alone = (led(n, parts(draft=True), config, work) for n in (4, 1))
    assert_alike(several, alone)
    assert {n: len(tokens) for n, tokens in several.answers.items()} == {60: 4, 61: 3, 62: 2, 63: 1}


@pytest.mark.slow
def test_what_drafts_cost_is_measured_on_all_ranks():
    """The times differ from run to run, and with them the steps; the tokens do not, nor do ranks from each
    other."""
    config = EngineConfig(**SIZES | {"num_drafts": 3, "adaptive_verification": True, "max_num_seqs": 2})
    several = led(2, parts(draft=True), config, served := Served())
    assert several.answers[0] == answers()
    assert served.engine.speculation.adaptive.verify.rows == (1, 2, 4, 8)
    assert_together(several)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["observe", "choose"])
def test_a_drafter_that_fails_on_rank_0_is_switched_off_for_all(place):
    def broken(*_):
        raise ValueError("no idea")

    served = Served(drafter_error="ValueError: no idea")

    def work(engine):
        setattr(engine.speculation.drafter, place, broken)
        return served(engine)

    config = EngineConfig(**SIZES | {"num_drafts": 3})
    several = led(2, parts(draft=True), config, work)
    assert_together(several)
    assert several.answers[0] == answers()
    assert served.engine.speculation.drafter is None
    kinds = [kind for _, kind in several.commands[1]]
    assert kinds.count("draft") == (place == "choose")
    assert kinds.count("run") > 10
