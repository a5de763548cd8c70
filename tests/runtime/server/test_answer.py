"""One choice while it grows: the earlier of stop and limit wins, and every token is counted once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3compile.runtime.engine import Update
from k3compile.runtime.request import Request, SamplingParams, cut
from k3compile.runtime.sampler import TokenLogprobs
from k3compile.runtime.server.answer import Answer, ChatReader, TextReader
from k3compile.runtime.text_stream import TextStream
from serving import ANSWER, ids_of, tokenizer


def deliver(answer, tokens, block, *, max_tokens=None, stop_ids=(), eos=None):
    """Give ``tokens`` to an answer in blocks as an engine would; returns the text of each channel."""
    tok = tokenizer()
    request = Request("r", [1], SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids))
    text = {"reasoning": "", "content": ""}
    entries = 0
    for at in range(0, len(tokens), block):
        kept, finish = cut(
            request, tokens[at : at + block], frozenset([tok.stop_id if eos is None else eos]), 10**6
        )
        request.tokens.extend(kept)
        logprobs = [TokenLogprobs(token, -1.0, ()) for token in kept]
        update = Update("r", kept, logprobs, finish, None, 1, request.output_tokens, 0)
        piece = answer.take(update)
        entries += len(piece.logprobs)
        for delta in piece.deltas:
            text[delta.channel] += delta.text
        if answer.finish_reason:
            break
    assert entries == answer.num_tokens, "one entry a token that counts"
    return text


def text_answer(stop=()):
    return Answer(TextReader(TextStream(tokenizer(), stop)))


def chat_answer(thinking=True, stop=(), **options):
    return Answer(ChatReader(tokenizer(), thinking, stop, **options))


WORDS = [tokenizer().encode(word)[0] for word in ("a", "b", "c", "d", "e", "f", "g", "h")]
STOP = tokenizer().stop_id


@pytest.mark.parametrize("block", range(1, 9))
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "stop", "expected"),
    [
        (WORDS[:2] + [STOP] + WORDS[2:5], 5, (), ("ab", "stop", 3)),  # stop at 3, limit 5
        (WORDS[:4] + [STOP] + WORDS[4:5], 3, (), ("abc", "length", 3)),  # limit 3, stop at 5
        ([STOP] + WORDS[:5], 5, (), ("", "stop", 1)),  # the end at once
        (WORDS[:7], 1, (), ("a", "length", 1)),  # limit 1, seven accepted
        (WORDS[:6], 6, ("cd",), ("ab", "stop", 4)),  # a stop string over two accepted tokens
        (WORDS[:6], 6, ("f",), ("abcde", "stop", 6)),  # in the last allowed token
        (WORDS[:3] + [STOP], 6, ("cx",), ("abc", "stop", 4)),  # held text is shown when nothing comes of it
        (WORDS[:6], 5, ("ef",), ("abcde", "length", 5)),  # half a stop string at the limit is text
        (WORDS[:5] + [STOP], 6, (), ("abcde", "stop", 6)),  # the stop in the bonus place
    ],
)
def test_the_earlier_of_stop_and_limit_wins_for_every_block_size(block, tokens, max_tokens, stop, expected):
    answer = text_answer(stop)
    text = deliver(answer, tokens, block, max_tokens=max_tokens)["content"]
    assert (text, answer.finish_reason, answer.num_tokens) == expected
    answer = chat_answer(False, stop)
    text = deliver(answer, tokens, block, max_tokens=max_tokens)["content"]
    assert (text, answer.finish_reason, answer.num_tokens) == expected


def test_stop_reason_names_the_string_or_the_clients_own_token_and_nothing_else():
    answer = text_answer(["cd"])
    deliver(answer, WORDS, 3)
    assert answer.stop_reason == "cd"
    answer = Answer(TextReader(TextStream(tokenizer())), (WORDS[1],))
    assert deliver(answer, WORDS, 3, stop_ids=(WORDS[1],))["content"] == "a"
    assert (answer.finish_reason, answer.stop_reason, answer.num_tokens) == ("stop", WORDS[1], 2)
    answer = text_answer()
    deliver(answer, [*WORDS, STOP], 3)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


@pytest.mark.parametrize("name", tokenizer().control_ids)
def test_a_stop_token_is_counted_and_never_shown_whichever_control_token_it_is(name):
    stop = tokenizer().control_ids[name]
    for reader in (TextReader(TextStream(tokenizer())), ChatReader(tokenizer(), thinking=False)):
        answer = Answer(reader, (stop,))
        assert deliver(answer, [*WORDS[:2], stop], 2, stop_ids=(stop,)) == {"reasoning": "", "content": "ab"}
        assert (answer.finish_reason, answer.stop_reason, answer.num_tokens) == ("stop", stop, 3)


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_a_chat_answer_is_split_and_counted_the_same_for_every_block_size(block):
    tokens = ids_of(ANSWER)
    thoughts = len(ids_of(ANSWER[: ANSWER.index("<|open|>")]))
    answer = chat_answer()
    text = deliver(answer, tokens, block)
    assert text == {"reasoning": "Let me think.", "content": "Grüße!"}
    assert answer.finish_reason == "stop"
    assert answer.num_tokens == len(tokens)
    assert answer.reader.reasoning_tokens == thoughts


@pytest.mark.parametrize("limit", range(1, len(ids_of(ANSWER)) + 1))
def test_cut_while_thinking_is_reasoning_and_never_more_reasoning_than_tokens(limit):
    for block in (1, 8):
        answer = chat_answer()
        text = deliver(answer, ids_of(ANSWER), block, max_tokens=limit)
        assert answer.num_tokens == limit
        assert answer.reader.reasoning_tokens <= limit
        assert "Let me think.".startswith(text["reasoning"].rstrip("\ufffd"))
        assert not text["content"] or text["reasoning"] == "Let me think."


def test_stop_strings_are_looked_for_in_the_content_only():
    tokens = ids_of("think. ok<|close|>think<|sep|><|open|>response<|sep|>one think two")
    answer = chat_answer(stop=["think", "response"])
    text = deliver(answer, tokens, 1)
    assert text == {"reasoning": "think. ok", "content": "one "}
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "think")


def test_stop_strings_wait_for_min_tokens_and_may_be_kept():
    tokens = [WORDS[1]] * 5
    answer = chat_answer(False, ["b"], min_tokens=3)
    assert deliver(answer, tokens, 2)["content"] == "bbb"
    answer = chat_answer(False, ["bb"], include_stop=True)
    assert deliver(answer, tokens, 1)["content"] == "bb"


def test_a_finished_tool_call_changes_the_reason_and_a_cut_one_does_not():
    call = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    tokens = ids_of("<|close|>response<|sep|>" + call + "<|close|>message<|sep|><|end_of_msg|>")
    answer = chat_answer(False)
    pieces = answer.take(Update("r", tokens, None, "stop", None, 1, len(tokens), 0)).deltas
    assert [delta.call.name for delta in pieces if delta.call] == ["f"]
    assert answer.finish_reason == "tool_calls"
    answer = chat_answer(False)
    answer.take(Update("r", tokens, None, "length", None, 1, len(tokens), 0))
    assert answer.finish_reason == "length"


def test_an_error_ends_the_answer_and_is_kept():
    answer = chat_answer()
    answer.take(Update("r", [], None, "error", "boom", 1, 0, 0))
    assert (answer.finish_reason, answer.error) == ("error", "boom")


@given(st.lists(st.sampled_from([*WORDS, *ids_of(ANSWER)[-8:-1]]), max_size=20), st.data())
@settings(max_examples=100, deadline=None)
def test_any_blocks_give_the_answer_of_single_tokens(tokens, data):
    tokens = [*tokens, STOP]
    stops = data.draw(st.lists(st.sampled_from(["ab", "c", "de", "fgh"]), max_size=2))
    limit = data.draw(st.integers(1, 22))
    block = data.draw(st.integers(2, 22))
    results = []
    for size in (1, block):
        for answer in (chat_answer(True, stops), chat_answer(False, stops), text_answer(stops)):
            text = deliver(answer, tokens, size, max_tokens=limit)
            results.append((text, answer.finish_reason, answer.num_tokens, answer.reader.reasoning_tokens))
    assert results[:3] == results[3:]
