"""The graphs of a model on one rank, traced and rewritten as for serving, without a byte of its weights.

    layers    one graph a kind        weights and pools are fake tensors; the step is a real one of one token
    outside   Model.forward with its layers taken out: embedding, bank of snapshots, last mix and norm
    logits    Model.logits

Serving compiles the layers (:mod:`k3compile.forward`) and runs the other two as they are written; those are
traced to be counted. Nothing that is compiled here runs: a stand-in takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..backend import compile_with_report
from ..dump import recording
from ..forward import LayerCompiler, null_step
from ..graph_capture import timelines
from ..graphdiff.timeline import Timeline
from ..kinds import CompiledKind
from ..options import CompileOptions, pass_names
from ..report import Report
from ..runtime.config import K3Config
from ..runtime.model import UNBACKED_SOURCES, DecoderLayer, Model
from ..runtime.parallel.ranks import Ranks
from .mix import Mix

OUTSIDE, LOGITS = "outside the layers", "logits"


class Part(NamedTuple):
    """One graph of a step. layers: those that run it; none where it runs once, uncompiled."""

    name: str
    layers: tuple[int, ...]
    timeline: Timeline
    report: Report

    @property
    def compiled(self) -> bool:
        """Whether serving runs what the passes leave of it."""
        return bool(self.layers)


class Traced(LayerCompiler):
    """Layers as serving compiles them, but a call of one gives nothing: no weight has a value."""

    def _compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        super()._compile(gm, inputs)
        return stand_in(gm)


def trace(
    config: K3Config, ranks: Ranks, mix: Mix, options: CompileOptions, dtype: torch.dtype
) -> list[Part]:
    """The kinds of layer in the order in which they occur, what lies outside of layers, and the logits.

    dtype: of activations and weights. Raises what :func:`k3compile.backend.compile_graph` raises.
    """
    torch._dynamo.reset()  # a rank's sizes are not to be taken for another batch of the last one's
    with FakeTensorMode():
        model = Model(config, dtype, ranks=ranks)
        pools = model.make_pools(2, 2, mix.page_size, mix.drafts)
    layers: dict[tuple[str, str, bool], list[int]] = {}
    for index in range(config.num_hidden_layers):
        layers.setdefault(config.kind(index), []).append(index)

    step = null_step(torch.device("cpu"), mix.max_requests)
    p = torch.zeros(1, config.hidden_size, dtype=dtype)
    blocks = torch.zeros(config.num_snapshots, *p.shape, dtype=dtype)
    compiler = Traced(options, mix.max_requests)
    plain = Plain(options)
    with recording() as seen, torch.no_grad(), unbacked():
        for first, *_ in layers.values():
            compiler(model.layers[first], p, blocks, pools[first], step)
        plain(Model.forward, model, step, pools, layer=leave_out)
        plain(Model.logits, model, p)
    found = {one.graph: one for one in timelines(seen)}
    kinds = zip(layers.items(), compiler.reports, strict=True)
    named = [(CompiledKind(kind, len(its), made).name, tuple(its), made) for (kind, its), made in kinds]
    named += [(name, (), made) for name, made in zip((OUTSIDE, LOGITS), plain.reports, strict=True)]
    return [Part(name, its, found[made.key], made) for name, its, made in named]


class Plain:
    """Traces a function that serving does not compile: no pass looks at it."""

    def __init__(self, options: CompileOptions) -> None:
        self.options = replace(options, disable=tuple(pass_names()))
        self.reports: list[Report] = []

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.reports.append(compile_with_report(gm, inputs, self.options)[1])
            return stand_in(gm)

        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)


def leave_out(layer: DecoderLayer, p: torch.Tensor, *others: Any) -> torch.Tensor:
    """In the place of a layer."""
    return p


def stand_in(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """What Dynamo may call instead of the graph: as many results, none of them a value."""
    (output,) = gm.graph.find_nodes(op="output")
    results = (None,) * len(output.args[0])
    return lambda *args: results


@contextmanager
def unbacked() -> Iterator[None]:
    """Inside, graphs are for any number of rows: those of layers, and the rows that get logits."""
    with torch.compiler.config.patch(unbacked_sources=f"{UNBACKED_SOURCES},L['hidden']:0"):
        yield
