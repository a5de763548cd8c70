"""Reading a JSON object field by field, keeping every complaint instead of stopping at the first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REQUIRED = object()


class Fields:
    """One JSON object, what was asked of it, and what was wrong with it.

    A reader returns None for a value it complained about, so that a later check can leave it out.
    ``problems`` is shared between the objects of one file; ``where`` names this one in messages.
    """

    def __init__(self, values: Any, where: str, problems: list[str]) -> None:
        self.where, self.problems = where, problems
        self.asked: set[str] = set()
        self.values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
        if not isinstance(values, Mapping):
            problems.append(f"{where or 'the file'} is {values!r}, and must be a JSON object")

    def complain(self, name: str, given: Any, allowed: str) -> None:
        """Add "name is X, and must be Y"."""
        self.problems.append(f"{self.where}{name} is {given!r}, and must be {allowed}")

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The raw value; a missing or null one gives ``default``, or a complaint and None."""
        self.asked.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            self.problems.append(f"{self.where}{name} is missing")
            return None
        return default

    def integer(self, name: str, default: Any = REQUIRED, least: int = 1) -> int | None:
        """A whole number of at least ``least``; the default is not checked."""
        value = self.get(name, default)
        if self.values.get(name) is None:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return self.complain(name, value, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: Any = REQUIRED, allowed: str = "a positive number") -> float | None:
        """A positive finite number; the default is not checked."""
        value = self.get(name, default)
        if self.values.get(name) is None:
            return value
        if not is_number(value) or not 0 < value < float("inf"):
            return self.complain(name, value, allowed)
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool | None:
        """true or false."""
        value = self.get(name, default)
        return (
            value if value is None or isinstance(value, bool) else self.complain(name, value, "true or false")
        )

    def only(self, name: str, *allowed: Any, default: Any = REQUIRED) -> Any:
        """One of ``allowed``; null counts as missing."""
        value = self.get(name, default)
        if self.values.get(name) is None:
            return value
        if not any(type(value) is type(one) and value == one for one in allowed):
            return self.complain(name, value, " or ".join(map(repr, allowed)))
        return value

    def absent(self, name: str, why: str) -> None:
        """Null, or not there at all."""
        if self.get(name, default=None) is not None:
            self.complain(name, self.values[name], f"null: {why}")

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or not all(type(one) is int for one in value):
            return self.complain(name, value, "a list of whole numbers")
        return tuple(value)

    def refuse_unknown(self, harmless: Iterable[str]) -> None:
        """Complain about names that were neither asked for nor are known to leave the logits alone."""
        known = self.asked | set(harmless)
        for name in self.values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.problems.append(
                    f"{self.where}{name} = {self.values[name]!r} is not a field we know{hint}"
                )


def is_number(value: Any) -> bool:
    """An int or a float, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
