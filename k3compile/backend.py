"""The life of a graph: Dynamo's graph in, a callable out.

    Dynamo graph -> copy -> Dynamo passes -> AOTAutograd -> ATen passes -> lowering -> inner compiler
                      \\______ a precondition fails: handed on without passes, and the report says so

The report is kept whatever happened; on a warm cache, where no pass runs, it is read back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from . import inner, islands, report, reproduce, torch_private, versions
from .dump import dumper, told_in
from .example_values import concrete
from .export import EXPORT_ROWS
from .extra_inputs import supplied
from .features import FEATURES, resolve
from .fingerprint import fingerprint
from .generated import counts
from .graphdiff.measures import sizes_of
from .opened_ops import open_all, without_gradient
from .opened_ops import wanted as open_ops_wanted
from .options import CompileOptions, Switches, read_switches
from .passes import pipeline, snapshot
from .passes.graph import fake_mode_of
from .passes.history import Recorder
from .passes.input_names import carry, names_of
from .passes.lower import CannotObey, Lower
from .passes.multi_version import GENERIC, RANGES, range_inputs
from .passes.no_site import explained, nothing_for_us
from .passes.remarks import PassRecord
from .passes.runner import Context, Fuel, run_passes
from .passes.source import location
from .passes.symbol_names import SymbolNames, renamed
from .verify import Differential

log = logging.getLogger(__name__)
_fuel: dict[int, Fuel] = {}  # one tank a process for each K3_FUEL value, shared by its graphs


def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions) -> Callable[..., Any]:
    """Compile one graph as ``options`` say. ``gm`` itself is left alone: Dynamo reads it again.

    Raises PassError for a failing pass (on_error ``raise``), CannotObey for an implementation that cannot be
    used, ValueError for an unmet ``require``; whatever the inner compiler raises.
    """
    return compile_with_report(gm, inputs, options)[0]


def compile_with_report(
    gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions, max_requests: int | None = None
) -> tuple[Callable[..., Any], report.Report]:
    """:func:`compile_graph`, and the report that it kept.

    max_requests: rows of a step, where our runtime calls the graph; None where we know nothing of the caller.
    """
    return Compile(gm, inputs, options, read_switches(), max_requests).run()


class Compile:
    """One call of the backend. Dynamo may call twice for one artifact; the report has the same key then."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        options: CompileOptions,
        switches: Switches,
        max_requests: int | None = None,
    ) -> None:
        self.gm, self.inputs, self.options, self.switches = gm, inputs, options, switches
        self.started = time.perf_counter()
        self.opened = options.plain or open_ops_wanted()
        self.fuel = tank(switches.fuel)
        self.inner = options.inner
        self.records: list[PassRecord] = []
        self.notes: list[str] = []
        self.stepped: list[str] = []  # why an earlier try of this compile was given up
        self.graphs: dict[str, str] = {}
        self.compare = Differential(concrete(gm.graph, inputs))
        self.generated: list[dict[str, int]] = []
        self.passes_ran = False
        self.fixed: list[Any] = []  # added inputs as AOTAutograd is to see them
        self.device = next((t.device.type for t in inputs if isinstance(t, torch.Tensor)), "cpu")
        self.max_requests = max_requests
        self.settings = resolve(
            options.features,
            tensor_parallel=dist.get_world_size() if dist.is_initialized() else 1,
            device=self.device,
            serving=max_requests is not None,
        )
        self.symbols = SymbolNames()  # one language for snapshots and remarks
        self.sizes: dict[str, str] = {}
        before = snapshot.snapshot(gm, "dynamo", self.symbols)
        places = [location(node) for node in gm.graph.nodes]
        self.sources = tuple(str(place) if place else None for place in places)
        self.indices = [] if options.range_source == "prove" else range_inputs(gm)
        self.annotated = versions.worth_a_body(self.indices, inputs)
        words = {"opened": self.opened, "fuel": self.fuel.left, "annotated": self.annotated}
        words["max_requests"] = max_requests
        words["disabled"] = sorted(switches.disable)
        self.name = fingerprint(options, gm, inputs, **words)
        self.key = f"{snapshot.digest(before)}-{self.name[:12]}"
        self.dump = dumper(switches.dump, self.key)

    def run(self) -> tuple[Callable[..., Any], report.Report]:
        """Compile, then keep the report."""
        if objection := torch_private.version_objection():
            return self.hand_on(torch_private.clone_dynamo_graph(self.gm), objection)
        if objection := training_objection(self.gm):
            gm = torch_private.clone_dynamo_graph(self.gm)
            self.open(gm)  # a meaning can be differentiated, an op cannot
            if lost := without_gradient(gm):
                raise ValueError(f"no gradient goes through {lost}: call under torch.no_grad()")
            return self.hand_on(gm, objection, guarded=True)
        try:
            compiled = self.compile_or_step_back()
        except Exception as error:  # whatever it is, it goes on; what can be run again is written first
            if not isinstance(error, torch_private.RestartAnalysis) and not obeys(error):
                reproduce.announce(error, self.write_reproducer(error))
            raise
        made = self.make_report()
        self.check_required(made)
        return compiled, self.keep(made)

    def compile_or_step_back(self) -> Callable[..., Any]:
        """Compile; where Inductor cannot, or would do it wrongly, step back to what can be, and say so."""
        try:
            return self.compile()
        except inner.UnsafeForInductor as error:
            self.stepped.append(f"compiled with aot_eager: {error}")
            self.inner = "aot_eager"
        except torch_private.InductorError as error:
            torn = torch_private.delete_torn_library(error)
            again = f"a compile that was killed had left {torn} torn: made again"
            if torn and again not in self.stepped:  # once each, or a library that stays bad would loop
                self.stepped.append(again)
            elif self.opened:
                first = str(error).strip().splitlines()[0]
                self.stepped.append(
                    f"only pure ops are opened: Inductor cannot compile all of them opened ({first})"
                )
                self.opened = False
            else:
                raise
        self.notes, self.records, self.graphs, self.passes_ran = [*self.stepped], [], {}, False
        self.generated = []
        return self.compile_or_step_back()

    def compile(self) -> Callable[..., Any]:
        """Passes and the inner compiler, on a copy of the graph."""
        gm = torch_private.clone_dynamo_graph(self.gm)
        if self.opened:
            self.open(gm)
        ctx = self.context("dynamo", gm)
        self.records += run_passes(gm, pipeline.DYNAMO_PASSES, ctx)
        gm.recompile()
        added = [extra.example for extra in ctx.extra_inputs]
        self.fixed = torch_private.fix_sizes(added, self.inputs)
        inputs = [*self.inputs, *added]
        return supplied(self.compile_bodies(gm, inputs, ctx), ctx.extra_inputs)

    def compile_bodies(self, gm: fx.GraphModule, inputs: list[Any], ctx: Context) -> Callable[..., Any]:
        """The graph compiled, and again for ranges where indices among its inputs are annotated.

        The body for ranges comes last: the passes of the other must not rest on facts of annotations.
        """
        taken = [] if "contiguous_views" in ctx.disabled else self.annotated
        copy, made = torch_private.clone_dynamo_graph(gm), versions.symbols_made(gm)
        body = self.compile_body(gm, inputs, GENERIC if taken else "")
        if taken:
            starts = versions.use_ranges_of(taken, copy, inputs, ctx, made)
            self.fixed += torch_private.fix_sizes([starts], inputs)
            try:
                with torch_private.scalars_allowed(fake_mode_of(copy.graph)):  # it reads its first rows
                    ranges = self.compile_body(copy, [*inputs, starts], RANGES)
            except (inner.UnsafeForInductor, torch_private.InductorError) as error:
                self.records = [record for record in self.records if record.body != RANGES]
                first = str(error).strip().splitlines()[0]
                self.notes.append(f"annotated ranges are not used: {first}")
            else:
                self.notes.append(versions.note(taken))
                body = versions.pick(body, ranges, taken)
        return versions.comparing(body, self.indices) if self.options.range_source == "check" else body

    def compile_body(self, gm: fx.GraphModule, inputs: Sequence[Any], body: str) -> Callable[..., Any]:
        """What the inner compiler and the ATen passes make of a Dynamo graph that is ready."""
        optimise = partial(self.optimise, body=body, inputs=names_of(gm))
        if self.inner == "inductor":
            name = None if self.must_run() else f"{self.name} {body}".rstrip()
            with torch_private.generated_code() as code:
                compiled = inner.inductor(gm, inputs, optimise, name, dict(self.options.inductor))
            self.generated.append(counts(code))
            return compiled
        return inner.aot(gm, inputs, optimise, by_node=self.inner == "eager")

    def optimise(self, gm: fx.GraphModule, body: str, inputs: Sequence[str]) -> None:
        """The ATen passes and lowering, on one functional graph. inputs: what the user calls them."""
        self.passes_ran = True
        carry(inputs, gm)
        ctx = replace(self.context("aten", gm), body=body)
        guards = torch_private.guards_of(ctx.fake_mode)
        fuses = self.inner == "inductor"
        table = torch_private.decompositions_of_inductor() if fuses else {}
        providers = {} if self.options.lower == "auto" else self.options.lower
        self.graphs[f"aten {body}".rstrip()] = snapshot.digest(snapshot.snapshot(gm))
        self.sizes |= sizes_of(snapshot.snapshot(gm, "aten", self.symbols)["nodes"])
        self.records += run_passes(gm, pipeline.ATEN_PASSES, ctx)
        lower = Lower(fuses, providers, table)
        self.records += run_passes(gm, (lower,), ctx)
        self.graphs[f"lowered {body}".rstrip()] = snapshot.digest(snapshot.snapshot(gm))
        if islands.compiler_of(self.inner):
            self.records += run_passes(gm, (islands.islands(self.inner, self.options.on_error),), ctx)
        added = torch_private.guards_of(ctx.fake_mode)[len(guards) :]
        self.notes += [f"a pass added the guard {guard}" for guard in added]

    def context(self, level: str, gm: fx.GraphModule) -> Context:
        """What the runner is told for a graph of this level."""
        off = {name for name, f in FEATURES.items() if f.by == "pass" and not self.settings[name].on}
        if self.opened:
            off.add("state_export")  # a convolution that was opened leaves no window
            off.add("read_bf16")  # it would put a closed op in again
        return Context(
            level=level,
            disabled=frozenset(off | set(self.options.disable) | set(self.switches.disable)),
            fuel=self.fuel,
            veto=torch_private.bisector_veto,
            verify=self.options.verify,
            compare=self.compare,
            on_error=self.options.on_error,
            never_undone=(CannotObey,),
            on_undone=self.note_undone,
            fake_mode=self.fake_mode(level, gm),
            clone_graph=torch_private.clone_graph,
            snapshot=Recorder(level, self.symbols) if self.dump else lambda gm: None,
            on_pass=self.dump and told_in(self.symbols, self.dump),
            export_rows=self.max_requests or EXPORT_ROWS,
        )

    def fake_mode(self, level: str, gm: fx.GraphModule) -> FakeTensorMode | None:
        """That of the graph's values; for a Dynamo graph it is another than the one AOTAutograd will use."""
        if level == "dynamo":
            return None
        return torch_private.fake_mode_of([n.meta.get("val") for n in gm.graph.nodes] or self.inputs)

    def write_reproducer(self, error: Exception) -> Path | None:
        """The folder that makes this compile fail again; the graph in it is the one before passes."""
        folder = self.switches.dump or torch_private.cache_folder()
        return reproduce.write(folder, self.key, self.gm, self.inputs, self.options, error)

    def note_undone(self, name: str, error: Exception) -> None:
        """Say loudly that a pass was undone: the program runs without its rewrites."""
        folder = self.write_reproducer(error)
        where = f"; reproducer: python {folder / 'repro.py'}" if folder else ""
        self.notes.append(f"pass {name} failed and was undone ({type(error).__name__}: {error}){where}")
        log.warning("graph %s: %s", self.key, self.notes[-1])

    def must_run(self) -> bool:
        """Whether the passes have to run even where a cache could answer."""
        return self.dump is not None or torch_private.bisecting()

    def open(self, gm: fx.GraphModule) -> None:
        """Open every op that can be, and say which cannot."""
        count, closed = open_all(gm)
        if count:
            self.notes.append(f"{count} k3 ops opened before tracing")
        if closed:
            self.notes.append(f"cannot be opened: {', '.join(closed)}")

    def hand_on(
        self, gm: fx.GraphModule, reason: str, guarded: bool = False
    ) -> tuple[Callable[..., Any], report.Report]:
        """What the inner compiler alone makes of ``gm``; guarded: nothing that Inductor computes wrongly."""
        patches = dict(self.options.inductor)
        if self.inner == "inductor" and guarded:
            try:
                copy = torch_private.clone_dynamo_graph(gm)
                compiled = inner.inductor(copy, self.inputs, None, f"{self.name} guard", patches)
            except inner.UnsafeForInductor as error:
                self.notes.append(f"compiled with aot_eager: {error}")
                self.inner = "aot_eager"
                compiled = inner.other("aot_eager", gm, self.inputs)
        elif self.inner == "inductor":
            compiled = torch_private.compile_with_inductor(gm, self.inputs, patches)
        elif islands.compiler_of(self.inner):
            compiled = inner.other("aot_eager", gm, self.inputs)
            self.notes.append("no islands are taken of a graph without passes: compiled with aot_eager")
        else:
            compiled = inner.other(self.inner, gm, self.inputs)
        self.passes_ran = True  # there are none: no stored report would say more
        return compiled, self.keep(replace(self.make_report(), status="handed on", reason=reason))

    def keep(self, made: report.Report) -> report.Report:
        return report.keep(made, torch_private.cache_folder(), self.options.report)

    def make_report(self) -> report.Report:
        """This compile's report, or the stored one where a cache answered."""
        made = report.Report(
            key=self.key,
            status="compiled",
            inner=self.inner,
            features={name: self.state_of(name) for name in self.settings},
            reason=self.nothing_here(),
            records=tuple(renamed(self.symbols, explained(self.records))),
            sizes=dict(sorted(self.sizes.items())),
            notes=tuple(self.notes),
            graphs=tuple(self.graphs.items()),
            generated=tuple(self.generated),
            seconds=time.perf_counter() - self.started,
            sources=self.sources,
            torch=torch.__version__,
        )
        if self.inner != "inductor" or (self.passes_ran and not self.annotated):
            return made
        found = report.stored(self.key, torch_private.cache_folder())
        if self.passes_ran:
            return versions.completed(made, found)
        if found is None:
            gone = "the compile cache had this graph but its report is gone; clear the cache to see one again"
            return replace(made, status="cached", notes=(*self.notes, gone))
        return replace(report.with_lines_of(found, self.sources), status="cached", seconds=made.seconds)

    def nothing_here(self) -> str:
        """What the report says of a graph that the inner compiler gets as it came."""
        if not self.passes_ran or self.opened or not self.records or not nothing_for_us(self.records):
            return ""
        if any(record.body for record in self.records):
            return ""  # there are two bodies, which is not what it came as
        return f"nothing here for k3, so it is what {self.inner} alone makes of it"

    def state_of(self, name: str) -> str:
        """A feature's setting; ``absent`` where no pass implements it yet."""
        built = {p.name for p in (*pipeline.DYNAMO_PASSES, *pipeline.ATEN_PASSES)}
        absent = FEATURES[name].by == "pass" and name not in built
        return "absent" if absent and self.settings[name].on else self.settings[name].state

    def check_required(self, made: report.Report) -> None:
        """Raise ValueError where a pass applied fewer sites than required of a graph that has some."""
        for name, count in self.options.require.items():
            applied, missed = made.applied(name), made.missed(name)
            if applied + len(missed) and applied < count:
                reasons = "; ".join(dict.fromkeys(missed)) or "there were no more sites"
                raise ValueError(f"{name} applied {applied} of the required {count} sites: {reasons}")


def training_objection(gm: fx.GraphModule) -> str | None:
    """Why a graph is for training, or None: an output, or what is left in an input, wants a gradient."""
    (output,) = gm.graph.find_nodes(op="output")
    advice = "call under torch.no_grad() or torch.inference_mode()"
    results = [node.meta.get("example_value") for node in output.all_input_nodes]
    if any(isinstance(v, torch.Tensor) and v.requires_grad for v in results):
        return f"an output requires a gradient; {advice}"
    if torch.is_grad_enabled():
        given = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        if any(isinstance(v, torch.Tensor) and v.grad_fn is not None for v in given):  # Dynamo wrote into it
            return f"an input is written with what requires a gradient, or is computed from it; {advice}"
    return None


def obeys(error: BaseException) -> bool:
    """Whether an error says that the user's own choice cannot be had, which no reproducer would add to."""
    return isinstance(error, CannotObey) or (error.__cause__ is not None and obeys(error.__cause__))


def tank(amount: int | None) -> Fuel:
    """The fuel of this process."""
    return Fuel() if amount is None else _fuel.setdefault(amount, Fuel(amount))
