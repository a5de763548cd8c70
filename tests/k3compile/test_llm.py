"""The offline front door: what it answers, in which shapes, and what it refuses."""

import logging

import pytest
import torch
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.sampling_params import SamplingParams
from k3compile.runtime.speculate.dspark import DSparkDrafter
from k3compile.runtime.speculate.dspark_checkpoint import make_draft

from k3compile import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny", seed=0)


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path, compile=False, dtype="float64", max_model_len=512, max_num_seqs=3)


def test_a_text_is_continued_by_the_models_best_tokens(llm):
    (answer,) = llm.generate("Once upon a time", GREEDY)
    tokens = llm.tokenizer.encode("Once upon a time")
    assert answer.prompt_token_ids == tokens
    for token in answer.token_ids:
        (again,) = llm.generate(tokens, SamplingParams(temperature=0.0, max_tokens=1))
        assert again.token_ids == [token]
        tokens.append(token)
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert (answer.finish_reason, answer.logprobs, answer.error) == ("length", None, None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(answer.prompt_token_ids), 12)


@pytest.mark.slow
def test_prompts_may_be_texts_or_ids_one_or_many(llm):
    ids = llm.tokenizer.encode("Hello")
    expected = llm.generate("Hello", GREEDY)[0].token_ids
    for prompts in (["Hello"], ids, [ids], ("Hello",)):
        assert [a.token_ids for a in llm.generate(prompts, GREEDY)] == [expected]
    both = llm.generate(["Hello", [5, 6, 7]], GREEDY)
    assert both[0].token_ids == expected
    assert both[1].prompt_token_ids == [5, 6, 7]


@pytest.mark.slow
def test_many_prompts_come_back_in_their_order_with_their_own_params(llm):
    prompts = [[i + 1] * (i + 1) for i in range(8)]
    params = [SamplingParams(temperature=0.0, max_tokens=i + 1) for i in range(8)]
    answers = llm.generate(prompts, params)
    assert [a.prompt_token_ids for a in answers] == prompts
    assert [len(a.token_ids) for a in answers] == list(range(1, 9))
    for prompt, own, answer in zip(prompts, params, answers):
        assert llm.generate(prompt, own)[0] == answer


def test_more_prompts_than_the_queue_holds_are_fed_as_it_empties(path):
    small = LLM(path, compile=False, max_model_len=64, max_num_seqs=2, max_waiting=2)
    answers = small.generate([[i + 1, 2] for i in range(9)], SamplingParams(temperature=0.0, max_tokens=3))
    assert [len(a.token_ids) for a in answers] == [3] * 9


def test_logprobs_match_the_tokens(llm):
    (answer,) = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
    assert [entry.token for entry in answer.logprobs] == answer.token_ids
    assert all(entry.top[0][0] == entry.token for entry in answer.logprobs)


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm):
    (free,) = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=40))
    stop = free.text[10:13]
    before = llm.engine.stats().finished
    (answer,) = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=40), stop=[stop])
    assert llm.engine.stats().finished == {**before, "stop": before.get("stop", 0) + 1}, "no hang-up"
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert answer.usage.completion_tokens == len(answer.token_ids) < 40
    (kept,) = llm.generate(
        "Once", SamplingParams(temperature=0.0, max_tokens=40), stop=[stop], include_stop=True
    )
    assert kept.text == answer.text + stop
    assert llm.engine.cache.available == llm.engine.cache.pages.size - 1


@pytest.mark.slow
def test_a_request_that_met_its_stop_string_does_not_run_on_beside_others(llm):
    params = SamplingParams(temperature=0.0, max_tokens=40)
    (free,) = llm.generate("Once", params)
    before = llm.engine.stats().output_tokens
    answers = llm.generate(["Once", "Hello"], params, stop=[free.text[10:13]])
    made = llm.engine.stats().output_tokens - before
    assert answers[0].finish_reason == "stop"
    assert made == sum(a.usage.completion_tokens for a in answers)


def test_a_stop_token_counts_but_is_not_shown(llm):
    (free,) = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=20))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(stop,))
    (answer,) = llm.generate("Once", params)
    assert answer.token_ids == free.token_ids[: first + 1]
    assert answer.text == llm.tokenizer.decode(free.token_ids[:first])
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", first + 1)


