"""The notes byte for byte; the conversation around them is held by test_chat.py."""

import pytest
from k3compile.runtime import chat_notes


def test_the_tool_note_fences_compact_sorted_json():
    note = chat_notes.tool_declare([{"b": [{"z": 1, "a": "ä"}], "a": None}])
    assert note == (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
        '```json\n[{"a":null,"b":[{"a":"ä","z":1}]}]\n```'
    )


def test_the_effort_note_lists_medium_although_it_is_refused():
    assert "`low`, `medium`, `high`, and `max`." in chat_notes.thinking_effort("low")
    with pytest.raises(ValueError, match="'medium'; K3 was trained on low, high, max"):
        chat_notes.thinking_effort("medium")


def test_choices_and_formats_without_a_note_give_none():
    assert chat_notes.tool_choice("auto") is None
    assert chat_notes.tool_choice({"type": "function"}) is None
    assert chat_notes.response_format(None) is None
    assert chat_notes.response_format({"type": "text"}) is None


def test_a_schema_is_found_with_or_without_its_wrapper():
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    bare = {"type": "json_schema", "json_schema": {"type": "array"}}
    assert chat_notes.response_format(wrapped) == chat_notes.response_format(bare)
    assert chat_notes.response_format(bare).endswith('schema:\n```json\n{"type":"array"}\n```')
