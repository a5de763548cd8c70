"""The sums that make up a graph's cost, as expressions over its sizes, and as numbers at given sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import sympy

from .sizes import Size

COUNTED = (
    "launches", "bytes_read", "bytes_written", "allocations", "allocated_bytes",
    "collectives", "collective_bytes", "flops",
)  # fmt: skip


class Life(NamedTuple):
    """One piece of memory the graph allocates: the nodes between which it lives, and its bytes."""

    born: int
    last: int
    size: Size


@dataclass(frozen=True)
class Cost:
    """The sums over a graph: sympy expressions over the snapshot's symbols, or integers.

    bytes are bytes, flops floating point operations. lives: what is allocated, for the peak. symbols: what
    each symbol measures, for instance ``p.0``, the rows of ``p``. names: every name of a size, to its symbol.
    """

    launches: Size
    bytes_read: Size
    bytes_written: Size
    allocations: Size
    allocated_bytes: Size
    collectives: Size
    collective_bytes: Size
    flops: Size
    lives: tuple[Life, ...] = ()
    symbols: Mapping[str, str] | None = None
    names: Mapping[str, str] | None = None

    def at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Every sum and ``peak_bytes`` for given sizes: symbols of the snapshot, or the name of a size.

        Raises ValueError for sizes that are missing or unknown, saying what each symbol measures.
        """
        values = self._resolved(sizes)
        found = {name: evaluated(getattr(self, name), values) for name in COUNTED}
        return found | {"peak_bytes": peak(self.lives, values)}

    def to_json(self) -> dict[str, Any]:
        """Plain data: integers where nothing is symbolic, text where something is."""
        sums = {f.name: getattr(self, f.name) for f in fields(self) if f.name in COUNTED}
        return {name: plain(value) for name, value in sums.items()} | {"symbols": dict(self.symbols or {})}

    @property
    def unknown(self) -> list[str]:
        """Symbols that need a value before the sums are numbers."""
        sums = [getattr(self, name) for name in COUNTED] + [life.size for life in self.lives]
        return sorted({str(s) for value in sums for s in sympy.sympify(value).free_symbols}, key=by_number)

    def resolved(self, name: str) -> str | None:
        """The symbol behind the name of a size, itself a symbol or what one measures; None for no size."""
        known = {*(self.symbols or {}), *self.unknown}
        return next((s for s in ((self.names or {}).get(name), name) if s in known), None)

    def _resolved(self, sizes: Mapping[str, int]) -> dict[str, int]:
        measured = self.symbols or {}
        given = {name: self.resolved(name) for name in sizes}
        values = {symbol: sizes[name] for name, symbol in given.items() if symbol}
        wrong = [name for name, symbol in given.items() if symbol is None]
        missing = [measured.get(name, name) for name in self.unknown if name not in values]
        if wrong or missing:
            parts = [f"no size is called {', '.join(wrong)}"] if wrong else []
            parts += [f"no value for {', '.join(missing)}"] if missing else []
            raise ValueError(f"{'; '.join(parts)}; sizes of this graph: {described(measured, self.unknown)}")
        return values


def described(measured: Mapping[str, str], needed: Sequence[str]) -> str:
    """``p.0 (u1)``: what to give, and how the formulas call it."""
    return ", ".join(f"{measured[s]} ({s})" if s in measured else s for s in needed) or "none"


def total(values: Sequence[Size]) -> Size:
    """A sum, an integer where it can be."""
    number = sum(v for v in values if isinstance(v, int))
    rest = [v for v in values if not isinstance(v, int)]
    return sympy.Add(number, *rest) if rest else number


def evaluated(value: Size, sizes: Mapping[str, int]) -> int:
    if isinstance(value, int):
        return value
    return int(value.subs({s: sizes[str(s)] for s in value.free_symbols}))


def peak(lives: Sequence[Life], sizes: Mapping[str, int]) -> int:
    """The most bytes alive at once, inputs not counted."""
    events: dict[int, int] = {}
    for life in lives:
        size = evaluated(life.size, sizes)
        events[life.born] = events.get(life.born, 0) + size
        events[life.last + 1] = events.get(life.last + 1, 0) - size
    now = most = 0
    for place in sorted(events):
        now += events[place]
        most = max(most, now)
    return most


def plain(value: Size) -> int | str:
    return value if isinstance(value, int) else int(value) if value.is_Integer else str(value)


def by_number(name: str) -> tuple[str, int]:
    return name.rstrip("0123456789"), int("".join(c for c in name if c.isdigit()) or 0)
