"""Random programs about shared memory, checked at three depths against eager; a mismatch is made small.

    functional    traced once as a functional graph, several choices of results, passes run on each,
                  interpreted: fast, no Dynamo                                        20,000 in make accept
    aot_eager     torch.compile(backend="k3", options={"inner": "aot_eager"})            500
    inductor      torch.compile(backend="k3")                                             40

    python tests/helpers/alias_fuzz.py aot_eager 1234        runs program 1234 again and makes it small

alias_writer draws the programs.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import reversing_op  # noqa: F401  (declares the op that programs call)
import torch
from alias_programs import program
from alias_writer import CALLS, Program, arguments, written
from k3compile.passes import in_place
from k3compile.passes.graph import remove_dead, storage_id, tensor
from k3compile.passes.pipeline import ATEN_PASSES
from k3compile.passes.runner import Context, run_passes
from torch import fx
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from k3compile import kernels  # noqa: F401  (declares the ops)

FRESH = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", "")[:7] or "0", 16) or random.randrange(10**8)  # a run
DEPTHS = ("functional", "aot_eager", "inductor")
FULL = {"functional": 20_000, "aot_eager": 500, "inductor": 40}
RESULTS = 8  # choices of what is returned, and ways to write in place, that share one trace


class Mismatch(AssertionError):
    """What a program computed is not what eager computes."""


def compare(fn: Callable, compiled: Callable, call: tuple[int, int, int], exact: bool, aliases: bool) -> None:
    """Raise Mismatch unless results, arguments afterwards and, if asked, their sharing are eager's."""
    want_args, got_args = arguments(*call), arguments(*call)
    with torch.no_grad():
        want, got = fn(*want_args), compiled(*got_args)
    pairs = [(f"result {i}", w, g) for i, (w, g) in enumerate(zip(want, got, strict=True))]
    pairs += [(f"argument {i}", w, g) for i, (w, g) in enumerate(zip(want_args, got_args))]
    for what, w, g in pairs:
        same = torch.equal(w, g) if exact else torch.allclose(w, g, rtol=1e-5, atol=1e-5)
        if not same:
            raise Mismatch(f"{what} of call {call}: eager {w.tolist()}, compiled {g.tolist()}")
    if aliases:
        for i, (w, g) in enumerate(zip(want, got)):
            shared = [
                [storage_id(r) == storage_id(x) for x in xs] for r, xs in ((w, want_args), (g, got_args))
            ]
            if shared[0] != shared[1]:
                raise Mismatch(f"result {i} of call {call} shares memory with other arguments than in eager")


# ---- the functional depth: one trace, several programs ----


def traced(text: str, decompose: bool) -> fx.GraphModule:
    """The functional graph of a program: ``copy_`` of what it wrote into its inputs comes last."""
    fn = program(text)
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def functional(*args: torch.Tensor) -> list[torch.Tensor]:
        with FunctionalTensorMode():
            wrapped = [to_fun(a) for a in args]
            results = fn(*wrapped)
            for w in [*wrapped, *results]:
                torch._sync(w)
            with disable_functional_mode():
                values = [from_fun(r) for r in results]
                for a, w in zip(args, wrapped):
                    if has_data_mutation(w):
                        a.copy_(from_fun(w))
        return values

    fakes = [mode.from_tensor(a, static_shapes=True) for a in arguments(2, 5, 1)]
    table = select_decomp_table() if decompose else {}
    with mode, torch.no_grad():
        return make_fx(functional, decomposition_table=table)(*fakes)


