"""Runs passes over one graph and owns everything that is not a pass's idea.

    for each pass:  skip if disabled -> snapshot -> run -> clean up -> infer meta -> lint -> verify -> snapshot, record
                                                     \\________ an error: raise, or put the graph back ________/

A pass is a value with a name, a level, what it keeps, and ``run(gm, ctx) -> PassResult``. It asks
``ctx.may_rewrite`` before each rewrite, so that fuel and the bisector can stop between any two of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from k3compile.passes.remarks import PassRecord, PassResult, Remark

Level = Literal["dynamo", "aten"]
Keeps = Literal["exact", "numeric"]


class PassError(RuntimeError):
    """A pass raised, or left a graph that does not mean what it meant; the message names the pass."""


class Pass(Protocol):
    """Anything with these four; ``keeps`` is exact (bit-equal under eager) or numeric (equal up to rounding)."""

    name: str
    level: Level
    keeps: Keeps

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Change ``gm`` in place and say what was done; never clean up, lint or recompile."""
        ...


@dataclass
class Fuel:
    """How many rewrites a compile may still apply; shared by all its graphs. None: as many as there are."""

    left: int | None = None

    def take(self) -> bool:
        """Use one unit; False when none is left."""
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True)
class Context:
    """What passes and runner are given for one graph: plain values and services.

    disabled: names of passes not to run. fuel: see :class:`Fuel`. veto(name): True forbids the next rewrite of
    that pass (the bisector's hook). verify: ``static`` re-checks every pass. on_error: ``raise`` a PassError or
    ``fallback`` to the graph as it was before the pass. fake_mode: found on the graph's values when None.
    clone_graph: copies a graph with all that its level keeps on nodes. snapshot(gm) is called before and after
    each pass when on_pass is set, which then gets (name, before, after, seconds).
    """

    level: Level
    disabled: frozenset[str] = frozenset()
    fuel: Fuel = field(default_factory=Fuel)
    veto: Callable[[str], bool] = lambda name: False
    verify: Literal["off", "static"] = "off"
    on_error: Literal["raise", "fallback"] = "raise"
    fake_mode: FakeTensorMode | None = None
    clone_graph: Callable[[fx.Graph], fx.Graph] = copy.deepcopy
    snapshot: Callable[[fx.GraphModule], Any] = lambda gm: None
    on_pass: Callable[[str, Any, Any, float], None] | None = None

    def may_rewrite(self, name: str) -> bool:
        """Whether pass ``name`` may apply its next rewrite. Asking uses fuel: ask once, last, per rewrite."""
        return not self.veto(name) and self.fuel.take()


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass], ctx: Context) -> list[PassRecord]:
    """Run ``passes`` in order over ``gm``, in place; one record each. Raises PassError when on_error is raise."""
    assert all(p.level == ctx.level for p in passes), "a pass list holds one level"
    records = []
    for one in passes:
        started, before = time.perf_counter(), len(gm.graph.nodes)
        if one.name in ctx.disabled:
            note = Remark(one.name, "note", "", "", "disabled by name")
            records.append(PassRecord(one.name, 0.0, False, (note,), before, before))
            continue
        result = one.run(gm, ctx)
        seconds = time.perf_counter() - started
        records.append(
            PassRecord(one.name, seconds, result.changed, result.remarks, before, len(gm.graph.nodes))
        )
    return records
