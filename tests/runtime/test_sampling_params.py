"""SamplingParams: every bad value is refused with the name of its field (H20)."""

import math

import pytest
from k3compile.runtime.sampling_params import MAX_STOP_TOKENS, SamplingParams

BAD = [
    ("temperature", math.nan),
    ("temperature", -1.0),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0.0),
    ("logprobs", 1_000_000),
    ("logprobs", -1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKENS + 1))),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", {3: 101}),
    ("logit_bias", {-3: 1.0}),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} ") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 200


def test_the_ends_of_every_range_are_allowed():
    SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=1.0, seed=-(2**63), logprobs=0, max_tokens=1)
    SamplingParams(temperature=100, presence_penalty=-2, frequency_penalty=2, seed=2**64 - 1, logprobs=128)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ValueError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("params", [{"stop_token_ids": (100,)}, {"logit_bias": {100: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused(params):
    made = SamplingParams(**params)
    made.check_vocabulary(101)
    with pytest.raises(ValueError, match=r"\[100\], token ids are from 0 to 99"):
        made.check_vocabulary(100)


def test_forbidding_most_of_the_vocabulary_is_refused():
    params = SamplingParams(stop_token_ids=range(60), min_tokens=1)
    params.check_vocabulary(1000)
    with pytest.raises(ValueError, match="forbid most of the vocabulary"):
        params.check_vocabulary(100)


def test_what_was_passed_can_be_changed_without_changing_the_params():
    bias, stops = {1: 1.0}, [4]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[2], stops[0] = 5.0, 9
    assert dict(params.logit_bias) == {1: 1.0}
    assert params.stop_token_ids == (4,)
