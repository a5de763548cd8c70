"""Compile one layer of every kind a configuration has, without its weights: what would the passes do to it?

    [(("kda", "dense", True), 1 layer, report), (("kda", "moe", False), 62 layers, report), ...]

Weights do not change a graph, so one layer a kind is enough, unfilled, however large the model: one token
reads a few experts, and the memory of the others is never touched.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from .forward import LayerCompiler, null_step, unbacked_rows
from .options import CompileOptions
from .report import Report
from .runtime.config import K3Config
from .runtime.model import Model

Kind = tuple[str, str, bool]
TOUCHED = 2**20  # smaller parameters are filled with zeros, larger ones left as they come


class CompiledKind(NamedTuple):
    """One kind of layer: (attention, feed-forward, snapshot), how many layers are like it, what was done."""

    kind: Kind
    layers: int
    report: Report

    @property
    def name(self) -> str:
        """``kda+moe+snapshot``"""
        attention, ffn, snapshot = self.kind
        return "+".join([attention, ffn, *(["snapshot"] if snapshot else [])])


def compile_kinds(
    config: K3Config, options: CompileOptions, dtype: torch.dtype = torch.float32
) -> list[CompiledKind]:
    """Compile the first layer of each kind for one token; kinds in the order in which they occur.

    Raises what :func:`k3compile.backend.compile_graph` raises.
    """
    counts = Counter(config.kind(i) for i in range(config.num_hidden_layers))
    model = Model(config, dtype, device="meta")
    pools = model.make_pools(num_slots=1, num_pages=1, page_size=1)
    compiler = LayerCompiler(options)
    step = null_step(torch.device("cpu"))
    p = torch.zeros(1, config.hidden_size, dtype=dtype)
    blocks = torch.zeros(config.num_snapshots, *p.shape, dtype=dtype)
    for index, layer in enumerate(model.layers):
        if config.kind(index) in map(config.kind, range(index)):
            continue
        real = layer.to_empty(device="cpu")
        for parameter in real.parameters():
            if parameter.numel() < TOUCHED:
                parameter.zero_()
        own = type(pools[index])(*(torch.zeros_like(t, device="cpu") for t in pools[index]))
        with torch.no_grad(), unbacked_rows():
            compiler(real, p, blocks, own, step)
        layer.to_empty(device="meta")
    return [
        CompiledKind(kind, layers, report)
        for (kind, layers), report in zip(counts.items(), compiler.reports, strict=True)
    ]
