"""The tokenizer against the written pattern, an independent regex engine and an independent BPE."""

import os
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from k3compile.runtime import tokenizer as module
from k3compile.runtime.tokenizer import CONTROL_OFFSETS, PRE_SPLIT, Tokenizer, read_ranks, split_chunks
from k3compile.runtime.tokenizer_train import train_bpe

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
# Built letter by letter as look-aheads, so that it shares neither engine nor spelling with PRE_SPLIT.
HAN = r"\p{Script=Han}"
UPPER = rf"(?:(?!{HAN})(?:\p{{Lu}}|\p{{Lt}}|\p{{Lm}}|\p{{Lo}}|\p{{M}}))"
LOWER = rf"(?:(?!{HAN})(?:\p{{Ll}}|\p{{Lm}}|\p{{Lo}}|\p{{M}}))"
LEAD = r"(?:(?![\r\n])\P{L}(?<!\p{N}))?"
TAIL = r"(?:'(?:[sSſ]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"
SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
INDEPENDENT = regex.compile(
    rf"{HAN}+|{LEAD}{UPPER}*{LOWER}+{TAIL}|{LEAD}{UPPER}+{LOWER}*{TAIL}|\p{{N}}{{1,3}}"
    rf"| ?(?:(?!{SPACE})[^\p{{L}}\p{{N}}])+[\r\n]*|{SPACE}*[\r\n]+|{SPACE}+(?={SPACE}|\Z)|{SPACE}+",
    regex.V0,
)

WORDS = ["'s", "'T", "'re", "'VE", "'m", "'ll", "'d", "'x", "don't", "HTTPServer", "漢字", "かな", "한국"]
MARKS = ["\n", "\r\n", "  ", "\t", "\u3000", "1", "12345", "Ⅷ", "!?", "ǅ", "ʰ", "\u0300", "e\u0301"]
ASSIGNED = st.characters(exclude_categories=("Cs", "Cn"))  # engines differ in how new their Unicode is
TEXT = st.lists(
    st.one_of(st.sampled_from(WORDS), st.sampled_from(MARKS), st.text(ASSIGNED, max_size=6)),
    max_size=12,
).map("".join)


def write_ranks(folder, data):
    (folder / "tiktoken.model").write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tokenizer(write_ranks(tmp_path_factory.mktemp("tiny"), train_bpe(None, 768)))


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory):
    """No merges: every pre-split piece stays apart, so its borders are what we see through merges of 2."""
    return Tokenizer(write_ranks(tmp_path_factory.mktemp("bytes"), train_bpe(None, 256)))


def pieces(text):
    """Where tiktoken's own engine cuts ``text``, seen by giving every possible substring a rank."""
    import tiktoken

    data = text.encode()
    ranks = {bytes([byte]): byte for byte in range(256)}
    for size in range(2, len(data) + 1):
        for start in range(len(data) - size + 1):
            ranks.setdefault(data[start : start + size], len(ranks))
    whole = tiktoken.Encoding(name="all", pat_str=PRE_SPLIT, mergeable_ranks=ranks, special_tokens={})
    return [whole.decode([index]) for index in whole.encode_ordinary(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("漢字かな", ["漢字", "かな"]),  # 1: Han stands alone, kana are letters
        ("helloWorld", ["hello", "World"]),  # 2: an upper run then a lower run
        ("HELLOworld x", ["HELLOworld", " x"]),
        (".hello", [".hello"]),  # 2: one leading char that is no letter, number or line end
        ("\nhello", ["\n", "hello"]),
        ("we'Ll they'D it'x", ["we'Ll", " they'D", " it", "'x"]),
        ("e\u0301t\u0301", ["e\u0301t\u0301"]),  # marks belong to both classes
        ("HTTP", ["HTTP"]),  # 3: no lower letter needed
        ("HTTP'S", ["HTTP'S"]),
        ("1234567", ["123", "456", "7"]),  # 4
        ("12Ⅷ4", ["12Ⅷ", "4"]),
        (" ?!\r\n\nx", [" ?!\r\n\n", "x"]),  # 5
        ("  ?!", [" ", " ?!"]),
        ("a \t\n\n b", ["a", " \t\n\n", " b"]),  # 6
        ("a   b", ["a", "  ", " b"]),  # 7: leave the last space to the word
        ("a   ", ["a", "   "]),
        ("a 1", ["a", " ", "1"]),  # 8
    ],
)
def test_each_alternative_of_the_pattern_cuts_where_it_is_written(text, expected):
    assert pieces(text) == expected


@pytest.mark.oracle
@given(TEXT)
@settings(max_examples=5000 if FULL else 150, deadline=None)
def test_tiktokens_engine_cuts_like_an_independent_pattern_in_another_engine(text):
    assert pieces(text) == INDEPENDENT.findall(text)


@pytest.mark.oracle
@given(TEXT)
@settings(max_examples=5000 if FULL else 150, deadline=None)
def test_ids_equal_tiktokens_educational_bpe(tiny, text):
    from tiktoken._educational import bpe_encode

    expected = []
    for word in INDEPENDENT.findall(text):
        expected += bpe_encode(tiny._encoding._mergeable_ranks, word.encode(), visualise=None)
    assert tiny.encode(text) == expected


@given(TEXT)
@settings(max_examples=5000 if FULL else 150, deadline=None)
def test_decoding_an_encoding_returns_the_text_and_no_control_id(tiny, text):
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert not any(tiny.is_control(index) for index in ids)


