"""Differential verification: run a graph before and after a pass on real values and compare what comes out.

    inputs of the compile --copy--> before --> results, inputs afterwards, who shares memory with whom
                          --copy--> after  --> the same three        exact: equal in every bit, NaN equal NaN
                          --copy--> before in float64                numeric: as near to it as before

The graph before the pass, run node by node, is the oracle, never an inner compiler. Both runs get copies:
the tensors of the user, state pools among them, are read once and never written. It costs three runs and
four copies of the inputs a pass, so it is for a test or a bug hunt, not for every start. Where rounding
errors look larger than before, that is asked again of nudged inputs, and the errors of all runs are judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import torch_private
from .difference import Compared, Observed, differences
from .example_values import fitting, synthesised
from .passes.communication import group_of
from .passes.extra_inputs import ExtraInput
from .passes.graph import storage_id, value
from .passes.lower import ranks_of
from .passes.remarks import Remark
from .passes.runner import Pass, PassError

ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
REDRAWS = 16  # further runs before rounding errors are called larger: those of one run often share a cause
NUDGE = 2.0**-6  # relative, so that bfloat16 inputs move, too


class Differential:
    """``compare`` of :class:`passes.runner.Context` for one compile, whose inputs it was called with."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = list(inputs)

    def __call__(
        self, one: Pass, before: fx.GraphModule, after: fx.GraphModule, extras: tuple[ExtraInput, ...]
    ) -> tuple[Remark, ...]:
        """Remarks on what was compared. Raises PassError naming the output and the biggest difference."""
        with torch_private.on_real_tensors():
            return self.compare(one, before, after, extras)

    def compare(
        self, one: Pass, before: fx.GraphModule, after: fx.GraphModule, extras: tuple[ExtraInput, ...]
    ) -> tuple[Remark, ...]:
        """:meth:`__call__` where tensors are real."""
        if why := communicates(before.graph) or communicates(after.graph):
            return (Remark(one.name, "note", "", "", f"not run to compare: {why}"),)
        known = {extra.name: extra.example for extra in extras}
        given, made_up = inputs_of(before.graph, self.inputs, known)
        longer, _ = inputs_of(after.graph, given, known)
        want, got = observe(before, given), observe(after, longer)
        reference, note = None, ""
        if one.keeps == "numeric":
            reference, note = in_float64(before, given)
        problems = differences([Compared(want, got, reference)])
        if problems and differences([Compared(want, observe(before, given), None)]):
            return (Remark(one.name, "note", "", "", "not compared: two runs before the pass differ"),)
        if problems and reference:
            more = [redrawn(before, after, given, longer, seed) for seed in range(REDRAWS)]
            problems = differences([Compared(want, got, reference), *more])
        if problems and not note:
            raise PassError(f"it changed what the graph computes ({one.keeps}): " + "; ".join(problems))
        source = f"on {made_up} made-up inputs of {len(given)}" if made_up else "on the inputs of this call"
        done = note or f"computes what the graph before it computed ({one.keeps}), {source}"
        return (Remark(one.name, "note", "", "", f"differential verification: {done}"),)


def redrawn(
    before: fx.GraphModule, after: fx.GraphModule, given: Sequence[Any], longer: Sequence[Any], seed: int
) -> Compared:
    """The three runs of a numeric pass on inputs that are a little off; ``longer`` are those of ``after``."""
    inputs = nudged([*given, *longer], seed)
    mine, theirs = inputs[: len(given)], inputs[len(given) :]
    return Compared(observe(before, mine), observe(after, theirs), observe(before, mine, double=True))


def nudged(inputs: Sequence[Any], seed: int) -> list[Any]:
    """Copies whose rounded floats are off by up to NUDGE, and that share memory as the originals do."""
    draw, done, made = torch.Generator().manual_seed(seed), set(), copies(inputs)
    for given in made:
        if (
            isinstance(given, torch.Tensor)
            and given.dtype in ROUNDED
            and (key := storage_id(given)) not in done
        ):
            flat = whole(given)
            flat.mul_(torch.rand(flat.shape, generator=draw).mul_(2).sub_(1).mul_(NUDGE).add_(1).to(flat))
            done.add(key)
    return made


