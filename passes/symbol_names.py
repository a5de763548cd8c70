"""Names for the symbols of a compile that do not depend on what was compiled before: s77 -> s0, u12 -> u0.

snapshot        f32[s77, u12]                     f32[s0, u0]
remark          "end <= size: u12 <= s77"         "end <= size: u0 <= s0"     the same names in both
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import sympy
from k3compile.passes.remarks import PassRecord, Proof, Remark

SYMBOL = re.compile(r"\b[a-z]+\d+\b")
OF_SIZES = re.compile(r"[su]\d+")  # the kinds that torch gives to sizes


class SymbolNames:
    """Old name -> new name, numbered by kind in the order in which they are asked for."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def name(self, old: str) -> str:
        """The new name of a symbol."""
        if old not in self.known:
            kind = old[0] if re.fullmatch(r"[a-z]+\d+", old) else "s"
            number = self.counts.setdefault(kind, 0)
            self.counts[kind] += 1
            self.known[old] = f"{kind}{number}"
        return self.known[old]

    def text(self, words: str) -> str:
        """A sentence with its symbols renamed; one that no snapshot has met gets a name of its own."""
        return SYMBOL.sub(
            lambda m: self.name(m[0]) if m[0] in self.known or OF_SIZES.fullmatch(m[0]) else m[0], words
        )

    def remark(self, told: Remark) -> Remark:
        """A remark with its symbols renamed."""
        return respelled(told, self.text)


def meant(told: Remark, sizes: Mapping[str, str]) -> Remark:
    """A remark that says what sizes measure, ``step.spans[0] <= p.0``, where ``sizes`` has the symbol."""
    return respelled(told, lambda words: SYMBOL.sub(lambda m: sizes.get(m[0], m[0]), words))


def renamed(symbols: SymbolNames, records: Iterable[PassRecord]) -> Iterator[PassRecord]:
    """The runner's records, their remarks in the names of the snapshots."""
    for record in records:
        yield replace(record, remarks=tuple(map(symbols.remark, record.remarks)))


def respelled(told: Remark, spell: Callable[[str], str]) -> Remark:
    """A remark with every sentence and expression spelled anew."""
    return replace(
        told,
        reason=spell(told.reason),
        detail=spell(told.detail),
        fix_it=told.fix_it and spell(told.fix_it),
        proofs=tuple(Proof(spell(p.obligation), p.how, spell(p.expression)) for p in told.proofs),
        expected={k: spell(v) if isinstance(v, str) else v for k, v in told.expected.items()},
    )


def by_number(symbol: sympy.Symbol) -> tuple[str, int]:
    """Symbols in the order of their numbers."""
    digits = re.sub(r"\D", "", symbol.name)
    return re.sub(r"\d", "", symbol.name), int(digits or 0)