def test_control_spellings_in_text_are_plain_bytes(tiny):
    text = "".join(tiny.control_ids)
    ids = tiny.encode(text)
    assert max(ids) < tiny.num_ranks
    assert tiny.decode(ids) == text


def test_control_ids_stand_at_the_released_offsets(tiny):
    assert tiny.vocab_size == 1024
    assert len(tiny.control_ids) == 256
    assert sorted(tiny.control_ids.values()) == list(range(768, 1024))
    assert tiny.stop_id == tiny.control_ids["<|end_of_msg|>"] == 768 + 2
    released = module.control_ids(163_584)
    expected = {
        "[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588,
        "<|sep|>": 163589, "[start_header_id]": 163590, "[end_header_id]": 163591, "[EOT]": 163593,
        "<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604,
        "<|media_pad|>": 163605, "<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839,
        "<|reserved_token_163592|>": 163592,
    }  # fmt: skip
    assert {name: released[name] for name in expected} == expected
    assert set(CONTROL_OFFSETS) == set(expected) - {"<|reserved_token_163592|>"}


def test_decoding_keeps_control_tokens(tiny):
    ids = tiny.encode_segments([("<|open|>", True), ("think", False), ("<|sep|>", True)])
    assert tiny.decode(ids) == "<|open|>think<|sep|>"
    assert ids[0] == 768 + 3
    assert ids[-1] == 768 + 5


def test_segments_are_encoded_apart(tiny):
    apart = tiny.encode_segments([("mess", False), ("age", False)])
    assert apart == tiny.encode("mess") + tiny.encode("age")
    assert apart != tiny.encode("message")
    assert tiny.encode_segments([("<|open|>", False)]) == tiny.encode("<|open|>")


def test_markup_that_is_no_control_token_is_refused(tiny):
    with pytest.raises(ValueError, match="'<\\|nope\\|>' is not a control token"):
        tiny.encode_segments([("<|nope|>", True)])


def test_a_wrong_id_is_refused_when_decoding(tiny):
    with pytest.raises(ValueError, match=r"1024 is outside 0\.\.1023"):
        tiny.decode([1, 1024])
    with pytest.raises(ValueError, match="-1 is outside"):
        tiny.decode([-1])


def test_a_cut_character_decodes_to_the_replacement_character(bytes_only):
    ids = bytes_only.encode("é")
    assert len(ids) == 2
    assert bytes_only.decode(ids[:1]) == "\ufffd"
    assert bytes_only.decode_bytes(ids[:1]) == "é".encode()[:1]


def test_long_texts_are_cut_into_chunks_and_long_runs():
    assert list(split_chunks("")) == []
    assert [len(chunk) for chunk in split_chunks("ab " * 300_000)] == [400_000, 400_000, 100_000]
    assert [len(chunk) for chunk in split_chunks("x" * 60_000)] == [25_000, 25_000, 10_000]
    assert [len(chunk) for chunk in split_chunks("x" * 25_000 + " ")] == [25_001]
    assert [len(chunk) for chunk in split_chunks("a b" + " " * 25_001 + "c")] == [25_003, 2]


@given(st.lists(st.tuples(st.sampled_from(" \nx漢"), st.integers(0, 9)), max_size=12))
def test_chunks_follow_a_character_by_character_rule(runs):
    text = "".join(char * count for char, count in runs)
    expected, start, length, space = [], 0, 0, None
    for at, char in enumerate(text):
        length = length + 1 if char.isspace() == space else 1
        space = char.isspace()
        if length > 3:
            expected.append(text[start:at])
            start, length = at, 1
    expected += [text[start:]] if text else []
    saved = module.MAX_RUN_CHARS, module._LONG_RUN
    try:
        module.MAX_RUN_CHARS, module._LONG_RUN = 3, module.runs_above(3)
        assert list(split_chunks(text)) == expected
    finally:
        module.MAX_RUN_CHARS, module._LONG_RUN = saved


def test_runs_just_below_the_longest_are_looked_at_once():
    text = ("x" * 24_999 + " ") * 8
    started = time.perf_counter()
    assert list(split_chunks(text)) == [text]
    assert time.perf_counter() - started < 1.0, "the server stands still meanwhile"


def test_hostile_runs_take_no_time(tiny):
    for text in ["X" * 30_000, "漢" * 30_000, " " * 30_000, " \n" * 20_000, "'" * 30_000, "\u0301" * 30_000]:
        assert tiny.decode(tiny.encode(text)) == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [b"%%% 0"] + lines[1:], "line 1: expected a base64 token and a rank"),
        (lambda lines: [lines[0] + b" 7"] + lines[1:], "line 1: expected"),
        (lambda lines: lines[:300] + lines[301:], "line 301: rank 301 is repeated or out of order"),
        (lambda lines: lines[:300] + [lines[2].split()[0] + b" 300"], "line 301: rank 300 is repeated"),
        (lambda lines: lines[:200], "56 single bytes have no rank, first 0xc8"),
    ],
)
def test_a_damaged_rank_file_is_refused_by_line(damage, message):
    lines = train_bpe(None, 400).splitlines()
    with pytest.raises(ValueError, match=message):
        read_ranks(b"\n".join(damage(lines)), name="ranks")


def test_a_missing_rank_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds a file 'tiktoken"):
        Tokenizer(tmp_path)
