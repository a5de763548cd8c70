"""A request's counter, and where its output ends: the earlier of stop and limit (H07)."""

import pytest
from k3compile.runtime.request import Request, SamplingParams, cut

STOP, EOS = 7, 1


def end(tokens, *, done=(), limit=1000, **params):
    request = Request("a", [5, 5], SamplingParams(**params))
    request.tokens.extend(done)
    return cut(request, tokens, frozenset([EOS]), limit)


def test_prompt_and_output_are_read_from_one_row_of_tokens():
    request = Request("a", [3, 4, 5])
    request.tokens.extend([9, 8])
    request.seen = 4
    assert (request.prompt, request.output, request.output_tokens, request.unseen) == (
        [3, 4, 5],
        [9, 8],
        2,
        1,
    )


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        Request("a", [])


@pytest.mark.parametrize("salt", [None, 5, b"tenant"])
def test_a_salt_that_is_no_text_is_refused_before_it_reaches_the_engine_thread(salt):
    with pytest.raises(ValueError, match="cache_salt must be a string"):
        Request("a", [1], cache_salt=salt)


@pytest.mark.parametrize(
    ("tokens", "params", "kept", "finish"),
    [
        ([2, 3, STOP, 4, 5, 6], {"max_tokens": 5}, [2, 3, STOP], "stop"),
        ([2, 3, 4, 5, STOP, 6], {"max_tokens": 3}, [2, 3, 4], "length"),
        ([EOS, 3, 4], {"max_tokens": 5}, [EOS], "stop"),
        ([2, 3, 4, 5, 6, 7, 8], {"max_tokens": 1}, [2], "length"),
        ([2, 3, STOP], {"max_tokens": 3}, [2, 3, STOP], "stop"),
        ([2, 3], {"max_tokens": 5}, [2, 3], None),
        ([], {"max_tokens": 5}, [], None),
        ([2, EOS, 3], {"ignore_eos": True}, [2, EOS, 3], None),
        ([2, STOP, EOS], {"ignore_eos": True}, [2, STOP], "stop"),
        ([EOS, 2, STOP, 3], {"min_tokens": 2, "max_tokens": 9}, [EOS, 2, STOP], "stop"),
    ],
)
def test_the_earlier_of_stop_and_limit_wins(tokens, params, kept, finish):
    assert end(tokens, stop_token_ids=(STOP,), **params) == (kept, finish)


def test_one_token_at_a_time_ends_where_a_block_does():
    tokens = [2, 3, 4, STOP, 6, EOS]
    for params in ({"max_tokens": 2}, {"max_tokens": 4}, {"max_tokens": 9}, {"ignore_eos": True}):
        whole = end(tokens, stop_token_ids=(STOP,), **params)
        kept, finish = [], None
        while finish is None:
            piece, finish = end([tokens[len(kept)]], done=kept, stop_token_ids=(STOP,), **params)
            kept += piece
        assert (kept, finish) == whole


def test_the_context_limit_ends_with_length():
    assert end([2, 3, 4], limit=4) == ([2, 3], "length")
    assert end([2, STOP, 4], limit=4, stop_token_ids=(STOP,)) == ([2, STOP], "stop")
