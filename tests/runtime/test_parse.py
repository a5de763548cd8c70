"""The output grammar: golden answers cut and fed in every way, and the ways models leave the grammar."""

import codecs
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3compile.runtime.chat import render
from k3compile.runtime.parse import OutputParser
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.tokenizer_train import train_bpe

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
CALL_OSLO = (
    'O[call tool="get_weather" index="1"]S[]O[argument key="city" type="string"]Oslo <3C[argument]'
    'O[argument key="days" type="number"]2C[argument]C[call]'
)


def spell(short):
    """O[x] and C[x] are markers, S[] and E[] are nothing and the end of the message."""
    text = short.replace("S[]", "").replace("E[]", "<|end_of_msg|>")
    for letter, name in (("O", "open"), ("C", "close")):
        while (start := text.find(letter + "[")) >= 0:
            end = text.index("]", start)
            text = f"{text[:start]}<|{name}|>{text[start + 2 : end]}<|sep|>{text[end + 1 :]}"
    return text


OSLO = ("get_weather", {"city": "Oslo <3", "days": 2})
GOLDEN = {  # name: (thinking, output, reasoning, content, calls)
    "the whole grammar": (
        True, f"Hmm é.C[think]O[response]It is é.C[response]O[tools]{CALL_OSLO}C[tools]C[message]E[]",
        "Hmm é.", "It is é.", [OSLO],
    ),
    "no thinking": (False, "Hello 漢字.C[response]C[message]E[]", "", "Hello 漢字.", []),
    "thinking, then tools at once": (
        True, f"Need it.O[tools]{CALL_OSLO}C[tools]C[message]E[]", "Need it.", "", [OSLO],
    ),
    "thinking closed, then tools": (
        True, f"Need it.C[think]O[tools]{CALL_OSLO}C[tools]C[message]E[]", "Need it.", "", [OSLO],
    ),
    "response opened without closing the thinking": (
        True, "Hmm.O[response]Yes.C[response]C[message]E[]", "Hmm.", "Yes.", [],
    ),
    "response opened at once": (True, "O[response]Yes.C[response]C[message]E[]", "", "Yes.", []),
    "no response marker after the thinking": (True, "Hmm.C[think]Yes.C[message]E[]", "Hmm.", "Yes.", []),
    "ended by the message close only": (True, "Hmm.C[think]O[response]Yes.C[message]E[]", "Hmm.", "Yes.", []),
    "ended by the end of message only": (False, "Yes.E[]", "", "Yes.", []),
    "no marker at all": (True, "Just thoughts", "Just thoughts", "", []),
    "no marker at all, no thinking": (False, "Just words", "", "Just words", []),
    "a close of a part never opened": (
        False, "Yes.C[think] No.C[tools]C[call]C[response]E[]", "", "Yes. No.", [],
    ),
    "response closed while thinking": (True, "Hmm.C[response]More.C[message]E[]", "Hmm.", "More.", []),
    "two tool sections": (
        False, f"C[response]O[tools]{CALL_OSLO}C[tools]O[tools]{CALL_OSLO}C[tools]C[message]E[]",
        "", "", [OSLO, OSLO],
    ),
    "text after the tools": (
        False, f"One.C[response]O[tools]{CALL_OSLO}C[tools]Two.C[message]E[]", "", "One.Two.", [OSLO],
    ),
    "text after the message": (False, "One.C[response]C[message]lost E[]lost too", "", "One.", []),
    "blanks between the elements": (
        False, f"C[response]\nO[tools]\n {CALL_OSLO}\n\nC[tools]C[message]E[]", "", "\n", [OSLO],
    ),
    "the json form": (
        False, 'O[tools]O[call tool="f" index="1"]O[json type="object"]{"a": [1]}C[json]C[call]C[tools]E[]',
        "", "", [("f", {"a": [1]})],
    ),
    "json behind an argument is ignored": (
        False, 'O[tools]O[call tool="f"]O[argument key="a" type="null"]nullC[argument]O[json type="object"]{}'
        "C[json]C[call]C[tools]E[]", "", "", [("f", {"a": None})],
    ),
    "markers inside an argument": (
        False, 'O[tools]O[call tool="f"]O[argument key="a" type="string"]x O[think]yC[think] <|sep|> '
        'O[call tool="g"]<|open|>word C[argument]C[call]C[tools]E[]',
        "", "", [("f", {"a": spell('x O[think]yC[think] <|sep|> O[call tool="g"]<|open|>word ')})],
    ),
    "an argument closed by its call": (
        False, 'O[tools]O[call tool="f"]O[argument key="a" type="string"]xC[call]C[tools]E[]',
        "", "", [("f", {"a": "x"})],
    ),
    "a call closed by the message": (
        False, 'O[tools]O[call tool="f"]O[argument key="a" type="string"]xC[message]E[]',
        "", "", [("f", {"a": "x"})],
    ),
    "a call without a name": (
        False, f'O[tools]O[call index="1"]C[call]{CALL_OSLO}C[tools]E[]', "", "", [OSLO],
    ),
    "escaped attributes": (
        False, 'O[tools]O[call tool="f"]O[argument key="&quot;&amp;quot;" type="string"]&amp;'
        "C[argument]C[call]E[]",
        "", "", [("f", {'"&quot;': "&amp;"})],
    ),
    "a value that is not of its type": (
        False, 'O[tools]O[call tool="f"]O[argument key="a" type="number"]two C[argument]C[call]E[]',
        "", "", [("f", {"a": "two "})],
    ),
    "an unknown marker": (False, "A <|open|>list S <|sep|>B <|close|>x<|sep|>C", "", "A list S B xC", []),
    "a stray separator": (False, "A<|sep|>B", "", "AB", []),
    "a marker inside a marker": (True, "A<|close|>think<|open|>response<|sep|>B", "A", "B", []),
    "the thinking opened again": (True, "O[think]A.C[think]O[think]B.C[think]Yes", "A.B.", "Yes", []),
}  # fmt: skip


