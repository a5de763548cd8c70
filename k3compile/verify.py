"""Differential verification: run a graph before and after a pass on real values and compare what comes out.

    inputs of the compile --copy--> before --> results, inputs afterwards, who shares memory with whom
                          --copy--> after  --> the same three        exact: equal in every bit, NaN equal NaN
                          --copy--> before in float64                numeric: as near to it as before

The graph before the pass, run node by node, is the oracle, never an inner compiler. Both runs get copies:
the tensors of the user, state pools among them, are read once and never written. It costs three runs and
four copies of the inputs a pass, so it is for a test or a bug hunt, not for every start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import torch_private
from .example_values import fitting, synthesised
from .passes.extra_inputs import ExtraInput
from .passes.graph import storage_id, value
from .passes.lower import ranks_of
from .passes.remarks import Remark
from .passes.runner import Pass, PassError

GROWTH = 1.1  # by how much the error of a numeric pass may exceed that of the graph it was given
SCATTER = 3.0  # the norm of n rounding errors is a draw itself, the wider the fewer they are
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Observed:
    """One run of a graph: its results and its inputs as they are afterwards, and which of them share memory.

    values: name -> tensor or number, in a fixed order. shared: pairs of names that sit in one storage.
    """

    values: dict[str, Any]
    shared: frozenset[tuple[str, str]]


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
        problems = differences(want, got, reference)
        if problems and differences(want, observe(before, given), None):
            return (Remark(one.name, "note", "", "", "not compared: two runs before the pass differ"),)
        if problems and not note:
            raise PassError(f"it changed what the graph computes ({one.keeps}): " + "; ".join(problems))
        source = f"on {made_up} made-up inputs of {len(given)}" if made_up else "on the inputs of this call"
        done = note or f"computes what the graph before it computed ({one.keeps}), {source}"
        return (Remark(one.name, "note", "", "", f"differential verification: {done}"),)


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
            whole = given.untyped_storage().size() // given.element_size()
            flat = torch.as_strided(given.detach(), (whole,), (1,), 0)
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


def differences(want: Observed, got: Observed, reference: Observed | None) -> list[str]:
    """What differs, as sentences. With ``reference`` rounding may differ, or else nothing may."""
    problems = []
    for name, expected in want.values.items():
        if name not in got.values:
            problems.append(f"{name} is gone")
        elif why := difference(expected, got.values[name], reference and reference.values[name]):
            problems.append(f"{name} {why}")
    if extra := [n for n in got.values if n.startswith("output") and n not in want.values]:
        problems.append(f"there are more results: {', '.join(extra)}")
    mine = {pair for pair in got.shared if all(n in want.values for n in pair)}
    for gone in sorted(want.shared - mine):
        problems.append(f"{gone[0]} and {gone[1]} no longer share memory")
    for new in sorted(mine - want.shared):
        problems.append(f"{new[0]} and {new[1]} now share memory")
    return problems


def difference(want: Any, got: Any, reference: Any) -> str | None:
    """Why ``got`` does not do for ``want``, or None."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if type(want) is type(got) and want == got else f"was {want} and is {got}"
    if (want.shape, want.dtype, want.device) != (got.shape, got.dtype, got.device):
        return f"was {looks(want)} and is {looks(got)}"
    if want.layout != torch.strided or want.numel() == 0:
        return None
    a, b = want.detach(), got.detach()
    if not a.is_floating_point() and not a.is_complex():
        return None if torch.equal(a, b) else biggest(a, b)
    if not same_pattern(a, b):
        return "has NaN or infinity elsewhere: " + biggest(a, b)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return None
    if reference is None or not a.is_floating_point():
        return biggest(a, b)
    before, after, size = (error_norm(t, reference) for t in (a, b, torch.zeros_like(a)))
    growth = GROWTH * (1 + SCATTER / math.sqrt(a.numel()))
    allowed = max(growth * before, torch.finfo(a.dtype).eps / 2 * size)
    if after <= allowed:
        return None
    return f"is {after:.3e} from float64, where {before:.3e} was and {allowed:.3e} may be: {biggest(a, b)}"


def same_pattern(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether NaN and the infinities stand in the same places."""
    infinite = a.isinf()
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(infinite, b.isinf())
        and torch.equal(a[infinite], b[infinite])
    )


def error_norm(t: torch.Tensor, reference: torch.Tensor) -> float:
    """The l2 norm of the difference where both are finite."""
    delta = t.double() - reference.double()
    return float(delta[delta.isfinite()].square().sum().sqrt())


def biggest(a: torch.Tensor, b: torch.Tensor) -> str:
    """The place of the biggest difference, with both values."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    delta = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=math.inf)
    delta = torch.where((a == b) | ((a != a) & (b != b)), torch.zeros_like(delta), delta)
    place = tuple(int(i) for i in torch.unravel_index(delta.argmax(), delta.shape))
    return f"was {a[place].item()} and is {b[place].item()} at {list(place)}"


def looks(t: torch.Tensor) -> str:
    return f"{t.dtype}{list(t.shape)}"


def communicates(graph: fx.Graph) -> str | None:
    """Why a graph may not be run by one rank alone."""
    for node in graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace.startswith(("_c10d", "c10d")):
            group = node.args[-1]
            if isinstance(group, str) and ranks_of(group) != 1:
                return f"it communicates with other ranks ({target})"
    return None
