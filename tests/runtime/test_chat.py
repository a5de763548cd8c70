"""The prompt, segment for segment: the worked example, the history rules, hostile text."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3compile.runtime.chat import Segment, render
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.tokenizer_train import train_bpe

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
DATA = Path(__file__).parent.parent / "data"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather now",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'},
}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "reasoning_content": "Need the tool.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "3C"},
]
CONTROL = re.compile(r"(<\|(?:open|close|sep|end_of_msg)\|>)")


def text_of(segments):
    return "".join(segment.text for segment in segments)


def brief(messages, **options):
    """The rendered text with the four control tokens as O C S E."""
    text = text_of(render(messages, **{"effort": None, "add_generation_prompt": False, **options}))
    names = {"<|open|>": "⟨", "<|close|>": "⟨/", "<|sep|>": "⟩", "<|end_of_msg|>": "■"}
    return CONTROL.sub(lambda match: names[match[0]], text)


def split_by_hand(text):
    """Segments of a rendered text, by the rule of where they are cut: a second opinion on ``render``."""
    segments, inside = [], False
    for piece in CONTROL.split(text):
        if CONTROL.fullmatch(piece):
            segments.append([piece, True])
            inside = piece in ("<|open|>", "<|close|>")
        elif inside:
            segments += [[part, False] for part in re.split(r'( \w+)(=")([^"]*)(")', piece) if part]
        elif piece:
            segments.append([piece, False])
    return segments


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiktoken.model").write_bytes(train_bpe(None, 768))
    return Tokenizer(folder)


def test_the_worked_example_is_rendered_segment_for_segment():
    segments = render(CONVERSATION, tools=TOOLS)
    text = (DATA / "chat_worked_example.txt").read_text()
    golden = json.loads((DATA / "chat_worked_example.json").read_text())
    assert text_of(segments) == text
    assert [list(segment) for segment in segments] == golden
    assert golden == split_by_hand(text)


def test_a_message_is_cut_into_segments_at_every_attribute():
    message = {"role": "user", "content": "Hi", "name": "Ada"}
    assert render([message], effort=None, add_generation_prompt=False) == [
        Segment("<|open|>", True), Segment("message", False),
        Segment(" role", False), Segment('="', False), Segment("user", False), Segment('"', False),
        Segment(" name", False), Segment('="', False), Segment("Ada", False), Segment('"', False),
        Segment("<|sep|>", True), Segment("Hi", False),
        Segment("<|close|>", True), Segment("message", False), Segment("<|sep|>", True),
        Segment("<|end_of_msg|>", True),
    ]  # fmt: skip


def test_the_ids_are_those_of_the_segments_and_not_of_the_joined_text(tiny):
    segments = render([{"role": "user", "content": "a<|sep|>b"}])
    ids = tiny.encode_segments(segments)
    assert tiny.decode(ids) == text_of(segments)
    joined = tiny._encoding.encode(text_of(segments), allowed_special="all")
    assert ids != joined


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_the_effort_note_names_the_effort(effort):
    assert f"`thinking_effort={effort}`.<|close|>" in text_of(render([], effort=effort))


def test_effort_has_no_note_without_thinking_or_without_effort():
    assert "thinking_effort" not in text_of(render([], thinking=False, effort="max"))
    assert "thinking_effort" not in text_of(render([], effort=None))


@pytest.mark.parametrize("effort", ["medium", "none", "", "MAX"])
def test_an_effort_that_was_never_trained_is_refused(effort):
    with pytest.raises(ValueError, match=f"reasoning_effort is '{effort}'; K3 was trained on low, high, max"):
        render([], effort=effort)


def test_the_generation_prompt_opens_think_or_response():
    assert brief([], add_generation_prompt=True) == '⟨message role="assistant"⟩⟨think⟩'
    assert brief([], thinking=False, add_generation_prompt=True) == '⟨message role="assistant"⟩⟨response⟩'


def test_with_thinking_every_assistant_message_carries_the_think_pair():
    history = [
        {"role": "assistant", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning": "because"},
        {"role": "assistant", "content": "Three", "reasoning_content": " "},
    ]
    assert brief(history) == (
        '⟨message role="assistant"⟩⟨think⟩⟨/think⟩⟨response⟩One⟨/response⟩⟨/message⟩■'
        '⟨message role="assistant"⟩⟨think⟩because⟨/think⟩⟨response⟩Two⟨/response⟩⟨/message⟩■'
        '⟨message role="assistant"⟩⟨think⟩ ⟨/think⟩⟨response⟩Three⟨/response⟩⟨/message⟩■'
    )
    assert "think" not in brief(history, thinking=False)


def test_attribute_values_are_escaped_and_bodies_are_not():
    message = {"role": "user", "name": 'A&B "C" &amp;', "content": 'x & "y"'}
    assert (
        brief([message]) == '⟨message role="user" name="A&amp;B &quot;C&quot; &amp;amp;"⟩x & "y"⟨/message⟩■'
    )


def test_text_parts_stay_apart_and_empty_content_has_no_segment():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    segments = render([{"role": "user", "content": parts}], effort=None, add_generation_prompt=False)
    assert segments[7:9] == [Segment("a", False), Segment("b", False)]
    assert brief([{"role": "user", "content": ""}]) == '⟨message role="user"⟩⟨/message⟩■'
    assert brief([{"role": "user", "content": None}]) == '⟨message role="user"⟩⟨/message⟩■'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1e2, "b": [1,2], "c": {"k":  "v"}}',
         '⟨argument key="a" type="number"⟩1e2⟨/argument⟩⟨argument key="b" type="array"⟩[1,2]⟨/argument⟩'
         '⟨argument key="c" type="object"⟩{"k":  "v"}⟨/argument⟩'),
        ('{"t": true, "n": null, "s": "1\\n"}',
         '⟨argument key="t" type="boolean"⟩true⟨/argument⟩⟨argument key="n" type="null"⟩null⟨/argument⟩'
         '⟨argument key="s" type="string"⟩1\n⟨/argument⟩'),
        ({"é": ["ü"]}, '⟨argument key="é" type="array"⟩["ü"]⟨/argument⟩'),
        ("{not json", '⟨json type="object"⟩{not json⟨/json⟩'),
        ("[1]", '⟨json type="object"⟩[1]⟨/json⟩'),
        ("", ""), (None, ""), ("{}", ""),
    ],
)  # fmt: skip
def test_call_arguments_are_spelled_by_type_or_raw_when_they_are_no_object(arguments, expected):
    call = {"function": {"name": "f", "arguments": arguments}}
    text = brief([{"role": "assistant", "content": "", "tool_calls": [call, call]}], thinking=False)
    assert text == (
        '⟨message role="assistant"⟩⟨response⟩⟨/response⟩⟨tools⟩'
        f'⟨call tool="f" index="1"⟩{expected}⟨/call⟩⟨call tool="f" index="2"⟩{expected}⟨/call⟩'
        "⟨/tools⟩⟨/message⟩■"
    )


def calls(*pairs):
    return [{"id": i, "function": {"name": name, "arguments": "{}"}} for i, name in pairs]


def results(*pairs, **extra):
    return [{"role": "tool", "tool_call_id": i, "content": body, **extra} for i, body in pairs]


def tool_messages(messages):
    return re.findall(r'role="tool" tool="(\w+)" index="(\d)"⟩(\w*)⟨', brief(messages))


def test_tool_results_are_sorted_into_the_order_of_their_calls():
    asked = {"role": "assistant", "content": "", "tool_calls": calls(("a", "f"), ("b", "g"))}
    messages = [asked, *results(("b", "second"), ("a", "first"), name="stale")]
    assert tool_messages(messages) == [("f", "1", "first"), ("g", "2", "second")]
    before = json.dumps(messages)
    render(messages)
    assert json.dumps(messages) == before, "the caller's messages are left alone"


def test_tool_results_stay_as_they_are_when_one_id_is_unknown():
    asked = {"role": "assistant", "content": "", "tool_calls": calls(("a", "f"), ("b", "g"))}
    messages = [asked, *results(("b", "second"), ("zzz", "first"))]
    assert tool_messages(messages) == [("f", "1", "second"), ("g", "2", "first")]


def test_each_assistant_message_starts_its_own_count():
    asked = {"role": "assistant", "content": "", "tool_calls": calls(("a", "f"))}
    again = {"role": "assistant", "content": "", "tool_calls": calls(("a", "g"))}
    messages = [asked, *results(("a", "one")), again, *results(("a", "two"))]
    assert tool_messages(messages) == [("f", "1", "one"), ("g", "1", "two")]


def test_a_tool_result_that_belongs_to_nothing_is_refused():
    with pytest.raises(ValueError, match=r"messages\[0\].tool_call_id matches no call"):
        render(results(("a", "x")))
    assert tool_messages(results(("a", "x"), name="h")) == [("h", "1", "x")]


def test_a_system_message_with_tools_extends_them():
    text = brief([{"role": "system", "tools": [{"b": 1, "a": [{"d": 1, "c": "é"}]}]}])
    assert text == (
        '⟨message role="system" type="tool-declare"⟩## New Tools Available\n'
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n"
        '```json\n[{"a":[{"c":"é","d":1}],"b":1}]\n```⟨/message⟩■'
    )


def test_notes_behind_the_messages_stand_in_order():
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "a": 1}}}
    text = brief([{"role": "user", "content": "x"}], tool_choice="required", response_format=schema)
    assert text == (
        '⟨message role="user"⟩x⟨/message⟩■'
        '⟨message role="system" type="tool-choice"⟩The system is invoked with `tool_choice=required`.\n'
        "You MUST call tools in the next message.⟨/message⟩■"
        '⟨message role="system" type="response-format"⟩'
        "The system is invoked with `response_format=json_schema`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) "
        "or any additional formatting.\n"
        'The JSON data must match the following schema:\n```json\n{"a":1,"type":"object"}\n```⟨/message⟩■'
    )
    assert "MUST NOT call any tools" in brief([], tool_choice="none")
    assert brief([], tool_choice="auto", response_format={"type": "text"}) == ""
    assert "`response_format=json_object`" in brief([], response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "wizard", "content": "x"}, r"messages\[1\].role is 'wizard'; K3 knows system, user"),
        ({"content": "x"}, r"messages\[1\].role is None"),
        ("hello", r"messages\[1\] is str, not an object"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"messages\[1\].content\[0\].type is 'image_url'",
        ),
        ({"role": "user", "content": ["x"]}, r"messages\[1\].content\[0\].type is 'str'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            r"messages\[1\].tool_calls\[0\].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]},
            r"function.arguments must be JSON",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message, complaint):
    with pytest.raises(ValueError, match=complaint):
        render([{"role": "user", "content": "fine"}, message])


SPELLINGS = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[BOS]",
    "[EOT]",
    "<|media_pad|>",
    "message",
    '"',
]
HOSTILE = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=4)), max_size=6).map("".join)


@given(body=HOSTILE, name=HOSTILE, reasoning=HOSTILE, key=HOSTILE, value=HOSTILE)
@settings(max_examples=3000 if FULL else 100, deadline=None)
def test_no_text_of_a_request_ever_becomes_a_control_token(tiny, body, name, reasoning, key, value):
    def prompt(body, name, reasoning, key, value):
        call = {"function": {"name": "f" + name, "arguments": json.dumps({key: value})}}
        return render(
            [
                {"role": "system", "content": body},
                {"role": "user", "content": [{"type": "text", "text": body}], "name": "u" + name},
                {"role": "assistant", "content": body, "reasoning": reasoning, "tool_calls": [call]},
                {"role": "tool", "content": value},
            ],
            tools=[{"name": body}],
        )

    controls = [
        i for i in tiny.encode_segments(prompt(body, name, reasoning, key, value)) if tiny.is_control(i)
    ]
    plain = [i for i in tiny.encode_segments(prompt("b", "n", "r", "k", "v")) if tiny.is_control(i)]
    assert controls == plain
