"""Tool-call arguments in K3's two spellings: one JSON object, and one typed element per key.

    {"city": "Oslo", "days": 2}   <->   city string `Oslo`, days number `2`

A string stands raw; every other value keeps its JSON literal byte for byte, so `1e2` stays `1e2` both ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_DECODER = json.JSONDecoder(strict=False)
_BLANKS = re.compile(r"[ \t\n\r]*")


class Argument(NamedTuple):
    """One element: ``text`` is the raw string, or the JSON literal of any other type."""

    key: str
    type: str  # string, number, boolean, null, object, array
    text: str


def split_arguments(arguments: str | Mapping | None) -> list[Argument] | str:
    """Elements of the arguments, or the text itself when it is no JSON object (it then goes out raw).

    None and "" mean no arguments. What follows the closing brace is ignored. Raises ``ValueError`` for
    anything that is neither text nor a mapping.
    """
    if arguments is None or arguments == "":
        return []
    if isinstance(arguments, Mapping):
        return [_argument(str(key), value, dump(value)) for key, value in arguments.items()]
    if not isinstance(arguments, str):
        raise ValueError(f"arguments must be JSON text or an object, not {type(arguments).__name__}")
    try:
        return _read_object(arguments)
    except (ValueError, RecursionError):
        return arguments


def join_arguments(arguments: Iterable[Argument]) -> str:
    """JSON object text of the elements. A literal that is no JSON after all is quoted as a string."""
    return "{" + ", ".join(f"{dump(a.key)}: {_literal(a)}" for a in arguments) + "}"


def dump(value: object) -> str:
    """JSON text with the separators and the raw non-ASCII that K3 was trained on."""
    return json.dumps(value, ensure_ascii=False)


def _literal(argument: Argument) -> str:
    if argument.type != "string":
        try:
            json.loads(argument.text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return dump(argument.text)
        return argument.text.strip()
    return dump(argument.text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_object(text: str) -> list[Argument]:
    at = _expect(text, _skip(text, 0), "{")
    if text[at : at + 1] == "}":
        return []
    found: list[Argument] = []
    while True:
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"key {key!r} is not a string")
        start = _expect(text, _skip(text, at), ":")
        value, at = _DECODER.raw_decode(text, start)
        found.append(_argument(key, value, text[start:at]))
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return found
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()


def _expect(text: str, at: int, mark: str) -> int:
    """Position behind ``mark`` and the blanks that follow it."""
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark!r} at {at}")
    return _skip(text, at + 1)


def _argument(key: str, value: object, literal: str) -> Argument:
    if isinstance(value, str):
        return Argument(key, "string", value)
    return Argument(key, _type_of(value), literal)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before numbers: bool is an int
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "object" if isinstance(value, Mapping) else "array"
