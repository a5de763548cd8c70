"""What a pass says about a graph: proofs, remarks, results, and the runner's record of a run.

Every candidate site ends in exactly one remark. A remark is data, so it is stored beside the compile cache
and read back when no pass runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

How = Literal["static", "torch._check", "annotation", "construction"]
Kind = Literal["applied", "missed", "note"]


@dataclass(frozen=True)
class Proof:
    """One obligation and what discharged it.

    how: ``construction`` (it follows from the nodes that built the value), ``static`` (integers, or sizes
    Dynamo guards), ``torch._check`` (a fact about a data-dependent size, asserted at run time),
    ``annotation``. expression: the obligation over the graph's own symbols, for instance ``u0 <= s77``.
    """

    obligation: str
    how: How
    expression: str


@dataclass(frozen=True)
class Remark:
    """What happened at one site, and why.

    node and op name the site in the graph the pass was given. reason is the stable sentence tests compare,
    detail the rest. source is ``file:line`` of the user's code. expected is what the rewrite should change,
    by quantity (``launches``, ``bytes``): an int or a symbolic expression.
    """

    pass_name: str
    kind: Kind
    node: str
    op: str
    reason: str
    detail: str = ""
    source: str | None = None
    proofs: tuple[Proof, ...] = ()
    fix_it: str | None = None
    expected: Mapping[str, int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and integers."""
        return asdict(self) | {"proofs": [asdict(p) for p in self.proofs], "expected": dict(self.expected)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Remark:
        """The inverse of :meth:`to_json`. Raises TypeError for unknown fields."""
        return cls(**{**data, "proofs": tuple(Proof(**p) for p in data.get("proofs", ()))})

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        hint = f" (fix: {self.fix_it})" if self.fix_it else ""
        return f"{self.pass_name}: {self.kind} {self.op} {self.node}{where}: {self.reason}{hint}"


@dataclass(frozen=True)
class PassResult:
    """What ``Pass.run`` returns: whether it changed the graph, and its remarks."""

    changed: bool
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph as the runner saw it. seconds is wall time of the pass and its clean-up,
    cpu_seconds what this process computed in it.

    body: which of the bodies of a graph that has several (:mod:`multi_version`); empty where there is one.
    """

    name: str
    seconds: float
    changed: bool
    remarks: tuple[Remark, ...]
    nodes_before: int
    nodes_after: int
    cpu_seconds: float = 0.0
    body: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self) | {"remarks": [r.to_json() for r in self.remarks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PassRecord:
        """The inverse of :meth:`to_json`. Raises TypeError for unknown fields."""
        return cls(**{**data, "remarks": tuple(Remark.from_json(r) for r in data["remarks"])})
