"""Compile a function with chosen ATen passes and nothing else, and compare it with eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from functorch.compile import make_boxed_func
from k3compile.passes.pipeline import ATEN_PASSES
from k3compile.passes.remarks import PassRecord, Remark
from k3compile.passes.runner import Context, run_passes
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table


class Compiled:
    """``fn`` behind Dynamo and AOTAutograd; keeps its graphs, as they are after the passes, and the records.

    decompose: with Inductor's decompositions, so that the passes meet index.Tensor and iota. unbacked: names
    of dimensions as for torch.compiler.config.unbacked_sources. context: fields of passes.runner.Context.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        passes: Sequence[Any] = ATEN_PASSES,
        *,
        decompose: bool = False,
        unbacked: str | None = None,
        dynamic: bool | None = False,
        **context: Any,
    ) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.records: list[PassRecord] = []
        self.passes, self.context, self.unbacked = passes, {"verify": "static", **context}, unbacked
        backend = aot_autograd(
            fw_compiler=self._optimise,
            decompositions=select_decomp_table() if decompose else {},
            keep_inference_input_mutations=True,
        )
        torch._dynamo.reset()
        self.fn = torch.compile(fn, backend=backend, fullgraph=True, dynamic=None if unbacked else dynamic)

    def _optimise(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.records += run_passes(gm, self.passes, Context("aten", **self.context))
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)

    def __call__(self, *args: Any) -> Any:
        patch = (
            torch.compiler.config.patch(unbacked_sources=self.unbacked) if self.unbacked else nullcontext()
        )
        with torch.no_grad(), patch:
            return self.fn(*args)

    def remarks(self, kind: str | None = None, name: str = "contiguous_views") -> list[Remark]:
        """Remarks of one pass, of one kind or of all."""
        found = [r for record in self.records if record.name == name for r in record.remarks]
        return [r for r in found if kind in (None, r.kind)]

    def missed(self) -> list[str]:
        """The reasons of contiguous_views, in graph order."""
        return [r.reason for r in self.remarks("missed")]

    def applied(self) -> list[str]:
        """The ops of the sites that were rewritten."""
        return [r.op for r in self.remarks("applied")]

    def targets(self) -> list[str]:
        """The names of all ops in the last graph."""
        return [str(n.target) for n in self.graphs[-1].graph.nodes if n.op == "call_function"]


def check(fn: Callable[..., Any], *calls: Sequence[Any], **options: Any) -> Compiled:
    """Compile ``fn``, run it for each argument list, and require eager's bits.

    Compared are the results, what became of the arguments, and which results share memory with which
    argument. With decompose the reference is the same graph without passes, since decompositions round
    differently.
    """
    compiled = Compiled(fn, **options)
    reference = Compiled(fn, (), **{**options, "verify": "off"}) if options.get("decompose") else fn
    expected = [run(reference, copies(args)) for args in calls]
    torch._dynamo.reset()
    for args, want in zip(calls, expected):
        got = run(compiled, copies(args))
        for (what, a), (_, b) in zip(got, want, strict=True):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert same, f"{what}: {a} and not {b}"
    return compiled


def run(fn: Callable[..., Any], args: Sequence[Any]) -> list[tuple[str, Any]]:
    """Everything that can be observed of one call."""
    with torch.no_grad():
        results = fn(*args)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    seen: list[tuple[str, Any]] = [(f"argument {i}", a) for i, a in enumerate(tensors)]
    for i, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            seen.append((f"result {i}", result.clone()))
            shares = [memory(result) == memory(a) for a in tensors]
            seen.append((f"aliases of result {i}", shares))
    return seen


def memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def copies(args: Sequence[Any]) -> list[Any]:
    """Clones that keep what the arguments share with each other and how they are laid out."""
    storages: dict[int, torch.UntypedStorage] = {}
    fresh = []
    for a in args:
        if isinstance(a, torch.Tensor):
            storage = storages.setdefault(memory(a), a.untyped_storage().clone())
            a = torch.empty(0, dtype=a.dtype).set_(storage, a.storage_offset(), a.shape, a.stride())
        fresh.append(a)
    return fresh