def whole(given: torch.Tensor) -> torch.Tensor:
    """All that the storage of a tensor holds, as one row of its dtype."""
    return torch.as_strided(
        given.detach(), (given.untyped_storage().size() // given.element_size(),), (1,), 0
    )


def inputs_of(
    graph: fx.Graph, inputs: Sequence[Any], known: dict[str, torch.Tensor]
) -> tuple[list[Any], int]:
    """A value for each placeholder, and how many had to be made up.

    AOTAutograd keeps the order of the inputs, drops some and adds others, so each placeholder takes the next
    input that looks like it.
    """
    values, place, made_up = [], 0, 0
    for node in graph.find_nodes(op="placeholder"):
        if node.name in known:
            values.append(known[node.name])
            continue
        found = next((j for j in range(place, len(inputs)) if fitting(value(node), inputs[j])), None)
        if found is None:
            values.append(synthesised(node, seed=len(values)))
            made_up += 1
        else:
            values.append(inputs[found])
            place = found + 1
    return values, made_up


def copies(inputs: Sequence[Any], double: bool = False) -> list[Any]:
    """Copies that share memory among themselves as the originals do; ``double``: floats as float64."""
    storages: dict[Any, torch.Tensor] = {}

    def copy(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        if (key := storage_id(given)) is None or given.is_quantized:
            return given.clone()
        widened = double and given.dtype in ROUNDED
        if (key, given.dtype) not in storages:
            flat = whole(given)
            storages[key, given.dtype] = flat.double() if widened else flat.clone()
        flat = storages[key, given.dtype]
        return flat.as_strided(given.shape, given.stride(), given.storage_offset())

    with torch.no_grad():
        return [copy(given) for given in inputs]


def observe(gm: fx.GraphModule, inputs: Sequence[Any], *, double: bool = False) -> Observed:
    """Run ``gm`` node by node on copies of ``inputs``; random numbers are the same in every run."""
    mine = copies(inputs, double)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        results = (InFloat64(gm) if double else fx.Interpreter(gm)).run(*mine)
    named = {f"output {i}": r for i, r in enumerate(pytree.tree_leaves(results))}
    named |= {
        f"input {node.name}": given
        for node, given in zip(gm.graph.find_nodes(op="placeholder"), mine)
        if isinstance(given, torch.Tensor)
    }
    return Observed(named, frozenset(sharing(named)))


def sharing(named: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of an output and an input or another output that sit in one storage."""
    where = {n: storage_id(t) for n, t in named.items() if isinstance(t, torch.Tensor) and t.numel()}
    outputs = [n for n in where if n.startswith("output")]
    return [(o, n) for o in outputs for n in where if o < n and where[o] == where[n] is not None] + [
        (n, o) for o in outputs for n in where if n < o and where[o] == where[n] is not None
    ]


class InFloat64(fx.Interpreter):
    """Runs a graph with every rounded float in float64: what it would compute with hardly any rounding."""

    def run_node(self, n: fx.Node) -> Any:
        return pytree.tree_map_only(torch.Tensor, doubled, super().run_node(n))

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map_only(
            torch.dtype, lambda d: torch.float64 if d in ROUNDED else d, (args, kwargs)
        )


def doubled(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.dtype in ROUNDED else t


def in_float64(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Observed | None, str]:
    """The graph in float64, or why there is none: an op may know only narrower floats."""
    try:
        return observe(gm, inputs, double=True), ""
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return None, f"not compared, since the graph does not run in float64: {str(error).splitlines()[0]}"


def communicates(graph: fx.Graph) -> str | None:
    """Why a graph may not be run by one rank alone."""
    for node in graph.nodes:
        group = group_of(node) if node.op == "call_function" else ""
        if group and ranks_of(group) != 1:
            return f"it communicates with other ranks ({node.target})"
    return None