def tokenizer(folder, ranks):
    (folder / "tiktoken.model").write_bytes(train_bpe(None, ranks))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tiny"), 768)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """Every token is one byte, so feeding ids one by one feeds bytes."""
    return tokenizer(tmp_path_factory.mktemp("bytes"), 256)


def ids_of(tok, text):
    return tok._encoding.encode(text, allowed_special="all")


def run(thinking, pieces, tok=None):
    parser = OutputParser(thinking, tok)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    text = {"reasoning": "", "content": "", "tool_call": ""}
    for delta in deltas:
        text[delta.channel] += delta.text
    calls = [(d.call.name, json.loads(d.call.arguments)) for d in deltas if d.call]
    assert [d.call.index for d in deltas if d.call] == list(range(len(calls)))
    return text["reasoning"], text["content"], calls


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_answers_are_split_the_same_whole_per_token_and_per_byte(tiny, bytewise, name):
    thinking, short, *expected = GOLDEN[name]
    text = spell(short)
    decode = codecs.getincrementaldecoder("utf-8")().decode
    feeds = {
        "text, whole": ([text], None),
        "text, per character": (list(text), None),
        "text, per byte": ([decode(bytes([byte])) for byte in text.encode()], None),
        "ids, whole": ([ids_of(tiny, text)], tiny),
        "ids, per token": ([[index] for index in ids_of(tiny, text)], tiny),
        "ids, per byte": ([[index] for index in ids_of(bytewise, text)], bytewise),
    }
    for feed, (pieces, tok) in feeds.items():
        assert list(run(thinking, pieces, tok)) == expected, feed


@pytest.mark.parametrize("name", GOLDEN)
def test_an_answer_cut_after_any_token_is_split_the_same_whole_and_streamed(tiny, name):
    thinking, short, reasoning, content, calls = GOLDEN[name]
    ids = ids_of(tiny, spell(short))
    for cut in range(len(ids) + 1):
        whole = run(thinking, [ids[:cut]], tiny)
        assert whole == run(thinking, [[index] for index in ids[:cut]], tiny)
        assert reasoning.startswith(whole[0].rstrip("\ufffd"))
        assert content.startswith(whole[1].rstrip("\ufffd"))
        assert calls[: len(whole[2])] == whole[2]


def test_an_answer_cut_while_thinking_is_reasoning_only(tiny):
    ids = ids_of(tiny, spell("Let me think.C[think]O[response]Yes"))
    end_of_thinking = ids.index(tiny.control_ids["<|sep|>"]) + 1
    for cut in range(1, end_of_thinking + 1):
        reasoning, content, _ = run(True, [ids[:cut]], tiny)
        assert reasoning
        assert content == ""


def test_no_marker_is_shown_in_any_prefix():
    for thinking, short, *_ in GOLDEN.values():
        text = spell(short)
        if "key" in short:
            continue
        for cut in range(len(text)):
            shown = "".join(run(thinking, [text[:cut]])[:2])
            assert "<|sep|>" not in shown
            assert "think" not in shown


MARKUP = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "think",
    "response",
    "tools",
    "call",
    "message",
]
PIECES = [
    *MARKUP,
    'call tool="f"',
    'argument key="k" type="number"',
    "argument",
    "json",
    " ",
    "1",
    "<",
    "<|",
    "é",
]


@given(st.booleans(), st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25), st.data())
@settings(max_examples=10_000 if FULL else 300, deadline=None)
def test_any_output_is_split_the_same_however_it_is_fed(tiny, bytewise, thinking, pieces, data):
    text = "".join(pieces)
    cut = data.draw(st.integers(0, len(text)))
    expected = run(thinking, [text])
    assert run(thinking, [text[:cut], text[cut:]]) == expected
    assert run(thinking, list(text)) == expected
    ids = ids_of(tiny, text)
    assert run(thinking, [ids], tiny) == run(thinking, [[i] for i in ids], tiny)
    assert run(thinking, [[i] for i in ids_of(bytewise, text)], bytewise) == run(thinking, [ids], tiny)


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25))
@settings(max_examples=10_000 if FULL else 200, deadline=None)
def test_text_and_ids_agree_when_no_plain_token_spells_a_control_token(tiny, pieces):
    text = "".join(pieces) + "."  # a text that ends in half a spelling is for the text reader alone to judge
    assert run(True, [text]) == run(True, [ids_of(tiny, text)], tiny)


def test_a_body_that_only_spells_a_marker_is_safe_when_ids_are_read(tiny):
    spelled = "<|close|>argument<|sep|>"
    head = ids_of(tiny, spell('O[tools]O[call tool="f"]O[argument key="a" type="string"]'))
    tail = ids_of(tiny, spell("C[argument]C[call]C[tools]"))
    assert run(False, [head + tiny.encode(spelled) + tail], tiny) == ("", "", [("f", {"a": spelled})])


def test_rendered_history_is_parsed_back(tiny):
    arguments = {
        "city": "<|close|>",
        "list": [1, {"a": None}],
        "none": None,
        "yes": True,
        'k"&': 1.5,
        "s": "",
    }
    message = {
        "role": "assistant",
        "content": "Let us <|sep|> see",
        "reasoning_content": "I need <|close|>think<|sep|> it",
        "tool_calls": [{"function": {"name": 'f"&quot;', "arguments": arguments}}],
    }
    ids = tiny.encode_segments(render([message], effort=None, add_generation_prompt=False))
    prompt = tiny.encode_segments(render([], effort=None))
    assert ids[: len(prompt)] == prompt
    for pieces in ([ids[len(prompt) :]], [[index] for index in ids[len(prompt) :]]):
        assert run(True, pieces, tiny) == (
            message["reasoning_content"],
            message["content"],
            [('f"&quot;', arguments)],
        )


def test_deltas_come_as_soon_as_they_are_certain():
    parser = OutputParser(thinking=True)
    assert [(d.channel, d.text) for d in parser.push("Hm <|")] == [("reasoning", "Hm ")]
    assert [(d.channel, d.text) for d in parser.push("x")] == [("reasoning", "<|x")]
    assert parser.push("<|close|>thi") == []
    assert parser.push("nk<|sep|>") == []
    assert [(d.channel, d.text) for d in parser.push("Yes")] == [("content", "Yes")]


def test_an_endless_header_is_given_up_and_shown():
    parser = OutputParser(thinking=False)
    shown = "".join(d.text for _ in range(6000) for d in parser.push("x"))
    assert shown == "x" * 6000
    parser.push('<|open|>call tool="')
    shown = "".join(d.text for _ in range(6000) for d in parser.push("x"))
    assert shown == 'call tool="' + "x" * 6000


def test_reasoning_tokens_end_with_the_marker_that_ends_the_thinking(tiny):
    parser = OutputParser(True, tiny)
    thoughts = ids_of(tiny, spell("One two.C[think]"))
    parser.push([*thoughts, *ids_of(tiny, spell("O[response]Yes.C[response]"))])
    assert parser.reasoning_tokens == len(thoughts)
    parser = OutputParser(False, tiny)
    parser.push(ids_of(tiny, "Yes."))
    assert parser.reasoning_tokens == 0


def test_other_control_tokens_are_spelled_out_and_end_a_half_character(bytewise):
    ids = [0xC3, bytewise.control_ids["[PAD]"], 0x41]
    assert run(False, [ids], bytewise)[1] == "\ufffd[PAD]A"
