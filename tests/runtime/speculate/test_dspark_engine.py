"""The drafter in an engine: under any traffic it drafts what it would draft alone, and no token changes."""

from types import SimpleNamespace

import pytest
import torch
from draft_reference import small_draft
from draft_serving import FIVE, tapped, taps_of
from identity import PreemptAt
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams
from lanes import thinned

SIZES = {
    "page_size": 16,
    "num_pages": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "poison": True,
}
LENGTHS = (1, 2, 40, 90, 130, 131)
TOKENS = 10


@pytest.fixture(scope="module")
def parts():
    return SimpleNamespace(target=tapped(), draft=small_draft(FIVE))


def prompts(lengths=LENGTHS):
    """The two longest begin alike."""
    shared = [(7 * i + i * i) % 90 for i in range(128)]
    made = [[(31 * k + 5 * i + i * i) % 90 for i in range(n)] for k, n in enumerate(lengths)]
    return [shared[:n] + one[128:] if n >= 128 else one for n, one in zip(lengths, made)]


class Heard:
    """What a request got."""

    def __init__(self):
        self.tokens, self.error = [], None

    def __call__(self, update):
        self.tokens += update.tokens
        self.error = update.error or self.error


def serve(engine, asked, params, between=lambda engine: None):
    heard = [Heard() for _ in asked]
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, params), heard[i])
    while engine.step():
        between(engine)
    assert not any(one.error for one in heard)
    assert engine.speculation.error is None
    engine.cache.check()
    return [one.tokens for one in heard]


def record_drafts(engine):
    """(request, position of the anchor, draft) of everything that ``engine`` drafts from now on."""
    drafter, made, propose = engine.speculation.drafter, [], engine.speculation.drafter.propose

    def recorded(requests, holdings):
        drafts = propose(requests, holdings)
        made.extend((r, r.seen, d) for r, d in zip(requests, drafts, strict=True))
        return drafts

    drafter.propose = recorded
    return made


def assert_made_alone(made, parts):
    """Every draft is what the draft model makes of those tokens alone, densely and at once."""
    for request in {request for request, _, _ in made}:
        own = [(anchor, draft) for other, anchor, draft in made if other is request]
        tokens = request.tokens.tolist()
        before = [[tokens[anchor], *draft.tokens[:-1]] for anchor, draft in own]
        with torch.no_grad():
            block = parts.draft.training_logits(
                taps_of(parts.target, tokens).transpose(0, 1)[None],
                torch.tensor([tokens]),
                torch.tensor([anchor for anchor, _ in own]),
                parts.target,
                len(own[0][1].tokens),
                previous=torch.tensor([before]),
            )
        for (_, draft), logits, confidence in zip(own, block.logits[0], block.confidence[0].sigmoid()):
            if draft.probs is None:
                assert logits.argmax(-1).tolist() == draft.tokens
            else:
                scores = logits / request.params.temperature
                assert (scores.softmax(-1) - draft.probs).abs().max() < 1e-9
            assert (confidence - draft.confidence).abs().max() < 1e-9


GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(parts):
    """Greedy answers without drafts, each alone."""
    return [serve(make_engine(parts.target, EngineConfig(**SIZES)), [one], GREEDY)[0] for one in prompts()]


TRAFFIC = {
    "chunks and mixed steps": {},
    "preemption": {"num_pages": 20},
    "prefix cache": {"prefix_cache": True, "block_size": 64, "prefix_match_unit": 16},
    "no state replay": {"state_replay": False},
    "one draft": {"num_drafts": 1},
}


SLOW = ("preemption", "no state replay", "one draft")


@pytest.mark.parametrize(
    "traffic", [pytest.param(t, marks=pytest.mark.slow) if t in SLOW else t for t in TRAFFIC]
)
def test_greedy_answers_are_those_without_drafts_and_drafts_those_made_alone(parts, plain, traffic):
    config = {"num_drafts": 5, **SIZES, **TRAFFIC[traffic]}
    target = parts.target if config.get("state_replay", True) else tapped(state_replay=False)
    engine = make_engine(target, EngineConfig(**config), draft=parts.draft)
    made = record_drafts(engine)
    thrown = PreemptAt([2, 4], 5) if traffic == "preemption" else lambda engine: None
    assert serve(engine, prompts(), GREEDY, thrown) == plain
    assert {request.id for request, _, _ in made} == set(map(str, range(len(LENGTHS))))
    assert traffic != "preemption" or engine.scheduler.preemptions
    if traffic == "prefix cache":
        assert serve(engine, prompts(), GREEDY) == plain
        assert any(request.cached_tokens for request, _, _ in made)
    assert engine.speculation.drafter.broken == 0
    assert_made_alone(made, parts)


@pytest.mark.parametrize("sampling", thinned(["probabilistic", "greedy"], 1))
def test_sampled_drafts_are_made_alone_too(parts, sampling):
    settings = EngineConfig(num_drafts=3, draft_sampling=sampling, **SIZES)
    engine = make_engine(parts.target, settings, draft=parts.draft)
    made = record_drafts(engine)
    params = SamplingParams(temperature=1.3, seed=4, max_tokens=TOKENS, ignore_eos=True)
    answers = serve(engine, prompts(), params)
    assert all(len(answer) == TOKENS for answer in answers)
    assert_made_alone(made, parts)


def test_context_rows_are_in_the_pages_before_a_step_is_committed(parts):
    engine = make_engine(parts.target, EngineConfig(num_drafts=2, **SIZES), draft=parts.draft)
    order, drafter = [], engine.speculation.drafter
    observe, commit = drafter.observe, engine.scheduler.commit
    drafter.observe = lambda *args: order.append("observe") or observe(*args)
    engine.scheduler.commit = lambda *args: order.append("commit") or commit(*args)
    serve(engine, [[5, 6, 7]], GREEDY)
    assert order == ["observe", "commit"] * (len(order) // 2)


@pytest.mark.slow
def test_context_rows_come_back_from_the_disk_with_their_pages(parts, plain, tmp_path):
    prefixes = {"prefix_cache": True, "block_size": 64, "prefix_match_unit": 16}
    config = EngineConfig(num_drafts=5, offload_dir=str(tmp_path), **prefixes, **SIZES)
    first = make_engine(parts.target, config, draft=parts.draft)
    assert serve(first, prompts(), GREEDY) == plain
    first.stop()
    second = make_engine(parts.target, config, draft=parts.draft)
    made = record_drafts(second)
    assert serve(second, prompts(), GREEDY) == plain
    assert any(request.cached_tokens for request, _, _ in made)
    assert second.speculation.drafter.broken == 0
    assert_made_alone(made, parts)
    second.stop()
