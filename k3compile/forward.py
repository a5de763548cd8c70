"""The compiled forward of a model: one graph a kind of layer, for every batch mix, in one place.

    forward = compile_forward(model, pools, options)       warm: every kind is compiled when this returns
    hidden, taps = forward(step)

What keeps the number of graphs at the number of kinds (four for Kimi K3), however deep the model:

 * the unbound ``DecoderLayer.forward`` is compiled, so a layer's weights and pools are inputs of the graph;
 * ``dynamic=False``: with ``True`` a float read from the layer would become an input as well, and with
   ``None`` Dynamo remembers the widths of a model compiled before in the process and makes ours dynamic;
 * the ragged dimensions are declared by name for the time of the warm-up (``UNBACKED_SOURCES``), since the
   output of one layer, which is the input of the next, carries no mark;
 * the warm-up is a step of one token in slot 0 and page 0, which belong to no request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .backend import compile_with_report
from .direct import FEW_ROWS, Direct, DirectHead
from .export import Request, asking
from .kernels.choice import Chosen, Compute, by_meaning
from .options import CompileOptions
from .replay import Replays
from .report import Report
from .runtime.cache.pools import KdaPools, MlaPools
from .runtime.model import UNBACKED_SOURCES, DecoderLayer, Model, scores
from .runtime.step import Step
from .torch_private import probe_processor

log = logging.getLogger(__name__)
Pools = Sequence[KdaPools | MlaPools]
EXPORTS_OF_A_LAYER = 2  # its recurrent state and its conv window
DIRECT = {DecoderLayer.forward: Direct, scores: DirectHead}
SERVING = {"size_asserts": False, "alignment_asserts": False}  # Dynamo's guards check the inputs already


class LayerCompiler:
    """``DecoderLayer.forward``, compiled: call it with a layer in front of its arguments.

    max_requests: rows of a step that may export their state; a size of the graph. function: compiled in the
    same way instead.
    """

    def __init__(
        self,
        options: CompileOptions,
        max_requests: int = 1,
        function: Callable[..., Tensor] = DecoderLayer.forward,
    ) -> None:
        if options.inner == "inductor":
            options = replace(options, inductor=SERVING | dict(options.inductor))
            probe_processor()
        self.options, self.max_requests = options, max_requests
        self.reports: list[Report] = []  # one a graph, in the order of compilation
        self._direct: Direct | DirectHead | None = DIRECT[function]() if function in DIRECT else None
        self._forward = torch.compile(
            own_copy(function),
            backend=self._backend,
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,
        )

    def __call__(self, *args: Any) -> Tensor:
        return self._forward(*args) if self._direct is None else self._direct.call(self._forward, *args)

    def through_dynamo(self) -> int:
        """Calls of layers that Dynamo was asked about, to find their graph or to compile it."""
        return self._direct.through_dynamo if self._direct else 0

    def _backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._direct is None:
            return self._compile(gm, inputs)
        return self._direct.watched(gm, lambda: self._compile(gm, inputs))

    def _compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, report = compile_with_report(gm, inputs, self.options, self.max_requests)
        self.reports.append(report)
        return compiled


def own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own. Dynamo keeps graphs with the code, and counts them
    there over all compilers of a process: a hundred engines in a row would come to its limit of 256.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


class CompiledForward:
    """``forward(step) -> (hidden [T, D], taps [n, T, D])``, with the pools it was compiled for."""

    def __init__(
        self, model: Model, pools: Pools, options: CompileOptions, max_requests: int | None = None
    ) -> None:
        self.model, self.pools = model, pools
        self.seconds = 0.0
        self.exports = False  # whether a step's export columns are obeyed, in every layer; see warm_up
        self._inference = pools[0][0].is_inference()
        self.layer = LayerCompiler(options, max_requests or slots_of(pools))
        asked = {} if options.lower == "auto" else dict(options.lower)
        self.compute: Compute = by_meaning if options.plain else Chosen(asked)  # what ops outside layers are
        kept = model.place.resident == model.place.dtype  # else the head is widened, which a pass avoids
        self.head = None if kept else LayerCompiler(options, function=scores)
        on_host = options.replay and model.place.device.type == "cpu"
        self.replays = Replays(self._graphs, self.layer.through_dynamo) if on_host else None

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        # Graphs are guarded by whether inputs are inference tensors: the caller's mode must not matter.
        with torch.inference_mode(self._inference), torch.no_grad():
            if step.tokens.is_inference() != self._inference:
                step = Step(*(t.clone() for t in step))
            if self.replays is not None and step.tokens.shape[0] <= FEW_ROWS:
                return self.replays.call(step, self.model, self.pools)
            return self._graphs(step)

    def _graphs(self, step: Step) -> tuple[Tensor, Tensor]:
        """The pass, each layer by its graph."""
        with asking(Request(step.export_offset, step.export_slot)):
            return self.model(step, self.pools, layer=self.layer)

    def logits(self, hidden: Tensor) -> Tensor:
        """As Model.logits; compiled where the head is kept in another dtype than activations have."""
        if self.head is None:
            return self.model.logits(hidden)
        with torch.inference_mode(self._inference), torch.no_grad():
            if hidden.is_inference() != self._inference:
                hidden = hidden.clone()
            rows = self.model.logits(hidden.reshape(-1, hidden.shape[-1]), self.head)
            return rows.view(*hidden.shape[:-1], rows.shape[-1])

    @property
    def reports(self) -> list[Report]:
        """One a kind of layer, in the order in which the kinds first occur."""
        return self.layer.reports

    def graphs(self) -> int:
        """Graphs compiled so far; it stays what it was after the warm-up."""
        return len(self.reports)

    def warm_up(self) -> None:
        """Compile every kind of layer by a step of one token that no request owns."""
        started = time.perf_counter()
        with unbacked_rows():
            hidden, _ = self(null_step(self.model.place.device, self.layer.max_requests))
            self.logits(hidden)
        self.seconds = time.perf_counter() - started
        self.exports = self._exports()
        log.info("compiled %d kinds of layer in %.1f s", self.graphs(), self.seconds)

    def _exports(self) -> bool:
        """Whether each kind with a state writes its checkpoint, recurrent state and conv window alike. One
        that does not would leave a slot half written, and half a checkpoint is worse than none.
        """
        config = self.model.config
        kinds = dict.fromkeys(config.kind(i) for i in range(config.num_hidden_layers))
        if len(kinds) != len(self.reports):
            return False
        of_states = [r for (attention, *_), r in zip(kinds, self.reports) if attention == "kda"]
        return bool(of_states) and all(
            r.applied("state_export") == EXPORTS_OF_A_LAYER and not r.missed("state_export")
            for r in of_states
        )


def unbacked_rows() -> AbstractContextManager[None]:
    """Inside, a layer compiles to a graph for any number of rows, requests, pages and snapshots."""
    return torch.compiler.config.patch(unbacked_sources=f"{UNBACKED_SOURCES},L['hidden']:0")


def slots_of(pools: Pools) -> int:
    """The slots but the null one: no more requests can be in a step."""
    states = [layer.state for layer in pools if isinstance(layer, KdaPools)]
    return max(1, len(states[0]) - 1) if states else 1


def compile_forward(
    model: Model, pools: Pools, options: CompileOptions | None = None, max_requests: int | None = None
) -> CompiledForward:
    """Compile ``model`` for ``pools`` (of ``model.make_pools``) and warm it up: minutes if nothing is cached.

    max_requests: the most requests of a step, EngineConfig.max_num_seqs (None: one for each slot but the null
    one). Slot 0 and page 0 of the pools are written. Raises what :func:`k3compile.backend.compile_graph`
    raises, as torch._dynamo.exc.BackendCompilerFailed.
    """
    options = options or CompileOptions()
    forward = CompiledForward(model, pools, options, max_requests)
    forward.warm_up()
    return forward


def compile_in_background(
    model: Model,
    pools: Pools,
    options: CompileOptions,
    ready: Callable[[CompiledForward], None],
    failed: Callable[[Exception], None],
    max_requests: int | None = None,
) -> threading.Thread:
    """Compile on a thread of its own while the plain forward serves the same model and pools.

    ``ready(forward)`` or ``failed(error)`` is called on that thread, once. The thread is a daemon.
    """

    def work() -> None:
        try:
            forward = compile_forward(model, pools, options, max_requests)
        except Exception as error:  # whatever a compiler raises must reach the server, which goes on without
            log.exception("compiling in the background failed")
            failed(error)
            return
        ready(forward)

    thread = threading.Thread(target=work, name="k3-compile", daemon=True)
    thread.start()
    return thread


def null_step(device: torch.device, max_requests: int = 1) -> Step:
    """One decode token in the null slot and the null page; export columns of ``max_requests`` entries."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    no_export = torch.zeros(max_requests, dtype=torch.int32, device=device)
    return Step(
        tokens=ints(0),
        spans=torch.tensor([0, 1, 0]),
        cu_verify=ints(0),
        cu_other=ints(0, 1),
        slots=ints(0),
        seen=ints(0),
        pages=ints(0).view(1, 1),
        scratch=nothing.view(0, 1),
        anchor=nothing,
        export_offset=no_export,
        export_slot=no_export,
    )