def with_results(gm: fx.GraphModule, places: Sequence[int]) -> fx.GraphModule:
    """A copy of the graph that returns only some of its results."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    (results,) = gm.graph.output_node().args
    graph.graph_copy(gm.graph, copied)
    graph.output([copied[results[place]] for place in places])
    remove_dead(graph)
    return fx.GraphModule(gm, graph)


def write_early(graph: fx.Graph) -> None:
    """Move each ``copy_`` up to where everything it overwrites was read, as a scheduler may: whoever reads
    later reads the new content."""
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, source = copy.args
        memory = [
            n for n in graph.nodes if n is not copy and storage_id(tensor(n)) == storage_id(tensor(target))
        ]
        readers = [user for n in memory for user in n.users if user is not copy]
        last = max([source, *memory, *readers])
        if last.op not in ("output", "placeholder"):
            last.append(copy)


def write_as_inductor(gm: fx.GraphModule) -> None:
    """Write in place wherever the old content is not read *later*, whatever the op itself reads."""
    storages = in_place.nodes_by_storage(gm.graph)
    for node in in_place.functional_writes(gm.graph):
        bases = node.kwargs["_all_bases"]
        families = [in_place.alias_family(base, storages) for base in bases]
        quiet = [
            not any(u > node and not in_place.is_target_of_copy(u, m) for m in f for u in m.users)
            for f in families
        ]
        ends = [
            b.op != "placeholder" or any(in_place.is_target_of_copy(u, b) for u in b.users) for b in bases
        ]
        values = [v for index in range(len(bases)) for v in in_place.new_values(node, index)]
        new = {n for v in values for n in in_place.alias_family(v, storages)}
        returned = not new.isdisjoint(gm.graph.output_node().all_input_nodes)
        distinct = sum(map(len, families)) == len({n for f in families for n in f})
        roots = [next(iter(f)) is b for f, b in zip(families, bases)]
        if all(quiet) and all(ends) and all(roots) and distinct and not returned:
            for index, base in enumerate(bases):
                in_place.read_base_instead(node, index, base)
            if not in_place.has_list_argument(node):
                in_place.call_directly(node)
    gm.graph.lint()
    gm.recompile()


def functional_programs(seed: int) -> Iterator[tuple[Program, fx.GraphModule, int]]:
    """Programs ``seed``: one body, several choices of what is returned; its functional graph; its variant."""
    body, variables = written(seed)
    everything = replace(body, results=(*variables, *(f"{v} + 1" for v in variables)))
    gm = traced(everything.text, decomposed(seed * RESULTS))
    rng = random.Random(seed + 1)
    for which in range(RESULTS):
        names = body.results if which == 0 else rng.sample(everything.results, rng.randint(1, 4))
        places = [everything.results.index(n) for n in names]
        yield replace(body, results=tuple(names)), with_results(gm, places), seed * RESULTS + which


def decomposed(variant: int) -> bool:
    """Whether a program is traced with the decompositions of Inductor."""
    return variant // RESULTS % 4 == 3


def check_functional(one: Program, gm: fx.GraphModule, variant: int) -> tuple[int, int]:
    """Run the passes on a functional graph and compare with eager; sites applied and missed.

    A graph returns values; which of them are aliases of arguments the wrapper of AOTAutograd sees to, so
    sharing is compared with the graph before the passes.
    """
    if variant % 3 == 0:  # the in-place forms rest on AOTAutograd's order, in which copies come last
        write_early(gm.graph)
        gm.recompile()
    before = fx.GraphModule(gm, fx.Graph.__deepcopy__(gm.graph, {}))
    records = run_passes(gm, ATEN_PASSES, Context("aten", verify="static" if variant % 5 == 0 else "off"))
    if variant % 3 == 1:
        in_place.write_in_place(gm)
        gm.recompile()
    elif variant % 3 == 2:
        write_as_inductor(gm)
    fn = program(one.text)
    for call in (CALLS[0], CALLS[variant % len(CALLS)], CALLS[(variant // 7) % len(CALLS)]):
        compare(fn, gm, call, exact=True, aliases=False)
    compare(before, gm, CALLS[variant % len(CALLS)], exact=True, aliases=True)
    kinds = [r.kind for record in records if record.name == "contiguous_views" for r in record.remarks]
    return kinds.count("applied"), kinds.count("missed")


def check_compiled(one: Program, depth: str, calls: Sequence[tuple[int, int, int]] = CALLS[:3]) -> int:
    """Compile a program as a user would and compare with eager; sites applied."""
    from k3compile import report

    torch._dynamo.reset()
    options = {"inner": depth, "lower": {"short_conv": "meaning", "short_conv_export": "meaning"}}
    fn = program(one.text)
    compiled = torch.compile(fn, backend="k3", fullgraph=True, options=options)
    for call in calls:
        compare(fn, compiled, call, exact=depth != "inductor", aliases=True)
    return report.latest().applied("contiguous_views")


# ---- running many, and making a mismatch small ----


def check(one: Program, depth: str, variant: int) -> int:
    """Check one program at one depth; raises Mismatch. variant: how a functional graph is treated."""
    if depth == "functional":
        return check_functional(one, traced(one.text, decomposed(variant)), variant)[0]
    return check_compiled(one, depth)


def fails(one: Program, depth: str, variant: int, kind: type[Exception]) -> bool:
    """Whether a program still fails in this kind of way; one that is no program does not."""
    try:
        program(one.text)(*arguments(*CALLS[0]))
    except (NameError, RuntimeError, IndexError):
        return False
    try:
        check(one, depth, variant)
    except Exception as error:  # another kind is not the one that is being made small
        return type(error) is kind
    return False


def shrunk(one: Program, depth: str, variant: int, kind: type[Exception]) -> Program:
    """The program with as few lines and results as still fail in the same kind of way."""
    again = True
    while again:
        again = False
        smaller = [replace(one, lines=one.lines[:i] + one.lines[i + 1 :]) for i in range(len(one.lines))]
        smaller += [
            replace(one, results=one.results[:i] + one.results[i + 1 :])
            for i in range(len(one.results))
            if len(one.results) > 1
        ]
        for candidate in reversed(smaller):
            if fails(candidate, depth, variant, kind):
                one, again = candidate, True
                break
    return one


def complaint(one: Program, depth: str, variant: int, error: Exception) -> str:
    """The message of a failure: the smallest program, as Python that can be run."""
    small = shrunk(one, depth, variant, type(error))
    seed = variant // RESULTS if depth == "functional" else variant
    return (
        f"{type(error).__name__}: {error}\n\n# again: python tests/helpers/alias_fuzz.py {depth} {seed}\n"
        f"import sys\n\nsys.path[:0] = ['tests/helpers']\nimport torch\n"
        f"from alias_fuzz import Program, check\n\n\n{small.text}\n\n"
        f"check(Program({small.lines!r}, {small.results!r}), {depth!r}, {variant})\n"
    )


def run(depth: str, first: int, count: int) -> dict[str, float]:
    """Check ``count`` programs from ``first``; totals. Raises AssertionError with the smallest program."""
    started, seed = time.perf_counter(), first
    totals = {"programs": 0, "applied": 0, "missed": 0}
    while totals["programs"] < count:
        several = functional_programs(seed) if depth == "functional" else [(written(seed)[0], None, seed)]
        for one, gm, variant in several:
            try:
                sites = check_functional(one, gm, variant) if gm else (check_compiled(one, depth), 0)
            except Exception as error:
                raise AssertionError(complaint(one, depth, variant, error)) from error
            for name, number in zip(totals, (1, *sites)):
                totals[name] += number
        seed += 1
    return totals | {"seconds": time.perf_counter() - started}


def count_of(depth: str, lane: str) -> int:
    """How many programs a lane checks: all when K3_ACCEPT is set, or a tenth (slow), or a few (fast)."""
    if lane == "fast":
        return {"functional": 40, "aot_eager": 4, "inductor": 0}[depth]
    return FULL[depth] if os.environ.get("K3_ACCEPT") else FULL[depth] // 10


def run_part(depth: str, first: int, part: int, parts: int) -> None:
    """Check one of ``parts`` parts of half of the slow lane's count, and say how to run it again."""
    count = -(-count_of(depth, "slow") // 2 // parts)
    print(f"python tests/helpers/alias_fuzz.py {depth} {first + part * count} {count}")
    totals = run(depth, first + part * count, count)
    print(totals)
    assert totals["programs"] >= count


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1))
