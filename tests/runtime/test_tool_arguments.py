"""Arguments in both spellings: every JSON object survives the round trip."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3compile.runtime.tool_arguments import Argument, join_arguments, split_arguments

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), JSON), st.sampled_from([None, 2]), st.booleans())
def test_every_object_survives_both_ways(value, indent, as_text):
    arguments = json.dumps(value, indent=indent) if as_text else value
    assert json.loads(join_arguments(split_arguments(arguments))) == value


def test_literals_keep_their_bytes():
    text = '{"a" : 1.50e+2, "b":[ 1,2 ] , "c":"\\u00e9", "d": -0.0}'
    assert split_arguments(text) == [
        Argument("a", "number", "1.50e+2"),
        Argument("b", "array", "[ 1,2 ]"),
        Argument("c", "string", "é"),
        Argument("d", "number", "-0.0"),
    ]
    assert join_arguments(split_arguments(text)) == '{"a": 1.50e+2, "b": [ 1,2 ], "c": "é", "d": -0.0}'


@pytest.mark.parametrize(
    "text", ["{", '{"a"}', '{"a":1,}', "{1:2}", "3", '"x"', " ", '{"a":1 "b":2}', '{"a":' + "[" * 200_000]
)
def test_what_is_no_object_comes_back_as_it_is(text):
    assert split_arguments(text) == text


def test_what_follows_the_object_is_ignored():
    assert split_arguments(' {"a": 1} and more') == [Argument("a", "number", "1")]


def test_a_broken_literal_becomes_a_string():
    broken = [Argument("a", "number", "1 2"), Argument("b", "object", "{"), Argument("c", "number", "NaN")]
    assert json.loads(join_arguments(broken)) == {"a": "1 2", "b": "{", "c": "NaN"}


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="arguments must be JSON text or an object, not int"):
        split_arguments(3)