def test_a_chat_parts_thoughts_from_content(llm):
    (thought,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    (direct,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY, thinking=False)
    assert thought.reasoning
    assert thought.text == ""
    assert thought.usage.reasoning_tokens == 12
    assert direct.text
    assert direct.reasoning == ""
    talks = [[{"role": "user", "content": word}] for word in ("Hello", "Bye")]
    answers = llm.chat(talks, GREEDY, thinking=False)
    assert answers[0].text == direct.text != answers[1].text


def test_the_same_seed_gives_the_same_text_again(llm):
    params = SamplingParams(seed=3, max_tokens=12)
    first, second = llm.generate(["Once", "Once"], params)
    assert first.text == second.text == llm.generate("Once", params)[0].text
    assert llm.generate("Once", SamplingParams(seed=4, max_tokens=12))[0].text != first.text


def test_a_failed_step_is_an_error_in_the_answer_and_the_next_call_works(llm, monkeypatch):
    good = llm.engine._forward

    def broken(step):
        raise RuntimeError("out of luck")

    llm.engine.use(broken)
    (answer,) = llm.generate("Once", GREEDY)
    assert (answer.finish_reason, answer.error) == ("error", "RuntimeError: out of luck")
    llm.engine.use(good)
    assert llm.generate("Once", GREEDY)[0].finish_reason == "length"


def test_an_interruption_leaves_an_empty_engine(llm):
    good = llm.engine._forward
    calls = []

    def interrupted(step):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return good(step)

    llm.engine.use(interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4], [5, 6], [7, 8]], GREEDY)
    llm.engine.use(good)
    assert llm.engine.scheduler.idle
    cache = llm.engine.cache
    assert cache.slots.used == 0
    assert cache.available == cache.pages.size - 1, "what is kept can go when somebody needs it"
    assert len(llm.generate("Once", GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt is empty"),
        ([[5], []], GREEDY, "prompt is empty"),
        ([5000], GREEDY, "prompt holds a token id outside 0 to 1023"),
        ([5] * 600, GREEDY, "prompt has 600 tokens"),
        ([5], [GREEDY, GREEDY], "2 params for 1 prompts"),
        ([5], SamplingParams(stop_token_ids=(5000,)), "stop_token_ids holds"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(llm, prompts, params, message):
    steps = llm.engine.stats().steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert llm.engine.stats().steps == steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 3}, "unknown engine setting 'max_num_seq'.*max_num_seqs"),
        ({"dtype": "float8"}, "dtype is 'float8'; allowed: float32"),
        ({"options": {"iner": "eager"}}, "unknown k3 compile option 'iner'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"state_replay": False}, "state_replay: name it in the features of options"),
        ({"options": {"features": "speculate"}}, "features names speculate, but num_drafts is 0"),
        ({"draft": "nowhere", "num_drafts": 2}, r"draft is nowhere, which has no config\.json"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(path, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(path, compile=False, **settings)


def test_features_and_capabilities_become_the_engines_settings(path):
    made = LLM(path, compile=False, options={"features": "state_replay"}, max_model_len=64).engine.config
    assert (made.prefix_cache, made.state_replay, made.adaptive_budget) == (True, True, False)
    made = LLM(path, compile=False, prefix_cache=False, max_model_len=64).engine.config
    assert (made.prefix_cache, made.state_replay, made.adaptive_budget) == (False, True, True)


@pytest.mark.parametrize("folder", [pytest.param(None, marks=pytest.mark.slow), "draft"])
def test_drafts_of_either_kind_change_no_greedy_answer(llm, path, folder):
    make_draft(path)
    more = {"draft": path / folder} if folder else {}
    drafting = LLM(
        path, compile=False, dtype="float64", max_model_len=512, max_num_seqs=3, num_drafts=3, **more
    )
    drafter = drafting.engine.speculation.drafter
    assert isinstance(drafter, DSparkDrafter), "the checkpoint brings its draft, whether it is named or not"
    prompts = ["Once upon a time", "one two one two one"]
    assert [a.token_ids for a in drafting.generate(prompts, GREEDY)] == [
        a.token_ids for a in llm.generate(prompts, GREEDY)
    ]
    assert drafting.engine.speculation.error is None
    assert drafting.engine.stats().drafts_proposed


def test_the_salt_of_a_call_reaches_its_requests(llm, monkeypatch):
    salts = []
    submit = llm.engine.submit
    monkeypatch.setattr(llm.engine, "submit", lambda r, f: salts.append(r.cache_salt) or submit(r, f))
    llm.generate(["Hello", "Bye"], GREEDY, cache_salt="tenant 7")
    llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
    assert salts == ["tenant 7", "tenant 7", ""]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint"):
        LLM(tmp_path)


def test_pool_sizes_are_logged(path, caplog):
    with caplog.at_level(logging.INFO):
        LLM(path, compile=False, num_pages=9, page_size=16)
    assert "pools: 9 pages x 16 tokens" in caplog.text


def test_no_prompt_is_no_work(llm):
    assert llm.generate([]) == []


@pytest.mark.slow
def test_compiled_it_answers_the_same(path, llm):
    compiled = LLM(path, options={"inner": "aot_eager"}, dtype="float64", max_model_len=512, max_num_seqs=3)
    prompts = ["Once upon a time", "Hello"]
    assert compiled.generate(prompts, GREEDY) == llm.generate(prompts, GREEDY)
    assert compiled.engine._forward.graphs() == 4


def test_activations_have_the_asked_dtype(path):
    small = LLM(path, compile=False, dtype="bfloat16", max_model_len=64)
    assert small.engine.pools[-1].pages.dtype == torch.bfloat16
    assert len(small.generate("Hello", GREEDY)[0].token_ids) == 12
