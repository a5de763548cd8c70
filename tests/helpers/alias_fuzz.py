"""Random programs about shared memory, checked at three depths against eager; a mismatch is made small.

    functional    traced once as a functional graph, several choices of results, passes run on each,
                  interpreted: fast, no Dynamo                                        20,000 in make accept
    aot_eager     torch.compile(backend="k3", options={"inner": "aot_eager"})            500
    inductor      torch.compile(backend="k3")                                             40

    python tests/helpers/alias_fuzz.py aot_eager 1234        runs program 1234 again and makes it small

The programs are those of alias_programs and more: strided views at data-dependent offsets, gather and
scatter, several spellings of one write, test ops and k3 ops that write their arguments.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from alias_programs import RANGES, ROWS, WIDTH, Writer, program
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

DEPTHS = ("functional", "aot_eager", "inductor")
FULL = {"functional": 20_000, "aot_eager": 500, "inductor": 40}
HEADER = """def program(a, b, pools, spans, pick, cu):
    n0, n1, k = spans[0].item(), spans[1].item(), spans[2].item()
    torch._check(n0 >= 0)
    torch._check(n0 <= n1)
    torch._check(n1 <= 8)
    torch._check(k >= 0)
    torch._check(k <= 5)
"""
CALLS = [(2, 5, 1), (0, 0, 0), (8, 8, 5), (3, 3, 3), (0, 8, 2), (1, 6, 4)]  # n0, n1, k


class FuzzWriter(Writer):
    """Programs over everything our passes look at. ``pools`` is [2, 3, WIDTH], the windows of short_conv."""

    KINDS = [
        "gather",
        "gather",
        "scatter",
        "scatter",
        "put",
        "assign",
        "scale",
        "custom",
        "view",
        "pure",
        "clone",
        "strided",
        "strided",
        "strided_custom",
        "convolve",
        "gather2",
        "scatter2",
        "slice_scatter",
        "add_at",
        "column",
        "pool_row",
    ]

    def put(self, new: str) -> None:
        start, end, length = self.range(used=True)
        base, rows, index = self.any("8"), self.any(length), self.index(start, end)
        how = self.rng.choice(
            ["{b}[{i}] = {r} * 1", "{b}.index_put_(({i},), {r} + 0)", "torch.index_put({b}, ({i},), {r})"]
        ).format(b=base, i=index, r=rows)
        if how.startswith("torch"):
            self.line(how, new, "8")
        else:
            self.line(how)

    def strided(self, new: str) -> None:
        base = self.any("8")
        how = self.rng.choice(["narrow(0, k, 3)", "t().narrow(1, k, 3).t()", "narrow(0, k, 3).flip(0)"])
        self.line(f"{base}.{how}", new, "3", None if "flip" in how else self.owner[base])

    def strided_custom(self, new: str) -> None:
        rows, target = self.any("3"), self.any("8")
        if rows in self.length and self.owner[rows] != self.owner[target]:
            view = self.rng.choice(["narrow(0, k, 3)", "t().narrow(1, k, 3).t()", "narrow(0, 2, 3)"])
            self.line(f"torch.ops.k3test.rev_into({rows}, {target}.{view})")

    def convolve(self, new: str) -> None:
        length = self.rng.choice(["8", "3"])
        rows, slot = self.any(length), self.rng.choice([0, 1])
        cu = "cu[0]" if length == "8" else "cu[1]"
        slots = f"pick[{slot}:{slot + 1}] % 2"
        self.line(
            f"torch.ops.k3.short_conv({rows}, a.new_ones({WIDTH}, 4), pools, {slots}, {cu})", new, length
        )

    def pool_row(self, new: str) -> None:
        self.line(f"pools[{self.rng.choice([0, 1])}]", new, "3", "pools")

    def gather2(self, new: str) -> None:
        start, end, length = self.range(used=False)
        index = f"({self.index(start, end)}).unsqueeze(1).expand(-1, {WIDTH})"
        self.line(f"{self.any('8')}.gather(0, {index})", new, length)

    def scatter2(self, new: str) -> None:
        start, end, length = self.range(used=True)
        index = f"({self.index(start, end)}).unsqueeze(1).expand(-1, {WIDTH})"
        self.line(f"{self.any('8')}.scatter_(0, {index}, {self.any(length)} * 1)")

    def slice_scatter(self, new: str) -> None:
        start, end, length = self.range(used=True)
        self.line(f"torch.slice_scatter({self.any('8')}, {self.any(length)}, 0, {start}, {end})", new, "8")

    def add_at(self, new: str) -> None:
        start, end, length = self.range(used=True)
        index = self.index(start, end)
        self.line(f"{self.any('8')}.index_add_(0, {index}, {self.any(length)} + 0)")

    def column(self, new: str) -> None:
        how = self.rng.choice(["flip(0)", "index_select(1, torch.arange(0, 3))", "cumsum(0)"])
        base = self.any()
        self.line(f"{base}.{how}", new, self.length[base])

    def any(self, length: str | None = None) -> str:
        fitting = [v for v, rows in sorted(self.length.items()) if length in (None, rows)]
        if not fitting:  # every length can be cut from the first input
            start, end, _ = next(r for r in RANGES.values() if r[2] == length)
            return f"a[{start}:{end}].clone()"
        return self.rng.choice(fitting)


@dataclass(frozen=True)
class Program:
    """Lines of a body, and what it returns: expressions over its variables."""

    lines: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def text(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"{HEADER}{body}    return {', '.join(self.results)},\n"


def written(seed: int, steps: int = 8) -> tuple[Program, list[str]]:
    """Program ``seed``, and every variable it could have returned."""
    writer = FuzzWriter(seed)
    for step in range(steps):
        kind = writer.rng.choice(FuzzWriter.KINDS)
        writer_kind = getattr(writer, kind)
        writer_kind(f"v{step}")
    return Program(tuple(writer.lines), tuple(chosen(writer))), sorted(writer.length)


def chosen(writer: Writer) -> list[str]:
    """Some of the variables, as they are or as values of their own."""
    return writer.results().split(", ")


def arguments(n0: int, n1: int, k: int, seed: int = 0) -> list[torch.Tensor]:
    """Arguments of any program; whole numbers, so that no order of adding them rounds."""
    made = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (ROWS, WIDTH), generator=made).float() for _ in range(2))
    pools = torch.randint(-2, 3, (2, 3, WIDTH), generator=made).float()
    pick = torch.randperm(ROWS, generator=made)
    return [a, b, pools, torch.tensor([n0, n1, k]), pick, torch.tensor([[0, 8], [0, 3]])]


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


def functional_programs(seed: int, results: int = 4) -> Iterator[tuple[Program, fx.GraphModule, Program]]:
    """Programs ``seed``: one body, several choices of what is returned; each with its functional graph."""
    body, variables = written(seed)
    everything = replace(body, results=(*variables, *(f"{v} + 1" for v in variables)))
    gm = traced(everything.text, decompose=seed % 4 == 3)
    rng = FuzzWriter(seed + 1).rng
    for which in range(results):
        names = body.results if which == 0 else rng.sample(everything.results, rng.randint(1, 4))
        names = [n for n in names if n in everything.results]
        yield (
            replace(body, results=tuple(names)),
            with_results(gm, [everything.results.index(n) for n in names]),
            everything,
        )


def check_functional(one: Program, gm: fx.GraphModule, seed: int) -> tuple[int, int]:
    """Run the passes on a functional graph and compare with eager; sites applied and missed.

    A graph returns values; which of them are aliases of arguments the wrapper of AOTAutograd sees to, so
    sharing is compared with the graph before the passes.
    """
    if seed % 3 == 0:  # the in-place forms rest on AOTAutograd's order, in which copies come last
        write_early(gm.graph)
        gm.recompile()
    before = fx.GraphModule(gm, fx.Graph.__deepcopy__(gm.graph, {}))
    records = run_passes(gm, ATEN_PASSES, Context("aten", verify="static" if seed % 8 == 0 else "off"))
    if seed % 3 == 1:
        in_place.write_in_place(gm)
        gm.recompile()
    elif seed % 3 == 2:
        write_as_inductor(gm)
    fn = program(one.text)
    for call in (CALLS[0], CALLS[seed % len(CALLS)], CALLS[(seed // 7) % len(CALLS)]):
        compare(fn, gm, call, exact=True, aliases=False)
    compare(before, gm, CALLS[seed % len(CALLS)], exact=True, aliases=True)
    kinds = [r.kind for record in records if record.name == "contiguous_views" for r in record.remarks]
    return kinds.count("applied"), kinds.count("missed")


def check_compiled(one: Program, depth: str, calls: Sequence[tuple[int, int, int]] = CALLS[:3]) -> int:
    """Compile a program as a user would and compare with eager; sites applied."""
    from k3compile import report

    torch._dynamo.reset()
    options = {"inner": depth, "lower": {"short_conv": "meaning"}}
    fn = program(one.text)
    compiled = torch.compile(fn, backend="k3", fullgraph=True, options=options)
    for call in calls:
        compare(fn, compiled, call, exact=depth != "inductor", aliases=True)
    return report.latest().applied("contiguous_views")


# ---- running many, and making a mismatch small ----


def check(one: Program, depth: str, seed: int) -> int:
    """Check one program at one depth; raises Mismatch."""
    if depth == "functional":
        return check_functional(one, traced(one.text, decompose=seed % 4 == 3), seed)[0]
    return check_compiled(one, depth)


def fails(one: Program, depth: str, seed: int, kind: type[Exception]) -> bool:
    """Whether a program still fails in this kind of way; one that is no program does not."""
    try:
        program(one.text)(*arguments(*CALLS[0]))
    except (NameError, RuntimeError, IndexError):
        return False
    try:
        check(one, depth, seed)
    except Exception as error:  # another kind is not the one that is being made small
        return type(error) is kind
    return False


def shrunk(one: Program, depth: str, seed: int, kind: type[Exception]) -> Program:
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
            if fails(candidate, depth, seed, kind):
                one, again = candidate, True
                break
    return one


def complaint(one: Program, depth: str, seed: int, error: Exception) -> str:
    """The message of a failure: the smallest program, as Python that can be run."""
    small = shrunk(one, depth, seed, type(error))
    return (
        f"{type(error).__name__}: {error}\n\n# again: python tests/helpers/alias_fuzz.py {depth} {seed}\n"
        f"import sys\n\nsys.path[:0] = ['tests/helpers']\nimport torch\n"
        f"from alias_fuzz import Program, check\n\n\n{small.text}\n\n"
        f"check(Program({small.lines!r}, {small.results!r}), {depth!r}, {seed})\n"
    )


def run(depth: str, first: int, count: int) -> dict[str, float]:
    """Check ``count`` programs from ``first``; totals. Raises AssertionError with the smallest program."""
    rev_into()
    started, done, applied, missed, seed = time.perf_counter(), 0, 0, 0, first
    while done < count:
        if depth == "functional":
            for one, gm, _ in functional_programs(seed):
                try:
                    sites = check_functional(one, gm, seed)
                except Exception as error:
                    raise AssertionError(complaint(one, depth, seed, error)) from error
                applied, missed, done = applied + sites[0], missed + sites[1], done + 1
        else:
            one, _ = written(seed)
            try:
                applied += check_compiled(one, depth)
            except Exception as error:
                raise AssertionError(complaint(one, depth, seed, error)) from error
            done += 1
        seed += 1
    seconds = time.perf_counter() - started
    return {"programs": done, "applied": applied, "missed": missed, "seconds": seconds}


def count_of(depth: str, lane: str) -> int:
    """How many programs a lane checks: all when K3_ACCEPT is set, or a tenth (slow), or a few (fast)."""
    if lane == "fast":
        return {"functional": 40, "aot_eager": 4, "inductor": 0}[depth]
    return FULL[depth] if os.environ.get("K3_ACCEPT") else FULL[depth] // 10


def rev_into() -> None:
    """Declare the test op where no test session has: last row first, so that it reads its own writes."""
    if hasattr(torch.ops.k3test, "rev_into"):
        return
    global _library
    _library = torch.library.Library("k3test", "FRAGMENT")

    def reverse_into(source: torch.Tensor, target: torch.Tensor) -> None:
        for row in range(source.shape[0]):
            target[source.shape[0] - 1 - row] = source[row]

    _library.define("rev_into(Tensor source, Tensor(a!) target) -> ()")
    _library.impl("rev_into", reverse_into, "CompositeExplicitAutograd")
    torch.library.register_fake("k3test::rev_into", lambda source, target: None, lib=_library)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1))
