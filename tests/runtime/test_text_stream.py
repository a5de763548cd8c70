"""Streaming text: any cut into tokens gives the same text, the same stop and the same count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3compile.runtime.text_stream import StopStrings, TextStream
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.tokenizer_train import train_bpe


def tokenizer(folder, ranks):
    (folder / "tiktoken.model").write_bytes(train_bpe(None, ranks))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tiny"), 768)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """Every token is one byte."""
    return tokenizer(tmp_path_factory.mktemp("bytes"), 256)


def first_stop(text, stops):
    """Where the answer ends, found letter by letter: the stop that is complete first, then the longest."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end - max(map(len, here)), end
    return len(text), len(text)


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(pieces, stops):
    text = "".join(pieces)
    start, end = first_stop(text, stops)
    for include, expected in [(False, text[:start]), (True, text[:end])]:
        search = StopStrings(stops, include)
        shown = [search.push(piece) for piece in pieces]
        shown.append(search.finish())
        assert "".join(shown) == expected
        assert (search.matched is not None) == (any(stop in text for stop in stops))


def test_text_that_cannot_become_a_stop_is_shown_at_once():
    search = StopStrings(["END"])
    assert search.push("the E") == "the "
    assert search.push("N") == ""
    assert search.push("X") == "ENX"
    assert search.push("EN") == ""
    assert search.finish() == "EN"


def test_the_stop_that_is_complete_first_wins():
    assert StopStrings(["abc", "b"]).push("abc") == "a"
    search = StopStrings(["bc", "abc"])
    assert search.push("xabc") == "x"
    assert search.matched == "abc"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop holds an empty string"):
        StopStrings(["a", ""])


@given(st.text(max_size=30), st.data())
@settings(deadline=None)
def test_the_stream_joined_is_the_text_for_every_cut(tiny, bytewise, text, data):
    for tok in (tiny, bytewise):
        ids = tok.encode(text)
        cut = data.draw(st.integers(0, len(ids)))
        stream = TextStream(tok)
        assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == text
        assert stream.num_tokens == len(ids)


@given(st.lists(st.integers(0, 511), max_size=30))
@settings(deadline=None)
def test_random_bytes_and_controls_give_the_same_text_whole_or_one_by_one(bytewise, ids):
    whole, single = TextStream(bytewise, skip_control=False), TextStream(bytewise, skip_control=False)
    text = whole.push(ids) + whole.finish()
    assert text == "".join(single.push([index]) for index in ids) + single.finish()
    plain = [index for index in ids if index < 256]
    if plain == ids:
        assert text == bytes(ids).decode("utf-8", errors="replace")


def test_half_a_character_is_held_and_becomes_a_replacement_at_the_end(bytewise):
    stream = TextStream(bytewise)
    assert [stream.push([byte]) for byte in "€x".encode()] == ["", "", "€", "x"]
    assert stream.push("€".encode()[:2]) == ""
    assert stream.finish() == "\ufffd"


def test_a_stop_string_across_tokens_ends_the_answer_at_the_token_that_completes_it(bytewise):
    stream = TextStream(bytewise, ["lo w"])
    assert stream.push(b"hello world") == "hel"
    assert stream.matched == "lo w"
    assert stream.num_tokens == len("hello w")
    assert stream.push(b"more") == ""
    assert stream.finish() == ""
    assert stream.num_tokens == len("hello w")


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_block_of_tokens_counts_like_single_tokens(bytewise, cut):
    ids = list(b"abc stop xyz")
    stream = TextStream(bytewise, ["stop"])
    text = stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish()
    assert (text, stream.matched, stream.num_tokens) == ("abc ", "stop", 8)


def test_the_stop_string_can_be_kept(bytewise):
    stream = TextStream(bytewise, ["ll"], include_stop=True)
    assert stream.push(b"hello") == "hell"


def test_stop_strings_wait_for_min_tokens(bytewise):
    stream = TextStream(bytewise, ["b"], min_tokens=2)
    assert stream.push(b"abab") == "aba"
    assert stream.num_tokens == 4


def test_the_stop_token_is_counted_and_not_shown(bytewise):
    stream = TextStream(bytewise)
    assert stream.push(b"ab") + stream.finish(stop_token=bytewise.stop_id) == "ab"
    assert stream.num_tokens == 3


def test_control_tokens_are_left_out_except_the_three_of_the_markup(tiny):
    names = ["[BOS]", "<|open|>", "<|sep|>", "<|close|>", "[PAD]", "<|end_of_msg|>"]
    ids = [tiny.control_ids[name] for name in names]
    assert TextStream(tiny).push(ids) == "<|open|><|sep|><|close|>"
    assert TextStream(tiny, skip_control=False).push(ids) == "".join(names)
