"""A field reader complains in words and goes on."""

import pytest
from k3compile.runtime.config_fields import Fields


def test_a_good_value_passes_and_a_bad_one_is_named_with_what_is_allowed():
    problems: list[str] = []
    fields = Fields({"a": 3, "b": 0, "c": "x"}, "part.", problems)
    assert fields.integer("a") == 3
    assert fields.integer("b") is None
    assert fields.integer("c") is None
    assert fields.integer("d") is None
    assert problems == [
        "part.b is 0, and must be a whole number of at least 1",
        "part.c is 'x', and must be a whole number of at least 1",
        "part.d is missing",
    ]


def test_null_counts_as_missing():
    problems: list[str] = []
    fields = Fields({"a": None}, "", problems)
    assert fields.integer("a", default=0) == 0
    assert fields.flag("a", default=False) is False
    assert not problems


@pytest.mark.parametrize("value", [True, 1.0, "1", [1]])
def test_an_integer_is_nothing_else(value):
    assert Fields({"a": value}, "", []).integer("a") is None


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0, -1, True, "1"])
def test_a_number_is_positive_and_finite(value):
    assert Fields({"a": value}, "", []).number("a") is None


def test_one_and_true_are_not_the_same_choice():
    problems: list[str] = []
    assert Fields({"a": 1}, "", problems).only("a", True) is None
    assert problems == ["a is 1, and must be True"]


def test_unknown_names_come_with_the_nearest_known_one():
    problems: list[str] = []
    fields = Fields({"hidden_size": 1, "hiden_size": 2}, "", problems)
    fields.integer("hidden_size")
    fields.refuse_unknown(())
    assert problems == ["hiden_size = 2 is not a field we know; did you mean 'hidden_size'?"]


def test_something_that_is_no_object_is_said_so():
    problems: list[str] = []
    Fields([1], "text_config.", problems)
    assert problems == ["text_config. is [1], and must be a JSON object"]
