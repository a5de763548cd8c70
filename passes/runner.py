"""Runs passes over one graph and owns everything that is not a pass's idea.

    for each pass:   skip if disabled -> run -> clean up -> lint -> verify -> record, show before and after
                                         \\________ an error: raise, or put the graph back ________/

    verify:   static: on fake tensors, nothing runs      differential: both graphs run on real values

A pass is a value with a name, a level, what it keeps, and ``run(gm, ctx) -> PassResult``. It asks
``ctx.may_rewrite`` before each rewrite, so that fuel and the bisector can stop between any two of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from k3compile.passes.extra_inputs import ExtraInput
from k3compile.passes.graph import fake_mode_of, infer, remove_dead
from k3compile.passes.prover import Prover
from k3compile.passes.remarks import PassRecord, PassResult, Remark
from k3compile.passes.static_check import Signature, differences, unfounded
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

Level = Literal["dynamo", "aten"]
Keeps = Literal["exact", "numeric"]
Verify = Literal["off", "static", "differential"]


class PassError(RuntimeError):
    """A pass raised, or left a graph that does not mean what it meant; the message names the pass."""


class Pass(Protocol):
    """Anything with these four. ``keeps``: exact is bit-equal under eager, numeric equal up to rounding."""

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

    disabled: names of passes not to run. fuel: see :class:`Fuel`. veto(name): True forbids the next rewrite
    of that pass (the bisector's hook). verify: one level for all passes, or {pass: level} with ``off`` for
    the others; unless ``off`` a pass is checked statically, and where ``differential`` by ``compare(pass,
    before, after, extra_inputs)`` too, which raises PassError or returns remarks. on_error: ``raise`` a
    PassError or ``fallback`` to the graph as it was before the pass, except for errors of the types
    ``never_undone``; on_undone(name, error) hears of each. fake_mode: found on the
    graph's values when None. clone_graph: copies a graph with all that its level keeps on nodes.
    snapshot(gm) is called before and after each pass when on_pass is set, which then gets (name, before,
    after, seconds). extra_inputs: the placeholders that passes added, in order. export_rows: length of the
    export columns, one entry a row of a call. body: which of a graph's
    bodies this is, where it has several.
    """

    level: Level
    disabled: frozenset[str] = frozenset()
    fuel: Fuel = field(default_factory=Fuel)
    veto: Callable[[str], bool] = lambda name: False
    verify: Verify | Mapping[str, Verify] = "off"
    compare: Callable[..., tuple[Remark, ...]] | None = None
    on_error: Literal["raise", "fallback"] = "raise"
    never_undone: tuple[type[Exception], ...] = ()
    on_undone: Callable[[str, Exception], None] = lambda name, error: None
    fake_mode: FakeTensorMode | None = None
    prover: Prover | None = None
    clone_graph: Callable[[fx.Graph], fx.Graph] = copy.deepcopy
    snapshot: Callable[[fx.GraphModule], Any] = lambda gm: None
    on_pass: Callable[[str, Any, Any, float], None] | None = None
    extra_inputs: list[ExtraInput] = field(default_factory=list)
    export_rows: int = 256
    body: str = ""

    def may_rewrite(self, name: str) -> bool:
        """Whether pass ``name`` may apply its next rewrite. Asking uses fuel: ask once, last, per rewrite."""
        return not self.veto(name) and self.fuel.take()

    def verifies(self, name: str) -> Verify:
        """How pass ``name`` is to be checked."""
        return self.verify if isinstance(self.verify, str) else self.verify.get(name, "off")


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass], ctx: Context) -> list[PassRecord]:
    """Run ``passes`` in order over ``gm``, in place; one record each.

    Raises PassError, naming the pass, when one fails and ``ctx.on_error`` is ``raise``.
    """
    assert all(p.level == ctx.level for p in passes), "a pass list holds one level"
    mode = ctx.fake_mode or fake_mode_of(gm.graph)
    prover = ctx.prover or Prover(mode.shape_env if mode is not None else None)
    ctx = replace(ctx, fake_mode=mode, prover=prover)
    records = [skipped(gm, one) if one.name in ctx.disabled else run_one(gm, one, ctx) for one in passes]
    return [replace(record, body=ctx.body) for record in records]


def skipped(gm: fx.GraphModule, one: Pass) -> PassRecord:
    count = len(gm.graph.nodes)
    return PassRecord(
        one.name, 0.0, False, (Remark(one.name, "note", "", "", "disabled by name"),), count, count
    )


def run_one(gm: fx.GraphModule, one: Pass, ctx: Context) -> PassRecord:
    """Run one pass with everything around it."""
    count, extras = len(gm.graph.nodes), len(ctx.extra_inputs)
    before = ctx.snapshot(gm) if ctx.on_pass else None
    kept = ctx.on_error == "fallback" or ctx.verifies(one.name) == "differential"
    pristine = ctx.clone_graph(gm.graph) if kept else None
    started, began = time.perf_counter(), time.process_time()
    try:
        result = checked(gm, one, ctx, pristine)
    except Exception as error:  # whatever a pass does wrong, the user's program still has to run
        if ctx.on_error == "raise" or isinstance(error, ctx.never_undone):
            raise PassError(f"pass {one.name} failed: {error}") from error
        gm.graph = pristine
        del ctx.extra_inputs[extras:]  # placeholders that went with the graph
        reason = f"failed and was undone: {type(error).__name__}: {error}"
        result = PassResult(False, (Remark(one.name, "note", "", "", reason),))
        ctx.on_undone(one.name, error)
    gm.recompile()
    seconds, busy = time.perf_counter() - started, time.process_time() - began
    if ctx.on_pass:
        after = ctx.snapshot(gm)
        if isinstance(after, dict):
            after |= {"pass": one.name, "seconds": seconds, "remarks": [r.to_json() for r in result.remarks]}
        ctx.on_pass(one.name, before, after, seconds)
    return PassRecord(one.name, seconds, result.changed, result.remarks, count, len(gm.graph.nodes), busy)


def checked(gm: fx.GraphModule, one: Pass, ctx: Context, pristine: fx.Graph | None) -> PassResult:
    """Run the pass, clean up behind it, and hold it to what it may not change."""
    level = ctx.verifies(one.name)
    expected = None if level == "off" else Signature.of(gm.graph)
    result = one.run(gm, ctx)
    if result.changed:
        remove_dead(gm.graph)
        fill_values(gm.graph, ctx)
    gm.graph.lint()
    if expected is not None:
        problems = differences(expected, gm.graph, ctx.fake_mode, ctx.prover)
        problems += unfounded(result.remarks, ctx.prover)
        problems += [] if result.changed or not expected.touched(gm.graph) else ["it says it changed nothing"]
        if problems:
            raise PassError("; ".join(problems))
    if level == "differential" and result.changed:
        assert ctx.compare is not None, "differential verification needs values to run on"
        said = ctx.compare(one, fx.GraphModule(gm, pristine), gm, tuple(ctx.extra_inputs))
        result = replace(result, remarks=(*result.remarks, *said))
    return result


def fill_values(graph: fx.Graph, ctx: Context) -> None:
    """Give new nodes the value they lack. A Dynamo graph's nodes may lack one; ATen's may not."""
    for node in graph.nodes:
        if node.op == "call_function" and not node.meta.keys() & {"val", "example_value"}:
            node.meta["val" if ctx.level == "aten" else "example_value"] = infer(node, ctx.fake_mode)
